"""Every benchmark has `--smoke`: the same code on a tiny input, to its end, without a result."""

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness

ROOT = Path(__file__).resolve().parents[2]
WORKERS = {"bubbles_rank", "redundancy_ends", "reshard_ranks"}
"""Processes that a benchmark starts, with arguments of their own."""
FAST = {"pages", "tuner"}
"""Less than 5 s here, with the imports."""
WITHIN_S = 280.0
BENCHMARKS = sorted(
    path.stem
    for path in ROOT.glob("benchmarks/[a-z]*.py")
    if "__main__" in path.read_text(encoding="utf-8") and path.stem not in WORKERS
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_knows_smoke(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` lists it."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--smoke" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in BENCHMARKS],
)
def test_a_smoke_ends_well_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Exit code 0, an empty working directory, and the results as they were."""
    before = _results()
    log = tmp_path / "log"
    work = tmp_path / "work"
    work.mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{name}", "--smoke"],
            cwd=work, env={**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=WITHIN_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it ends what it started in other sessions
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text(errors="replace")[-3000:]
    assert list(work.iterdir()) == []
    assert _results() == before


def _results() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in harness.RESULTS.iterdir()}


def test_smoke_is_tiny_but_for_what_is_given() -> None:
    """Options keep their defaults without it, and what the user gives wins with it."""

    def parsed(*words: str) -> tuple[int, str, bool]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--rounds", type=int, default=9)
        parser.add_argument("--size", default="60m")
        args = harness.parse(parser, words, rounds=1, size="tiny")
        return args.rounds, args.size, args.smoke

    assert parsed() == (9, "60m", False)
    assert parsed("--smoke") == (1, "tiny", True)
    assert parsed("--smoke", "--rounds", "3") == (3, "tiny", True)


def test_a_smoke_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows the table and says that no result was written."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    rows = [harness.row("a", "b", [1.0], "s")]
    harness.publish("x", rows, settings={}, smoke=True)
    assert list(tmp_path.iterdir()) == []
    assert "no result was written" in capsys.readouterr().out
