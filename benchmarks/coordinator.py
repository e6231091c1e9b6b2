"""`make bench-coordinator`: what the coordinating keeper computes, by the number of ranks.

The real machines, N virtual ranks, 8 a node; nothing is lost and no time passes.  Every frame that
crosses a connection of the coordinator is really encoded or decoded.  Counted is the CPU time of
the coordinator alone: decoding, deciding, encoding, and the text of the COMMIT.  The nodes'
machines run beside it and are not counted.

    checkpoint      memory and disk, in a run that remembers 32 settled saves
    memory          the same for memory alone
    copies          a round of copies on partner nodes, after the seals
    restart         all trainers attach again, and restore from memory
    disk            new keepers everywhere: the newest COMMIT is restored
    one node fewer  every rank gathers its parts from the memory of all nodes

The exponent is the slope of a least squares line through (log ranks, log seconds).
"""

import argparse
import copy
import gc
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autockpt.executors.network.handshake import Channel, Framer, Identity, frame
from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.executors.storage.directory.records import CommitFile
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from benchmarks.harness import Row, parse, publish, row

RANKS = (1024, 2048, 4096, 8192, 16384)
REMEMBERED = 32
"""Settled saves that a run which lasts remembers."""
EXPONENT = 1.1
AT_MOST_S = {"checkpoint": 2.5, "memory": 2.5, "restart": 5.0, "disk": 5.0, "one node fewer": 5.0}
"""CPU seconds at `JUDGED` ranks."""
JUDGED = 8192
STATE_BYTES = 10**10
"""Of one rank; only its digits are written."""


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints and restarts of each")
    args = parse(parser, ranks=[32, 64], rounds=1)
    measured = {ranks: measure(ranks, args.per_node, args.rounds) for ranks in sorted(args.ranks)}
    publish("coordinator", rows(measured), settings=vars(args), smoke=args.smoke)


