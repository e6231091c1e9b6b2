"""The result of a simulation, as tables and as an object."""

from collections.abc import Sequence
from typing import Any

from autockpt.cli.planning.simulation_input import Asked
from autockpt.console import Console
from autockpt.tuner.simulation.compare import PARTS
from autockpt.tuner.simulation.outcome import Spread, Summary
from autockpt.values.record import to_data
from autockpt.values.units import format_bytes, format_duration, format_fraction

HEADERS = (
    *("strategy", "every (iterations)", "goodput", "+-"),
    *("behind", "formula", "google", "meta", "back from"),
)


def as_object(asked: Asked, found: Sequence[Summary], skipped: Sequence[str]) -> dict[str, Any]:
    """For --json."""
    return {
        "nodes": asked.nodes,
        "length_s": asked.histories[0].length_s,
        "runs": len(asked.histories),
        "seed": asked.seed,
        "mtbf_s": asked.mtbf_s,
        "process_share": asked.process_share,
        "believed_mtbf_s": 1.0 / asked.profile.failures.interruptions_per_s,
        "strategies": [to_data(summary) for summary in found],
        "left_out": list(skipped),
    }


def print_found(console: Console, asked: Asked, found: Sequence[Summary]) -> None:
    """The answer in a sentence, its assumptions, results best first, and where the time went."""
    console.styled(_answer(asked, found[0]), "bold")
    console.result(_assumptions(asked))
    console.result(_cluster(asked, found[0]))
    ranked = sorted(found, key=lambda summary: -summary.goodput.mean)
    console.result("")
    console.table(HEADERS, [_row(summary, found[0]) for summary in ranked])
    console.result("")
    shares = [(s.name, *(f"{100 * s.parts[part]:.2f}" for part in PARTS)) for s in ranked]
    console.table(("% of wall time", *PARTS), shares)
    if console.verbosity > 0:
        console.result("")
        for summary in ranked:
            console.result(f"{summary.name}: {summary.says}")


def say_alike(console: Console, found: Sequence[Summary]) -> None:
    """Name the strategies that decide and end as another one does."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        parts = [f"{share:.4f}" for share in one.parts.values()]
        key = (_intervals(one), f"{one.goodput.mean:.4f}", *parts)
        groups.setdefault(key, []).append(one.name)
    alike = [f"{', '.join(rest)} as {first}" for first, *rest in groups.values() if rest]
    if alike:
        console.say(f"the same intervals and times: {'; '.join(alike)}")


def as_page(asked: Asked, found: Sequence[Summary], command: str) -> str:
    """The same as one HTML file."""
    from autockpt.reports.html.simulation_page import Row, render

    rows = []
    for summary in sorted(found, key=lambda one: -one.goodput.mean):
        parts = dict(summary.parts)
        down, other = parts.pop("restart") + parts.pop("restore"), parts.pop("waiting")
        rows.append(
            Row(
                name=summary.name,
                cells=_row(summary, found[0]),
                shares={**parts, "down": down, "other": other},
                says=summary.says,
            )
        )
    cluster = _cluster(asked, found[0])
    return render(cluster=cluster, command=command, head=HEADERS, rows=rows)


def _answer(asked: Asked, first: Summary) -> str:
    """The first strategy in units of time."""
    iteration_s = asked.profile.iteration_s.p50
    tiers = (
        ("memory", first.memory_steps), ("a peer", first.peer_steps), ("disk", first.disk_steps),
    )  # fmt: skip
    places = [
        f"to {place} every {format_duration(steps * iteration_s)} ({steps} iterations)"
        for place, steps in tiers if steps
    ]  # fmt: skip
    lost = format_duration(3600.0 * first.lost_h_per_day)
    return (
        f"{first.name}: checkpoint {' and '.join(places) or 'nowhere'}. "
        f"{100 * first.goodput.mean:.2f} % of the time trains; {lost} a day are trained twice."
    )


def _assumptions(asked: Asked) -> str:
    """The costs that the answer rests on, measured or assumed, in words."""
    profile = asked.profile
    recovery = profile.recovery
    persist = profile.persist_s
    holder = "rank" if asked.is_measured else "node"
    parts = [
        f"iteration {format_duration(profile.iteration_s.p50)}",
        f"state {format_bytes(profile.state.total_bytes)} a {holder}",
        *([f"a write {format_duration(persist.p50)}"] if persist else []),
        f"detection {format_duration(recovery.detect.value_s)}",
        f"restart {format_duration(recovery.restart.value_s)}",
        *asked.bandwidths,
    ]
    origin = "from the profile" if asked.is_measured else "assumed unless given"
    return f"{origin}: {', '.join(parts)}"


def _cluster(asked: Asked, first: Summary) -> str:
    history = asked.histories[0]
    source = (
        "of a trace" if asked.seed is None else f"{len(asked.histories)} runs of seed {asked.seed}"
    )
    return (
        f"{asked.nodes} nodes, {format_duration(history.length_s)}, {source}: "
        f"{first.failures:.0f} failures a run, one every {format_duration(asked.mtbf_s)}; "
        f"{format_fraction(asked.process_share)} leave every node's memory alive"
    )


def _row(summary: Summary, first: Summary) -> tuple[str, ...]:
    behind = "" if summary.name == first.name else _signed(summary.behind)
    return (
        summary.name,
        _intervals(summary),
        f"{100 * summary.goodput.mean:.2f}",
        _half(summary.goodput),
        behind,
        f"{100 * summary.predicted:.2f}",
        f"{100 * summary.google:.2f}",
        f"{100 * summary.meta:.2f}",
        ", ".join(f"{n:.0f} {place}" for place, n in summary.recoveries.items() if n >= 0.5),
    )


def _intervals(summary: Summary) -> str:
    """`memory 4, disk 20`: iterations."""
    steps = (
        ("memory", summary.memory_steps),
        ("peer", summary.peer_steps),
        ("disk", summary.disk_steps),
    )
    return ", ".join(f"{place} {n}" for place, n in steps if n)


def _half(spread: Spread) -> str:
    return "-" if spread.high is None else f"{100 * (spread.high - spread.mean):.2f}"


def _signed(spread: Spread) -> str:
    half = "" if spread.high is None else f" +-{100 * (spread.high - spread.mean):.2f}"
    return f"{100 * spread.mean:.2f}{half}"
