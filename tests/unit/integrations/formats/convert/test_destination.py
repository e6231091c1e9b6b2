"""An export is there as a whole or not at all, and costs nothing that was there before."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autockpt.integrations.formats.convert.destination import new_export
from autockpt.integrations.formats.convert.export import TARGETS, export
from autockpt.values.errors import ConfigError, CorruptCheckpointError, GuardError, StorageError
from tests.unit.integrations.trained import saved, trained_job


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """A committed generation; the source is as it was afterwards."""
    made = saved(tmp_path / "checkpoints", trained_job())
    before = {name: Path(made, name).read_bytes() for name in os.listdir(made)}
    yield made
    if "damaged" not in os.listdir(tmp_path):
        assert {name: Path(made, name).read_bytes() for name in os.listdir(made)} == before


@pytest.mark.parametrize("target", TARGETS)
def test_a_flipped_byte_exports_nothing(folder: str, tmp_path: Path, target: str) -> None:
    """Whichever tensor it is in; the error names file, rank and chunk."""
    (tmp_path / "damaged").touch()
    shard = next(Path(folder).glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CorruptCheckpointError, match=r"shard-00000.*rank 0, chunk \d+"):
        export(folder, str(tmp_path / "out"), target, everything=True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_is_replaced_on_demand_only(folder: str, tmp_path: Path, target: str) -> None:
    """Without --force it stays as it is, byte for byte."""
    out = tmp_path / "out"
    export(folder, str(out), target)
    contents = _contents(out)
    with pytest.raises(ConfigError, match="exists; name another destination"):
        export(folder, str(out), target)
    assert _contents(out) == contents
    export(folder, str(out), target, force=True)
    assert sorted(_contents(out)) == sorted(contents)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_a_failed_replacement_leaves_the_old_export(folder: str, tmp_path: Path) -> None:
    """The old one is moved away only when the new one is whole."""
    (tmp_path / "damaged").touch()
    out = tmp_path / "out"
    export(folder, str(out), "safetensors")
    contents = _contents(out)
    shard = next(Path(folder).glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="chunk"):
        export(folder, str(out), "safetensors", force=True)
    assert _contents(out) == contents


def test_force_never_replaces_what_no_export_wrote(folder: str, tmp_path: Path) -> None:
    """Somebody's directory, the checkpoints themselves, a link, a file."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.tex").write_text("years")
    for place in (work, Path(folder), tmp_path / "checkpoints"):
        with pytest.raises(GuardError, match="which no export writes"):
            export(folder, str(place), "safetensors", force=True)
    (tmp_path / "link").symlink_to(work)
    with pytest.raises(GuardError, match="no plain file or directory"):
        export(folder, str(tmp_path / "link"), "safetensors", force=True)
    for target in TARGETS:
        with pytest.raises(GuardError, match=r"thesis\.tex: is no file of torch\.save"):
            export(folder, str(work / "thesis.tex"), target, force=True)
    assert (work / "thesis.tex").read_text() == "years"


def test_an_empty_directory_may_be_filled(folder: str, tmp_path: Path) -> None:
    """Nothing is lost by that."""
    (tmp_path / "out").mkdir()
    export(folder, str(tmp_path / "out"), "safetensors")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_appears_in_the_meantime_is_not_written_over(tmp_path: Path) -> None:
    """Files by link(2), directories by rename(2): neither replaces without --force."""
    for make in (_file, _folder):
        out = tmp_path / make.__name__

        def race(make: Callable[[Path, str], None] = make, out: Path = out) -> None:
            with new_export(str(out), force=False) as path:
                make(Path(path), "new")
                make(out, "old")

        with pytest.raises((ConfigError, StorageError), match=r"meantime|cannot be written"):
            race()
        assert "old" in _contents(out).values()
        assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_a_storage_error(folder: str, tmp_path: Path) -> None:
    """And leaves nothing behind."""

    def fill() -> None:
        with new_export(str(tmp_path / "out"), force=False) as path:
            Path(path).write_bytes(b"part")
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        fill()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_progress_ends_at_the_total(folder: str, tmp_path: Path) -> None:
    """Every tensor counts once."""
    for target in TARGETS:
        seen: list[tuple[int, int]] = []
        export(
            folder, str(tmp_path / target), target,
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )  # fmt: skip
        assert seen[-1][0] >= seen[-1][1] > 0
        assert seen == sorted(seen)


def test_no_commit_is_no_source(folder: str, tmp_path: Path) -> None:
    """An interrupted generation is refused with the reason."""
    (tmp_path / "damaged").touch()
    Path(folder, "COMMIT").unlink()
    with pytest.raises(ConfigError, match="has no COMMIT"):
        export(folder, str(tmp_path / "out"), "torch")


def _contents(path: Path) -> dict[str, str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: file.read_bytes().decode("latin-1") for file in files}


def _file(path: Path, text: str) -> None:
    path.write_text(text)


def _folder(path: Path, text: str) -> None:
    path.mkdir()
    (path / "file").write_text(text)
