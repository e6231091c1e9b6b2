"""`make bench-engine`: autockpt against everything else, and against what the machine allows.

Everybody checkpoints the same training (`benchmarks.job`), each in a process of its own, peers in
environments of their own (`benchmarks.peers`), all with the same allocator settings and sleeping
OpenMP threads.  Contestants take turns round by round in groups that fit the memory, at most four
at once, each group with a `none` of its own; who waits sleeps.

**A round** is two segments of k iterations, one that begins with a checkpoint and one without, in
the order AB, BA, AB, ... so that drift cancels; their ratio is the end-to-end cost.  Between them
everything comes to rest outside the times: the checkpoint becomes durable, read-back ends.  Work
left over after k iterations is therefore not charged to anybody's end-to-end ratio, which favours
the slow; their CPU seconds count to the end, which favours nobody.  The first round does not count.

**Durable** is when the contestant says so, plus an fsync by the harness where it does none itself.
It is held against a plain O_DIRECT write + fsync of as many bytes by a helper process beside the
same training, in the same turn. **CPU seconds** are of all but the training thread, and of what
that spends in the contestant's calls (`benchmarks.peers.rounds`), to the end of the read-back, less
those of the segment without; the least possible is one copy of the state, beside the training too,
and that write.

**Every iteration**: segments in which each iteration begins with a checkpoint; compared are the
ratios to the same iterations without, because they are paired in time.

Every peer loads its last checkpoint back, cold, into a zeroed state, and what is not equal to the
bit is named.  What a contestant leaves out stands in its note.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.contest.client import MALLOC, Training
from benchmarks.contest.restores import restore_rows
from benchmarks.contest.rows import EVERY, MEMORY_ONLY, NONE, contest_rows, every_rows
from benchmarks.contest.schedule import (
    MOST_AT_ONCE,
    Rounds,
    Taken,
    groups,
    run_group,
)
from benchmarks.harness import Row, parse, publish, row
from benchmarks.peers.registry import BY_NAME, ENTRIES, Entry

MAIN = ("plain write", "autockpt", "floor")
"""Together, and as often as ours: the first two are paired by turn."""
SMOKED = (EVERY, MEMORY_ONLY, "torch.save", "DCP async thread")
"""Beside `none` and `MAIN`: each kind of contestant, and none that has to be installed."""
SMOKE_AT_ONCE = 12
"""A smoke test starts few groups: its figures say nothing anyway."""
STATE_BYTES = {"1m": 12e6, "10m": 0.12e9, "60m": 0.71e9, "125m": 1.5e9, "350m": 4.3e9}
"""About, to size the groups before anything runs."""


Measured = tuple[list[Row], dict[str, Any]]
"""Rows, and what they were taken with."""


def main() -> None:
    """Measures and publishes."""
    run("engine", arguments(sys.argv[1:]), measure)


def run(
    name: str,
    args: argparse.Namespace,
    what: Callable[[argparse.Namespace, Path, "Runner"], Measured],
) -> None:
    """Measures `what` in a folder of its own and publishes it under `name`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=Path.cwd()))
    training = Training(size=args.state, tokens=args.tokens, threads=args.threads)
    try:
        rows, settings = what(args, folder, Runner(folder, training, args))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    shown = {one.contestant for one in rows}
    notes = {entry.name: entry.note for entry in ENTRIES if entry.note and entry.name in shown}
    variant = f"_{args.state}" if args.state != "60m" else ""
    variant += f"_threads{args.threads}" if args.threads > 1 else ""
    publish(name, rows, settings=settings, notes=notes, variant=variant, smoke=args.smoke)