def measure(ranks: int, per_node: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of the coordinator by what happens."""
    found: dict[str, list[float]] = {}
    job = VirtualJob(ranks, per_node)

    def note(figure: str, act: Callable[[], object], job: VirtualJob = job) -> None:
        gc.collect()
        gc.disable()  # the garbage of all the nodes is not the coordinator's
        job.spent_s = 0.0
        act()
        found.setdefault(figure, []).append(job.spent_s)
        gc.enable()

    job.attach()
    job.checkpoint()
    job.remember(REMEMBERED)
    for _ in range(rounds):
        note("checkpoint", job.checkpoint)
        note("memory", lambda: job.checkpoint(disk=False))
    for _ in range(rounds):
        note("restart", job.attach)
    job.checkpoint()
    for _ in range(rounds):
        job.replace_keepers()
        note("disk", job.attach)
    job.checkpoint()
    job.lose_last_node()
    note("one node fewer", job.attach)
    protected = VirtualJob(ranks, per_node, Redundancy(scheme="replicas", copies=2))
    protected.attach()
    protected.checkpoint(disk=False)
    for _ in range(rounds):
        note("copies", lambda: protected.checkpoint(disk=False), protected)
    return found


def rows(measured: dict[int, dict[str, list[float]]]) -> list[Row]:
    """Seconds by size, and how they grow."""
    figures = list(next(iter(measured.values())))
    found = []
    for ranks, seconds in measured.items():
        for figure in figures:
            target = AT_MOST_S.get(figure) if ranks == JUDGED else None
            found.append(row(f"{ranks} ranks", figure, seconds[figure], "s", at_most=target))
    for figure in figures if len(measured) > 1 else ():
        points = [(ranks, min(seconds[figure])) for ranks, seconds in measured.items()]
        found.append(row("exponent", figure, [exponent(points)], "s", at_most=EXPONENT))
    return found


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Slope of log seconds over log ranks, least squares."""
    logs = [(math.log(ranks), math.log(max(seconds, 1e-9))) for ranks, seconds in points]
    mean_x = sum(x for x, _ in logs) / len(logs)
    mean_y = sum(y for _, y in logs) / len(logs)
    above = sum((x - mean_x) * (y - mean_y) for x, y in logs)
    return above / sum((x - mean_x) ** 2 for x, _ in logs)


@dataclass(slots=True)
class _Directory:
    """What stands on the storage."""

    term: int = 0
    committed: dict[Generation, m.CatalogueEntry] = field(default_factory=dict)
    parents: dict[int, Generation | None] = field(default_factory=dict)


class VirtualJob:
    """The keepers of a job as a queue of events; trainers and storage answer at once."""

    def __init__(self, ranks: int, per_node: int, redundancy: Redundancy = NO_REDUNDANCY) -> None:
        self.per_node = per_node
        self.redundancy = redundancy
        self.nodes = tuple(rank // per_node for rank in range(ranks))
        self.machines: list[NodeProtocol] = []
        self.coordinator = CoordinatorProtocol()
        self.replace_keepers()
        self.spent_s = 0.0
        """CPU time of the coordinator."""
        self._queue: deque[Callable[[], None]] = deque()
        self._directory = _Directory()
        self._seq = 0
        self._round = 0
        me = Identity(run_id="r", node=0, incarnation=self._incarnation())
        self._channel = Channel(b"secret", me, to_node=None)
        self._channel.peer = me  # as after the handshake
        self._framer = Framer()

    # ------------------------------------------------------------------ acts

    def attach(self) -> None:
        """All trainers of a new start attach; returns when all may train."""
        self._round += 1
        incarnation = self._incarnation()
        for rank, node in enumerate(self.nodes):
            attach = m.TrainerAttached(
                rank=rank, incarnation=incarnation, world_size=len(self.nodes), nodes=self.nodes,
                slots=2, layout_digest=_digest("layout", rank, len(self.nodes)),
                redundancy=self.redundancy,
            )  # fmt: skip
            self._later(node, attach)
        self._run()
        self._seq = 0
        assert self.coordinator.state.phase == "running"

    @property
    def generation(self) -> Generation:
        """The newest that was begun."""
        return Generation(term=self._directory.term, step=self._seq)

    def checkpoint(self, *, disk: bool | Callable[[int], bool] = True) -> None:
        """All ranks seal, and vote where it goes to disk; returns when the verdicts are there.

        `disk` may tell ranks apart: where some write it, all are asked to.
        """
        self._seq += 1
        generation = self.generation
        for rank, node in enumerate(self.nodes):
            asked = m.SaveRequested(
                rank=rank, generation=generation, step=self._seq,
                disk=disk(rank) if callable(disk) else disk,
            )  # fmt: skip
            self._later(node, asked)
        self._run()
        for rank, node in enumerate(self.nodes):
            sealed = m.ShardSealed(
                rank=rank, generation=generation, root=_digest("root", rank, self._seq),
                bytes=STATE_BYTES, chunk_bytes=2**22,
                layout_digest=_digest("layout", rank, len(self.nodes)),
            )  # fmt: skip
            self._later(node, sealed)
        self._run()
        for rank, node in enumerate(self.nodes) if disk else ():
            record = {
                "rank": rank, "file": f"shard-{rank:05d}-a1.safetensors",
                "index": f"shard-{rank:05d}-a1.json", "bytes": STATE_BYTES, "chunks": 2400,
                "root": _digest("root", rank, self._seq), "chunk_bytes": 2**22,
                "layout_digest": _digest("layout", rank, len(self.nodes)),
            }  # fmt: skip
            persisted = m.ShardPersisted(rank=rank, generation=generation, attempt=1, record=record)
            self._later(node, persisted)
        self._run()
        assert self.coordinator.state.memory_committed == generation
        assert not disk or self.machines[-1].state.durable == generation
        if self.coordinator.state.protects:
            assert self.machines[-1].state.protected == generation

    def remember(self, saves: int) -> None:
        """As if so many saves had settled: copies of the newest, under older names."""
        known = self.coordinator.state.saves
        settled = known[max(known)]
        self._seq += saves
        for back in range(1, saves):
            older = copy.copy(settled)
            older.generation = replace(settled.generation, step=self._seq - back)
            known[older.generation] = older

    def replace_keepers(self) -> None:
        """New ones on all nodes: what was in memory is gone."""
        self.machines = [NodeProtocol(node=node) for node in range(max(self.nodes) + 1)]
        self.coordinator = CoordinatorProtocol()

    def lose_last_node(self) -> None:
        """It is gone with its memory; the job goes on with the ranks that are left."""
        self.machines.pop()
        self.nodes = self.nodes[: -self.per_node]

    # ------------------------------------------------------------------ events

    def _incarnation(self) -> m.Incarnation:
        return m.Incarnation(launch_id="launch", restart_round=self._round)

    def _later(self, node: int, event: m.NodeEvent) -> None:
        self._queue.append(lambda: self._node_event(node, event))

    def _run(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _node_event(self, node: int, event: m.NodeEvent) -> None:
        for instruction in self.machines[node].handle(event):
            self._do_at_node(node, instruction)

    def _coordinator_event(self, event: m.CoordinatorEvent) -> None:
        with _Counted(self):
            instructions = self.coordinator.handle(event)
        for instruction in instructions:
            self._do_at_coordinator(instruction)

    def _do_at_node(self, node: int, instruction: Any) -> None:
        if isinstance(instruction, m.Send):
            self._queue.append(lambda: self._arrive(node, instruction.message))
        elif isinstance(instruction, m.RestoreShard):
            self._later(node, m.ShardVerified(
                rank=instruction.rank, term=instruction.term, attempt=instruction.attempt
            ))  # fmt: skip
        elif isinstance(instruction, m.FetchShard):
            fetched = replace(
                instruction.shard, slot=instruction.slot, copied=instruction.shard.parity is None
            )
            self._later(node, m.ShardFetched(shard=fetched))
        elif isinstance(instruction, m.SkipSave | m.AttachRefused | m.RestoreRefused):
            raise RuntimeError(f"node {node}: {instruction}")

    def _arrive(self, node: int, message: Any) -> None:
        """At the coordinator: what comes from another node was bytes."""
        if node != 0:
            data = frame(message)
            with _Counted(self):
                (message,) = self._channel.feed(data)
        self._coordinator_event(m.MessageReceived(from_node=node, message=message))

    def _send(self, node: int, message: Any) -> None:
        if node != 0:
            with _Counted(self):
                self._framer.frame(message)
        self._later(node, m.MessageReceived(from_node=0, message=message))

    def _do_at_coordinator(self, instruction: Any) -> None:
        known, after = self._directory, self._queue.append
        if isinstance(instruction, m.Send):
            self._send(instruction.to_node, instruction.message)
        elif isinstance(instruction, m.ClaimTerm):
            known.term = instruction.term or known.term + 1
            claimed = m.TermClaimed(
                incarnation=instruction.incarnation, term=known.term,
                committed=tuple(known.committed.values()), ever_committed=bool(known.committed),
                parents=tuple(
                    m.TermParent(term=term, parent=parent)
                    for term, parent in known.parents.items()
                ),
            )  # fmt: skip
            after(lambda: self._coordinator_event(claimed))
        elif isinstance(instruction, m.WriteDecision):
            known.parents[instruction.term] = instruction.generation
            written = m.DecisionWritten(term=instruction.term, attempt=instruction.attempt)
            after(lambda: self._coordinator_event(written))
        elif isinstance(instruction, m.WriteCommit):
            self._commit(instruction)
        elif isinstance(instruction, m.VerifyGeneration):
            generation = instruction.generation
            known.committed[generation] = replace(known.committed[generation], verified=True)
            verified = m.GenerationVerified(generation=generation, ok=True)
            after(lambda: self._coordinator_event(verified))
        elif isinstance(instruction, m.DeleteGenerations):
            for generation in instruction.generations:
                known.committed.pop(generation, None)
        elif isinstance(instruction, m.Report) and instruction.kind != "stale":
            raise RuntimeError(f"coordinator: {instruction.kind}: {instruction.detail[:200]}")

    def _commit(self, order: m.WriteCommit) -> None:
        with _Counted(self):
            record = CommitFile(
                run_id="r" * 32, generation=order.generation, step=order.step,
                world_size=order.world_size, parent=order.parent, records=order.records,
                health=order.health, created_s=1.0,
            )  # fmt: skip
            to_json(record.sealed()).encode()
        self._directory.committed[order.generation] = m.CatalogueEntry(
            generation=order.generation, step=order.step, world_size=order.world_size,
            parent=order.parent, records=order.records, layout_digests=order.layout_digests,
            created_s=float(order.step), health=order.health, reshardable=True,
        )  # fmt: skip
        written = m.CommitWritten(generation=order.generation, created_s=float(order.step))
        self._queue.append(lambda: self._coordinator_event(written))


class _Counted:
    """Adds the CPU time of a block to what the coordinator spent."""

    def __init__(self, job: VirtualJob) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._job.spent_s += time.thread_time() - self._began_s


def _digest(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


if __name__ == "__main__":
    main()
