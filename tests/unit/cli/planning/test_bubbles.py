"""`autockpt bubbles`: closed forms, a measured pipeline laid out anew, clear refusals."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli import app
from autockpt.run_directory import RunDirectory
from autockpt.values.profile import Distribution, IterationTrace
from tests.support.profiles import distribution, example_profile

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "concepts" / "bubbles.md"
ITERATIONS, MICROBATCHES = 20, 8


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """What --json prints."""
    assert app.run(["bubbles", *argv, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """By schedule."""
    return {row["schedule"]: row for row in found(capsys, *argv)["schedules"]}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The error of a command line that is refused, or of a profile that it names."""
    assert app.run(["bubbles", *argv]) == (78 if argv[:-1] == ("--profile",) else 2)
    return capsys.readouterr().err


def test_the_document_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The first block of docs/concepts/bubbles.md with a command, line by line."""
    block = re.search(
        r"```console\n\$ autockpt (bubbles .*?)\n(.*?)```", DOCUMENT.read_text(), re.S
    )
    assert block is not None
    assert app.run(shlex.split(block[1])) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == block[2].splitlines()


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_idle_time_is_that_of_the_closed_forms(
    p: int, m: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """(p - 1)(F + B), a v-th of it with v stages a rank; ZBV has none when it repeats itself."""
    by_name = rows(
        capsys, "--ranks", str(p), "--microbatches", str(m), "--forward", "10 ms",
        "--backward", "20 ms", "--state", "3 GB", "--copy", "20 GB/s",
    )  # fmt: skip
    for name, stages in (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)):
        idle_s = 0.03 * (p - 1) / stages
        assert by_name[name]["idle_s"] == pytest.approx(idle_s), name
        assert by_name[name]["iteration_s"] == pytest.approx(0.03 * m + idle_s), name
    row = by_name["1F1B"]
    assert row["room_bytes"] == pytest.approx(20e9 * row["idle_s"] / 1.1, rel=1e-6)
    assert row["iterations"] == -(-3_000_000_000 // row["room_bytes"])
    none = by_name["ZBVZeroBubble"]
    assert (none["windows"], none["room_bytes"], none["iterations"]) == ([], 0, 0)


def test_gaps_that_take_no_chunk_are_no_windows(capsys: pytest.CaptureFixture[str]) -> None:
    """30 us chunks leave 90 us gaps: idle, and of no use."""
    row = rows(capsys, "--schedule", "1F1B", "--forward", "10 us", "--ranks", "2")["1F1B"]
    assert row["idle_s"] == pytest.approx(30e-6)
    assert (row["windows"], row["iterations"]) == ([], 0)


def test_messages_and_the_step_lengthen_an_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    """A message stands on the way to every stage and back; the step ends each rank's iteration."""
    bare = rows(capsys, "--schedule", "1F1B")["1F1B"]["iteration_s"]
    sent = rows(capsys, "--schedule", "1F1B", "--transfer", "1 ms")["1F1B"]["iteration_s"]
    stepped = rows(capsys, "--schedule", "1F1B", "--step", "5 ms")["1F1B"]["iteration_s"]
    assert sent >= bare + 2 * 3 * 1e-3
    assert stepped == pytest.approx(bare + 5e-3)


def pipeline_profile(folder: Path) -> str:
    """Of four ranks under 1F1B, the second stage of which is twice as slow."""

    def chunk(seconds: float) -> Distribution:
        return replace(distribution(seconds), n=ITERATIONS * MICROBATCHES)

    traces = tuple(
        IterationTrace(
            rank=rank, schedule="1F1B", fingerprint="feed",
            iteration_s=replace(distribution(0.4), n=ITERATIONS),
            chunk_s={f"{rank}F": chunk(0.01 * (1 + (rank == 1))), f"{rank}B": chunk(0.02)},
        )
        for rank in range(4)
    )  # fmt: skip
    directory = RunDirectory.create(folder / "pipeline")
    directory.write_profile(example_profile(traces=traces))
    return str(directory.path)


def test_a_measured_pipeline_is_laid_out_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its stages, micro-batches, state and copy; twice the micro-batches, the same gaps."""
    profile = pipeline_profile(tmp_path)
    body = found(capsys, "--profile", profile, "--schedule", "1F1B")
    asked = body["asked"]
    assert (asked["ranks"], asked["microbatches"]) == (4, MICROBATCHES)
    assert [stage["forward_s"] for stage in asked["stages"]] == [0.01, 0.02, 0.01, 0.01]
    assert asked["state_bytes"] == example_profile().state.total_bytes
    more = rows(capsys, "--profile", profile, "--schedule", "1F1B", "--microbatches", "16")["1F1B"]
    # The slow stage sets the pace: the others wait for it in every micro-batch.
    assert more["iteration_s"] > body["schedules"][0]["iteration_s"] + 8 * 0.039
    even = rows(capsys, "--profile", profile, "--schedule", "Interleaved1F1B")["Interleaved1F1B"]
    assert even["idle_s"] == pytest.approx(3 * (0.05 + 0.08) / 8)


def test_what_is_refused_says_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown schedules, numbers they do not allow, contradictions, jobs without a pipeline."""
    assert "'Nope'" in refusal(capsys, "--schedule", "Nope")
    assert "DualPipeV" in refusal(
        capsys, "--schedule", "DualPipeV", "--ranks", "8", "--microbatches", "3"
    )
    profile = pipeline_profile(tmp_path)
    assert "--profile and --copy" in refusal(capsys, "--profile", profile, "--copy", "1 GB/s")
    plain = RunDirectory.create(tmp_path / "plain")
    plain.write_profile(example_profile())
    assert "say --forward, --state and --copy" in refusal(capsys, "--profile", str(plain.path))
    assert "--copy" in refusal(capsys, "--copy", "0 GB/s")
    assert "--state" in refusal(capsys, "--state", "much")


def test_schedules_that_the_numbers_do_not_allow_are_left_out_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not asked for by name, they end nothing."""
    body = found(capsys, "--ranks", "8", "--microbatches", "3")
    shown = {row["schedule"] for row in body["schedules"]}
    assert {"1F1B", "GPipe"} <= shown
    assert body["left_out"]
