"""Tables of the README and of docs/benchmarks/benchmarks.md, from results of benchmarks/engine.py.

python -m benchmarks.contest.table benchmarks/results/engine.json [CONTESTANT ...]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autockpt.values.table import markdown

HEAD = ("time with / without", "training blocked", "durable, x the write", "CPU seconds")
NAMES = {
    "autockpt": "**autockpt**",
    "DLRover flash": "DLRover Flash Checkpoint",
    "DCP async staged": "torch DCP async, staged",
    "DCP async thread": "torch DCP async, thread",
    "DCP async process": "torch DCP async, process",
    "NVRx fork": "NVRx, forked child",
    "NVRx persistent": "NVRx, persistent worker",
    "torchsnapshot": "torchsnapshot async",
    "torchsnapshot sync": "torchsnapshot",
    "safetensors": "safetensors + fsync",
    "torch.save": "torch.save + fsync",
    "DCP": "torch DCP",
    "floor": "a hand-written floor: no digests, no commit",
    "none": "no checkpoint: noise of the method",
}
"""Contestants as a reader knows them; others keep their names."""
LAST = ("floor", "none")
"""Rows that are no system."""
LEFT_OUT = ("plain write", "autockpt every iteration", "autockpt memory only")
"""Rows that answer another question."""
README = (
    "autockpt", "DLRover flash", "DCP async staged", "Orbax async", "NVRx fork", "torch.save",
    "none",
)  # fmt: skip
"""The README shows these."""


def table(rows: Sequence[dict[str, Any]], chosen: Sequence[str] = ()) -> str:
    """Return a line for each system, the fastest training first; `chosen`: only these."""
    found = {(row["contestant"], row["figure"]): row for row in rows}
    names = [name for name, figure in found if figure == "end-to-end" and name not in LEFT_OUT]
    names = [name for name in names if found[name, "end-to-end"]["value"] is not None]
    names = [name for name in names if not chosen or name in chosen]
    names.sort(key=lambda name: (name in LAST, found[name, "end-to-end"]["value"]))
    lines = []
    for name in names:
        cells = [
            _spread(found[name, "end-to-end"]),
            _value(found.get((name, "stall")), "{:,.0f} ms"),
            _value(found.get((name, "durable/plain write")), "{:.1f}"),
            _value(found.get((name, "CPU per checkpoint")), "{:.2f}"),
        ]
        lines.append((NAMES.get(name, name), *cells))
    return "\n".join(markdown(("", *HEAD), lines))


def _spread(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    return f"{row['value']:.2f} ({low:.2f} to {high:.2f})"


def _value(row: dict[str, Any] | None, text: str) -> str:
    if row is None:
        return ""
    return text.format(row["value"])


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"], sys.argv[2:]))
