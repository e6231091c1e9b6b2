"""Archives: the history of a run, small, and honest about what it lost."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.cli.app import run
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import shards_on_disk
from autockpt.executors.storage.catalogue import list_generations
from autockpt.integrations.formats.archive import writing
from autockpt.integrations.formats.archive.reading import Archive
from autockpt.integrations.formats.archive.records import ArchiveFile, Codec
from autockpt.integrations.formats.archive.restoring import lossy_of, restore_member
from autockpt.integrations.formats.archive.writing import add_generation, open_archive
from autockpt.integrations.formats.tree.loading import opened
from autockpt.integrations.places import generation_folder
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.record import parse_json
from tests.unit.integrations.formats.convert.test_export import assert_same_job
from tests.unit.integrations.formats.convert.test_import_checkpoint import restored
from tests.unit.integrations.trained import Job, new_job, saved, state_of, train, trained_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MEMBERS = 5


class Wide(torch.nn.Module):
    """A matrix that is worth pruning, a vector, a frozen parameter and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.body = torch.nn.Linear(64, 96)
        self.head = torch.nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.arange(5.0), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.head(hidden).sum() + self.body(hidden).square().sum()


def wide_job(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    """Not trained yet."""
    torch.manual_seed(0)
    net = Wide()
    made = optimizer(net.parameters(), lr=1e-3)
    return net, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=10)


def history(path: Path, job: Job, members: int = MEMBERS) -> list[str]:
    """Generations of a training, oldest first; their folders."""
    folders = []
    for number in range(members):
        train(job, 2)
        folders.append(saved(path, job, Generation(term=1, step=7 + number)))
    return folders


def archived(path: Path, folders: list[str], codec: Codec = "excp", full_every: int = 4) -> Path:
    """All of them in a new archive."""
    run_id = (Path(folders[0]).parent / "RUN").read_text()
    about = ArchiveFile(run_id=parse_json(run_id)["run_id"], codec=codec, full_every=full_every)
    archive = open_archive(str(path), about)
    for folder in folders:
        add_generation(archive, folder)
    archive.close()
    return path


@pytest.mark.parametrize("codec", ["none", "excp", "quantised"])
def test_a_lossless_member_brings_the_job_back_to_the_bit(tmp_path: Path, codec: Codec) -> None:
    """Every fourth member of any archive; ties, schedule, buffers and dtypes included."""
    job = trained_job()
    folder = saved(tmp_path / "run", job)
    archive = archived(tmp_path / "archive", [folder], codec)
    done = restore_member(str(archive), str(tmp_path / "again"))
    fresh = new_job(1)
    applied = restored(generation_folder(str(tmp_path / "again")), state_of(fresh))
    assert applied["progress"]["step"] == done.step == 7
    assert_same_job(fresh, job)


def test_a_chain_is_lossy_between_full_members_and_says_so(tmp_path: Path) -> None:
    """Weights stay within the last residual, moments live, everything else is exact."""
    job = wide_job()
    folders = history(tmp_path / "run", job)
    path = archived(tmp_path / "archive", folders)
    archive = Archive(str(path))
    names = archive.names()
    found = [archive.open(name).member for name in names]
    assert [member.lossy for member in found] == [False, True, True, True, False]
    assert [member.base for member in found] == ["", *names[:3], ""]
    assert found[3].raw_bytes > 3 * archive.open(names[3]).bytes
    archive.close()
    restore_member(str(path), str(tmp_path / "again"), names[3])
    with (
        opened(folders[3]) as source,
        opened(folders[2]) as earlier,
        opened(str(tmp_path / "again")) as back,
    ):
        true, before, lossy = source.tree, earlier.tree, back.tree
        assert back.lossy.startswith("archived with")
        for name in ("embed.weight", "body.weight"):
            error = (true["model"][name].read() - lossy["model"][name].read()).norm()
            step = (true["model"][name].read() - before["model"][name].read()).norm()
            assert 0 < float(error) < 2 * float(step)
            moments = [
                tree["optimizer"]["state"][name]["exp_avg_sq"].read() for tree in (true, lossy)
            ]
            assert bool((moments[1][moments[0] > 0] > 0).all())
        for name in ("frozen", "norm.running_mean", "norm.num_batches_tracked"):
            assert torch.equal(true["model"][name].read(), lossy["model"][name].read())
        assert lossy["scheduler"]["last_epoch"] == 8
    fresh = wide_job()
    applied = restored(generation_folder(str(tmp_path / "again")), state_of(fresh))
    assert applied["progress"]["step"] == 7
    (record,) = list_generations(str(tmp_path / "again" / "checkpoints"))
    assert record.detail.startswith(f"LOSSY: archived with excp as {names[3]}; its effect")


@pytest.mark.parametrize("codec", ["none", "excp"])
def test_what_was_lost_before_is_said_of_an_archive_of_it(tmp_path: Path, codec: Codec) -> None:
    """A run that was made of a lossy member, archived again, and a run of that."""
    path = archived(tmp_path / "archive", history(tmp_path / "run", wide_job(), 2))
    restore_member(str(path), str(tmp_path / "again"))
    folder = generation_folder(str(tmp_path / "again"))
    second = archived(tmp_path / "second", [folder], codec)
    assert lossy_of(str(second), Path(folder).name).startswith("archived with excp")
    done = restore_member(str(second), str(tmp_path / "third"))
    assert done.lossy.startswith("archived with excp")
    third = generation_folder(str(tmp_path / "third"))
    (record,) = list_generations(str(Path(third).parent))
    assert record.detail == f"LOSSY: {done.lossy}"
    back = restore_shards(shards_on_disk(third, 0, 1), state_of(wide_job()))
    assert back.skeleton["lossy"] == done.lossy


