"""The first table of docs/concepts/compression.md, of a result file of benchmarks/codecs.py.

python -m benchmarks.compression.table benchmarks/results/codecs.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from autockpt.values.table import markdown

PEERS = ("zipnn", "blosc2 shuffle zstd-1", "blosc2 shuffle zstd-5", "zstd-1", "7-zip")
OURS, DELTA, XOR = "planes", "delta (subtract)", "delta (XOR)"
HEAD = ("ours: ratio, encode, decode", "XOR", *(name.replace(" shuffle", "") for name in PEERS),
        "size", "encode")  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """A line for every kind of tensors; cells are ratio @ encode/decode, GB per CPU second."""
    found = {(row["contestant"], row["figure"]): row for row in rows}
    cases = [figure.removesuffix(": ratio") for name, figure in found
             if name in (OURS, DELTA) and figure.endswith(": ratio")]  # fmt: skip
    lines = []
    for case in cases:
        own = DELTA if "apart" in case else OURS

        def value(name: str, figure: str, digits: str, case: str = case) -> str:
            row = found.get((name, f"{case}: {figure}"))
            missed = " (missed)" if row and row["met"] is False else ""
            return f"{row['value']:{digits}}{missed}" if row else "-"

        def cell(name: str, ratio: str) -> str:
            return f"{ratio} @ {value(name, 'encode', '.2g')}/{value(name, 'decode', '.2g')}"

        cells = [
            cell(own, f"**{value(own, 'ratio', '.3f')}**"),
            value(XOR, "ratio", ".3f") if own == DELTA else "",
            *(cell(name, value(name, "ratio", ".2f")) for name in PEERS),
            value(own, "size / best peer", ".3f"),
            value(own, "encode / best peer", ".2f"),
        ]
        lines.append((case, *cells))
    return "\n".join(markdown(("fp32 / bf16 tensors", *HEAD), lines))


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"]))
