"""The product part of `make bench-redundancy`: a job on four nodes, with copies and with storage.

Gemini's wasted time of a failure is t_ckpt + 1 / (2 f) + t_retrieve (SOSP'23, eq. 1): how old a
checkpoint is when it can be relied on, half the time between two, and bringing it back.  The
example job checkpoints into the memory of other nodes every few iterations, and, as often as it
can, to storage.  Gemini's nodes had 400 Gbit/s between them and 16 shared 20 Gbit/s of storage, so
the storage of a node gets the 320th part of its line here.  Copies are fetched from a node; what
reading from storage would take follows from its rate.

Recovery: nodes are killed, one after the other, and replaced; where the time goes until the first
new iteration.

Cost: what a checkpoint takes of training time, in memory alone and with each protection; and, for
parity, what that is of the iteration at the interval that the job's own profile plans.
"""

import itertools
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autockpt.policies.decide import decide
from autockpt.reports.analysis.restarts import LABELS, Restart, restarts
from autockpt.values import telemetry as t
from autockpt.values.goal import Goal, RedundancyWish
from benchmarks.cluster import ROOT, Cluster, ClusterError, cluster
from benchmarks.harness import Row, row
from benchmarks.namespaces import network

NODES = 4
BITS_PER_S = 1_000_000_000
STORAGE_SHARE = (20 / 16) / 400
"""Storage of a node over its line, in Gemini's setting."""
RATIO_TARGET, RECOVERY_TARGET_S, PARITY_TARGET = 13.0, 15.0, 0.03
INTERVAL_STEPS = 5
CYCLE_STEPS = 12
"""Between checkpoints where their cost is measured: the first half of it pays, the second does
not; a copy or parity is complete within a few iterations."""
SCRIPT = ("examples/gpt/train.py", "--batch", "1", "--accumulation", "1", "--threads", "1",
          "--text-bytes", "400000")  # fmt: skip
