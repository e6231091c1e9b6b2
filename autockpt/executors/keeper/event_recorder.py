"""Record the telemetry of the node and the failure log of the run."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autockpt import new_files
from autockpt.executors.keeper.slots import (
    CELL_STARTED_NS,
    CELL_STARTED_STEP,
    CELL_STEP,
    CELL_STEP_NS,
    RankMemory,
)
from autockpt.executors.keeper.wire import TrainerResumed
from autockpt.executors.protocol.messages import Dispute, HeldShard, OptimizerStateDropped
from autockpt.executors.storage.catalogue import VerifyResult
from autockpt.executors.storage.event_log import TelemetryWriter
from autockpt.executors.throttle.idle_windows import WindowUse
from autockpt.values import telemetry as t
from autockpt.values.failure import FailureRecord
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from autockpt.values.telemetry import newest_lines

KEEPER = -1
"""Rank under which a keeper reports."""
REMEMBERED = 4096
"""Generations whose beginning is known: a slow store is that many saves to memory behind."""


@dataclass(slots=True)
class Outage:
    """An interruption that has begun and is not over."""

    began_s: float
    step: int
    step_s: float
    """When the newest step ended, monotonic; 0 unknown."""
    exposure_s: float
    steps: int
    """Trained within the exposure."""
    what: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    of_script: bool = False
    """An exception of the script began it: it says nothing about machines."""
    nodes: tuple[int, ...] = ()
    """Of the job when it began; (): not known."""
    told_s: float | None = None
    """When the keepers let the ranks go on, monotonic; None: not yet."""


class EventRecorder:
    """Telemetry events of one keeper, and one FailureRecord per interruption.

    Keepers of other nodes write theirs to the same log; the term says which belong together.
    """

    def __init__(self, run_directory: str, node: int) -> None:
        self._node = node
        self._failures = os.path.join(run_directory, "failures.jsonl")
        self._writer = TelemetryWriter(
            os.path.join(run_directory, "telemetry", f"keeper-{node:03d}.jsonl")
        )
        self._began: dict[Generation, tuple[float, int]] = {}
        self._write_s: dict[Generation, float] = {}
        self._bytes: dict[Generation, tuple[int, int]] = {}
        self.outage = _unfinished_run(run_directory)
        self._failing: set[int] = set()
        """Ranks that the script's own exception is ending."""
        self._inherited = self.outage is not None
        """The outage was found at birth and is not confirmed yet."""

    def close(self) -> str:
        """Everything told is in the files; a sentence about events that are not, "" for none."""
        self._writer.close()
        return self._writer.gap

    def trainers_live(self) -> None:
        """Running trainers came back: only the former keeper had died."""
        if self._inherited:
            self.outage, self._inherited = None, False

    def _tell_inherited(self, outage: Outage) -> None:
        """Report that trainers and keeper died together."""
        self._writer.emit(
            t.FailureObserved(
                at_s=outage.began_s, rank=KEEPER, what="+".join(sorted(outage.what)),
                failed_rank=-1, pid=0, step=outage.step,
                detail="found by the next keeper: training had not ended",
            )
        )  # fmt: skip

    def snapshot_began(self, generation: Generation, step: int, at_s: float) -> None:
        """Remembers when a generation began on this node, for latencies."""
        self._began.setdefault(generation, (at_s, step))
        while len(self._began) > REMEMBERED:
            self._began.pop(next(iter(self._began)))

    def shard_written(
        self, generation: Generation, raw_bytes: int, stored_bytes: int, write_s: float
    ) -> None:
        """Adds one shard's bytes and the slowest time."""
        raw, stored = self._bytes.get(generation, (0, 0))
        self._bytes[generation] = (raw + raw_bytes, stored + stored_bytes)
        self._write_s[generation] = max(write_s, self._write_s.get(generation, 0.0))

    def memory_committed(self, generation: Generation) -> None:
        """Every rank sealed."""
        began, step = self._began.get(generation, (_now(), -1))
        self._writer.emit(
            t.MemoryCommitted(
                at_s=_now(), rank=KEEPER, generation=str(generation), step=step,
                latency_s=_now() - began,
            )
        )  # fmt: skip

    def protected(self, generation: Generation, nbytes: int, moving_s: float) -> None:
        """Every shard has its copies on other nodes; `nbytes` came here in `moving_s`."""
        began, step = self._began.get(generation, (_now(), -1))
        self._writer.emit(
            t.GenerationReplicated(
                at_s=_now(), rank=KEEPER, generation=str(generation), step=step,
                latency_s=_now() - began, bytes=nbytes, moving_s=moving_s,
            )
        )  # fmt: skip

    def protection_lost(self, reason: str) -> None:
        """Copies are missing."""
        self._writer.emit(t.ReplicationLost(at_s=_now(), rank=KEEPER, reason=reason))

    def copied(
        self,
        shard: HeldShard,
        from_node: int,
        nbytes: int,
        copy_s: float,
        restoring: bool,
        by_device: bool,
    ) -> None:
        """A shard or a parity came from other nodes; callable from any thread."""
        self._writer.emit(
            t.ReplicaFetched(
                at_s=_now(), rank=KEEPER, generation=str(shard.generation), step=shard.step,
                shard_rank=shard.rank, from_node=from_node, to_node=self._node, bytes=nbytes,
                copy_s=copy_s,
                purpose="restore" if restoring else "protect",
                path="emulated device" if by_device else "host",
            )
        )  # fmt: skip

    def sent(self, use: WindowUse, send_s: float) -> None:
        """Copies left for other nodes, in windows as far as these took them; from any thread."""
        self._writer.emit(
            t.ReplicaSent(
                at_s=_now(), rank=KEEPER, from_node=self._node, bytes=use.nbytes,
                window_bytes=use.passed["window"], chunk_bytes=use.chunk_bytes,
                held_s=use.blocked_s, send_s=send_s, reason=use.reason,
            )
        )  # fmt: skip

    def durable(self, generation: Generation) -> None:
        """COMMIT stands."""
        # Remembered all the same: its copies may arrive later than the disk's last word.
        began, step = self._began.get(generation, (_now(), -1))
        raw, stored = self._bytes.pop(generation, (0, 0))
        self._writer.emit(
            t.CheckpointDurable(
                at_s=_now(), rank=KEEPER, generation=str(generation), step=step, bytes=raw,
                stored_bytes=stored, latency_s=_now() - began,
                write_s=self._write_s.pop(generation, 0.0),
            )
        )  # fmt: skip

    def dropped(self, generation: Generation, reason: str) -> None:
        """A generation will not be durable."""
        _, step = self._began.pop(generation, (0.0, -1))
        self._bytes.pop(generation, None)
        self._write_s.pop(generation, None)
        self._writer.emit(
            t.PersistFailed(
                at_s=_now(), rank=KEEPER, generation=str(generation), step=step, reason=reason
            )
        )

    def retired(self, generation: Generation, step: int, freed: int) -> None:
        """Retention deleted a commit."""
        self._writer.emit(
            t.CheckpointDeleted(
                at_s=_now(), rank=KEEPER, generation=str(generation), step=step, bytes=freed
            )
        )

    def reduced(self, event: OptimizerStateDropped) -> None:
        """A commit holds weights only from now on."""
        self._writer.emit(
            t.OptimizerStateDropped(
                at_s=_now(), rank=KEEPER, generation=str(event.generation),
                step=event.generation.step, bytes=sum(int(r["bytes"]) for r in event.records),
            )
        )  # fmt: skip

    def scrubbed(self, result: VerifyResult, scrub_s: float) -> None:
        """A generation was read back; from any thread."""
        detail = "; ".join(result.problems[:3]) or result.sick
        verdict = "suspect" if result.sick else "whole"
        if not result.ok:
            verdict = "damaged" if result.damaged else "unread"
        self._writer.emit(
            t.Scrubbed(
                at_s=_now(), rank=KEEPER, generation=str(Generation.from_name(result.name)),
                verdict=verdict, bytes=result.bytes, scrub_s=scrub_s, detail=detail,
            )
        )  # fmt: skip
        if verdict != "whole":
            self.degraded("scrub", f"{result.name} is {verdict}: {detail}")

    def degraded(self, what: str, reason: str) -> None:
        """Something of ours failed; the training goes on."""
        self._writer.emit(t.Degraded(at_s=_now(), rank=KEEPER, what=what, reason=reason))

    def replicas_disagreed(self, generation: Generation, dispute: Dispute) -> None:
        """Record that replicated state is not equal any more."""
        self._writer.emit(
            t.ReplicasDisagreed(
                at_s=_now(), rank=KEEPER, generation=str(generation), step=generation.step,
                ranks=", ".join(map(str, dispute.ranks)), named=dispute.named,
                nodes=", ".join(map(str, dispute.nodes)), reason=dispute.who,
            )
        )  # fmt: skip

    def trainer_failing(self, rank: int) -> None:
        """The script's own exception is ending a rank, whose connection will close."""
        self._failing.add(rank)

    def boundary_ended(
        self, generation: Generation | None, ranks: str, took_s: float, reason: str
    ) -> None:
        """After a death the last boundary was sealed, or the reason why it was not."""
        self._writer.emit(
            t.LastBoundarySealed(
                at_s=_now(), rank=KEEPER, generation=str(generation or ""),
                step=generation.step if generation is not None else 0, dead=ranks, took_s=took_s,
                reason=reason,
            )
        )  # fmt: skip

    def told_to_go_on(self) -> None:
        """All nodes have read, and their ranks hear it at once."""
        if self.outage is not None:
            self.outage.told_s = _now()

    def trainer_lost(
        self, memory: RankMemory, pid: int, detail: str, *, nodes: Sequence[int] = ()
    ) -> None:
        """A trainer died without leaving; `nodes`: of the ranks of its job."""
        step, step_ns = memory.cell(CELL_STEP), memory.cell(CELL_STEP_NS)
        self._writer.emit(
            t.FailureObserved(
                at_s=_now(), rank=KEEPER, what="trainer", failed_rank=memory.rank, pid=pid,
                step=step, detail=detail,
            )
        )  # fmt: skip
        started_ns = memory.cell(CELL_STARTED_NS)
        if self.outage is None:
            exposure = (step_ns - started_ns) / 1e9 if started_ns and step_ns else 0.0
            self.outage = Outage(
                began_s=_now(), step=step, step_s=step_ns / 1e9, exposure_s=max(0.0, exposure),
                steps=step - memory.cell(CELL_STARTED_STEP), nodes=tuple(sorted(set(nodes))),
            )  # fmt: skip
        self.outage.what.add("trainer")
        self.outage.of_script |= memory.rank in self._failing
        self._failing.discard(memory.rank)
        self.outage.ranks.add(memory.rank)
        if step > self.outage.step:
            self.outage.step, self.outage.step_s = step, step_ns / 1e9

    def resumed(self, message: TrainerResumed) -> None:
        """A rank is back; closes the outage when it is the first of its incarnation to say so."""
        outage = self.outage
        if message.generation is None and outage is None:
            return  # the first start
        inherited = outage is not None and self._inherited
        if outage is not None and inherited:
            self._inherited = False
            self._tell_inherited(outage)
        lost_steps = max(0, outage.step - message.step) if outage and not message.discards else 0
        pace = outage.exposure_s / outage.steps if outage and outage.steps else 0.0
        down_s = _now() - outage.began_s if outage else 0.0
        detect_s, restart_s = _apart(message, down_s)
        self._writer.emit(
            t.Restored(
                at_s=_now(), rank=message.rank,
                generation="" if message.generation is None else str(message.generation),
                step=message.step, source=message.source, bytes=message.bytes,
                restore_s=message.restore_s, lost_steps=lost_steps, lost_s=lost_steps * pace,
                down_s=down_s, detect_s=detect_s if outage is not None else None,
            )
        )  # fmt: skip
        if outage is not None and message.rank == min(outage.ranks, default=message.rank):
            self._close(
                outage, message, lost_steps, lost_steps * pace, detect_s, restart_s,
                memory_died=inherited,
            )  # fmt: skip

    def _close(
        self,
        outage: Outage,
        message: TrainerResumed,
        lost_steps: int,
        lost_s: float,
        detect_s: float | None,
        restart_s: float | None,
        *,
        memory_died: bool,
    ) -> None:
        # A keeper that saw the trainers die is alive, and the node's memory with it, wherever the
        # state came back from.  One that found them dead may still have found their slots.
        # Peers serve what another node has lost.
        lost = memory_died or message.source in ("peer", "parity")
        survived = message.source == "memory" or not lost
        kind: Literal["process", "node", "script"] = "process" if survived else "node"
        record = FailureRecord(
            wall=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            kind="script" if outage.of_script else kind,
            what="+".join(sorted(outage.what)) or "trainer",
            node=self._node,
            step=outage.step,
            exposure_s=outage.exposure_s,
            detect_s=detect_s,
            restart_s=restart_s,
            restore_s=message.restore_s,
            source=message.source,
            lost_steps=lost_steps,
            lost_s=lost_s,
            term=message.term,
            nodes=outage.nodes,
            told_s=None if outage.told_s is None else outage.told_s - outage.began_s,
        )
        self.outage = None
        try:
            with open(self._failures, "a", opener=new_files.private) as file:
                file.write(to_json(record) + "\n")
        except OSError as error:
            self.degraded("failure log", str(error))


