"""The pure half of `make bench-engine`: groups, pairs, rows, and what takes part."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest.rows import (
    EVERY,
    OURS,
    PLAIN,
    contest_rows,
    every_rows,
    iteration_pairs,
    paired,
    typical_ratio,
)
from benchmarks.contest.schedule import Taken, groups, need_bytes
from benchmarks.engine import MAIN, STATE_BYTES
from benchmarks.harness import Row
from benchmarks.peers.registry import BY_NAME, ENTRIES

ROOT = Path(__file__).resolve().parents[2]


def round_of(ratio: float, **figures: Any) -> dict[str, Any]:
    """Figures of a round, the uninteresting ones filled in."""
    usual = {
        "ratio": ratio, "stall": 0.001, "stall_share": 0.002, "slowdown": 1.0, "durable": 0.4,
        "cpu": 0.3, "foreign": 0.0, "iteration": 0.5,
        "iterations": [0.5 * ratio] * 4, "bare_iterations": [0.5] * 4,
    }  # fmt: skip
    return usual | figures


def taken(*ratios: float, **figures: Any) -> Taken:
    """Measured rounds with these ratios."""
    rounds = {turn: round_of(ratio, **figures) for turn, ratio in enumerate(ratios)}
    return Taken(rounds=rounds, check={"torn": [], "load_s": 0.5})


def figure(rows: list[Row], contestant: str, name: str) -> Row:
    """The one row of a contestant with this figure."""
    (found,) = [r for r in rows if r.contestant == contestant and r.figure == name]
    return found


def test_groups_fit_the_memory_and_leave_nobody_out() -> None:
    """All entries, in order, each once; never more than four with `none`, and one always runs."""
    base = [BY_NAME["none"]]
    for state_bytes, available in ((1e8, 64e9), (7e8, 18e9), (1.5e9, 18e9), (1e11, 18e9)):
        made = list(groups(ENTRIES, base, state_bytes, available))
        assert [entry for group in made for entry in group] == list(ENTRIES)
        for group in made:
            need = sum(need_bytes(entry, state_bytes) for entry in [*base, *group])
            assert len(group) <= 3
            assert len(group) == 1 or need <= available


def test_ours_and_the_plain_write_share_a_group_where_it_matters() -> None:
    """The ratio of the two is paired by turn."""
    main = [BY_NAME[name] for name in MAIN]
    for state in ("60m", "125m"):
        first = next(groups(main, [BY_NAME["none"]], STATE_BYTES[state], 18e9))
        assert {OURS, PLAIN} <= {entry.name for entry in first}


def test_pairs_are_of_one_turn() -> None:
    """A drift that meets both in a turn cancels; an unpaired turn takes the usual value."""
    mine, plain = taken(1.0, 1.0, 1.0), taken(1.0, 1.0)
    for turn, slow in ((0, 1.0), (1, 3.0)):
        plain.rounds[turn]["durable"] *= slow
        mine.rounds[turn]["durable"] *= 2 * slow
    assert paired(mine, plain, "durable") == pytest.approx([2.0, 2.0, 0.5])


def test_our_excess_is_held_against_the_cheapest_durable_peer() -> None:
    """Not against one whose checkpoints a power cut takes."""
    names = (OURS, "DCP", "torch.save", "ml-flashpoint")
    measured = dict(zip(names, (taken(1.02), taken(1.5), taken(1.4), taken(1.01)), strict=True))
    rows = contest_rows([BY_NAME[name] for name in names], measured, 4)
    share = figure(rows, OURS, "(ours - 1)/(best peer - 1)")
    assert share.value == pytest.approx(0.02 / 0.4)
    assert share.met
    assert "torch.save" in share.note


def test_a_slow_moment_of_the_machine_does_not_outweigh_the_checkpoints() -> None:
    """The sum of a segment shows it, the medians of its iterations do not; each cost stays."""
    mine = taken(1.0, 1.0, 1.0)
    for one in mine.rounds.values():
        one["iterations"][0] = 0.54  # the first iteration after a checkpoint takes 8 % longer
    mine.rounds[1]["iterations"][2] = 0.9
    assert typical_ratio(iteration_pairs(mine)) == pytest.approx(1.02)
    rows = contest_rows([BY_NAME[OURS]], {OURS: mine}, 4)
    assert figure(rows, OURS, "end-to-end, iterations, upper 95 %").met is False


def test_a_peer_within_the_noise_is_no_yardstick() -> None:
    """Neither a miracle nor a division by nearly nothing."""
    names = (OURS, "DCP")
    measured = dict(zip(names, (taken(1.02), taken(1.001)), strict=True))
    rows = contest_rows([BY_NAME[name] for name in names], measured, 4)
    share = figure(rows, OURS, "(ours - 1)/(best peer - 1)")
    assert (share.value, share.met) == (None, None)
    assert "noise" in share.note


def test_who_did_not_run_is_a_row_with_the_reason() -> None:
    """Nobody disappears from the table."""
    gone = Taken(failed="absent: it does not build")
    rows = contest_rows([BY_NAME["CheckFreq"]], {"CheckFreq": gone}, 4)
    assert [(r.contestant, r.value, r.note) for r in rows] == [("CheckFreq", None, gone.failed)]


def test_cpu_is_held_against_one_copy_and_one_write() -> None:
    """0.3 s over 0.05 + 0.15 s."""
    plain = taken(1.0, copy_cpu=0.05, write_cpu=0.15)
    names = (OURS, PLAIN)
    rows = contest_rows([BY_NAME[n] for n in names], {OURS: taken(1.0), PLAIN: plain}, 4)
    assert figure(rows, OURS, "CPU/(copy + write)").value == pytest.approx(1.5)
    assert figure(rows, OURS, "1 + CPU/(k iterations)").value == pytest.approx(1.15)


def test_a_torn_load_is_named() -> None:
    """The first tensor that differs, and how many."""
    torn = taken(1.2)
    torn.check["torn"] = ["buffer.tokens_seen"]
    rows = contest_rows([BY_NAME["DCP"]], {"DCP": torn}, 4)
    exact = figure(rows, "DCP", "exact")
    assert exact.value == 0.0
    assert "buffer.tokens_seen" in exact.note


def test_checkpoints_that_were_skipped_do_not_count_as_fast() -> None:
    """Half of them durable: half the gain for each that is."""
    ours = taken(1.1)
    ours.asked, ours.saved = 8, {"memory": 8, "disk": 4, "skipped": 0}
    entries = [BY_NAME[EVERY], BY_NAME["torch.save"]]
    rows = every_rows(entries, {EVERY: ours, "torch.save": taken(3.3)})
    assert figure(rows, EVERY, "best blocking writer/ours").value == pytest.approx(3.0)
    assert figure(rows, EVERY, "best blocking writer/ours, per durable one").value == (
        pytest.approx(1.5)
    )
    assert figure(rows, EVERY, "saved to disk").value == 0.5


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_names_an_adapter_and_its_trap(entry: Any) -> None:
    """The module is there (its package need not be), the class is in it, the note is not empty."""
    module, kind = entry.adapter.split(":")
    source = ROOT / "benchmarks" / "peers" / f"{module}.py"
    assert f"class {kind}(" in source.read_text(encoding="utf-8")
    assert entry.note


def test_what_peers_import_of_ours_needs_nothing_of_autockpt() -> None:
    """Their environments have torch and themselves."""
    for name in ("benchmarks.job", "benchmarks.peers.contract", "benchmarks.peers.rounds",
                 "benchmarks.peers.worker", "benchmarks.peers.processes"):  # fmt: skip
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        assert "import autockpt" not in text
        assert "from autockpt" not in text
