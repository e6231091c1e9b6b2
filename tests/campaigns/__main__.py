"""The command line of the campaigns."""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaigns.framework import (
    CAMPAIGNS,
    DISTINCT,
    Summary,
    run_parallel_shares,
    run_share,
    write_summaries,
)
from tests.campaigns.schedule import counts_reached, play_all


def main() -> int:
    """Runs one campaign or all; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns")
    parser.add_argument("name", choices=[*CAMPAIGNS, "all"])
    parser.add_argument(
        "--count", type=_count,
        help="executions, or `distinct`; as many as fit the time if not given",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="at most; with `all`, of all together"
    )
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the table there, as JSON")
    given = parser.parse_args()
    if given.name == "all":
        summaries = play_all(partial(_run, given), given.minutes * 60)
        print(counts_reached(summaries), flush=True)
    else:
        summaries = [_run(given, given.name, given.count, given.minutes * 60, given.first)]
    if given.only is not None:
        print(f"  {dict(summaries[0].outcomes)}")
    if given.out is not None:
        write_summaries(given.out, summaries, **(_facts(given) if given.name == "all" else {}))
    return 1 if any(one.violated for one in summaries) else 0


def _facts(given: argparse.Namespace) -> dict[str, Any]:
    """What a result says of where it comes from, as a benchmark's does."""
    from benchmarks.harness import commit, machine, versions

    return {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(),
        "versions": versions(),
        "command": f"python -m tests.campaigns all --minutes {given.minutes:g}",
    }  # fmt: skip


def _count(text: str) -> int:
    return DISTINCT if text == "distinct" else int(text)


def _run(
    given: argparse.Namespace, name: str, count: int | None, seconds: float, first: int
) -> Summary:
    """One campaign, and what it came to on the terminal."""
    i, _, n = given.share.partition("/")
    summary = (
        run_parallel_shares(
            name, seed=given.seed, count=count, seconds=seconds, workers=given.workers, first=first
        )
        if given.workers > 1 and given.only is None
        else run_share(
            name, seed=given.seed, count=count, seconds=seconds, share=(int(i), int(n)),
            first=first, only=given.only,
        )
    )  # fmt: skip
    print(summary.line, flush=True)
    for violation in summary.violations[:3]:
        print(f"  {violation}", flush=True)
    return summary


if __name__ == "__main__":
    sys.exit(main())
