"""`autockpt verify`: what is damaged, what could not be read, and what is not there any more."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autockpt
from autockpt.cli.app import run
from autockpt.executors.storage import catalogue
from autockpt.executors.storage.catalogue import VerifyResult
from autockpt.executors.storage.directory import commits as commits_module
from autockpt.executors.storage.directory import records as records_module
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.integrations.formats.convert import image_reader
from autockpt.integrations.places import read_beside_run
from autockpt.values.errors import ConfigError, NoCheckpointError, StorageError
from autockpt.values.generation import Generation
from tests.unit.integrations.trained import saved, trained_job

FIRST, SECOND = (Generation(term=1, step=step) for step in (7, 8))


@pytest.fixture
def two(tmp_path: Path) -> str:
    """A checkpoint directory with two generations."""
    for generation in (FIRST, SECOND):
        saved(tmp_path / "c", trained_job(), generation)
    return str(tmp_path / "c")


def deleting(
    directory: str, victim: Generation, monkeypatch: pytest.MonkeyPatch, *, during: bool
) -> None:
    """Retention deletes `victim` before it is opened, or while its chunks are read."""
    gate = catalogue._NOW
    real: Callable[..., VerifyResult] = catalogue.verify_generation

    class Deletes:
        def wait(self, nbytes: int) -> None:
            CheckpointDirectory(directory).delete(victim)

    def verify(where: str, name: str, **how: object) -> VerifyResult:
        if name != victim.name:
            return real(where, name)
        if during:
            return real(where, name, gate=Deletes())
        CheckpointDirectory(directory).delete(victim)
        return real(where, name, gate=gate)

    monkeypatch.setattr(catalogue, "verify_generation", verify)


@pytest.mark.parametrize("during", [False, True])
def test_what_retention_deletes_meanwhile_is_no_damage(
    two: str, during: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Listed, and deleted before or while it is read: said as gone; the others are judged."""
    deleting(two, FIRST, monkeypatch, during=during)
    assert run(["verify", "--all", two]) == 0
    out = capsys.readouterr().out
    assert f"gone     {FIRST.name}: deleted meanwhile" in out
    assert f"ok       {SECOND.name}" in out
    assert "DAMAGED" not in out


