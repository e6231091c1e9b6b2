"""Where the output of ranks goes, also where a disk takes nothing."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from autockpt.launch.elastic.rank_output import SHOWN_BYTES, SHOWN_LINES, OutputFiles
from tests.unit.cli.scripts import environment, write

SCRIPT = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for stream in (sys.stdout, sys.stderr):
    print("before", stream.name, stream.encoding, file=stream)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for number in range(1000):
    print("line", number)
    print("line", number, file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("after")
"""
"""A limit on the size of files stands for a disk that is full, for a while."""


def made(outputs: OutputFiles, attempt: int) -> Any:
    """The destinations of an attempt of two ranks."""
    ranks = {
        local: {"RANK": str(local), "TORCHELASTIC_RESTART_COUNT": str(attempt)} for local in (0, 1)
    }
    return outputs.specs().reify(ranks)


def test_local_rank_0_speaks_on_the_terminal(tmp_path: Path) -> None:
    """The other ranks have two files for each attempt."""
    warned: list[str] = []
    outputs = OutputFiles(tmp_path / "logs", warned.append)
    for attempt in (0, 1):
        found = made(outputs, attempt)
        assert (found.stdouts[0], found.stderrs[0]) == ("", "")
        for path in (found.stdouts[1], found.stderrs[1]):
            assert Path(path).stat().st_mode & 0o777 == 0o600
            assert f"attempt-{attempt:03d}" in path
    assert warned == []
    Path(found.stderrs[1]).write_text("x" * SHOWN_BYTES + "".join(f"{n}\n" for n in range(500)))
    path, text = outputs.end_of_errors(1)
    assert path == found.stderrs[1]
    assert text.splitlines() == [str(n) for n in range(500 - SHOWN_LINES, 500)]
    assert outputs.end_of_errors(0) == ("", "")


@pytest.mark.parametrize("elsewhere", [True, False], ids=["temporary", "terminal"])
def test_a_start_whose_files_cannot_be_made_has_its_output_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """The job goes on, and it is said once where its output is."""
    (tmp_path / "full").touch()
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("other" if elsewhere else "full")))
    warned: list[str] = []
    outputs = OutputFiles(tmp_path / "full" / "logs", warned.append)
    for attempt in (1, 2):
        found = made(outputs, attempt)
        assert sorted(found.error_files) == [0, 1]
        if elsewhere:
            assert Path(found.stdouts[1]).is_relative_to(tmp_path / "other")
            assert Path(found.stderrs[1]).is_file()
            assert Path(found.error_files[0]).parent.is_dir()
        else:
            assert (found.stdouts[1], found.stderrs[1]) == ("", "")
            assert outputs.end_of_errors(1) == ("", "")
    (said,) = warned
    assert "cannot be written: Not a directory" in said
    assert said.endswith(str(next((tmp_path / "other").iterdir())) if elsewhere else "terminal")


def test_a_full_disk_loses_output_and_ends_no_script(tmp_path: Path) -> None:
    """When there is room again, the log tells how much is missing."""
    write(tmp_path, "s.py", SCRIPT)
    out, err = tmp_path / "out", tmp_path / "err"
    with open(out, "wb") as to_out, open(err, "wb") as to_err:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "autockpt.cli.script_runner", "s.py"], cwd=tmp_path,
            env=environment(), stdout=to_out, stderr=to_err, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, err.read_text()
    lines = out.read_text().splitlines()
    assert lines[0] == "before <stdout> utf-8"
    assert lines[-1] == "after"
    assert lines[-2].endswith("bytes of output were lost: a full disk]")
    assert err.read_text().startswith("before <stderr> utf-8\nline 0\n")
    assert err.stat().st_size == 4096


def test_a_reader_that_has_gone_is_met_as_ever(tmp_path: Path) -> None:
    """It is no disk: a script in a pipe may rely on it."""
    write(tmp_path, "s.py", "while True: print('y')")
    done = subprocess.run(
        f"{sys.executable} -u -m autockpt.cli.script_runner s.py | head -n 1", cwd=tmp_path,
        shell=True, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "y\n"
    assert "BrokenPipeError" in done.stderr