def test_other_optimizers_are_kept_to_the_bit(tmp_path: Path) -> None:
    """Only weights and moments of Adam's family are touched; SGD has none."""
    job = wide_job(torch.optim.SGD)
    folders = history(tmp_path / "run", job, 2)
    path = archived(tmp_path / "archive", folders)
    restore_member(str(path), str(tmp_path / "again"))
    fresh = wide_job(torch.optim.SGD)
    restored(generation_folder(str(tmp_path / "again")), state_of(fresh))
    assert_same_job(fresh, job)
    archive = Archive(str(path))
    assert not archive.open(archive.newest()).member.lossy
    archive.close()


def test_blocks_of_rows_come_back_as_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor beyond the block size is coded in parts, each with its own statistics."""
    monkeypatch.setattr(writing, "BLOCK_ELEMENTS", 5000)
    job = wide_job()
    folders = history(tmp_path / "run", job, 3)
    path = archived(tmp_path / "archive", folders)
    archive = Archive(str(path))
    groups = archive.open(archive.newest()).member.groups
    assert max(len(group.blocks) for group in groups) == 2
    assert archive.verify(archive.newest()) > 0
    archive.close()


def test_the_same_generations_give_the_same_members(tmp_path: Path) -> None:
    """Whatever the order in which workers finish."""
    folders = history(tmp_path / "run", wide_job(), 3)
    one, two = (archived(tmp_path / name, folders) for name in ("one", "two"))
    for name in os.listdir(one):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_damage_a_missing_and_an_exchanged_predecessor_are_found(tmp_path: Path) -> None:
    """By whoever needs them; nothing is made of them."""
    folders = history(tmp_path / "run", wide_job(), 3)
    path = archived(tmp_path / "archive", folders)
    other = archived(tmp_path / "other", folders, "quantised")
    files = sorted(path.glob("*.ackpt"))
    for number, change in enumerate(("flip", "cut", "gone", "exchanged")):
        broken = tmp_path / f"broken{number}"
        shutil.copytree(path, broken)
        middle = broken / files[1].name
        if change == "flip":
            data = bytearray(middle.read_bytes())
            data[100] ^= 1
            middle.write_bytes(data)
        elif change == "cut":
            middle.write_bytes(middle.read_bytes()[:-10])
        elif change == "gone":
            middle.unlink()
        else:
            source = sorted(other.glob("*.ackpt"))[1]
            middle.write_bytes(source.read_bytes())
        with pytest.raises(
            CorruptCheckpointError, match=r"own digest|cut off|is gone|against another"
        ):
            restore_member(str(broken), str(tmp_path / "again"))
        assert not (tmp_path / "again").exists()
        assert run(["verify", str(broken)]) == 65


def test_members_come_in_order_and_settings_stay(tmp_path: Path) -> None:
    """An older generation, another codec or another run is refused."""
    folders = history(tmp_path / "run", wide_job(), 3)
    path = archived(tmp_path / "archive", folders[1:2])
    archive = Archive(str(path))
    with pytest.raises(ConfigError, match="is not newer"):
        add_generation(archive, folders[0])
    about = archive.about
    archive.close()
    with pytest.raises(ConfigError, match="name another destination"):
        open_archive(str(path), ArchiveFile(run_id=about.run_id, codec="none", full_every=4))
    with pytest.raises(ConfigError, match="is no archive"):
        open_archive(str(tmp_path / "run"), about)


def test_the_commands_say_lossy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """convert, ls, show and verify; a second convert adds what is new."""
    job = wide_job()
    history(tmp_path / "run", job, 2)
    source, archive = str(tmp_path / "run"), str(tmp_path / "archive")
    assert run(["convert", source, archive, "--to", "archive", "--codec", "excp"]) == 0
    out = capsys.readouterr()
    assert "LOSSY (excp), against ckpt-t0001-step-00000007" in out.out
    assert "is LOSSY" in out.err
    train(job, 1)
    saved(tmp_path / "run", job, Generation(term=1, step=30))
    assert run(["convert", source, archive, "--to", "archive", "--codec", "excp"]) == 0
    assert capsys.readouterr().out.count("ckpt-") == 2
    for words, expected in (
        (["ls", archive], "LOSSY"),
        (["show", archive, "--tensors"], "LOSSY"),
        (["verify", archive, "--all"], "ok "),
        (["convert", archive, str(tmp_path / "again"), "--to", "autockpt"], "tensors"),
        (["ls", str(tmp_path / "again")], "LOSSY: archived with excp"),
        (["show", str(tmp_path / "again")], "archived with excp"),
    ):
        assert run(words) == 0
        assert expected in capsys.readouterr().out
    words = ["convert", str(tmp_path / "again"), str(tmp_path / "copy"), "--to", "autockpt"]
    assert run(words) == 0
    assert "LOSSY: archived with excp" in capsys.readouterr().err
    for words, expected in (
        (["ls", str(tmp_path / "copy")], "LOSSY: archived with excp"),
        (["show", str(tmp_path / "copy")], "archived with excp"),
    ):
        assert run(words) == 0
        assert expected in capsys.readouterr().out
    copied = shards_on_disk(generation_folder(str(tmp_path / "copy")), 0, 1)
    skeleton = restore_shards(copied, state_of(wide_job())).skeleton
    assert skeleton["lossy"].startswith("archived with excp")
    for target in ("safetensors", "dcp", "torch"):
        assert run(["convert", str(tmp_path / "copy"), str(tmp_path / target), "--to", target]) == 0
        assert "LOSSY: archived with excp" in capsys.readouterr().err
    assert run(["convert", archive, str(tmp_path / "x"), "--to", "dcp"]) == 78
    assert run(["convert", source, str(tmp_path / "x"), "--to", "dcp", "--codec", "excp"]) == 2
