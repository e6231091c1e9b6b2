"""The product part of `make bench-redundancy`: a job on four nodes, with copies and with storage.

Gemini's wasted time of a failure is t_ckpt + 1 / (2 f) + t_retrieve (SOSP'23, eq. 1): how old a
checkpoint is when it can be relied on, half the time between two, and bringing it back.  The
example job checkpoints into the memory of other nodes at its plan's interval, and, as often as it
can, to storage.  Gemini's nodes had 400 Gbit/s between them and 16 shared 20 Gbit/s of storage, so
the storage of a node gets the 320th part of its line here.  Retrieval is reported apart: copies are
fetched from a node, and what storage would take follows from its rate.

Slow-down: the same job with snapshots into its own memory only, before and after, against copies.
"""

import itertools
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autockpt.values import telemetry as t
from benchmarks.cluster import ROOT, Cluster, ClusterError, cluster
from benchmarks.harness import Row, row

NODES = 4
BITS_PER_S = 1_000_000_000
STORAGE_SHARE = (20 / 16) / 400
"""Storage of a node over its line, in Gemini's setting."""
TARGET = 13.0
INTERVAL_STEPS = 5
SCRIPT = ("examples/gpt/train.py", "--batch", "1", "--accumulation", "1", "--threads", "1",
          "--text-bytes", "400000")  # fmt: skip