def arguments(argv: list[str], **defaults: Any) -> argparse.Namespace:
    """The options, some with other defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--state", choices=STATE_BYTES, default="60m", help="size of the model")
    parser.add_argument("--tokens", type=int, default=96, help="of a batch")
    parser.add_argument("--every", type=int, default=4, help="iterations per checkpoint")
    parser.add_argument("--rounds", type=int, default=40, help="of ours and the references")
    parser.add_argument("--peer-rounds", type=int, default=5, help="of the others")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="contestants by name")
    parser.add_argument("--no-install", action="store_true", help="peers that are there already")
    parser.set_defaults(**defaults)
    args = parse(
        parser, argv, state="1m", tokens=16, rounds=1, peer_rounds=1, only=[*SMOKED],
        no_install=True,
    )  # fmt: skip
    unknown = sorted(set(args.only or ()) - set(BY_NAME))
    if unknown:
        parser.error(f"unknown contestant {unknown[0]!r}; known: {', '.join(BY_NAME)}")
    return args


def measure(args: argparse.Namespace, folder: Path, runner: "Runner") -> Measured:
    """All parts, one after the other."""
    rows, settings = contest(args, folder, runner)
    working = [BY_NAME[name] for name in settings["blocking"]]
    always = [e for e in _wanted(args) if e.name in (EVERY, MEMORY_ONLY)]
    always += working[:1] if args.smoke else working
    every = Rounds(
        rounds=args.peer_rounds, iterations=args.every, discarded=0 if args.smoke else 1,
        every=True, check=False,
    )  # fmt: skip
    if any(entry.kind == "ours" for entry in always):
        rows += every_rows(always, runner.run(always, every, "every"))
    rows += restore_rows(folder / "restores", runner.training, args.peer_rounds)
    rows += idle_rows(folder / "idle", smoke=args.smoke)
    return rows, settings


def contest(args: argparse.Namespace, folder: Path, runner: "Runner") -> Measured:
    """A checkpoint every few iterations: ours and the references, then the others."""
    once = Rounds(rounds=args.rounds, iterations=args.every, discarded=0 if args.smoke else 1)
    taken = runner.run([BY_NAME[name] for name in MAIN], once, "main")
    peers = [entry for entry in _wanted(args) if entry.kind in ("sync", "async")]
    taken = runner.run(peers, replace(once, rounds=args.peer_rounds), "peers") | taken
    blocking = [e.name for e in peers if e.kind == "sync" and taken[e.name].rounds]
    settings = {**settings_of(args, taken), "none_by_group": runner.noise, "blocking": blocking}
    return contest_rows(_wanted(args), taken, args.every), settings


def _wanted(args: argparse.Namespace) -> list[Entry]:
    return [e for e in ENTRIES if not args.only or e.name in args.only or e.name in (NONE, *MAIN)]


class Runner:
    """Runs contestants in groups."""

    def __init__(self, folder: Path, training: Training, args: argparse.Namespace) -> None:
        self._folder, self.training = folder, training
        self._install = not args.no_install
        self._most = SMOKE_AT_ONCE if args.smoke else MOST_AT_ONCE
        self.noise: dict[str, list[float]] = {}
        """End-to-end ratios of the `none` of every group: what the others' are worth."""

    def run(self, entries: Sequence[Entry], plan: Rounds, name: str) -> dict[str, Taken]:
        """What was measured of each, and of the `none` of the first group."""
        taken: dict[str, Taken] = {}
        base = [BY_NAME[NONE]]
        available = psutil.virtual_memory().available
        made = groups(entries, base, STATE_BYTES[self.training.size], available, self._most)
        for i, group in enumerate(made):
            folder = self._folder / f"{name}-{i}"
            found = run_group([*base, *group], folder, self.training, plan, install=self._install)
            self.noise[", ".join(entry.name for entry in group)] = found[NONE].values("ratio")
            taken = found | taken
        return taken


def idle_rows(folder: Path, *, smoke: bool) -> list[Row]:
    """What an attached session costs an iteration in which nothing is due."""
    from benchmarks.idle import measure as idle

    folder.mkdir()
    boundary_us, _ = idle(2 if smoke else 20, 25, folder)
    return [row("autockpt", "idle boundary", boundary_us, "us", at_most=50.0)]


def settings_of(args: argparse.Namespace, taken: dict[str, Taken]) -> dict[str, Any]:
    """What the figures were taken with."""
    plain = taken["plain write"]
    return {
        "state": args.state,
        "state_bytes": plain.state_bytes,
        "tokens": args.tokens,
        "checkpoint_every_iterations": args.every,
        "compute_threads": args.threads,
        "rounds": args.rounds,
        "peer_rounds": args.peer_rounds,
        "allocator": MALLOC,
        "OMP_WAIT_POLICY": "PASSIVE",
        "iteration_s": plain.values("iteration"),
        "plain_write_s": plain.values("durable"),
        "plain_write_cpu_s": plain.values("write_cpu"),
        "plain_copy_s": plain.values("copy_s"),
        "plain_copy_cpu_s": plain.values("copy_cpu"),
    }


if __name__ == "__main__":
    main()
