"""The command line of the campaigns."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from tests.campaigns.framework import (
    CAMPAIGNS,
    DISTINCT,
    FULL,
    Summary,
    run_parallel_shares,
    run_share,
    write_summaries,
)


def main() -> int:
    """Runs one campaign or all; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns")
    parser.add_argument("name", choices=[*CAMPAIGNS, "all"])
    parser.add_argument(
        "--count", type=_count, help="cases, or `distinct`; as many as fit the time if not given"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="at most; with `all`, of all together"
    )
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the table there, as JSON")
    given = parser.parse_args()
    names = list(CAMPAIGNS) if given.name == "all" else [given.name]
    summaries = []
    for name in names:
        summaries.append(_run(name, given))
        print(summaries[-1].line, flush=True)
        for violation in summaries[-1].violations[:3]:
            print(f"  {violation}", flush=True)
        if given.only is not None:
            print(f"  {dict(summaries[-1].outcomes)}")
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


def _run(name: str, given: argparse.Namespace) -> Summary:
    seconds, count = given.minutes * 60, given.count
    if given.name == "all":
        seconds *= FULL[name].share
        count = FULL[name].count if count is None else count
    if given.workers > 1 and given.only is None:
        return run_parallel_shares(
            name, seed=given.seed, count=count, seconds=seconds, workers=given.workers
        )
    i, _, n = given.share.partition("/")
    return run_share(
        name, seed=given.seed, count=count, seconds=seconds, share=(int(i), int(n)),
        only=given.only,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