def _apart(message: TrainerResumed, down_s: float) -> tuple[float | None, float | None]:
    """Of an outage the seconds of (detection, restart); None: not known.

    Without a time of the launcher all of it counts as restart.  The wait for a new launch is
    neither: it says nothing about the next failure.
    """
    came_s = message.came_s
    if message.begins_launch:
        return None, None if came_s is None else max(0.0, came_s - message.restore_s)
    detect_s = 0.0 if came_s is None else max(0.0, down_s - came_s)
    return detect_s, max(0.0, down_s - detect_s - message.restore_s)


def _now() -> float:
    return time.monotonic()


def _unfinished_run(run_directory: str) -> Outage | None:
    """The outage that a new keeper was born into: trainers that never said they ended.

    It listens only behind this, so of each file as little is read as tells the end.
    """
    folder = os.path.join(run_directory, "telemetry")
    newest: _Progress | None = None
    last_s, of_script = 0.0, False
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("rank-"))
    except OSError:
        return None
    for name in names:
        last = _last_progress(os.path.join(folder, name))
        if last is None:
            continue
        last_s, of_script = max(last_s, last.at_s), of_script or bool(last.of_script)
        if newest is None or last.step > newest.step:
            newest = last
    if newest is None:
        return None
    exposure_s, steps = newest.life()
    # Just after the last thing that anybody said: nobody was left to see the failure itself.
    outage = Outage(
        began_s=last_s + 1e-6, step=newest.step, step_s=newest.at_s,
        exposure_s=exposure_s, steps=steps, of_script=of_script,
    )  # fmt: skip
    outage.what |= {"trainer", "keeper"}
    return outage


