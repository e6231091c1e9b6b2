"""Writes counts of the last full campaign into docs/concepts/reliability.md.

Use: `python -m tests.campaigns.table`.
"""

import json
import re
from pathlib import Path
from typing import Any

from autockpt.values.table import markdown
from tests.campaigns.framework import ROOT

PAGE = ROOT / "docs" / "concepts" / "reliability.md"
RESULT = ROOT / "benchmarks" / "results" / "campaigns.json"
HEAD = ("campaign", "holds", "played", "asked for", "of different", "violations", "minutes")
_BLOCK = re.compile(r"(<!-- campaigns -->\n).*?(<!-- /campaigns -->)", re.S)


def table(data: dict[str, Any]) -> str:
    """The markdown of a result."""
    several = f" ({data['runs']} runs, {data['minutes']:.0f} minutes)" if data["runs"] > 1 else ""
    lines = [
        f"`{data['command']}`{several}, {data['date']}, commit {data['commit']}, "
        f"{data['machine']['cores']} "
        f"cores, Python {data['versions']['python']}, torch {data['versions']['torch']}:",
        "",
    ]
    rows = []
    for row in data["campaigns"]:
        played = "skipped: " + row["skipped"] if row["skipped"] else f"{row['executions']:,}"
        wanted = f"{row['wanted']:,}" if row["wanted"] else ""
        distinct = f"{row['distinct']:,}" if row["distinct"] else ""
        minutes = f"{row['seconds'] / 60:.1f}"
        rows.append(
            (row["name"], row["claim"], played, wanted, distinct, str(row["violated"]), minutes)
        )
    return "\n".join([*lines, *markdown(HEAD, rows)]) + "\n"


def with_table(page: str, data: dict[str, Any]) -> str:
    """The page with the table between its marks."""
    return _BLOCK.sub(lambda found: found[1] + table(data) + found[2], page)


def main(page: Path = PAGE, result: Path = RESULT) -> None:
    """Writes it."""
    page.write_text(with_table(page.read_text(), json.loads(result.read_text())))


if __name__ == "__main__":
    main()
