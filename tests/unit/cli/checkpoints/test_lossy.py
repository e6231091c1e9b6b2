"""From a policy that wants a lossy archive to a restore that says what was lost."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from autockpt.api import load
from autockpt.cli.app import run
from autockpt.cli.checkpoints import archive as archives
from autockpt.cli.checkpoints.archive import Request, add
from autockpt.cli.checkpoints.archive_quality import Job
from autockpt.console import Console
from autockpt.integrations.dcp.storage_reader import GenerationReader
from autockpt.integrations.formats.archive.reading import Archive
from autockpt.integrations.formats.convert.import_checkpoint import import_tree
from autockpt.integrations.formats.tree.loading import opened
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from tests.unit.cli.scripts import ROOT, autockpt, environment, write
from tests.unit.integrations.trained import saved, trained_job

SCRIPT = str(ROOT / "examples" / "gpt" / "train.py")
SMALL = ("--size", "tiny", "--batch", "1", "--sequence", "32", "--log-every", "1", "--threads", "1")


@pytest.mark.slow
def test_a_lossy_archive_is_made_measured_and_said(tmp_path: Path) -> None:
    """`run` archives beside the training, `quality` measures, a resume says LOSSY everywhere."""
    done = autockpt(
        "run", "--no-profile", "--run-dir", "r", "--policy", "builtin:excp",
        "--set", "disk.interval=10 steps", SCRIPT, *SMALL, "--steps", "30", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "LOSSY archive of every checkpoint (excp-published)" in done.stderr
    archive = Archive(str(tmp_path / "r" / "archive"))
    names = archive.names()
    assert [archive.open(name).member.lossy for name in names] == [False, True, True]
    archive.close()
    measured = autockpt(
        "archive-eval", "--json", "--archive", "r/archive", "--steps", "3",
        "--lossless-runs", "1", SCRIPT, *SMALL, "--steps", "40", "--seed", "{seed}", cwd=tmp_path,
    )  # fmt: skip
    assert measured.returncode in (0, 1), measured.stderr
    found = json.loads(measured.stdout)
    assert (found["generation"], len(found["lossless"])) == (names[-1], 1)
    assert not list((tmp_path / "r").glob("quality-*"))
    back = autockpt("convert", "r/archive", "again", "--to", "autockpt", cwd=tmp_path)
    assert "LOSSY: archived with excp-published" in back.stderr
    resumed = autockpt(
        "run", "--no-profile", "--run-dir", "again", SCRIPT, *SMALL, "--steps", "32", cwd=tmp_path
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "LOSSY: checkpoint step 1 (term 1) is not what was trained" in resumed.stderr
    assert "mean loss of 3 resumed steps" in resumed.stderr
    assert "restored from a lossy archive" in (tmp_path / "again" / "report.html").read_text()


@pytest.mark.parametrize("mark", ["", "VERIFIED", "SUSPECT VERIFIED"])
def test_a_state_with_nan_is_archived_only_when_it_is_named(
    tmp_path: Path, mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its seal did not see it: neither before its keeper has read it back nor after that."""
    sick = trained_job()
    with torch.no_grad():
        sick[0].embed.weight[3, 3] = torch.nan
    run = tmp_path / "checkpoints"
    saved(run, trained_job())
    folder = saved(run, sick, Generation(term=1, step=8))
    for name in mark.split():
        Path(folder, name).touch()
    wish = Request(
        source=str(run), destination=str(tmp_path / "history"), generation=None, codec="none",
        full_every=None, follow=False,
    )  # fmt: skip
    add(Console(), wish)
    archive = Archive(wish.destination)
    trusted = mark == "VERIFIED"
    assert len(archive.names()) == (2 if trusted else 1)
    assert ("NaN in" in capsys.readouterr().err) == (not mark)
    if not trusted:
        add(Console(), replace(wish, generation="ckpt-t0001-step-00000008"))
        assert len(archive.names()) == 2
    archive.close()


