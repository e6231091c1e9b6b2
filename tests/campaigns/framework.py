"""What every campaign shares: numbered cases from a seed, an oracle that raises, a replay line.

A case is (campaign, seed, number) and nothing else: its random numbers come from these three, so
that one line on a command line plays it again, alone.
"""

import importlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
CASE_S = 120.0
"""No case may take longer: bounded time is one of the promises."""
DISTINCT = -1
"""As a count: every different case once."""
KEPT_VIOLATIONS = 20
"""Written down of one campaign; the rest is counted."""


class Violation(AssertionError):
    """A promise was broken; the message says which one, where, expected and got."""


def require(holds: object, *told: object) -> None:
    """Raises Violation unless it `holds`."""
    if not holds:
        raise Violation(" ".join(str(one) for one in told))


class Campaign(Protocol):
    """Cases of one kind."""

    claim: str
    """What holds in every case, one line."""
    distinct: int | None
    """How many different cases there are, when they can be counted; else None."""

    def run(self, number: int, rng: random.Random) -> str:
        """Plays a case; what became of it, in a word or two.  Raises Violation."""

    def close(self) -> None:
        """Lets everything go."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """What a campaign, or a share of it, came to."""

    name: str
    claim: str = ""
    seed: int = 0
    cases: int = 0
    distinct: int | None = None
    executions: int = 0
    """Attempts within the cases, where a case is many."""
    violations: list[str] = field(default_factory=list)
    """The first of them, each with its replay line."""
    violated: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    skipped: str = ""
    """Why nothing was run."""

    def add(self, other: "Summary") -> None:
        """Another share of the same campaign."""
        self.claim, self.distinct = other.claim or self.claim, other.distinct or self.distinct
        self.cases += other.cases
        self.executions += other.executions
        self.violated += other.violated
        self.violations = (self.violations + other.violations)[:KEPT_VIOLATIONS]
        self.outcomes.update(other.outcomes)
        self.seconds = max(self.seconds, other.seconds)
        self.skipped = other.skipped or self.skipped

    @property
    def line(self) -> str:
        """For people."""
        if self.skipped:
            return f"{self.name:<12} skipped: {self.skipped}"
        among = f" of {self.distinct} different" if self.distinct else ""
        rate = self.executions / self.seconds if self.seconds else 0.0
        return (
            f"{self.name:<12} {self.executions:>9} cases{among}, {self.violated} violations, "
            f"{self.seconds:.0f} s, {rate:.0f}/s: {self.claim}"
        )


class Skipped(Exception):
    """This machine cannot run a campaign; the message says what it lacks."""


CAMPAIGNS: dict[str, str] = {
    "errno": "tests.campaigns.errno_ops:ErrnoEverywhere",
    "corruption": "tests.campaigns.corruption:Corruptions",
    "peers": "tests.campaigns.peers:PeerMemory",
    "fuzz": "tests.campaigns.fuzz:Fuzz",
    "power": "tests.campaigns.power:PowerCuts",
    "kill": "tests.campaigns.kill_ops:KillEverywhere",
    "kill-again": "tests.campaigns.kill_ops:KillInRecovery",
    "strace": "tests.campaigns.straced:StracedKills",
    "fence": "tests.campaigns.fence:FenceRaces",
    "random-kills": "tests.campaigns.processes:RandomKills",
    "oom": "tests.campaigns.oom:OomKills",
    "keeper-ops": "tests.campaigns.processes:KeeperOperations",
    "sigterm": "tests.campaigns.processes:Terminated",
    "exact-ranks": "tests.campaigns.processes:ExactRanks",
}
"""name: module:class, imported when it is run."""


@dataclass(frozen=True, slots=True)
class Full:
    """What `make test-all` plays of a campaign."""

    count: int | None
    """Cases; None: as many as fit."""
    share: float
    """Of the time of all."""


FULL: dict[str, Full] = {
    "errno": Full(26_000, 0.05),
    "corruption": Full(1_000_000, 0.07),
    "peers": Full(20_000, 0.06),
    "fuzz": Full(None, 0.24),
    "power": Full(5_000, 0.08),
    "kill": Full(DISTINCT, 0.03),
    "kill-again": Full(5_000, 0.03),
    "strace": Full(DISTINCT, 0.03),
    "fence": Full(10_000, 0.03),
    "random-kills": Full(3_334, 0.26),
    "oom": Full(500, 0.02),
    "keeper-ops": Full(DISTINCT, 0.05),
    "sigterm": Full(500, 0.01),
    "exact-ranks": Full(50, 0.04),
}
"""Cases of random-kills are of six kills, of fuzz of some two hundred inputs."""


def numbers(count: int | None, share: tuple[int, int], only: int | None) -> Iterator[int]:
    """Numbers of the cases of share (i of n)."""
    if only is not None:
        yield only
        return
    number = share[0]
    while count is None or number < count:
        yield number
        number += share[1]


def run_share(
    name: str, *, seed: int, count: int | None, seconds: float, share: tuple[int, int] = (0, 1),
    only: int | None = None,
) -> Summary:  # fmt: skip
    """Plays the cases of one share, in this process, until they end or the time does."""
    summary = Summary(name=name, seed=seed)
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=f"autockpt-{name}-", dir=_fast()))
    module, _, made = CAMPAIGNS[name].partition(":")
    try:
        campaign: Campaign = getattr(importlib.import_module(module), made)(scratch)
    except Skipped as reason:
        summary.skipped = str(reason)
        shutil.rmtree(scratch, ignore_errors=True)
        return summary
    summary.claim, summary.distinct = campaign.claim, campaign.distinct
    if count == DISTINCT:
        count = campaign.distinct
    try:
        for number in numbers(count, share, only):
            if summary.cases and only is None and time.monotonic() > began + seconds:
                break  # at least one, however long the preparation took
            _play(campaign, summary, number)
    finally:
        campaign.close()
        shutil.rmtree(scratch, ignore_errors=True)
    summary.seconds = time.monotonic() - began
    summary.executions = getattr(campaign, "executions", summary.cases)
    return summary


def _play(campaign: Campaign, summary: Summary, number: int) -> None:
    began = time.monotonic()
    try:
        rng = random.Random(f"{summary.name}/{summary.seed}/{number}")
        outcome = campaign.run(number, rng)
        took = time.monotonic() - began
        require(took < CASE_S, f"took {took:.0f} s")
    except Exception as error:  # whatever it is, it was not promised
        summary.violated += 1
        outcome = "violation"
        replay = replay_line(summary.name, summary.seed, number)
        if len(summary.violations) < KEPT_VIOLATIONS:
            summary.violations.append(
                f"{type(error).__name__}: {str(error)[:2500]}\n  replay: {replay}"
            )
    summary.cases += 1
    summary.outcomes[outcome] += 1


def replay_line(name: str, seed: int, number: int) -> str:
    """The command that plays one case again."""
    return f"python -m tests.campaigns {name} --seed {seed} --only {number}"


def run_parallel_shares(
    name: str, *, seed: int, count: int | None, seconds: float, workers: int
) -> Summary:
    """Like `run_share`, in so many processes of their own."""
    with tempfile.TemporaryDirectory(prefix="autockpt-shares-") as folder:
        started = []
        for i in range(workers):
            out = Path(folder) / f"{i}.json"
            command = [
                sys.executable, "-m", "tests.campaigns", name, "--seed", str(seed),
                "--minutes", str(seconds / 60), "--share", f"{i}/{workers}", "--out", str(out),
            ]  # fmt: skip
            if count is not None:
                command += ["--count", "distinct" if count == DISTINCT else str(count)]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
            )
            started.append((process, out))
        total = Summary(name=name, seed=seed)
        for process, out in started:
            status = process.wait()
            if not out.exists():
                raise RuntimeError(f"{shlex.join(map(str, process.args))}: ended with {status}")  # type: ignore[arg-type]
            (part,) = read_summaries(out)
            total.add(part)
    return total


def environment() -> dict[str, str]:
    """Our package importable, one thread everywhere."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def write_summaries(path: Path, summaries: Iterable[Summary], **facts: Any) -> None:
    """The table as JSON."""
    rows = [{f.name: getattr(one, f.name) for f in fields(one)} for one in summaries]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "campaigns": rows}, indent=1) + "\n")


def read_summaries(path: Path) -> list[Summary]:
    """What `write_summaries` wrote."""
    rows = json.loads(path.read_text())["campaigns"]
    return [Summary(**{**row, "outcomes": Counter(row["outcomes"])}) for row in rows]


def _fast() -> str | None:
    """Memory, where there is a file system of it: thousands of fsyncs are not what is tested."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
