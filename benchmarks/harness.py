"""What every benchmark shares: the machine, the versions, the result file, the table.

benchmarks/results/NAME.json = {machine, versions, commit, command, date, rows: [...]}
row = {figure, value, unit, target, met, ...}; `value` is a median, `spread` and `n` beside it.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


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


def row(
    contestant: str,
    figure: str,
    samples: Sequence[float],
    unit: str,
    *,
    at_most: float | None = None,
) -> Row:
    """The median of `samples`, judged against an upper target."""
    if not samples:
        return Row(contestant=contestant, figure=figure, value=None, unit=unit, n=0)
    value = statistics.median(samples)
    return Row(
        contestant=contestant,
        figure=figure,
        value=value,
        unit=unit,
        spread=(min(samples), max(samples)),
        n=len(samples),
        target="" if at_most is None else f"<= {at_most:g}",
        met=None if at_most is None else value <= at_most,
    )


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


def publish(name: str, rows: Sequence[Row], *, settings: dict[str, Any]) -> Path:
    """Prints the table and writes the result file."""
    print_table(rows)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    data = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "settings": settings,
        "rows": [asdict(one) for one in rows],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"\nwritten to {os.path.relpath(path)}")
    return path


def print_table(rows: Sequence[Row]) -> None:
    """Contestants down, figures across; `*` marks a missed target."""
    figures = list(dict.fromkeys((one.figure, one.unit) for one in rows))
    contestants = list(dict.fromkeys(one.contestant for one in rows))
    by_key = {(one.contestant, one.figure): one for one in rows}
    heads = [f"{figure} [{unit}]" if unit else figure for figure, unit in figures]
    width = max(len(name) for name in contestants) + 2
    print(" " * width + "  ".join(f"{head:>22}" for head in heads))
    for contestant in contestants:
        cells = [_cell(by_key.get((contestant, figure))) for figure, _ in figures]
        print(f"{contestant:<{width}}" + "  ".join(f"{cell:>22}" for cell in cells))


def _cell(one: Row | None) -> str:
    if one is None or one.value is None:
        return "-"
    text = f"{one.value:.4g}"
    if one.spread is not None and one.n > 1:
        text += f" ({one.spread[0]:.3g}-{one.spread[1]:.3g})"
    return text + (" *" if one.met is False else "")