_SHOW_PROGRESS = ("IterationsTimed", "SnapshotBegan", "SnapshotSealed", "TrainerFailed")
PACE_LINES = 256
"""So many of the newest lines of a file tell the pace of a long life."""
LIFE_BYTES = 2**26
"""The beginning of a life is sought so far back: days of training.  An older one counts as long as
these."""


@dataclass(slots=True)
class _Progress:
    """The newest step of a rank, and its life as far as it was read from the end of the file."""

    path: str
    at_s: float
    step: int
    began_s: float
    """The oldest time that was read of this life."""
    is_whole: bool = False
    """That is its beginning."""
    steps: int = 0
    """Trained since `began_s`, as far as blocks of iterations were reported."""
    of_script: bool | None = None

    def life(self) -> tuple[float, int]:
        """(seconds, steps) since this life began; steps of a long one by its newest pace."""
        seen_s = max(0.0, self.at_s - self.began_s)
        if self.is_whole:
            return seen_s, self.steps
        life_s = max(seen_s, self.at_s - _life_began_s(self.path))
        return life_s, round(self.steps * life_s / seen_s) if seen_s else self.steps


def _last_progress(path: str) -> _Progress | None:
    """The newest step in a telemetry file that has no end, else None."""
    found: _Progress | None = None
    lines = 0
    try:
        with open(path, "rb") as file:
            names = (*_SHOW_PROGRESS, "RunStarted", "RunEnded")
            for line in newest_lines(file, most_bytes=LIFE_BYTES, naming=names):
                with contextlib.suppress(*_NO_EVENT):
                    data = json.loads(line)
                    kind, at_s = data["event"], float(data["at_s"])
                    if kind == "RunEnded" and found is None:
                        return None
                    if kind in ("RunStarted", "RunEnded") and found is not None:
                        found.began_s, found.is_whole = min(at_s, found.at_s), True
                        break
                    if kind in _SHOW_PROGRESS:
                        found = found or _Progress(path, at_s, int(data["step"]), at_s)
                        _go_back(found, data)
                        lines += 1
                if lines > PACE_LINES:
                    break
            else:
                if found is not None:
                    found.is_whole = file.seek(0, 2) <= LIFE_BYTES
    except OSError:
        return None
    if found is not None and found.at_s > time.monotonic():
        return None  # another boot's clock
    return found


_NO_EVENT = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Errors of a line that is torn, or of other writers."""


def _go_back(progress: _Progress, data: dict[str, Any]) -> None:
    """Take an older event of the same life into account."""
    progress.began_s = min(progress.began_s, float(data["at_s"]))
    if data["event"] == "IterationsTimed":
        progress.steps += int(data.get("count", 0))
    if data["event"] == "TrainerFailed" and progress.of_script is None:
        progress.of_script = data["origin"] != "machine"


def _life_began_s(path: str) -> float:
    """The newest start in a telemetry file; the oldest time in LIFE_BYTES if that is newer."""
    with contextlib.suppress(OSError, *_NO_EVENT), open(path, "rb") as file:
        for line in newest_lines(file, most_bytes=LIFE_BYTES, naming=("RunStarted",)):
            return float(json.loads(line)["at_s"])
        file.seek(max(0, file.seek(0, 2) - LIFE_BYTES))
        file.readline()
        return float(json.loads(file.readline())["at_s"])
    return float("inf")
