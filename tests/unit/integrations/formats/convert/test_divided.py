"""Checkpoints of several ranks are one state: real DDP, FSDP2 and tensor parallel ones."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import autockpt
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.state.live_state import LiveState
from autockpt.integrations.formats.archive.records import ArchiveFile
from autockpt.integrations.formats.archive.restoring import restore_member
from autockpt.integrations.formats.archive.writing import add_generation, open_archive
from autockpt.integrations.formats.convert.export import export
from autockpt.integrations.formats.convert.image_reader import Images, commit_of
from autockpt.integrations.formats.tree.diff import compare
from autockpt.integrations.formats.tree.loading import opened
from tests.unit.integrations import ranks
from tests.unit.integrations.formats.convert.test_export import same
from tests.unit.integrations.trained import saved_states

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generations of two ranks, one per way of being parallel."""
    path = tmp_path_factory.mktemp("ranks")
    ranks.run(path)
    return path


def expected(root: Path, way: str) -> dict[str, Any]:
    """What torch itself gathered."""
    whole: dict[str, Any] = torch.load(root / f"{way}.pt", weights_only=True)
    return whole


@pytest.mark.parametrize("way", ranks.WAYS)
def test_the_whole_state_is_put_together(root: Path, way: str) -> None:
    """Parameters, buffers and optimizer state, as torch gathers them; objects of the first rank."""
    state, whole = autockpt.load(str(root / way)), expected(root, way)
    assert same(state["model"], whole["model"])
    assert same(state["optimizer"]["state"], whole["optimizer"]["state"])
    assert same(state["optimizer"]["param_groups"], whole["optimizer"]["param_groups"])
    assert state["mine"] == {"rate": 0.5, "n": 3}
    assert state["step"] == 2


@pytest.mark.parametrize("target", ["safetensors", "dcp", "torch"])
def test_divided_checkpoints_are_exported_and_are_the_same(
    root: Path, tmp_path: Path, target: str
) -> None:
    """In every format, in files of a few tensors; `diff` finds nothing."""
    for way in ("ddp", "fsdp"):
        out = str(tmp_path / way)
        (folder,) = (root / way).glob("ckpt-*")
        export(str(folder), out, target, everything=True, max_shard_bytes=2000)
        if target == "torch":
            loaded = torch.load(out, weights_only=True)
            assert same(loaded["model"], expected(root, way)["model"])
            continue
        with opened(str(folder)) as a, opened(out) as b:
            assert compare(a.tree, b.tree).equal


def test_what_dcp_saved_is_a_checkpoint_of_ours(root: Path) -> None:
    """Two generations of two ranks; keys as they were saved, values of every rank."""
    from autockpt.executors.storage.catalogue import list_generations, verify_generation

    path = root / "dcp"
    found = list_generations(str(path))
    assert [(r.step, r.world_size, r.state) for r in found] == [
        (10, 2, "committed"), (20, 2, "committed")
    ]  # fmt: skip
    assert all(verify_generation(str(path), record.name).ok for record in found)
    state = autockpt.load(str(path))
    assert state.pop("step") == 20
    assert state.pop("loader") == {"rank_0": b"\x02\x00", "rank_1": b"\x02\x01"}
    assert same(state, expected(root, "dcp"))


@pytest.mark.parametrize("way", ["fsdp", "dcp"])
def test_divided_checkpoints_become_one_that_a_single_process_goes_on_from(
    root: Path, tmp_path: Path, way: str
) -> None:
    """By `convert --to autockpt`, from images of `attach` and of `dcp.save`."""
    from tests.unit.integrations.formats.convert.test_import_checkpoint import imported, restored

    folder, done = imported(root / way, tmp_path / "run")
    assert done.left_out == ()
    net = ranks.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    applied = restored(folder, LiveState.of(model=net, optimizer=optimizer))
    assert applied["progress"]["step"] == {"fsdp": 2, "dcp": 20}[way]
    whole = expected(root, way)
    assert same(dict(net.state_dict()), whole["model"])
    moments = {n: optimizer.state[p] for n, p in net.named_parameters()}
    assert same(moments, whole["optimizer"]["state"])
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_one_rank_is_what_its_image_holds(root: Path) -> None:
    """Parts as it stored them; what another rank stores is not there."""
    first, second = (autockpt.load(str(root / "ddp"), rank=rank) for rank in (0, 1))
    whole = expected(root, "ddp")["model"]
    names = set(first["model"]) | set(second["model"])
    assert names == set(whole)
    elements = [sum(t.numel() for n, t in one["model"].items() if n != "seen")
                for one in (first, second)]  # fmt: skip
    assert sum(elements) == sum(t.numel() for n, t in whole.items() if n != "seen")
    half = autockpt.load(str(root / "fsdp"), rank=1)["model"]["up.weight"]
    assert torch.equal(half, expected(root, "fsdp")["model"]["up.weight"][16:])