@pytest.fixture
def close_to_it(tmp_path: Path) -> str:
    """A run whose only checkpoint has lost something."""
    kept = saved(tmp_path / "checkpoints", trained_job())
    with opened(kept) as source:
        import_tree(source.tree, str(tmp_path / "r"), lossy="archived with x", models=source.models)
    return str(tmp_path / "r")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_who_reads_a_lossy_checkpoint_is_told(
    tmp_path: Path, close_to_it: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python, through torch's reader, by `diff`, by `ls` here and in an object store."""
    told = r"^LOSSY: .* is not what was trained, but close to it \(archived with x\)$"
    with pytest.warns(UserWarning, match=told):
        state = load(close_to_it)
    with pytest.warns(UserWarning, match=told):
        torch.distributed.checkpoint.load(
            {"model": state["model"]}, storage_reader=GenerationReader(close_to_it), no_dist=True
        )
    assert run(["diff", close_to_it, str(tmp_path / "checkpoints")]) == 0
    assert "LOSSY: " + close_to_it in capsys.readouterr().err
    url = (tmp_path / "store").as_uri()
    assert run(["push", close_to_it, url]) == 0
    for place in (close_to_it, url):
        capsys.readouterr()
        assert run(["ls", place]) == 0
        assert "LOSSY: archived with x" in capsys.readouterr().out


def wish_of(tmp_path: Path, *, follow: bool) -> Request:
    """Everything in `checkpoints` into `history`, lossless."""
    return Request(
        source=str(tmp_path / "checkpoints"), destination=str(tmp_path / "history"),
        generation=None, codec="none", full_every=None, follow=follow,
    )  # fmt: skip


def members(tmp_path: Path) -> list[str]:
    """Of the archive `history`."""
    archive = Archive(str(tmp_path / "history"))
    archive.close()
    return archive.names()


@pytest.fixture
def ends_on_sigterm() -> Iterator[None]:
    """`add` follows in this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@dataclass(slots=True, kw_only=True)
class Told(Console):
    """Does something at the first warning, and ends the follower as soon as something is added."""

    warned: Callable[[str], object]

    def warn(self, text: str) -> None:
        """Once, for one reason."""
        Console.warn(self, text)
        self.warned(text)

    def result(self, text: str) -> None:
        """SIGTERM: the training is over."""
        os.kill(os.getpid(), signal.SIGTERM)


def test_who_follows_into_an_archive_of_another_codec_is_told(tmp_path: Path) -> None:
    """At once, not tried again until the training ends and then called a success."""
    saved(tmp_path / "checkpoints", trained_job())
    add(Console(), wish_of(tmp_path, follow=False))
    follower = subprocess.Popen(
        [sys.executable, "-m", "autockpt", "convert", "checkpoints", "history", "--to", "archive",
         "--codec", "excp", "--follow"],
        cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        told = follower.communicate(timeout=60)[1]
    finally:
        follower.kill()
        follower.communicate()
    assert (follower.returncode, "with codec none" in told) == (78, True), told


def test_storage_that_fails_for_a_while_does_not_end_the_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_on_sigterm: None
) -> None:
    """A file stands where the archive should be, until somebody moves it."""
    monkeypatch.setattr(archives, "AGAIN_S", 0.01)
    saved(tmp_path / "checkpoints", trained_job())
    blocker = tmp_path / "mount"
    blocker.touch()
    wish = replace(wish_of(tmp_path, follow=True), destination=str(blocker / "history"))
    warnings: list[str] = []

    def mend(text: str) -> None:
        warnings.append(text)
        blocker.unlink()

    assert add(Told(warned=mend), wish) == 0
    assert [text.startswith("not archived: ") for text in warnings] == [True]
    archive = Archive(wish.destination)
    assert len(archive.names()) == 1
    archive.close()


def test_a_follower_passes_over_what_is_damaged_and_says_so_at_the_end(
    tmp_path: Path, ends_on_sigterm: None
) -> None:
    """What came after it is archived; without --follow nothing is passed over."""
    damaged = saved(tmp_path / "checkpoints", trained_job())
    saved(tmp_path / "checkpoints", trained_job(), Generation(term=1, step=8))
    shard = next(Path(damaged).glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpointError, match="shard-"):
        add(Console(), wish_of(tmp_path, follow=False))
    assert members(tmp_path) == []
    warnings: list[str] = []
    told = Told(warned=warnings.append)
    assert add(told, wish_of(tmp_path, follow=True)) == CorruptCheckpointError.exit_code
    assert members(tmp_path) == ["ckpt-t0001-step-00000008"]
    assert [text.partition(":")[0] for text in warnings] == [os.path.basename(damaged)]


def test_a_job_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    done = autockpt("archive-eval", "--archive", ".", "--loss", "(", "t.py", cwd=tmp_path)
    assert (done.returncode, "no regular expression" in done.stderr) == (2, True)
    done = autockpt("archive-eval", "--archive", ".", "t.py", "--lr", "1", cwd=tmp_path)
    assert (done.returncode, "has no {seed}" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    """Its exit code and its own last lines; one that ends well is told what is expected of it."""
    source = """
import sys
print("loss 1.5", flush=True)
if "--fail" in sys.argv:
    raise SystemExit("no data in " + sys.argv[-1])
"""
    script = str(write(tmp_path, "s.py", source))
    failing = Job(words=(script, "--fail", "{seed}"), steps=2, loss=re.compile(r"loss (\S+)"))
    with pytest.raises(ConfigError, match=r"failed with exit code 1; it printed 1 .*") as failed:
        failing.losses(str(tmp_path / "a"), 7)
    assert "\n  no data in 7" in str(failed.value)
    assert "next: " not in str(failed.value)
    short = replace(failing, words=(script,))
    with pytest.raises(ConfigError, match="must go on that far and print one per iteration"):
        short.losses(str(tmp_path / "b"), 7)
