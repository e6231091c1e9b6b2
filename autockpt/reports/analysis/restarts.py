"""Where did a restart's time go?  From the failure to the end of the first iteration, in parts.

    total = detect + not started + launch + interpreter + torch + group + script + wait + fetch
            + read + apply + first

Only the restored bytes are the checkpoint's; at scale the rest dominates.  One rank is the witness,
as in the accounting.  A process knows its own parts and reports them in RunStarted.  A part that
was not separated (no launcher of ours, no boot module) is None and contained in another part.  The
launch is then in `detect`, which is the difference, so that the parts add up by construction; all
others are in `script`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autockpt.reports.analysis.accounting import Restore, is_found_later, startup_s
from autockpt.values.goal import RestartWish
from autockpt.values.telemetry import (
    Event,
    FailureObserved,
    FirstIterationEnded,
    IterationsTimed,
    ReplayChecked,
    ReplicaFetched,
    Restored,
    RunEnded,
    RunStarted,
)

LABELS = {
    "detect": "failure noticed, other ranks ended",
    "not started": "until the next launch began",
    "launch": "launcher: rendezvous, new processes",
    "interpreter": "interpreter until the script begins",
    "torch": "import torch",
    "group": "process group",
    "script": "script until attach: imports, model, data",
    "wait": "attach: keepers and other ranks",
    "fetch": "checkpoint from another node",
    "read": "checkpoint verified and copied into place",
    "apply": "state put together",
    "first": "first iteration",
}
"""Parts in the order in which they happen."""


STANDBY = "a parked process has these done: restart.standby: on"
CACHES = "compiled code that a new machine finds: restart.caches: on"
MEMORY = "a checkpoint in memory is read faster than one in storage: memory.interval"
REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("interpreter", "torch"), STANDBY),
    (("first",), CACHES),
    (("read",), MEMORY),
    (
        ("script",),
        "the script before attach(): its imports, model and data",
    ),
    (("first",), "what the first iteration does beyond a later one: compiling, the first samples"),
    (
        ("launch", "group", "wait"),
        "launch and waits for other ranks: see logs/launcher.log",
    ),
    (("detect",), "the ranks that live end late: a handler of SIGTERM may hold them"),
)
"""(parts, what shortens them), the cheapest first: a setting, then the script, then the system."""
WORTH_SHARE = 0.15
"""Of a restart; what saves less is not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One way back, from the failure to the end of the first iteration."""

    failed_at_s: float
    """When the failure was observed, seconds since the run began."""
    rank: int
    """Whose time this is."""
    total_s: float
    parts: dict[str, float | None]
    """Seconds by name of `LABELS`; None: not told apart.  Without "fetch" nothing was fetched."""
    source: str = ""
    """Where the checkpoint came from, as in `Restored`; "": there was none, or it is not known."""
    process: str = ""
    """Its process, as in `RunStarted`; "": not known."""
    new_process_reason: str = ""
    """As in `RunStarted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A remedy that shortens the newest restart, and by how much at most."""

    seconds: float
    remedy: str


def restarts(events: Sequence[Event], witness: int | None, start_s: float) -> tuple[Restart, ...]:
    """The restarts in aligned `events`, oldest first."""
    found: list[Restart] = []
    failed: FailureObserved | None = None
    started: RunStarted | None = None
    run_id, again = "", False
    fetch_s: float | None = None
    restored: Restored | None = None
    for event in events:
        if isinstance(event, FailureObserved):
            if failed is not None and started is not None:
                found.append(_restart(failed, started, None, fetch_s, restored, start_s, again))
            if failed is None or started is not None or is_found_later(failed):
                failed, started, fetch_s, restored = event, None, None, None
        elif isinstance(event, Restored):
            if event.rank == witness:
                restored = event
        elif isinstance(event, ReplicaFetched):
            if event.purpose == "restore" and event.shard_rank == witness:
                fetch_s = event.copy_s
        elif event.rank != witness:
            continue
        elif isinstance(event, RunStarted):
            again, run_id = run_id not in ("", event.run_id), event.run_id
            started = None if failed is None else event
        elif isinstance(event, FirstIterationEnded) and failed and started:
            found.append(_restart(failed, started, event, fetch_s, restored, start_s, again))
            failed = started = None
    return tuple(found)


def _restart(
    failed: FailureObserved,
    started: RunStarted,
    first: FirstIterationEnded | None,
    fetch_s: float | None,
    restored: Restored | None,
    start_s: float,
    again: bool,
) -> Restart:
    """`again`: by another launch."""
    told_s = None if restored is None else restored.detect_s
    wait_s = started.wait_s
    if fetch_s is not None and wait_s is not None:
        fetch_s = min(fetch_s, wait_s)
        wait_s -= fetch_s
    known: dict[str, float | None] = {
        "launch": started.launch_s,
        "interpreter": started.interpreter_s,
        "torch": started.torch_import_s,
        "group": started.process_group_s,
        "script": started.script_s,
        "wait": wait_s,
        **({} if fetch_s is None else {"fetch": fetch_s}),
        "read": started.read_s,
        "apply": started.apply_s,
        "first": None if first is None else first.at_s - started.at_s,
    }
    total_s = (started if first is None else first).at_s - failed.at_s
    detect_s = max(0.0, total_s - sum(seconds or 0.0 for seconds in known.values()))
    if again:
        known, detect_s = {"not started": detect_s, **known}, 0.0
    elif told_s is not None:
        # The failure log's figure; the news of it may come a moment before or after the start.
        told_s = min(told_s, total_s)
        known["script"] = max(0.0, (known["script"] or 0.0) + detect_s - told_s)
        detect_s = told_s
    return Restart(
        failed_at_s=failed.at_s - start_s,
        rank=started.rank,
        total_s=total_s,
        parts={"detect": detect_s, **known},
        source="" if restored is None else restored.source,
        process=started.process,
        new_process_reason=started.new_process_reason,
    )


def cheapest_gain(restart: Restart, wish: RestartWish, iteration_s: float | None) -> Gain | None:
    """The first remedy that is worth it; None: no part is large enough.

    `iteration_s`: a usual iteration, which no remedy saves; None: it is not known, and no gain of
    the first one is named.
    """
    parts = dict(restart.parts)
    first_s = parts.get("first")
    known = first_s is not None and iteration_s is not None
    parts["first"] = max(0.0, (first_s or 0.0) - (iteration_s or 0.0)) if known else None
    own_s = restart.total_s - (parts.get("not started") or 0.0)
    for names, remedy in REMEDIES:
        seconds = sum(parts.get(name) or 0.0 for name in names)
        if seconds <= 0.0 or seconds < WORTH_SHARE * own_s:
            continue
        if _may_help(remedy, restart, wish):
            return Gain(seconds=seconds, remedy=remedy)
    return None


def _may_help(remedy: str, restart: Restart, wish: RestartWish) -> bool:
    """False: it is in force already, or is of no use for this restart."""
    if remedy == STANDBY:  # a parked process ends with its launcher
        return "not started" not in restart.parts and wish.standby != "on"
    if remedy == CACHES:  # `auto`: a restart finds the code again where it was compiled
        return wish.caches == "off"
    return remedy != MEMORY or restart.source == "disk"


def usual_iteration_s(events: Sequence[Event], witness: int | None) -> float | None:
    """The median over the blocks of iterations of the witness, seconds; None: it told of none."""
    blocks = [e for e in events if isinstance(e, IterationsTimed) and e.rank == witness and e.count]
    means = sorted((block.total_s / block.count, block.count) for block in blocks)
    half, passed = sum(count for _, count in means) / 2, 0
    for mean_s, count in means:
        passed += count
        if passed >= half:
            return mean_s
    return None


def with_replays(
    restores: Sequence[Restore], events: Sequence[Event], start_s: float
) -> tuple[Restore, ...]:
    """Return the restores with the comparison that each rank made behind its resume."""
    begun_s = [start_s + restore.at_s for restore in restores]
    ends_s = [*begun_s[1:], float("inf")]
    checks = [event for event in events if isinstance(event, ReplayChecked)]
    return tuple(
        replace(restore, replay=_replay([c for c in checks if begin_s <= c.at_s < end_s]))
        for restore, begin_s, end_s in zip(restores, begun_s, ends_s, strict=False)
    )


def _replay(checks: Sequence[ReplayChecked]) -> str:
    """The worst of the ranks; those without anything to compare count last."""
    differing = [check for check in checks if check.equal is False]
    if differing:
        ranks = ", ".join(str(rank) for rank in sorted({check.rank for check in differing}))
        return f"no: differs from step {differing[0].step} on (rank {ranks})"
    compared = next((check for check in checks if check.equal), None)
    if compared is not None:
        return f"yes: equal at step {compared.step}"
    return f"not checked: {checks[0].reason}" if checks else ""


UNSEEN = "before it attached, or as it ended: known by the restart that followed"


def with_unseen_deaths(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return aligned `events` with a failure for every death that only the launcher saw.

    The launcher restarted, and no keeper saw the death.  It came before the rank had attached, or
    after the last event of its training.

    A launcher counts its restarts.  Slurm counts requeues, and one behind an announced end is none.
    """
    known: Counter[str] = Counter()
    seen: Counter[int] = Counter()
    """By rank, since the last start."""
    told_s, ended = float("-inf"), False
    found: list[Event] = []
    for event in events:
        if isinstance(event, FailureObserved):
            seen[event.failed_rank] += 1
        elif isinstance(event, RunEnded):
            ended = True
        elif isinstance(event, RunStarted) and event.restart_count >= known[event.run_id]:
            new = event.run_id not in known or event.restart_count > known[event.run_id]
            deaths = event.restart_count - known[event.run_id] - max(seen.values(), default=0)
            requeued = ended and event.run_id.startswith("slurm-")
            at_s = max(told_s, event.at_s - startup_s(event))
            found += [_unseen(at_s)] * (0 if requeued else min(deaths, MOST_DEATHS))
            known[event.run_id] = event.restart_count
            if new:
                seen.clear()
                ended = False
        if event.rank >= 0:
            told_s = event.at_s
    return tuple(sorted([*events, *found], key=lambda event: event.at_s))


MOST_DEATHS = 1000
"""Of a start, as far as it is believed."""


def _unseen(at_s: float) -> FailureObserved:
    return FailureObserved(
        at_s=at_s, rank=-1, what="trainer", failed_rank=-1, pid=0, step=0, detail=UNSEEN
    )