WARM_UP = 2 * CYCLE_STEPS
"""Iterations that count for nothing."""
PROFILE_STEPS = 400
LOST = (1, 2, 3)
"""Nodes, one after the other; the witness is another one."""
STAGE_S = 150.0
STORAGE_S = 200.0
"""Three checkpoints of 12.6 MB at the storage's rate are 97 s."""
CONTESTANT = "example job on 4 nodes"
MEMORY_ONLY = ("disk.interval=120000 steps",)
COPIES = (*MEMORY_ONLY, "redundancy.scheme=replicas", "redundancy.copies=2")
PARITY = (*MEMORY_ONLY, "redundancy.scheme=xor", f"redundancy.set_size={NODES}")
STORAGE = ("memory.interval=1 steps", "disk.interval=1 steps", "staging.in_flight=1")
PROTECTIONS = {"memory alone": MEMORY_ONLY, "copies": COPIES, "parity": PARITY}
STEP_LINE = re.compile(r"step (\d+) +loss \S+ +([0-9.]+) ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wasted:
    """The parts of Gemini's wasted time, seconds, one sample a checkpoint or retrieval."""

    checkpoint_s: tuple[float, ...]
    """From the snapshot's beginning until it can be relied on, on the last node to know it."""
    period_s: tuple[float, ...]
    """Between two that can."""
    retrieval_s: tuple[float, ...] = ()

    @property
    def without_retrieval_s(self) -> float:
        """t_ckpt + 1 / (2 f), medians."""
        return statistics.median(self.checkpoint_s) + statistics.median(self.period_s) / 2

    @property
    def total_s(self) -> float:
        """t_ckpt + 1 / (2 f) + t_retrieve, medians."""
        return self.without_retrieval_s + statistics.median(self.retrieval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A node was killed, and the job is back."""

    noticed_s: float
    """From the kill until a launcher saw it."""
    way: Restart
    """From there to the first new iteration of a node that was not killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What checkpoints take of the training, one sample a checkpoint."""

    iteration_s: tuple[float, ...]
    """Iterations without a checkpoint, means of half a cycle."""
    checkpoint_s: tuple[float, ...]
    """By which the iterations after a checkpoint take longer, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything."""

    copies: Wasted
    storage: Wasted
    recoveries: Sequence[Recovery]
    costs: dict[str, Cost]
    """By name of `PROTECTIONS`."""
    planned_steps: int
    """Between checkpoints that are protected by parity, as the profile of the job plans it."""


# ------------------------------------------------------------------ from telemetry and output


def wasted(events: Sequence[t.GenerationReplicated | t.CheckpointDurable]) -> Wasted:
    """From telemetry of all keepers; the first checkpoint pays for new memory and is left out."""
    latest: dict[str, t.GenerationReplicated | t.CheckpointDurable] = {}
    for event in sorted(events, key=lambda e: e.at_s):
        if event.step >= 0:
            latest[event.generation] = event
    kept = sorted(latest.values(), key=lambda e: e.at_s)[1:]
    if len(kept) < 2:
        raise ClusterError(f"{len(kept)} checkpoints after the first, expected at least 2")
    gaps = (b.at_s - a.at_s for a, b in itertools.pairwise(kept))
    return Wasted(checkpoint_s=tuple(e.latency_s for e in kept), period_s=tuple(gaps))


def cost(lines: Sequence[str]) -> Cost:
    """From lines of every iteration of a job that checkpoints every `CYCLE_STEPS`.

    An iteration waits for all ranks, so those of rank 0 are those of the job.
    """
    found = (STEP_LINE.search(line) for line in lines)
    took_s = {int(m[1]): float(m[2]) / 1e3 for m in found if m is not None}
    first = -(-WARM_UP // CYCLE_STEPS) * CYCLE_STEPS
    starts = range(first, max(took_s, default=0) + 2 - CYCLE_STEPS, CYCLE_STEPS)
    half = CYCLE_STEPS // 2
    halves = [
        [sum(took_s[step] for step in range(at, at + half)) for at in (start, start + half)]
        for start in starts
    ]
    if len(halves) < 3:
        raise ClusterError(f"{len(halves)} checkpoints after warm-up, expected at least 3")
    return Cost(
        iteration_s=tuple(quiet / half for _, quiet in halves),
        checkpoint_s=tuple(paid - quiet for paid, quiet in halves),
    )


# ------------------------------------------------------------------ the measurement


def product(size: str, steps: int, *, smoke: bool) -> list[Row]:
    """All rows; none where namespaces are not to be had.  What failed keeps its folder.

    `smoke`: the job with copies alone, and one node is lost.
    """
    try:
        with network(1, BITS_PER_S):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{CONTESTANT}: not measured, needs root, ip and tc: {error}")
        return []
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-nodes-", dir=runs))
    script = (*SCRIPT, "--size", size)
    if smoke:
        copies, recoveries = _with_copies(folder / "copies", script, steps, LOST[:1])
        found = [*_wasted_rows(f"{CONTESTANT}, copies", copies), *_recovery_rows(recoveries)]
    else:
        found = rows(_measured(folder, script, steps))
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _measured(folder: Path, script: Sequence[str], steps: int) -> Measured:
    storage = _with_storage(folder / "storage", script, STORAGE_SHARE * BITS_PER_S / 8)
    copies, recoveries = _with_copies(folder / "copies", script, steps, LOST)
    return Measured(
        copies=copies,
        storage=storage,
        recoveries=recoveries,
        costs={
            name: _paced(folder / f"cost of {name}", script, 2 * steps + WARM_UP, settings)
            for name, settings in PROTECTIONS.items()
        },
        planned_steps=_planned(folder / "profile", script),
    )


def _with_storage(folder: Path, script: Sequence[str], rate_bytes_per_s: float) -> Wasted:
    """Of three checkpoints, each begun when the last is durable."""
    shaped = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'shaped_store'}",
              "SHAPED_STORE": repr(rate_bytes_per_s)}  # fmt: skip
    script = (*script, "--steps", "1000000")
    folder.mkdir()
    with cluster(
        NODES, BITS_PER_S, folder, settings=STORAGE, script=script, environment=shaped
    ) as job:
        _launch(job)
        durable = job.wait_for("three durable checkpoints", lambda: _durable(job, 3), STORAGE_S)
        found, read_s = wasted(durable), durable[0].bytes / rate_bytes_per_s
    return Wasted(
        checkpoint_s=found.checkpoint_s, period_s=found.period_s, retrieval_s=(read_s,)
    )  # fmt: skip


def _with_copies(
    folder: Path, script: Sequence[str], steps: int, lost: Sequence[int]
) -> tuple[Wasted, list[Recovery]]:
    """Undisturbed for so many steps; then the nodes that are lost."""
    script = (*script, "--steps", "1000000")
    settings = (f"memory.interval={INTERVAL_STEPS} steps", *COPIES)
    folder.mkdir()
    with cluster(NODES, BITS_PER_S, folder, settings=settings, script=script) as job:
        _launch(job)
        job.wait_for(f"step {steps}", lambda: _protected(job, steps), STAGE_S)
        undisturbed = wasted(job.events(t.GenerationReplicated))
        began_s = job.events(t.GenerationReplicated)[-1].at_s
        recoveries = [_recovered(job, node) for node in lost]
        fetched = job.events(t.ReplicaFetched, since_s=began_s)
    retrieval_s = tuple(e.copy_s for e in fetched if e.purpose == "restore")
    if len(retrieval_s) < len(lost):
        raise ClusterError(f"{len(retrieval_s)} fetches from another node; see {folder}")
    found = Wasted(
        checkpoint_s=undisturbed.checkpoint_s,
        period_s=undisturbed.period_s,
        retrieval_s=retrieval_s,
    )
    return found, recoveries


def _recovered(job: Cluster, node: int) -> Recovery:
    """The job lost a node, got another one, and is back and protected."""
    killed_s = job.lose(node)
    job.launch(node)

    def back() -> list[t.FirstIterationEnded] | None:
        first = job.events(t.FirstIterationEnded, since_s=killed_s)
        return first if len({event.rank for event in first}) == NODES else None

    first = job.wait_for(f"an iteration after node {node} was lost", back, STAGE_S)
    again_s = max(event.at_s for event in first)
    job.wait_for(
        "new copies", lambda: job.events(t.GenerationReplicated, since_s=again_s) or None, STAGE_S
    )
    events = [event for event in job.files.events() if event.at_s >= killed_s]
    witness = max((e for e in first if e.rank != node), key=lambda event: event.at_s).rank
    (way,) = restarts(events, witness, killed_s)
    return Recovery(noticed_s=way.failed_at_s, way=way)


def _paced(folder: Path, script: Sequence[str], steps: int, settings: Sequence[str]) -> Cost:
    folder.mkdir()
    script = (*script, "--steps", str(steps), "--log-every", "1")
    settings = (f"memory.interval={CYCLE_STEPS} steps", *settings)
    with cluster(NODES, BITS_PER_S, folder, settings=settings, script=script) as job:
        _launch(job)
        return cost(job.finish(STAGE_S))


def _planned(folder: Path, script: Sequence[str]) -> int:
    """Iterations between checkpoints in memory, as the job's profile has it for parity."""
    folder.mkdir()
    script = (*script, "--steps", str(PROFILE_STEPS))
    with cluster(
        NODES, BITS_PER_S, folder, settings=(), script=script, mode="profile"
    ) as job:  # fmt: skip
        _launch(job)
        job.finish(STAGE_S)
        profile = job.files.read_profile()
    if profile is None:
        raise ClusterError(f"no profile; see {folder}")
    goal = Goal(redundancy=RedundancyWish(scheme="xor", set_size=NODES))
    return decide(profile, goal).plan.tier("memory").interval_steps


def _launch(job: Cluster) -> None:
    for node in range(NODES):
        job.launch(node)


def _protected(job: Cluster, step: int) -> bool | None:
    return any(e.step >= step for e in job.events(t.GenerationReplicated)) or None


def _durable(job: Cluster, count: int) -> list[t.CheckpointDurable] | None:
    found = job.events(t.CheckpointDurable)
    return found if len({e.generation for e in found}) >= count else None


# ------------------------------------------------------------------ what is published


def rows(found: Measured) -> list[Row]:
    """All of it."""
    copies, storage = found.copies, found.storage
    ratio = storage.total_s / copies.total_s
    apart = storage.without_retrieval_s / copies.without_retrieval_s
    return [
        *_wasted_rows(f"{CONTESTANT}, copies", copies),
        *_wasted_rows(f"{CONTESTANT}, storage", storage,
                      note="bytes of a rank over the shaped rate, not measured"),
        row(CONTESTANT, "wasted time, storage over copies", [ratio], "x", at_least=RATIO_TARGET,
            note="t_ckpt + 1 / (2 f) + t_retrieve"),
        row(CONTESTANT, "the same without retrieval", [apart], "x", at_least=RATIO_TARGET),
        *_recovery_rows(found.recoveries),
        *_cost_rows(found.costs, found.planned_steps),
    ]  # fmt: skip


def _wasted_rows(name: str, one: Wasted, note: str = "") -> list[Row]:
    return [
        row(name, "snapshot until safe", one.checkpoint_s, "s"),
        row(name, "between two", one.period_s, "s"),
        row(name, "retrieval", one.retrieval_s, "s", note=note),
        row(name, "wasted time", [one.total_s], "s"),
    ]


def _recovery_rows(recoveries: Sequence[Recovery]) -> list[Row]:
    name = f"{CONTESTANT}, one killed"
    parts = [
        (label, [way.parts[part] for way in (r.way for r in recoveries) if part in way.parts])
        for part, label in LABELS.items()
    ]
    return [
        row(name, "kill until noticed", [r.noticed_s for r in recoveries], "s"),
        row(name, "from there to an iteration", [r.way.total_s for r in recoveries], "s",
            at_most=RECOVERY_TARGET_S, note="of a rank that was not killed; its parts follow"),
        *(row(name, label, [s for s in seconds if s is not None], "s")
          for label, seconds in parts if any(s is not None for s in seconds)),
    ]  # fmt: skip


def _cost_rows(costs: dict[str, Cost], planned_steps: int) -> list[Row]:
    found = []
    for protection, one in costs.items():
        name = f"{CONTESTANT}, {protection}"
        found.append(row(name, "iteration", one.iteration_s, "s"))
        found.append(row(name, "a checkpoint costs", one.checkpoint_s, "s",
                         note="the nodes share the cores of one machine"))  # fmt: skip
    alone, parity = costs["memory alone"], costs["parity"]
    iteration_s = statistics.median(parity.iteration_s)
    each_s = statistics.median(parity.checkpoint_s) - statistics.median(alone.checkpoint_s)
    name = f"{CONTESTANT}, parity"
    return [
        *found,
        row(name, "planned interval", [float(planned_steps)], "iterations"),
        row(name, "cost at that interval", [each_s / planned_steps / iteration_s], "x",
            at_most=PARITY_TARGET, note="of an iteration; a checkpoint in memory alone apart"),
        row(name, f"cost every {CYCLE_STEPS} iterations", [each_s / CYCLE_STEPS / iteration_s],
            "x"),
    ]  # fmt: skip