WARM_UP = 10
"""Iterations that count for nothing."""
STAGE_S = 150.0
STORAGE_S = 300.0
"""Three checkpoints of 12.6 MB at the storage's rate are 97 s on an idle machine."""
CONTESTANT = "example job on 4 nodes"
MEMORY = (f"memory.interval={INTERVAL_STEPS} steps", "disk.interval=100000 steps")
COPIES = (*MEMORY, "redundancy.scheme=replicas", "redundancy.copies=2")
STORAGE = ("memory.interval=1 steps", "disk.interval=1 steps", "staging.in_flight=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wasted:
    """The parts of Gemini's wasted time, seconds, one sample a checkpoint."""

    checkpoint_s: tuple[float, ...]
    """From the snapshot's beginning until it can be relied on, on the last node to know it."""
    period_s: tuple[float, ...]
    """Between two that can."""

    @property
    def without_retrieval_s(self) -> float:
        """t_ckpt + 1 / (2 f), medians."""
        return statistics.median(self.checkpoint_s) + statistics.median(self.period_s) / 2


def wasted(events: Sequence[t.GenerationProtected | t.PersistCommitted]) -> Wasted:
    """From telemetry of all keepers; the first checkpoint pays for new memory and is left out."""
    latest: dict[str, t.GenerationProtected | t.PersistCommitted] = {}
    for event in sorted(events, key=lambda e: e.at_s):
        if event.step >= 0:
            latest[event.generation] = event
    kept = sorted(latest.values(), key=lambda e: e.at_s)[1:]
    if len(kept) < 2:
        raise ClusterError(f"{len(kept)} checkpoints after the first, expected at least 2")
    gaps = (b.at_s - a.at_s for a, b in itertools.pairwise(kept))
    return Wasted(checkpoint_s=tuple(e.latency_s for e in kept), period_s=tuple(gaps))


def iterations_s(job: Cluster) -> float:
    """Seconds an iteration of rank 0, checkpoints' stalls included."""
    blocks = [e for e in job.events(t.Iterated) if e.rank == 0 and e.step > WARM_UP]
    steps = sum(e.count for e in blocks)
    if not steps:
        raise ClusterError("no iterations were reported")
    return sum(e.total_s + e.checkpoint_s for e in blocks) / steps


def product(size: str, steps: int) -> list[Row]:
    """All rows; none where namespaces are not to be had."""
    folder = Path(tempfile.mkdtemp(prefix="bench-nodes-", dir=_runs()))
    try:
        return _product(folder, size, steps)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{CONTESTANT}: not measured, needs root, ip and tc: {error}")
        return []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _runs() -> Path:
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    return runs


def _product(folder: Path, size: str, steps: int) -> list[Row]:
    script = (*SCRIPT, "--size", size)
    quiet = [_paced(folder / "quiet-0", script, steps, MEMORY)]
    copies, copied_s, fetched = _with_copies(folder / "copies", script, steps)
    quiet.append(_paced(folder / "quiet-1", script, steps, MEMORY))
    rate = STORAGE_SHARE * BITS_PER_S / 8
    storage, nbytes = _with_storage(folder / "storage", script, rate)
    return rows(copies, storage, fetched, [copied_s / one for one in quiet], nbytes / rate)


def rows(
    copies: Wasted,
    storage: Wasted,
    fetched_s: Sequence[float],
    slowdown: Sequence[float],
    read_s: float,
) -> list[Row]:
    """What is published of the measurements."""
    ratio = storage.without_retrieval_s / copies.without_retrieval_s
    return [
        row(f"{CONTESTANT}, copies", "snapshot to protected", copies.checkpoint_s, "s"),
        row(f"{CONTESTANT}, copies", "between two protected", copies.period_s, "s"),
        row(f"{CONTESTANT}, copies", "retrieval", fetched_s, "s"),
        row(f"{CONTESTANT}, storage", "snapshot to durable", storage.checkpoint_s, "s"),
        row(f"{CONTESTANT}, storage", "between two durable", storage.period_s, "s"),
        row(f"{CONTESTANT}, storage", "retrieval", [read_s], "s",
            note="bytes of a rank over the shaped rate, not measured"),
        row(CONTESTANT, "wasted time, storage over copies", [ratio], "x", at_least=TARGET,
            note="t_ckpt + 1 / (2 f), retrieval apart"),
        row(CONTESTANT, "iteration with copies over without", slowdown, "x",
            note="against runs before and after; the nodes share the cores of one machine"),
    ]  # fmt: skip


def _paced(folder: Path, script: Sequence[str], steps: int, settings: Sequence[str]) -> float:
    folder.mkdir()
    script = (*script, "--steps", str(steps))
    with cluster(NODES, BITS_PER_S, folder, settings=settings, script=script) as job:
        _launch(job)
        job.finish(STAGE_S)
        return iterations_s(job)


def _with_copies(
    folder: Path, script: Sequence[str], steps: int
) -> tuple[Wasted, float, list[float]]:
    """(wasted time, seconds an iteration, fetches): a node is lost after `steps`."""
    folder.mkdir()
    script = (*script, "--steps", str(steps + 3 * INTERVAL_STEPS), "--horizon", "1000")
    with cluster(NODES, BITS_PER_S, folder, settings=COPIES, script=script) as job:
        _launch(job)
        job.wait_for(f"step {steps}", lambda: _protected(job, steps), STAGE_S)
        found, paced_s = wasted(job.events(t.GenerationProtected)), iterations_s(job)
        lost_s = job.lose(1)
        job.launch(1)
        job.finish(STAGE_S)
        fetches = [e for e in job.events(t.ShardCopied, since_s=lost_s) if e.purpose == "restore"]
        if not fetches:
            raise ClusterError(f"nothing was fetched from another node; see {folder}")
        return found, paced_s, [e.copy_s for e in fetches]


def _with_storage(
    folder: Path, script: Sequence[str], rate_bytes_per_s: float
) -> tuple[Wasted, int]:
    """(wasted time, bytes a rank) of three checkpoints, each begun when the last is durable."""
    folder.mkdir()
    shaped = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'shaped_store'}",
              "SHAPED_STORE": repr(rate_bytes_per_s)}  # fmt: skip
    script = (*script, "--steps", "1000000")
    with cluster(
        NODES, BITS_PER_S, folder, settings=STORAGE, script=script, environment=shaped
    ) as job:
        _launch(job)
        durable = job.wait_for("three durable checkpoints", lambda: _durable(job, 3), STORAGE_S)
        return wasted(durable), durable[0].bytes


def _launch(job: Cluster) -> None:
    for node in range(NODES):
        job.launch(node)


def _protected(job: Cluster, step: int) -> bool | None:
    return any(e.step >= step for e in job.events(t.GenerationProtected)) or None


def _durable(job: Cluster, count: int) -> list[t.PersistCommitted] | None:
    found = job.events(t.PersistCommitted)
    return found if len({e.generation for e in found}) >= count else None
