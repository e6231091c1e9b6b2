"""What every benchmark shares: the machine, the versions, the result file, the table.

benchmarks/results/NAME.json = {machine, versions, commit, clean, command, date, rows: [...]}
`clean` is false where the code is not that of the commit: such figures cannot be made again.
row = {figure, value, unit, target, met, ...}; `value` is a median, `spread` and `n` beside it.
A contestant's trap (what it leaves out, or does otherwise) stands in `notes`, the reason why a
figure is missing in the row's `note`.

Every benchmark has `--smoke`: the same code on a tiny input, whose figures say nothing.
"""

import argparse
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from autockpt.values.table import table

RESULTS = Path(__file__).parent / "results"
Sample = TypeVar("Sample")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **tiny: Any
) -> argparse.Namespace:
    """The options, and `--smoke`, which takes `tiny` for every option that is not given."""
    parser.add_argument(
        "--smoke", action="store_true", help="tiny, in seconds: says nothing, writes no result"
    )
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**tiny)
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of one contestant."""

    contestant: str
    figure: str
    value: float | None
    """Median; None when it could not be measured."""
    unit: str
    spread: tuple[float, float] | None = None
    """Smallest and largest sample."""
    n: int = 1
    target: str = ""
    met: bool | None = None
    """None when there is no target."""
    note: str = ""
    """What the figure hides, or why there is none."""


def row(
    contestant: str,
    figure: str,
    samples: Sequence[float],
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    note: str = "",
) -> Row:
    """The median (or another statistic) of `samples`, judged against a target."""
    value = statistic(samples) if samples else None
    target, met = _judged(value, at_most, at_least)
    return Row(
        contestant=contestant,
        figure=figure,
        value=value,
        unit=unit,
        spread=(min(samples), max(samples)) if samples else None,
        n=len(samples),
        target=target,
        met=met,
        note=note,
    )


def _judged(
    value: float | None, at_most: float | None, at_least: float | None
) -> tuple[str, bool | None]:
    if at_most is not None:
        return f"<= {at_most:g}", None if value is None else value <= at_most
    if at_least is not None:
        return f">= {at_least:g}", None if value is None else value >= at_least
    return "", None


def quantile(samples: Sequence[float], q: float) -> float:
    """The smallest sample that a share `q` of all does not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def bootstrap_upper(
    samples: Sequence[Sample],
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
    statistic: Callable[[Sequence[Sample]], float] = statistics.median,  # type: ignore[assignment]
) -> float:
    """One-sided upper bound of a statistic: its `confidence` quantile over resamples.

    Seeded: the same samples give the same bound.  Source: Efron 1979, percentile bootstrap.
    """
    return quantile(_resampled(samples, resamples, seed, statistic), confidence)


def bootstrap_interval(
    samples: Sequence[Sample], statistic: Callable[[Sequence[Sample]], float], resamples: int = 400
) -> tuple[float, float]:
    """(low, high) of 95 %, as `bootstrap_upper`; for samples that do not depend on each other."""
    found = _resampled(samples, resamples, 0, statistic)
    return quantile(found, 0.025), quantile(found, 0.975)


def _resampled(
    samples: Sequence[Sample],
    resamples: int,
    seed: int,
    statistic: Callable[[Sequence[Sample]], float],
) -> list[float]:
    draw = random.Random(seed).choices
    return [statistic(draw(samples, k=len(samples))) for _ in range(resamples)]


def pseudomedian(samples: Sequence[float]) -> float:
    """Median of the means of all pairs of samples, each with itself among them.

    Nearly as exact as the mean where samples scatter evenly, and a few wild ones do not move it.
    Source: Hodges and Lehmann 1963.
    """
    pairs = itertools.combinations_with_replacement(samples, 2)
    return statistics.median((one + other) / 2 for one, other in pairs)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = "unknown"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Python, torch and ourselves."""
    import torch

    import autockpt

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "autockpt": autockpt.__version__,
    }


def commit() -> str:
    """The commit of the code, with a mark when it was changed since."""
    try:
        root = Path(__file__).parent.parent
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=root, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("-changed" if changed else "")


def publish(
    name: str,
    rows: Sequence[Row],
    *,
    settings: dict[str, Any],
    notes: Mapping[str, str] | None = None,
    variant: str = "",
    smoke: bool = False,
) -> None:
    """Prints the table and writes the result file; a `variant` has a file of its own.

    `smoke`: prints only.
    """
    print_table(rows)
    print_notes(rows, notes or {})
    if smoke:
        print("\nsmoke: these figures say nothing, and no result was written")
        return
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{variant}.json"
    data = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "commit": (code := commit()),
        "clean": code != "unknown" and not code.endswith("-changed"),
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "settings": settings,
        **({"notes": dict(notes)} if notes else {}),
        "rows": [asdict(one) for one in rows],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"\nwritten to {os.path.relpath(path)}")


def print_table(rows: Sequence[Row], *, columns: int = 6) -> None:
    """Contestants down, figures across, `columns` at a time; `*` marks a missed target.

    Figures that only one contestant has stand below, one a line.
    """
    owners: dict[tuple[str, str], set[str]] = {}
    for one in rows:
        owners.setdefault((one.figure, one.unit), set()).add(one.contestant)
    alone = len({one.contestant for one in rows}) == 1
    shared = [key for key, names in owners.items() if alone or len(names) > 1]
    for start in range(0, len(shared), columns):
        if start:
            print()
        _print_block(rows, shared[start : start + columns])
    single = [one for one in rows if (one.figure, one.unit) not in shared]
    if single:
        print()
    for one in single:
        target = f"   target {one.target}" if one.target else ""
        print(f"{one.contestant}, {one.figure}: {_cell(one)} {one.unit}{target}")


def _print_block(rows: Sequence[Row], figures: Sequence[tuple[str, str]]) -> None:
    by_key = {(one.contestant, one.figure): one for one in rows}
    names = [figure for figure, _ in figures]
    contestants = list(dict.fromkeys(one.contestant for one in rows if one.figure in names))
    heads = [f"{figure} [{unit}]" if unit else figure for figure, unit in figures]
    cells = ((name, *(_cell(by_key.get((name, one))) for one in names)) for name in contestants)
    print("\n".join(table(("", *heads), cells)))


def print_notes(rows: Sequence[Row], notes: Mapping[str, str]) -> None:
    """What stands beside the figures: targets missed, figures' notes, contestants' traps."""
    for one in rows:
        if one.met is False:
            print(f"* {one.contestant}, {one.figure}: {one.value:.4g}, target {one.target}")
    for one in rows:
        if one.note:
            print(f"{one.contestant}, {one.figure}: {one.note}")
    for contestant, note in notes.items():
        print(f"{contestant}: {note}")


def _cell(one: Row | None) -> str:
    if one is None or one.value is None:
        return "-"
    text = f"{one.value:.4g}"
    if one.spread is not None and one.n > 1:
        text += f" ({one.spread[0]:.3g}-{one.spread[1]:.3g})"
    return text + (" *" if one.met is False else "")