def stepped(module: torch.nn.Module, width: int) -> torch.optim.Optimizer:
    """An optimizer of two groups that has stepped once."""
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": 0.1 * number} for number, p in enumerate(module.parameters(), 1)]
    )
    module(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return optimizer


def test_stages_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    """Each rank has other parameters; groups that are set alike are one group."""
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(), torch.nn.Sequential()]
    stages[0].add_module("0", torch.nn.Linear(4, 3))
    stages[1].add_module("1", torch.nn.Linear(3, 2))
    optimizers = [stepped(stages[0], 4), stepped(stages[1], 3)]
    states = [LiveState.of(model=m, optimizer=o) for m, o in zip(stages, optimizers, strict=True)]
    state = autockpt.load(saved_states(tmp_path, states))
    both = {**stages[0].state_dict(), **stages[1].state_dict()}
    assert same(dict(state["model"]), both)
    groups = state["optimizer"]["param_groups"]
    assert [g["params"] for g in groups] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    moment = optimizers[1].state[stages[1][0].bias]["exp_avg"]
    assert same(state["optimizer"]["state"]["1.bias"]["exp_avg"], moment)


def test_state_of_parameters_that_ranks_share_out_is_put_together(tmp_path: Path) -> None:
    """ZeRO-1: every rank has all parameters in its groups, and the state of some."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    whole = stepped(net, 4)
    parts = []
    for own in ("weight", "bias"):
        part = torch.optim.AdamW([{"params": [p]} for p in net.parameters()])
        part.load_state_dict(whole.state_dict())
        for name, parameter in net.named_parameters():
            if name != own:
                del part.state[parameter]
        parts.append(LiveState.of(model=net, optimizer=part))
    state = autockpt.load(saved_states(tmp_path, parts))
    assert set(state["optimizer"]["state"]) == {"weight", "bias"}
    assert same(state["optimizer"]["state"]["bias"], whole.state[net.bias])
    assert len(state["optimizer"]["param_groups"]) == 2


def test_overlapping_parts_have_to_agree(tmp_path: Path) -> None:
    """Nodes divide what they hold alike differently: one element that differs is refused."""
    from autockpt.executors.image.layout.boxes import Box
    from autockpt.integrations.formats.convert.image_reader import Images, commit_of
    from autockpt.integrations.formats.tree.replicas import require_same
    from autockpt.values.errors import ConfigError
    from tests.unit.integrations.formats.convert.test_image_reader import write_parts

    tensor = torch.arange(40.0)
    halves = [[Box(offset=(0,), shape=(20,))], [Box(offset=(20,), shape=(20,))]]
    other = [[Box(offset=(0,), shape=(8,))], [Box(offset=(8,), shape=(32,))]]
    folder = write_parts(str(tmp_path / "a"), tensor, [*halves, *other])
    images = Images(folder, commit_of(folder), range(4))
    require_same(images, ["x"], "here")
    images.close()
    wrong = [tensor, tensor, tensor, torch.where(tensor == 30, -1.0, tensor)]
    folder = write_parts(str(tmp_path / "b"), wrong, [*halves, *other])
    images = Images(folder, commit_of(folder), range(4))
    with pytest.raises(ConfigError, match="here: rank 3 does not hold the same x as rank 1"):
        require_same(images, ["x"], "here")
    images.close()


def test_names_with_line_breaks_are_names(tmp_path: Path) -> None:
    """Of parameters with optimizer state; loaded and restored."""
    from autockpt.executors.restore.apply_state import apply_state
    from autockpt.executors.restore.reader import restore_shards
    from autockpt.executors.restore.shard_sources import shards_on_disk

    net = torch.nn.Module()
    net.register_parameter("two\nlines", torch.nn.Parameter(torch.ones(3)))
    (parameter,) = net.parameters()
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = LiveState.of(model=net, optimizer=optimizer)
    folder = saved_states(tmp_path, [state])
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    assert same(autockpt.load(folder)["optimizer"]["state"]["two\nlines"], before)
    optimizer.step()
    apply_state(restore_shards(shards_on_disk(folder, 0, 1), state), state)
    assert same(optimizer.state[parameter], before)


@pytest.mark.parametrize("way", ranks.WAYS)
def test_an_archive_brings_every_rank_back_as_it_was(root: Path, tmp_path: Path, way: str) -> None:
    """The same parts on the same ranks, private state included; lossy only where it says so."""
    (folder,) = (root / way).glob("ckpt-*")
    before = Images(str(folder), commit_of(str(folder)), range(ranks.WORLD))
    about = ArchiveFile(run_id="r", codec="none", full_every=1)
    with contextlib.closing(open_archive(str(tmp_path / "archive"), about)) as archive:
        add_generation(archive, str(folder))
    restore_member(str(tmp_path / "archive"), str(tmp_path / "again"))
    (made,) = (tmp_path / "again" / "checkpoints").glob("ckpt-*")
    after = Images(str(made), commit_of(str(made)), range(ranks.WORLD))
    with contextlib.closing(before), contextlib.closing(after):
        for rank in range(ranks.WORLD):
            assert after.skeletons[rank] == before.skeletons[rank]
            old, new = before.headers[rank], after.headers[rank]
            assert (new.parts, new.aliases) == (old.parts, old.aliases)
            for name in set(old.tensors) - {EXTRA}:
                places = (before, old.tensors[name]), (after, new.tensors[name])
                raw = [images.raw(rank, place.start, place.stop) for images, place in places]
                assert raw[0] == raw[1], name
