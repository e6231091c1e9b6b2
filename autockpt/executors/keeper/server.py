"""The keeper's loop: sockets and finished work in, protocol instructions carried out.

One thread owns all state.  Worker threads (shard pipelines, directory operations) only call `post`.
The decisions are NodeProtocol's and CoordinatorProtocol's; this module is their hands.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.keeper.hangs.stack_dumps import status_of
from autockpt.executors.keeper.hangs.watch import HangWatch, Watched
from autockpt.executors.keeper.replication.device_transfers import KeeperExchanges
from autockpt.executors.keeper.replication.network_windows import LinkWindows, NodeWindows
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.restoring.lending import RestoreLending
from autockpt.executors.keeper.restoring.stored_shards import StoredShards
from autockpt.executors.keeper.restoring.warm_pages import WarmPages
from autockpt.executors.keeper.saving.last_boundary import LastBoundary
from autockpt.executors.keeper.saving.shards import ShardSaves
from autockpt.executors.keeper.slots import CELL_STEP, MemoryTable
from autockpt.executors.keeper.standing.goal_in_force import ends_stuck_ranks, retention_in_force
from autockpt.executors.keeper.standing.run_standing import RunStanding
from autockpt.executors.keeper.storage_worker import DiskWorker
from autockpt.executors.keeper.trainers.connections import Connections, is_readable, peer_of
from autockpt.executors.keeper.trainers.trainers import Trainer, Trainers, describe, may_replace
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.control_plane import Peers
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.admission import may_send
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.executors.protocol.selection import on_lineage
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places import account
from autockpt.executors.storage.runtime_paths import is_removed
from autockpt.values.errors import AutockptError, NoRoomError
from autockpt.values.generation import Generation

TICK_S = 0.5
SEALING_TICK_S = 0.02
"""While the last boundary is being sealed."""
LINGER_S = 600.0
"""A keeper without trainers and without a launcher leaves after this time."""
FIRST_TRAINER_S = 300.0
REMOVED_LOOKS = 2
"""So many looks in a row that do not find the directories say that they were removed."""
OTHERS_PATIENCE_S = 10.0
"""A keeper that does not coordinate waits so long for the others when it has nothing left to do."""


class Keeper:
    """The keeper of one node."""

    def __init__(
        self, run_directory: str, node: int, checkpoints: str, *, run_id: str = ""
    ) -> None:
        self._run_directory = run_directory
        self._node = node
        self._directory = CheckpointDirectory(checkpoints)
        self._run_id = self._directory.open(run_id)
        self._directory.empty_trash()
        self._journal = EventRecorder(run_directory, node)
        self._memory = MemoryTable()
        self._hangs = HangWatch(run_directory, node, self._tell_stuck)
        self._connections = Connections(self, self._log)
        self._trainers = Trainers(self.post, self._log)
        self._standing = RunStanding(
            run_directory, trainers=self._trainers, memory=self._memory, journal=self._journal,
            log=self._log,
        )  # fmt: skip
        self._term = 0
        self._claimed_by: p.Incarnation | None = None
        self._disk = DiskWorker(
            self._directory,
            self._run_id,
            self.post,
            self._disk_answered,
            self._retired,
            self._journal.scrubbed,
            self._is_replaced,
        )
        retention = retention_in_force(run_directory)
        self._peers = Peers(
            self._directory.path,
            self._run_id,
            node,
            received=lambda sender, message: self.post(lambda: self._from_node(sender, message)),
            lost=lambda gone: self.post(lambda: self._both(p.NodeLost(node=gone))),
            trouble=lambda what: self.post(lambda: self._degrade("control plane", what)),
            log=self._log,
            opened=lambda secret, me, host: self._replicas.open(secret, me, host),
        )
        self._exchanges = KeeperExchanges(self._trainers.post_to)
        self._windows = NodeWindows(self._copy_rate, self._journal.sent)
        self._replicas = ReplicaSlots(
            run_id=self._run_id, memory=self._memory, post=self.post, tell=self._node_event,
            address=self._peers.transfer_address, rate=self._copy_rate,
            restoring=lambda: self._protocol.state.phase == "restoring", log=self._log,
            copied=self._journal.copied, receiver=self._receiver, exchanges=self._exchanges,
            windows=self._link_windows, stored=lambda want: self._stored.loan(want),
        )  # fmt: skip
        self._stored = StoredShards(checkpoints, node=node, replicas=self._replicas, log=self._log)
        self._shards = ShardSaves(
            directory=self._directory, run_id=self._run_id, memory=self._memory,
            journal=self._journal, post=self.post, tell=self._node_event,
            world_size=self._world_size, degrade=self._degrade,
        )  # fmt: skip
        self._protocol = NodeProtocol(node=node)
        self._coordinator = CoordinatorProtocol(retention=retention)
        self._boundary = LastBoundary(
            state=lambda: self._protocol.state, memory=self._memory, shards=self._shards,
            tell=self._node_event, send=self._trainers.send_to, lost=self._lose,
            report=self._boundary_ended,
        )  # fmt: skip
        self._leave_when_drained = False
        self._lonely_since = time.monotonic()
        self._had_trainers = False
        self._looks_removed = 0
        """Last looks in a row for which the directories of run and checkpoints were removed."""
        self._opened, self._inode = _held_open(run_directory)
        self._all_finished = False
        """The last trainer ended by itself: no trainer will come back."""
        self._local: deque[p.WireMessage] = deque()
        self._lending = RestoreLending(
            run_id=self._run_id, node=node, memory=self._memory, replicas=self._replicas,
            trainers=self._trainers, stored=self._stored, post=self.post, log=self._log,
        )  # fmt: skip
        self._kept = WarmPages()
        self._log(f"keeper of node {node}, pid {os.getpid()}, run {self._run_id}")

    # ------------------------------------------------------------------ loop

    def post(self, work: Callable[[], None]) -> None:
        """Runs `work` in the keeper's thread; callable from any thread."""
        self._connections.post(work)

    def serve(
        self,
        listener: socket.socket,
        renew: Callable[[], socket.socket | None] = lambda: None,
    ) -> None:
        """Serves until the run is over.

        `renew` gives another socket to listen at, where the path of the first one is gone.
        """
        self._connections.listen(listener)
        next_tick = next_heartbeat = time.monotonic()
        while not self._finished():
            wait_s = max(0.0, next_tick - time.monotonic())
            if self._boundary.is_active:
                wait_s = min(wait_s, SEALING_TICK_S)
            self._connections.turn(wait_s)
            self._boundary.look(self._trainers.live)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._both(p.TimePassed(now_s=now))
                self._shards.look_for_stalls()
                self._standing.remind(now)
                self._look_for_hangs(now)
                self._write_status(now)
                self._peers.stand("settled" if self._settled() else "busy")
                again = renew()
                if again is not None:
                    self._log("the directory of its socket was removed; it has another one")
                    self._connections.listen(again)
            # Without trainers it is not held: a launch on other machines may take over.
            if now >= next_heartbeat and self._term and self._trainers.live:
                next_heartbeat = now + self._directory.heartbeat_s
                self._disk.beat(self._term)
            elif now >= next_heartbeat and self._disk.idle:
                next_heartbeat = now + self._directory.heartbeat_s
                self._disk.submit(self._look_for_run)
        self._write_status(time.monotonic(), last=True)
        self._standing.close()
        self._lending.close()
        self._kept.close()
        self._replicas.close()
        self._peers.close()
        self._directory.spares.clear()
        if gap := self._journal.close():
            self._log(gap)
        if self._opened is not None:
            os.close(self._opened)
        self._log("keeper leaves")

    def _finished(self) -> bool:
        if self._trainers.live:
            self._lonely_since = time.monotonic()
            return False
        if self._shards.busy:
            return False
        lonely = time.monotonic() - self._lonely_since
        if self._looks_removed >= REMOVED_LOOKS and self._is_orphan:
            self._log(f"{self._run_directory}: was removed")
            return True
        leaving = self._leave_when_drained or self._all_finished
        if leaving and self._settled() and lonely > 0.05 and not self._needed(lonely):
            return True
        if not self._is_orphan:
            return False
        return lonely > (LINGER_S if self._had_trainers else FIRST_TRAINER_S)

    @property
    def _is_orphan(self) -> bool:
        """Neither a trainer lives, nor a launcher that would start one."""
        return not self._trainers.live and not self._connections.is_awaiting

    def _look_for_run(self) -> None:
        """On the disk's thread, which may hang: whether the run's directories were removed.

        An error of the storage does not say it.
        """
        removed = False
        with contextlib.suppress(OSError):
            removed = self._inode is not None and is_removed(
                self._run_directory, self._node, checkpoints=self._directory.path,
                run_id=self._run_id, inode=self._inode,
            )  # fmt: skip
        self._looks_removed = self._looks_removed + 1 if removed else 0

    def _settled(self) -> bool:
        """Nothing here waits any more, on this node or another one."""
        node = self._protocol.state
        if self._trainers.live or node.unsettled or not self._disk.idle:
            return False
        if len(set(node.nodes)) < 2 or node.phase == "fenced":  # no verdict will come
            return True
        return node.settled and self._coordinator.settled_for(node.incarnation)

    def _needed(self, lonely_s: float) -> bool:
        """The keepers of other nodes still need this one; most of all if it coordinates."""
        if not self._peers.needed:
            return False
        return self._node == self._protocol.state.coordinator or lonely_s < OTHERS_PATIENCE_S

    # ------------------------------------------------------------------ trainers

    def receive(self, connection: wire.Connection, message: Any, descriptors: list[int]) -> None:
        """Handles a message of a trainer, of a launcher, or of a stranger of this user."""
        if isinstance(message, wire.Hello):
            self._hello(connection, message, descriptors)
            return
        if isinstance(message, wire.RecordsGiven):
            self._take_records(connection, descriptors)
            return
        for fd in descriptors:
            os.close(fd)
        if isinstance(message, wire.StatusWanted):
            self._leave_when_drained |= message.leave_when_drained
            self._look_for_deaths()
            self._answer_status(connection)
            return
        trainer = self._trainers.of(connection)
        if trainer is None or getattr(message, "rank", trainer.rank) != trainer.rank:
            self._log(f"ignored {wire.describe(message)}: not its sender")
            return
        self._from_trainer(trainer, message)

    def _hello(
        self, connection: wire.Connection, hello: wire.Hello, descriptors: list[int]
    ) -> None:
        """Lets a trainer in, or refuses it, which changes nothing here."""
        if self._is_next_start(hello):
            self._boundary.end("the ranks have been started again")
        former = self._former(hello, connection)
        refusal = self._refusal(hello, former, connection)
        if refusal is not None or not descriptors:
            for fd in descriptors:
                os.close(fd)
            self._refuse(connection, hello, refusal or "it brought no board")
            return
        if former is not None:
            self._bury(former)
            self._trainers.replaced.append(former)
        if hello.account is not None and account.adopt(hello.account):
            self._log("asks the object store with the credentials of this start")
        self._kept.give_back(hello.rank)
        memory = self._memory.of(hello.rank)
        # Of every trainer that is let in: by the board of the one before, a slot would count as
        # filled before the copy into it has begun.
        memory.take_board(Arena.attach(descriptors[0]))
        fresh_memory = not memory.slots
        self._memory.adopt(
            hello.rank,
            descriptors[1:],
            chunk_bytes=hello.slot_chunk_bytes,
            image_bytes=hello.slot_image_bytes,
        )
        if fresh_memory and memory.slots:
            self._adopted(hello.rank)
        trainer = Trainer(
            rank=hello.rank, pid=hello.pid, launcher_pid=hello.launcher_pid, attach=hello.attach,
            connection=connection, launched=hello.launched,
        )  # fmt: skip
        self._trainers.live[hello.rank] = trainer
        self._had_trainers = True
        trainer.process = self._connections.watch(connection)
        if hello.awaits:
            self._connections.await_launcher(hello.launcher_pid)
        self._give_slots(trainer)
        self._attached(trainer, hello.control_host)

    def _is_next_start(self, hello: wire.Hello) -> bool:
        """Whether the protocol would let it in; a start by mistake ends nothing here."""
        spoken = hello.wire_version == wire.WIRE_VERSION
        return spoken and self._protocol.attach_refusal(hello.attach) is None

    def _former(self, hello: wire.Hello, connection: wire.Connection) -> Trainer | None:
        """The trainer that lives with this rank, if it is another one."""
        former = self._trainers.live.get(hello.rank)
        if former is None or former.connection is connection:
            return former
        same = (former.pid, peer_of(former.connection.sock)) == (
            hello.pid,
            peer_of(connection.sock),
        )
        if same or (former.process is not None and is_readable(former.process)):
            self._connections.drain(former.connection)
            return None
        return former

    def _refusal(
        self, hello: wire.Hello, former: Trainer | None, connection: wire.Connection
    ) -> str | None:
        """Why a trainer is not let in; None: it is."""
        if hello.wire_version != wire.WIRE_VERSION:
            return (
                f"the keeper (pid {os.getpid()}) is of another version of autockpt: its messages "
                f"are of version {wire.WIRE_VERSION}, the trainer's of {hello.wire_version}"
            )
        if self._trainers.of(connection) is not None:
            return "its connection is a trainer's already"
        if former is not None and not may_replace(hello.attach, former.attach):
            return (
                f"rank {hello.rank} of this run is live: {describe(former)}; stop that run "
                "first, or use another --run-dir"
            )
        return self._protocol.attach_refusal(hello.attach)

    def _refuse(self, connection: wire.Connection, hello: wire.Hello, reason: str) -> None:
        incarnation = hello.attach.incarnation
        self._log(f"refused rank {hello.rank} (pid {hello.pid}) of {incarnation}: {reason}")
        with contextlib.suppress(OSError):  # it did not wait for the answer
            connection.send(
                p.AttachRefused(rank=hello.rank, incarnation=incarnation, reason=reason)
            )

    def _attached(self, trainer: Trainer, control_host: str) -> None:
        """The protocol decides whether it is admitted; if so, its nodes are the job."""
        attach = trainer.attach
        self._leave_when_drained = False
        if attach.term is not None:
            self._journal.trainers_live()
        slots = len(self._memory.of(trainer.rank).slots)
        self._node_event(replace(attach, slots=slots))
        if self._protocol.state.incarnation != attach.incarnation:
            return
        if control_host:
            self._peers.expect(attach.incarnation, attach.nodes, control_host)
        if attach.term is None and not slots:
            self._expect_to_read(attach)

    def _expect_to_read(self, attach: p.TrainerAttached) -> None:
        """Prepare for ranks of this node to read from storage if memory lacks their state."""
        here = attach.nodes.count(self._node)

        def prepare() -> None:
            if self._protocol.state.phase != "open":  # else it was decided meanwhile
                self._lending.expect_readers(here)

        def look() -> None:
            with contextlib.suppress(AutockptError):
                if self._directory.ever_committed():
                    self.post(prepare)

        if here > 1 and not attach.fresh:
            self._disk.submit(look)

    def _adopted(self, rank: int) -> None:
        memory = self._memory.of(rank)
        self._shards.adopted(rank)
        self._node_event(
            p.SlotsAdopted(
                rank=rank, slots=len(memory.slots), held=memory.adopted_shards(self._run_id)
            )
        )

    def _give_slots(self, trainer: Trainer) -> None:
        memory = self._memory.of(trainer.rank)
        if not memory.slots:
            return
        given = wire.SlotsGiven(
            rank=trainer.rank, image_bytes=memory.image_capacity, slots=len(memory.slots),
            chunk_bytes=memory.chunk_bytes,
            window_bytes=memory.room.window_bytes if memory.room else 0,
            blocking=memory.room is not None and memory.room.blocking, note=memory.note,
            run_id=self._run_id,
        )  # fmt: skip
        descriptors = tuple(arena.fd for arena in memory.slots if arena.fd is not None)
        self._trainers.send(trainer, given, descriptors)

    def _from_trainer(self, trainer: Trainer, message: Any) -> None:
        if isinstance(message, wire.SlotsWanted):
            self._allocate(trainer, message)
        elif isinstance(message, wire.SnapshotBegan):
            self._shards.snapshot_began(message)
        elif isinstance(message, wire.SnapshotCopied):
            self._shards.snapshot_copied(message)
        elif isinstance(message, wire.SnapshotTorn):
            self._shards.snapshot_torn(message)
        elif isinstance(message, wire.ReceiverListens | wire.ExchangeEnded):
            self._exchanges.heard(message)
        elif isinstance(message, wire.BoundarySealed):
            self._boundary.answered(message)
        elif isinstance(message, wire.RateWanted):
            wanted = replace(trainer.attach.redundancy, rate_bytes_per_s=message.bytes_per_s)
            trainer.attach = replace(trainer.attach, redundancy=wanted)
        elif isinstance(message, wire.TrainerResumed):
            self._journal.resumed(message)
        elif isinstance(message, wire.ChunksWanted):
            self._lending.lend_chunks(trainer, message)
        elif isinstance(message, wire.TrainerFailing):
            self._journal.trainer_failing(message.rank)
            self._log(f"the script is failing on rank {message.rank}: {message.error}")
        elif isinstance(message, wire.TrainerLeaving):
            trainer.leaving, trainer.note = message.reason, message.note
            trainer.step = message.step
        else:
            self._node_event(message)

    def connection_closed(self, connection: wire.Connection) -> None:
        """The trainers behind a connection are gone."""
        for trainer in self._trainers:
            if trainer.connection is connection:
                self._trainer_gone(trainer)

    def _trainer_gone(self, trainer: Trainer) -> None:
        if trainer.process is not None:
            self._connections.unwatch(trainer.process)
            trainer.process = None
        if trainer in self._trainers.replaced or not self._boundary.put_off(
            trainer, self._trainers.live
        ):
            self._lose(trainer)

    def _lose(self, trainer: Trainer) -> None:
        if trainer in self._trainers.replaced:
            self._trainers.replaced.remove(trainer)
        else:
            self._bury(trainer)
        self._node_event(p.TrainerLost(rank=trainer.rank, incarnation=trainer.attach.incarnation))

    def _look_for_deaths(self) -> None:
        """A launcher that asks has seen a death; the answer must know of it."""
        for trainer in list(self._trainers.live.values()):
            if trainer.process is not None and is_readable(trainer.process):
                self._connections.drain(trainer.connection)

    def _take_records(self, connection: wire.Connection, descriptors: list[int]) -> None:
        trainer = self._trainers.of(connection)
        if trainer is None:  # its Hello was refused
            for fd in descriptors:
                os.close(fd)
            return
        records = [Arena.attach(fd, fault=False, huge=False) for fd in descriptors]
        self._memory.of(trainer.rank).take_records(records)

    def _boundary_ended(
        self, generation: Generation | None, ranks: tuple[int, ...], took_s: float, reason: str
    ) -> None:
        dead = ", ".join(map(str, ranks))
        if generation is not None and not reason:
            self._log(f"rank {dead} died; the survivors sealed {generation} in {took_s:.2f} s")
        else:
            self._log(f"rank {dead} died; its last boundary is not sealed: {reason}")
        self._journal.boundary_ended(generation, dead, took_s, reason)

    def _bury(self, trainer: Trainer) -> None:
        """It is the trainer of its rank no more: it is gone, or a later start has come."""
        del self._trainers.live[trainer.rank]
        trainer.step = trainer.step or self._memory.of(trainer.rank).cell(CELL_STEP)
        self._standing.note_end(trainer)
        if trainer.leaving != "finished":
            self._kept.keep(trainer.rank, self._memory.of(trainer.rank).image_capacity)
        self._all_finished = trainer.leaving == "finished"
        if not trainer.leaving:
            self._journal.trainer_lost(
                self._memory.of(trainer.rank), trainer.pid, "its connection closed",
                nodes=trainer.attach.nodes,
            )  # fmt: skip
            self._log(f"trainer of rank {trainer.rank} (pid {trainer.pid}) is gone")
        self._shards.leave(trainer.rank, sealed=False)
        self._exchanges.trainer_gone(trainer.rank)
        self._lonely_since = time.monotonic()

    def _allocate(self, trainer: Trainer, wanted: wire.SlotsWanted) -> None:
        """New slots; before the term is open it is unknown which of the old ones have to stay."""
        if self._protocol.state.phase != "open":
            trainer.wanted = wanted
            return
        if wanted.more and self._memory.of(trainer.rank).slots:
            self._add_slot(trainer, wanted)
            return
        self._node_event(p.SlotsOutgrown(rank=trainer.rank))
        self._shards.leave(trainer.rank, sealed=True)
        self._replicas.overwritten(trainer.rank)
        try:
            sharers = self._sharers(trainer.rank)
            if not self._memory.fits_whole(wanted, sharers=sharers):
                self._node_event(p.SlotsOutgrown(rank=trainer.rank, tight=True))
            memory = self._memory.allocate(wanted, sharers=sharers)
        except (AutockptError, OSError) as error:
            self._degrade("memory tier", str(error))
            slots = len(self._memory.of(trainer.rank).slots)
            self._node_event(p.SlotsReplaced(rank=trainer.rank, slots=slots))  # smaller ones gone
            refused = wire.SlotsRefused(
                rank=trainer.rank, reason=str(error),
                passing=isinstance(error, NoRoomError | OSError),
            )  # fmt: skip
            self._trainers.send(trainer, refused)
            return
        self._node_event(p.SlotsReplaced(rank=trainer.rank, slots=len(memory.slots)))
        if memory.streams:
            self._degrade("memory tier", memory.note)
        self._give_slots(trainer)

    def _add_slot(self, trainer: Trainer, wanted: wire.SlotsWanted) -> None:
        """It is mapped before it is granted; the answer is the same slots where no more fits."""
        added = self._memory.add_slot(wanted, sharers=self._sharers(trainer.rank))
        self._give_slots(trainer)
        if added:
            slots = len(self._memory.of(trainer.rank).slots)
            self._node_event(p.SlotsAdded(rank=trainer.rank, slots=slots))

    def _sharers(self, rank: int) -> int:
        """Ranks of this node that have no slots, and this one."""
        here = [r for r, node in enumerate(self._protocol.state.nodes) if node == self._node]
        return sum(r == rank or not self._memory.of(r).slots for r in here) or 1

    # ------------------------------------------------------------------ protocol

    def _is_replaced(self, incarnation: p.Incarnation) -> bool:
        """On any thread: trainers of another one were let in."""
        return self._protocol.state.incarnation not in (None, incarnation)

    def _world_size(self, rank: int) -> int:
        trainer = self._trainers.live.get(rank)
        return trainer.attach.world_size if trainer else len(self._protocol.state.nodes)

    def _both(self, event: Any) -> None:
        self._node_event(event)
        self._coordinator_event(event)

    def _node_event(self, event: p.NodeEvent) -> None:
        if isinstance(event, p.PersistFailed):
            self._standing.note_trouble(event.generation, event.reason)
        elif isinstance(event, p.PersistStalled):
            self._standing.note_failure(
                f"{event.generation} of rank {event.rank}: the storage hangs"
            )
        self._carry_out(self._protocol.handle(event))

    def _coordinator_event(self, event: Any) -> None:
        self._carry_out(self._coordinator.handle(event))

    def _disk_answered(self, event: Any) -> None:
        if isinstance(event, Exception):
            self._degrade("retention", str(event))
            return
        if isinstance(event, p.TermClaimed):
            self._term, self._claimed_by = event.term, event.incarnation
        if isinstance(event, p.DirectoryRenewed):
            self._shards.forget_bases()
            self._standing.note_failure("the checkpoint directory was emptied; it was made again")
        elif isinstance(event, p.DirectoryGone):
            self._standing.note_failure(event.reason)
        elif isinstance(event, p.CommitFailed) and not event.fenced:
            self._standing.note_trouble(event.generation, event.reason)
        if isinstance(event, p.GenerationVerified) and not (event.ok and event.health == "good"):
            self._shards.damaged(event.generation)
        elif isinstance(event, p.OptimizerStateDropped) and event.records:
            self._journal.reduced(event)
        self._coordinator_event(event)

    def _carry_out(self, instructions: Sequence[p.Instruction]) -> None:
        """In order; messages to ourselves are delivered after the batch."""
        for instruction in instructions:
            self._execute(instruction)
        while self._local:
            self._deliver(self._node, self._local.popleft())
        if self._protocol.state.phase == "open":
            for trainer in [t for t in self._trainers.live.values() if t.wanted is not None]:
                wanted, trainer.wanted = trainer.wanted, None
                if wanted is not None:
                    self._allocate(trainer, wanted)

    def _deliver(self, from_node: int, message: p.WireMessage) -> None:
        event = p.MessageReceived(from_node=from_node, message=message)
        if isinstance(message, p.TO_COORDINATOR):
            self._coordinator_event(event)
        else:
            self._node_event(event)

    def _from_node(self, node: int, message: p.WireMessage) -> None:
        """A keeper speaks for the ranks of its node, and the coordinator's for the job."""
        if may_send(node, message, self._coordinator.state.nodes, self._protocol.state.nodes):
            self._deliver(node, message)
        else:
            self._log(f"ignored of node {node}: {wire.describe(message)}")

    def _execute(self, instruction: p.Instruction) -> None:
        match instruction:
            case p.Send():
                self._send_node(instruction)
            case p.GrantSlot():
                self._grant(instruction)
            case p.StartPersist():
                self._shards.start_persist(instruction)
                self._to_trainer(instruction)
            case p.AbortPersist():
                self._shards.abort_persist(instruction)
            case (
                p.ClaimTerm()
                | p.WriteDecision()
                | p.WriteCommit()
                | p.TrashGeneration()
                | p.VerifyGeneration()
                | p.DeleteGenerations()
                | p.DropOptimizerState()
                | p.MarkEverCommitted()
            ):
                self._disk.execute(instruction)
            case p.WithdrawClaim(incarnation=incarnation, term=term):
                if self._disk.withdraw_claims(term):
                    withdrawn = p.ClaimWithdrawn(incarnation=incarnation)
                    self.post(lambda: self._coordinator_event(withdrawn))
                    self._standing.note_failure(
                        f"{self._directory.path}: the storage does not answer"
                    )
            case p.FetchShard():
                self._replicas.fetch(instruction)
            case p.AbortFetch():
                self._replicas.abort(instruction)
            case p.FreeReplicas():
                self._replicas.free(instruction)
            case p.KeepOutgrown():
                self._replicas.keep_outgrown(instruction)
            case p.FreeSlots(rank=rank):
                self._shards.leave(rank, sealed=True)
                self._replicas.overwritten(rank)
                self._memory.free(rank)
            case p.ServeShards():
                self._lending.gather(instruction)
            case p.AnnounceProtected(generation=generation, reason=reason):
                self._note_protected(generation, reason)
            case p.AnnounceMemoryCommitted(generation=generation):
                if not any(memory.streams for memory in self._memory.ranks.values()):
                    self._standing.memory_committed = str(generation)
                    self._journal.memory_committed(generation)
                self._trainers.send_all(instruction)
            case p.AnnounceDispute(generation=generation, dispute=dispute):
                self._log(f"{generation}: replicas disagree: {dispute.who}")
                if self._node == self._protocol.state.coordinator:
                    self._journal.replicas_disagreed(generation, dispute)
                self._trainers.send_all(instruction)
            case p.AnnounceDurable(generation=generation):
                self._standing.note_durable(generation)
                self._shards.durable(generation)
                self._journal.durable(generation)
                self._trainers.send_all(instruction)
            case p.AnnounceDropped(generation=generation, reason=reason):
                self._journal.dropped(generation, reason)
                trouble = self._shards.troubles.pop(generation, "")
                self._standing.note_dropped(generation, trouble)
                self._trainers.send_all(instruction)
            case p.FenceTrainer():
                self._trainers.fence(instruction)
            case p.Report(kind=kind, detail=detail):
                self._log(f"{kind}: {detail}")
                if kind == "violation":
                    self._degrade("protocol", detail)
            case _:
                self._to_trainer(instruction)

    def _send_node(self, send: p.Send) -> None:
        if send.to_node == self._node:
            self._local.append(send.message)
        else:
            self._peers.send(send.to_node, send.message)

    def _note_protected(self, generation: Generation | None, reason: str) -> None:
        """With the cost of the exchange, for the trainer that decides."""
        nbytes, moving_s = self._replicas.link.take() if generation is not None else (0, 0.0)
        self._standing.note_protected(generation, reason, nbytes=nbytes, moving_s=moving_s)
        if generation is not None:
            arrived = wire.CopiesArrived(generation=generation, bytes=nbytes, moving_s=moving_s)
            self._trainers.send_all(arrived)

    def _copy_rate(self) -> float:
        """Bytes per second that other nodes may take: a restore is not slowed down."""
        attaches = [trainer.attach for trainer in self._trainers.live.values()]
        if not attaches or self._protocol.state.phase != "open":
            return 0.0
        return attaches[0].redundancy.rate_bytes_per_s

    def _link_windows(self) -> LinkWindows | None:
        """Of the first rank here, where copies wait for them: a restore waits for nothing."""
        ranks = sorted(self._trainers.live) if self._protocol.state.phase == "open" else []
        return self._windows.of(self._memory.of(ranks[0]) if ranks else None)

    def _receiver(self, rank: int) -> int | None:
        """Whose trainer takes copies of `rank` through the devices, None where that is not asked
        for; callable from any thread."""
        attaches = {r: trainer.attach for r, trainer in list(self._trainers.live.items())}
        if self._protocol.state.phase != "open" or not attaches:
            return None
        ranks = sorted(attaches)
        path = attaches[ranks[0]].redundancy.path
        return ranks[rank % len(ranks)] if path == "device" else None

    def _grant(self, grant: p.GrantSlot) -> None:
        self._replicas.overwritten(grant.rank, grant.slot)
        self._shards.granted(grant)
        self._to_trainer(grant)

    def _to_trainer(self, instruction: Any) -> None:
        trainer = self._trainers.live.get(instruction.rank)
        if trainer is None:
            return
        if isinstance(instruction, p.RestoreShard):
            self._lending.lend(trainer, instruction, self._protocol.state.nodes)
        elif isinstance(instruction, p.Resume | p.StartFresh):  # all have read
            self._lending.close()
            self._journal.told_to_go_on()
        self._trainers.send(trainer, instruction)

    # ------------------------------------------------------------------ telling

    def _answer_status(self, connection: wire.Connection) -> None:
        status = wire.Status(
            pid=os.getpid(),
            run_id=self._run_id,
            term=self._term,
            trainers=tuple(sorted(self._trainers.live)),
            memory_committed=self._standing.memory_committed,
            durable=_text(self._standing.durable),
            draining=self._leave_when_drained,
            slots_bytes=(
                self._memory.total_bytes + self._replicas.total_bytes + self._lending.gathered_bytes
            ),
            protected=_text(self._standing.protected),
            peers=self._peers.connected,
            lost_peers=self._peers.lost,
            claimed_by=self._claimed_by,
            sealing=self._boundary.is_active,
            checkpoints=self._directory.path,
            wire_version=wire.WIRE_VERSION,
            is_orphan=self._is_orphan,
            inode=self._inode,
        )
        with contextlib.suppress(OSError):
            connection.send(status)

    def _retired(self, generation: Generation, step: int, freed: int) -> None:
        self.post(lambda: self._journal.retired(generation, step, freed))

    def _look_for_hangs(self, now_s: float) -> None:
        """Do the ranks of this node make progress?"""
        try:
            ranks = {
                rank: Watched(pid=trainer.pid, memory=self._memory.of(rank))
                for rank, trainer in self._trainers.live.items()
                if not trainer.leaving and not self._boundary.is_active
            }
            alone = all(len(ranks) == self._world_size(rank) for rank in ranks)
            self._hangs.look(
                now_s, ranks, alone=alone, kill=lambda: ends_stuck_ranks(self._run_directory)
            )
        except Exception as error:
            self._log(f"ranks are not watched: {type(error).__name__}: {error}")

    def _tell_stuck(self, text: str, where: str) -> None:
        """On the thread that gathered the evidence."""

        def tell() -> None:
            self._log(text)
            self._journal.degraded("progress", text)
            for trainer in self._trainers.live.values():
                if not status_of(trainer.pid).get("State", "").startswith(("T", "t")):
                    said = wire.StorageStands(rank=trainer.rank, text=text, launcher_tells=True)
                    self._trainers.send(trainer, said)
                    return

        self.post(tell)

    def _write_status(self, now_s: float, *, last: bool = False) -> None:
        node = self._protocol.state
        if node.nodes and self._node == node.coordinator and self._term:
            state = self._coordinator.state
            chain = state.chain_of_term()
            sound = [
                saved for saved, entry in state.catalogue.items()
                if not entry.corrupt and on_lineage(saved, chain)
            ]  # fmt: skip
            self._standing.leave_behind(lambda saved: bool(chain) and not on_lineage(saved, chain))
            self._standing.write(now_s, sound, began_from=state.began_from(), last=last)

    def _degrade(self, what: str, reason: str) -> None:
        self._log(f"degraded: {what}: {reason}")
        self._journal.degraded(what, reason)
        if what == "health":
            self._trainers.send_all(wire.StateSuspect(reason=reason))

    def _log(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        with contextlib.suppress(OSError, ValueError):  # its log is on a disk that may be full
            print(
                f"{stamp} [{threading.current_thread().name}] {text}", file=sys.stderr, flush=True
            )


def _held_open(path: str) -> tuple[int | None, tuple[int, int] | None]:
    """(descriptor, device and inode) of a directory; no other gets its inode while it is open."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None, None
    status = os.fstat(fd)
    return fd, (status.st_dev, status.st_ino)


def _text(generation: Generation | None) -> str:
    return "" if generation is None else str(generation)