def test_shards_that_are_written_over_before_they_go_are_no_damage(
    two: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deleted generation's files are used again: an open one reads another checkpoint's bytes."""
    shard = next(p for p in Path(two, FIRST.name).iterdir() if p.name.endswith(".safetensors"))

    class Overwrites:
        def wait(self, nbytes: int) -> None:
            if Path(two, FIRST.name, "COMMIT").exists():
                Path(two, FIRST.name, "COMMIT").unlink()
                shard.write_bytes(b"\xff" * shard.stat().st_size)

    real = catalogue.verify_generation
    monkeypatch.setattr(
        catalogue,
        "verify_generation",
        lambda where, name, **how: real(where, name, gate=Overwrites()) if name == FIRST.name
        else real(where, name, **how),
    )  # fmt: skip
    assert run(["verify", "--all", two]) == 0
    assert "DAMAGED" not in capsys.readouterr().out


def test_the_next_newest_is_read_where_the_newest_goes(
    two: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name the newest is meant, whichever that is now."""
    deleting(two, SECOND, monkeypatch, during=True)
    assert run(["verify", two]) == 0
    assert f"ok       {FIRST.name}" in capsys.readouterr().out


def deleting_once_opened(directory: str, monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Retention deletes the second one when its COMMIT has been read; what it has deleted."""
    gone: list[Generation] = []
    real = records_module.read_commit

    def read_commit(path: str) -> records_module.CommitFile:
        found = real(path)
        if SECOND.name in path and not gone:
            gone.append(SECOND)
            CheckpointDirectory(directory).delete(SECOND)
        return found

    for module in (commits_module, records_module, image_reader):
        monkeypatch.setattr(module, "read_commit", read_commit)
    return gone


READERS: dict[str, Callable[[str, str], int]] = {
    "show": lambda path, out: run(["show", path]),
    "diff": lambda path, out: run(["diff", path, path]),
    "convert": lambda path, out: run(["convert", path, out, "--to", "torch"]),
    "import": lambda path, out: run(["convert", path, out, "--to", "autockpt"]),
    "load": lambda path, out: int("model" not in autockpt.load(path)),
    "peek": lambda path, out: int(getattr(autockpt.peek(path), "step", 0) != FIRST.step),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_the_next_newest_where_the_newest_goes(
    two: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes the newest between the look at its COMMIT and the read of its shards."""
    gone = deleting_once_opened(two, monkeypatch)
    assert READERS[reader](two, str(tmp_path / "out")) == 0
    assert gone == [SECOND]


def test_a_named_one_that_goes_while_it_is_read_is_said(
    two: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No damage and no failing disk: exit code 66."""
    deleting_once_opened(two, monkeypatch)
    assert run(["show", two, SECOND.name]) == 66
    assert "was deleted while it was read" in capsys.readouterr().err


def test_an_unfinished_one_that_is_named_is_not_called_deleted(two: str) -> None:
    """Its folder is there without COMMIT: it is being written, or was interrupted."""
    Path(two, SECOND.name, "COMMIT").unlink()
    for read in (autockpt.load, autockpt.peek):
        with pytest.raises(ConfigError, match="has no COMMIT: interrupted, or still being written"):
            read(f"{two}/{SECOND.name}")


def test_a_disk_that_fails_is_not_called_deletion(
    two: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COMMIT cannot be looked for; the error of the read stays."""
    monkeypatch.setattr(image_reader, "read_commit", lambda path: _fails(OSError(5, "EIO")))
    failing = SimpleNamespace(exists=lambda path: _fails(OSError(5, "EIO")))
    monkeypatch.setattr(catalogue, "place_of", lambda path: failing)
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # it hides the errors of the disk
    with pytest.raises(StorageError, match="cannot be read"):
        read_beside_run(lambda: f"{two}/{SECOND.name}", image_reader.commit_of, named=True)


def _fails(error: OSError) -> Any:
    raise error


def test_peek_says_that_a_named_one_was_deleted(two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None means a run without checkpoints."""
    deleting_once_opened(two, monkeypatch)
    with pytest.raises(NoCheckpointError, match="was deleted while it was read"):
        autockpt.peek(f"{two}/{SECOND.name}")


def test_nothing_left_is_not_called_right(
    two: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All deleted meanwhile, or the disk unmounted: exit code 66."""
    CheckpointDirectory(two).delete(SECOND)
    deleting(two, FIRST, monkeypatch, during=False)
    assert run(["verify", "--all", two]) == 66
    assert "deleted while they were read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "socket", "pipe", "directory"])
@pytest.mark.parametrize("record", ["RUN", "terms/t-000001", "decisions/t-000001"])
def test_a_record_that_is_no_file_is_damage(
    two: str, record: str, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Named, exit code 65; nothing is followed and nothing waits."""
    path = Path(two, record)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert run(["verify", "--with-records", two]) == 65
    assert f"DAMAGED  {path}: " in capsys.readouterr().out


def test_what_cannot_be_read_now_is_no_damage(
    two: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Storage that does not answer is said as such, with exit code 74."""

    def open_shard(*_: object) -> None:
        raise StorageError("shard: cannot read: Input/output error")

    monkeypatch.setattr(catalogue, "open_shard", open_shard)
    assert run(["verify", two]) == 74
    out = capsys.readouterr().out
    assert f"UNREAD   {SECOND.name}:" in out
    assert "DAMAGED" not in out


def test_a_named_one_without_a_commit_is_said(two: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no checkpoint: exit code 78."""
    Path(two, FIRST.name, "COMMIT").unlink()
    assert run(["verify", two, FIRST.name]) == 78
    assert "has no COMMIT" in capsys.readouterr().err


def test_a_newest_that_cannot_be_read_is_not_passed_over_in_silence(
    two: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it is right, and the newest is damaged: both are said."""
    (Path(two) / SECOND.name / "COMMIT").write_text("")
    assert run(["verify", two]) == 65
    said = capsys.readouterr()
    assert f"ok       {FIRST.name}" in said.out
    assert f"DAMAGED  {SECOND.name}" in said.out
    assert run(["verify", two, FIRST.name]) == 0
    assert run(["show", two]) == 0
    assert f"{SECOND.name} is newer and unreadable" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_is_read_back_all_the_same(
    two: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage is 65, not a wrong path; `show` names the newest."""
    for generation in (FIRST, SECOND):
        (Path(two) / generation.name / "COMMIT").write_text("")
    assert run(["verify", two]) == 65
    said = capsys.readouterr()
    assert f"DAMAGED  {FIRST.name}" in said.out
    assert f"DAMAGED  {SECOND.name}" in said.out
    assert run(["show", two]) == 65
    assert f"the newest, {SECOND.name}, is unreadable" in capsys.readouterr().err
