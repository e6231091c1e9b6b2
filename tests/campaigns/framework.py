"""What every campaign shares: numbered cases from a seed, an oracle that raises, a replay line.

A case is (campaign, seed, number) and nothing else: its random numbers come from these three, so
that one line on a command line plays it again, alone.  Counts are of executions: of cases, or of
the attempts within them where a case is many.
"""

import fcntl
import gc
import hashlib
import importlib
import json
import mmap
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
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
CASE_S = 360.0
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
    following: int = 0
    """Every case below this number has been played."""
    wanted: int | None = None
    """Executions that `make test-all` asks for; None: as many as fit."""
    violations: list[str] = field(default_factory=list)
    """The first of them, each with its replay line."""
    violated: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    skipped: str = ""
    """Why nothing was run."""

    @property
    def reached(self) -> bool:
        """Nothing that was asked for is missing."""
        return self.wanted is None or self.executions >= self.wanted

    def add(self, other: "Summary") -> None:
        """Another share of the same campaign, at the same time."""
        self.claim, self.distinct = other.claim or self.claim, other.distinct or self.distinct
        self.cases += other.cases
        self.executions += other.executions
        self.violated += other.violated
        self.violations = (self.violations + other.violations)[:KEPT_VIOLATIONS]
        self.outcomes.update(other.outcomes)
        self.seconds = max(self.seconds, other.seconds)
        self.skipped = other.skipped or self.skipped

    def go_on(self, later: "Summary") -> None:
        """More cases of the same campaign, after these."""
        seconds = self.seconds + later.seconds
        self.add(later)
        self.seconds, self.following = seconds, later.following

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
    "simulation": "tests.campaigns.simulated:Simulated",
    "mutants": "tests.campaigns.simulated:Mutants",
    "errno": "tests.campaigns.errno_ops:ErrnoEverywhere",
    "store": "tests.campaigns.store_ops:StoreEverywhere",
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


class Numbers:
    """Which case is next, for all processes that play a campaign together: none is left out, and
    none is played twice."""

    def __init__(self, path: Path, *, first: int = 0) -> None:
        """`path`: a file that all of them open; the one that makes it begins with `first`."""
        if not path.exists():
            path.write_bytes(first.to_bytes(8, "little") + bytes(8))
        self._file = path.open("r+b")
        self._cells = mmap.mmap(self._file.fileno(), 16)

    def take(self, *, below: int | None, goal: int | None) -> int | None:
        """A number of one's own; None when all below `below` are taken, or `goal` is reached."""
        with self._alone():
            number, executions = self.following, int.from_bytes(self._cells[8:], "little")
            if (below is not None and number >= below) or (goal is not None and executions >= goal):
                return None
            self._cells[:8] = (number + 1).to_bytes(8, "little")
        return number

    def played(self, executions: int) -> None:
        """So many more."""
        with self._alone():
            before = int.from_bytes(self._cells[8:], "little")
            self._cells[8:] = (before + executions).to_bytes(8, "little")

    @property
    def following(self) -> int:
        """Every number below is taken."""
        return int.from_bytes(self._cells[:8], "little")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """The file stays."""
        self._cells.close()
        self._file.close()


def run_share(
    name: str, *, seed: int, count: int | None, seconds: float, numbers: Path | None = None,
    first: int = 0, only: int | None = None,
) -> Summary:  # fmt: skip
    """Plays cases from number `first` on, in this process, until they end or the time does.

    `numbers`: the file by which several processes share one campaign.
    """
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
    below = campaign.distinct if count == DISTINCT else None
    goal = None if count == DISTINCT else count
    gc.collect()
    gc.freeze()  # what is imported is not looked through again and again
    shared = Numbers(numbers or scratch / "numbers", first=first if only is None else only)
    try:
        while only is None or not summary.outcomes:
            if summary.outcomes and time.monotonic() > began + seconds:
                break  # at least one, however long the preparation took
            if (number := shared.take(below=below, goal=goal)) is None:
                break
            _play(campaign, summary, number)
            before = summary.executions
            summary.executions = getattr(campaign, "executions", summary.cases)
            shared.played(summary.executions - before)
        summary.following = shared.following
    finally:
        shared.close()
        campaign.close()
        shutil.rmtree(scratch, ignore_errors=True)
    summary.seconds = time.monotonic() - began
    return summary


def _play(campaign: Campaign, summary: Summary, number: int) -> None:
    began = time.monotonic()
    try:
        rng = random.Random(f"{summary.name}/{summary.seed}/{number}")
        outcome = campaign.run(number, rng)
        took = time.monotonic() - began
        require(took < CASE_S, f"took {took:.0f} s")
    except Skipped:  # the machine did not let it be played: no case, and no fault
        summary.outcomes["not played"] += 1
        return
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
    name: str, *, seed: int, count: int | None, seconds: float, workers: int, first: int = 0
) -> Summary:
    """Like `run_share`, in so many processes of their own."""
    with tempfile.TemporaryDirectory(prefix="autockpt-shares-") as folder:
        started, numbers = [], Path(folder) / "numbers"
        Numbers(numbers, first=first).close()
        for i in range(workers):
            out = Path(folder) / f"{i}.json"
            command = [
                sys.executable, "-m", "tests.campaigns", name, "--seed", str(seed),
                "--minutes", str(seconds / 60), "--numbers", str(numbers), "--out", str(out),
            ]  # fmt: skip
            if count is not None:
                command += ["--count", "distinct" if count == DISTINCT else str(count)]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
            )
            started.append((process, out))
        total, parts = Summary(name=name, seed=seed), []
        for process, out in started:
            status = process.wait()
            if not out.exists():
                raise RuntimeError(f"{shlex.join(map(str, process.args))}: ended with {status}")  # type: ignore[arg-type]
            parts += read_summaries(out)
    for part in parts:
        total.add(part)
    total.following = max(part.following for part in parts)
    return total


def environment() -> dict[str, str]:
    """Our package importable, one thread everywhere."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def write_summaries(path: Path, summaries: Iterable[Summary], **facts: Any) -> None:
    """The table as JSON."""
    rows = [{f.name: getattr(one, f.name) for f in fields(one)} for one in summaries]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**facts, "campaigns": rows}, indent=1) + "\n")
    part.replace(path)


def read_summaries(path: Path) -> list[Summary]:
    """What `write_summaries` wrote."""
    rows = json.loads(path.read_text())["campaigns"]
    return [Summary(**{**row, "outcomes": Counter(row["outcomes"])}) for row in rows]


def sources() -> str:
    """Hash of everything under autockpt/ and tests/: cases are the same where it is."""
    digest = hashlib.sha256()
    for folder in ("autockpt", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                data = path.read_bytes()
                digest.update(f"{path.relative_to(ROOT)} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def _fast() -> str | None:
    """Memory, where there is a file system of it: thousands of fsyncs are not what is tested."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
