"""The command line of the campaigns."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaigns.framework import (
    CAMPAIGNS,
    DISTINCT,
    Summary,
    read_summaries,
    run_parallel_shares,
    run_share,
    sources,
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
    parser.add_argument("--numbers", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, help="write the table there, as JSON; `all` goes on from what it has"
    )
    given = parser.parse_args()
    if given.name == "all":
        summaries = _all(given)
    else:
        summaries = [_run(given, given.name, given.count, given.minutes * 60, given.first)]
        if given.out is not None:
            write_summaries(given.out, summaries)
    if given.only is not None:
        print(f"  {dict(summaries[0].outcomes)}")
    return 1 if any(one.violated for one in summaries) else 0


def _all(given: argparse.Namespace) -> list[Summary]:
    """Every campaign, on from where an earlier run of the same sources ended."""
    began, minutes = time.monotonic(), 0.0
    facts = {**_facts(given), "sources": sources(), "seed": given.seed, "runs": 1}
    before: list[Summary] = []
    if given.out is not None and given.out.exists():
        earlier = json.loads(given.out.read_text())
        if all(earlier.get(name) == facts[name] for name in ("sources", "seed")):
            before, facts["runs"] = read_summaries(given.out), earlier["runs"] + 1
            minutes = earlier["minutes"]
            several = "runs" if facts["runs"] > 2 else "run"
            print(f"going on after {earlier['runs']} {several} of {given.out}", flush=True)
        else:
            print(f"anew: {given.out} is of other sources or another seed", flush=True)

    def keep(summaries: Iterable[Summary]) -> None:
        if given.out is not None:
            took = minutes + (time.monotonic() - began) / 60
            write_summaries(given.out, summaries, **facts, minutes=round(took, 1))

    summaries = play_all(partial(_run, given), given.minutes * 60, before=before, keep=keep)
    print(counts_reached(summaries), flush=True)
    return summaries


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
    summary = (
        run_parallel_shares(
            name, seed=given.seed, count=count, seconds=seconds, workers=given.workers, first=first
        )
        if given.workers > 1 and given.only is None
        else run_share(
            name, seed=given.seed, count=count, seconds=seconds, numbers=given.numbers,
            first=first, only=given.only,
        )
    )  # fmt: skip
    print(summary.line, flush=True)
    for violation in summary.violations[:3]:
        print(f"  {violation}", flush=True)
    return summary


if __name__ == "__main__":
    sys.exit(main())
