"""The keeper's loop: sockets and finished work in, protocol instructions carried out.

One thread owns all state.  Worker threads (shard pipelines, directory operations) only call `post`.
The decisions are NodeProtocol's and CoordinatorProtocol's; this module is their hands.
"""

import contextlib
import os
import re
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.keeper.hangs.stack_dumps import status_of
from autockpt.executors.keeper.hangs.watch import HangWatch, Watched
from autockpt.executors.keeper.replication.device_transfers import KeeperExchanges
from autockpt.executors.keeper.replication.network_windows import LinkWindows, NodeWindows
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.restoring.shard_gather import Gathering
from autockpt.executors.keeper.restoring.shared_buffers import SharedBuffers
from autockpt.executors.keeper.restoring.warm_pages import WarmPages
from autockpt.executors.keeper.saving.last_boundary import LastBoundary
from autockpt.executors.keeper.saving.shards import ShardSaves
from autockpt.executors.keeper.slots import CELL_STEP, MemoryTable
from autockpt.executors.keeper.status_file import METRICS_PORT, StatusEndpoint, StatusFile
from autockpt.executors.keeper.status_writer import Standing
from autockpt.executors.keeper.storage_worker import DiskWorker
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.control_plane import Peers
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.executors.storage.directory import CheckpointDirectory, pid_start
from autockpt.values.errors import AutockptError, NoRoomError, ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal, Retention
from autockpt.values.plan import Decision
from autockpt.values.record import from_json
from autockpt.values.status import RunStatus

_Record = TypeVar("_Record")
TICK_S = 0.5
SEALING_TICK_S = 0.02
"""While the last boundary is being sealed."""
LINGER_S = 600.0
"""A keeper without trainers and without a launcher leaves after this time."""
FIRST_TRAINER_S = 300.0
STATUS_S = 10.0
"""Between two writes of status.json, where nothing is new."""
OTHERS_PATIENCE_S = 10.0
"""A keeper that does not coordinate waits so long for the others when it has nothing left to do."""


@dataclass(slots=True)
class Trainer:
    """A connected trainer."""

    rank: int
    pid: int
    launcher_pid: int
    attach: p.TrainerAttached
    connection: wire.Connection
    leaving: str = ""
    note: str = ""
    """The note about its end, beside the reason."""
    step: int = 0
    """The step of its end."""
    launched: bool = False
    """`autockpt run` writes itself how it ended."""
    wanted: wire.SlotsWanted | None = None
    """Put off until it is known what the slots that it has are needed for."""
    process: int | None = None
    """Descriptor of its process, readable when that has ended; None where the system has none."""


@dataclass(slots=True)
class _State:
    trainers: dict[int, Trainer] = field(default_factory=dict)
    replaced: list[Trainer] = field(default_factory=list)
    """A later start has come, and they are still connected: they may write into their slots."""
    term: int = 0
    claimed_by: p.Incarnation | None = None
    memory_committed: str = ""
    durable: str = ""
    protected: str = ""
    durable_name: str | None = None
    protected_name: str | None = None
    unprotected: str = ""
    """Why copies on other nodes are missing; empty: they are not."""
    ended: Trainer | None = None
    """The one that was there last."""


class Keeper:
    """The keeper of one node."""

    def __init__(self, run_directory: str, node: int, checkpoints: str) -> None:
        self._run_directory = run_directory
        self._node = node
        self._directory = CheckpointDirectory(checkpoints)
        self._run_id = self._directory.open()
        self._directory.empty_trash()
        self._journal = EventRecorder(run_directory, node)
        self._memory = MemoryTable()
        self._hangs = HangWatch(run_directory, node, self._tell_stuck)
        self._s = _State()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector = selectors.DefaultSelector()
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
        self._exchanges = KeeperExchanges(self._tell_trainer)
        self._windows = NodeWindows(self._copy_rate, self._journal.sent)
        self._replicas = ReplicaSlots(
            run_id=self._run_id, memory=self._memory, post=self.post, tell=self._node_event,
            address=self._peers.transfer_address, rate=self._copy_rate,
            restoring=lambda: self._protocol.state.phase == "restoring", log=self._log,
            copied=self._journal.copied, receiver=self._receiver, exchanges=self._exchanges,
            windows=self._link_windows,
        )  # fmt: skip
        self._shards = ShardSaves(
            directory=self._directory, run_id=self._run_id, memory=self._memory,
            journal=self._journal, post=self.post, tell=self._node_event,
            world_size=self._world_size, degrade=self._degrade,
        )  # fmt: skip
        self._protocol = NodeProtocol(node=node)
        self._coordinator = CoordinatorProtocol(retention=retention)
        self._boundary = LastBoundary(
            state=lambda: self._protocol.state, memory=self._memory, shards=self._shards,
            tell=self._node_event, send=self._send_to, lost=self._lose,
            report=self._boundary_ended,
        )  # fmt: skip
        self._leave_when_drained = False
        self._lonely_since = time.monotonic()
        self._had_trainers = False
        self._is_removed = False
        """The directories of run and checkpoints are gone, as of the last look."""
        self._all_finished = False
        """The last trainer ended by itself: no trainer will come back."""
        self._local: deque[p.WireMessage] = deque()
        self._gathering: Gathering | None = None
        self._standing = Standing()
        self._troubles: dict[Generation, str] = {}
        """The storage's errors for generations on their way there."""
        self._status = StatusFile(run_directory)
        self._endpoint = StatusEndpoint(
            os.path.basename(run_directory), os.environ.get(METRICS_PORT, ""), self._log
        )
        self._next_status_s = 0.0
        self._reading = SharedBuffers(self._log)
        self._kept = WarmPages()
        self._log(f"keeper of node {node}, pid {os.getpid()}, run {self._run_id}")

    # ------------------------------------------------------------------ loop

    def post(self, work: Callable[[], None]) -> None:
        """Runs `work` in the keeper's thread; callable from any thread."""
        self._posted.append(work)
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def serve(
        self,
        listener: socket.socket,
        renew: Callable[[], socket.socket | None] = lambda: None,
    ) -> None:
        """Serves until the run is over.

        `renew` gives another socket to listen at, where the path of the first one is gone.
        """
        self._listen(listener)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        next_tick = next_heartbeat = time.monotonic()
        while not self._finished():
            wait_s = max(0.0, next_tick - time.monotonic())
            if self._boundary.is_active:
                wait_s = min(wait_s, SEALING_TICK_S)
            for key, _ in self._selector.select(timeout=wait_s):
                key.data(key.fileobj)
            while self._posted:
                self._posted.popleft()()
            self._boundary.look(self._s.trainers)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._both(p.TimePassed(now_s=now))
                self._shards.look_for_stalls()
                self._say_standing(self._standing.still(now))
                self._look_for_hangs(now)
                self._write_status(now)
                self._peers.stand("settled" if self._settled() else "busy")
                again = renew()
                if again is not None:
                    self._log("the directory of its socket was removed; it has another one")
                    self._listen(again)
            # Without trainers it is not held: a launch on other machines may take over.
            if now >= next_heartbeat and self._s.term and self._s.trainers:
                next_heartbeat = now + self._directory.heartbeat_s
                self._disk.beat(self._s.term)
            elif now >= next_heartbeat and self._disk.idle:
                next_heartbeat = now + self._directory.heartbeat_s
                self._disk.submit(self._look_for_run)
        self._next_status_s = 0.0
        self._write_status(time.monotonic())
        self._status.close()
        self._endpoint.close()
        self._end_gathering()
        self._reading.close()
        self._kept.close()
        self._replicas.close()
        self._peers.close()
        self._directory.spares.clear()
        self._journal.close()
        self._log("keeper leaves")

    def _finished(self) -> bool:
        if self._s.trainers:
            self._lonely_since = time.monotonic()
            return False
        if self._shards.busy:
            return False
        lonely = time.monotonic() - self._lonely_since
        if self._is_removed:
            return True
        leaving = self._leave_when_drained or self._all_finished
        if leaving and self._settled() and lonely > 0.05 and not self._needed(lonely):
            return True
        return lonely > (LINGER_S if self._had_trainers else FIRST_TRAINER_S)

    def _look_for_run(self) -> None:
        """On the disk's thread, which may hang: whether the run's directories were removed."""
        places = (self._directory.path, self._run_directory)  # never an object store
        self._is_removed = not any(map(os.path.isdir, places))

    def _settled(self) -> bool:
        """Nothing here waits any more, on this node or another one."""
        node = self._protocol.state
        if self._s.trainers or node.unsettled or not self._disk.idle:
            return False
        if len(set(node.nodes)) < 2 or node.phase == "fenced":  # no verdict will come
            return True
        return node.settled and self._coordinator.settled_for(node.incarnation)

    def _needed(self, lonely_s: float) -> bool:
        """The keepers of other nodes still need this one; most of all if it coordinates."""
        if not self._peers.needed:
            return False
        return self._node == self._protocol.state.coordinator or lonely_s < OTHERS_PATIENCE_S

    def _woken(self, sock: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            sock.recv(4096)

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self, listener: Any) -> None:
        sock, _ = listener.accept()
        _, uid = _peer(sock)
        if uid != os.getuid():
            self._log(f"refused a connection of uid {uid}")
            sock.close()
            return
        connection = wire.Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._readable(connection))

    def _readable(self, connection: wire.Connection) -> None:
        try:
            received = connection.receive()
        except (EOFError, OSError):
            self._closed(connection)
            return
        except ProtocolError as error:
            self._log(f"closed a connection: {error}")
            self._closed(connection)
            return
        for message, descriptors in received:
            self._from_peer(connection, message, descriptors)

    def _closed(self, connection: wire.Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.close()
        for trainer in [*self._s.trainers.values(), *self._s.replaced]:
            if trainer.connection is connection:
                self._trainer_gone(trainer)

    def _watch(self, trainer: Trainer) -> None:
        """Its end is seen at once: processes that it forked may hold its connection for long."""
        connection = trainer.connection
        try:
            trainer.process = os.pidfd_open(_peer(connection.sock)[0])
        except ProcessLookupError:
            self.post(lambda: self._ended(connection))
        except (OSError, AttributeError):
            # An old kernel, a Python built for one, a process we cannot see: the connection tells.
            pass
        else:
            self._selector.register(
                trainer.process, selectors.EVENT_READ, lambda _: self._ended(connection)
            )

    def _unwatch(self, trainer: Trainer) -> None:
        if trainer.process is not None:
            self._selector.unregister(trainer.process)
            os.close(trainer.process)
            trainer.process = None

    def _ended(self, connection: wire.Connection) -> None:
        """Its process is gone; read its last messages first."""
        while connection.sock.fileno() >= 0 and _is_ready(connection.sock.fileno()):
            self._readable(connection)
        self._closed(connection)

    # ------------------------------------------------------------------ trainers

    def _from_peer(self, connection: wire.Connection, message: Any, descriptors: list[int]) -> None:
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
        trainer = self._trainer_of(connection)
        if trainer is None or getattr(message, "rank", trainer.rank) != trainer.rank:
            self._log(f"ignored {wire.describe(message)}: not its sender")
            return
        self._from_trainer(trainer, message)

    def _trainer_of(self, connection: wire.Connection) -> Trainer | None:
        for trainer in self._s.trainers.values():
            if trainer.connection is connection:
                return trainer
        return None

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
            self._s.replaced.append(former)
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
        self._s.trainers[hello.rank] = trainer
        self._had_trainers = True
        self._watch(trainer)
        self._give_slots(trainer)
        self._attached(trainer, hello.control_host)

    def _is_next_start(self, hello: wire.Hello) -> bool:
        """Whether the protocol would let it in; a start by mistake ends nothing here."""
        spoken = hello.wire_version == wire.WIRE_VERSION
        return spoken and self._protocol.attach_refusal(hello.attach) is None

    def _former(self, hello: wire.Hello, connection: wire.Connection) -> Trainer | None:
        """The trainer that lives with this rank, if it is another one."""
        former = self._s.trainers.get(hello.rank)
        if former is None or former.connection is connection:
            return former
        same = (former.pid, _peer(former.connection.sock)) == (hello.pid, _peer(connection.sock))
        if same or (former.process is not None and _is_ready(former.process)):
            self._ended(former.connection)
            return None
        return former

    def _refusal(
        self, hello: wire.Hello, former: Trainer | None, connection: wire.Connection
    ) -> str | None:
        """Why a trainer is not let in; None: it is."""
        if hello.wire_version != wire.WIRE_VERSION:
            return f"keeper speaks version {wire.WIRE_VERSION}, trainer {hello.wire_version}"
        if self._trainer_of(connection) is not None:
            return "its connection is a trainer's already"
        if former is not None and not _may_replace(hello.attach, former.attach):
            return (
                f"rank {hello.rank} of this run is live: {_who(former)}; stop that run first, or "
                "use another --run-dir"
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
                self._reading.prepare(here)

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
            p.SlotsAdopted(rank=rank, slots=len(memory.slots), held=memory.held(self._run_id))
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
        )  # fmt: skip
        descriptors = tuple(arena.fd for arena in memory.slots if arena.fd is not None)
        self._send(trainer, given, descriptors)

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
        elif isinstance(message, wire.TrainerResumed):
            self._journal.resumed(message)
        elif isinstance(message, wire.ChunksWanted):
            self._lend_chunks(trainer, message)
        elif isinstance(message, wire.TrainerFailing):
            self._journal.trainer_failing(message.rank)
            self._log(f"the script is failing on rank {message.rank}: {message.error}")
        elif isinstance(message, wire.TrainerLeaving):
            trainer.leaving, trainer.note = message.reason, message.note
            trainer.step = message.step
        else:
            self._node_event(message)

    def _trainer_gone(self, trainer: Trainer) -> None:
        self._unwatch(trainer)
        if trainer in self._s.replaced or not self._boundary.put_off(trainer, self._s.trainers):
            self._lose(trainer)

    def _lose(self, trainer: Trainer) -> None:
        if trainer in self._s.replaced:
            self._s.replaced.remove(trainer)
        else:
            self._bury(trainer)
        self._node_event(p.TrainerLost(rank=trainer.rank, incarnation=trainer.attach.incarnation))

    def _look_for_deaths(self) -> None:
        """A launcher that asks has seen a death; the answer must know of it."""
        for trainer in list(self._s.trainers.values()):
            if trainer.process is not None and _is_ready(trainer.process):
                self._ended(trainer.connection)

    def _take_records(self, connection: wire.Connection, descriptors: list[int]) -> None:
        trainer = self._trainer_of(connection)
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
        del self._s.trainers[trainer.rank]
        trainer.step = trainer.step or self._memory.of(trainer.rank).cell(CELL_STEP)
        self._s.ended, self._next_status_s = trainer, 0.0
        if trainer.leaving != "finished":
            self._kept.keep(trainer.rank, self._memory.of(trainer.rank).image_capacity)
        self._all_finished = trainer.leaving == "finished"
        if not trainer.leaving:
            self._journal.trainer_lost(
                self._memory.of(trainer.rank), trainer.pid, "its connection closed"
            )
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
            self._send(trainer, refused)
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
        trainer = self._s.trainers.get(rank)
        return trainer.attach.world_size if trainer else len(self._protocol.state.nodes)

    def _both(self, event: Any) -> None:
        self._node_event(event)
        self._coordinator_event(event)

    def _node_event(self, event: p.NodeEvent) -> None:
        if isinstance(event, p.PersistFailed):
            self._troubles[event.generation] = event.reason
        elif isinstance(event, p.PersistStalled):
            self._disk_failed(f"{event.generation} of rank {event.rank}: the storage hangs")
        self._carry_out(self._protocol.handle(event))

    def _coordinator_event(self, event: Any) -> None:
        self._carry_out(self._coordinator.handle(event))

    def _disk_answered(self, event: Any) -> None:
        if isinstance(event, Exception):
            self._degrade("retention", str(event))
            return
        if isinstance(event, p.TermClaimed):
            self._s.term, self._s.claimed_by = event.term, event.incarnation
        if isinstance(event, p.DirectoryRenewed):
            self._shards.forget_bases()
            self._disk_failed("the checkpoint directory was emptied; it was made again")
        elif isinstance(event, p.DirectoryGone):
            self._disk_failed(event.reason)
        elif isinstance(event, p.CommitFailed) and not event.fenced:
            self._troubles[event.generation] = event.reason
        if isinstance(event, p.GenerationVerified) and not (event.ok and event.health == "good"):
            self._shards.damaged(event.generation)
        self._coordinator_event(event)

    def _carry_out(self, instructions: Sequence[p.Instruction]) -> None:
        """In order; messages to ourselves are delivered after the batch."""
        for instruction in instructions:
            self._execute(instruction)
        while self._local:
            self._deliver(self._node, self._local.popleft())
        if self._protocol.state.phase == "open":
            for trainer in [t for t in self._s.trainers.values() if t.wanted is not None]:
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
        if _may_say(node, message, self._coordinator.state.nodes, self._protocol.state.nodes):
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
                | p.MarkEverCommitted()
            ):
                self._disk.execute(instruction)
            case p.WithdrawClaim(incarnation=incarnation, term=term):
                if self._disk.withdraw_claims(term):
                    withdrawn = p.ClaimWithdrawn(incarnation=incarnation)
                    self.post(lambda: self._coordinator_event(withdrawn))
                    self._disk_failed(f"{self._directory.path}: the storage does not answer")
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
                self._end_gathering()
                self._gathering = Gathering(
                    instruction, run_id=self._run_id, node=self._node, memory=self._memory,
                    replicas=self._replicas,
                )  # fmt: skip
            case p.AnnounceProtected(generation=generation, reason=reason):
                self._protected(generation, reason)
            case p.AnnounceMemoryCommitted(generation=generation):
                if not any(memory.streams for memory in self._memory.ranks.values()):
                    self._s.memory_committed = str(generation)
                    self._journal.memory_committed(generation)
                self._to_all(instruction)
            case p.AnnounceDispute(generation=generation, dispute=dispute):
                self._log(f"{generation}: replicas disagree: {dispute.who}")
                if self._node == self._protocol.state.coordinator:
                    self._journal.replicas_disagreed(generation, dispute)
                self._to_all(instruction)
            case p.AnnounceDurable(generation=generation):
                self._s.durable, self._s.durable_name = str(generation), generation.name
                self._troubles = {g: why for g, why in self._troubles.items() if g > generation}
                self._say_standing(self._standing.committed(str(generation)))
                self._shards.durable(generation)
                self._journal.durable(generation)
                self._to_all(instruction)
            case p.AnnounceDropped(generation=generation, reason=reason):
                self._journal.dropped(generation, reason)
                streamed = self._shards.troubles.pop(generation, "")
                if trouble := self._troubles.pop(generation, streamed):
                    self._disk_failed(trouble)
                self._to_all(instruction)
            case p.FenceTrainer():
                self._fence(instruction)
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

    def _protected(self, generation: Generation | None, reason: str) -> None:
        """Survives the loss of a node; None: copies are missing, until the next round of them."""
        before = self._s.unprotected
        self._s.protected = "" if generation is None else str(generation)
        self._s.protected_name = None if generation is None else generation.name
        self._s.unprotected = reason if generation is None else ""
        if generation is None:
            if _without_figures(reason) != _without_figures(before):
                self._log(f"copies on other nodes are missing: {reason}")
                self._journal.protection_lost(reason)
        else:
            self._journal.protected(generation)

    def _copy_rate(self) -> float:
        """Bytes per second that other nodes may take: a restore is not slowed down."""
        attaches = [trainer.attach for trainer in self._s.trainers.values()]
        if not attaches or self._protocol.state.phase != "open":
            return 0.0
        return attaches[0].redundancy.rate_bytes_per_s

    def _link_windows(self) -> LinkWindows | None:
        """Of the first rank here, where copies wait for them: a restore waits for nothing."""
        ranks = sorted(self._s.trainers) if self._protocol.state.phase == "open" else []
        return self._windows.of(self._memory.of(ranks[0]) if ranks else None)

    def _receiver(self, rank: int) -> int | None:
        """Whose trainer takes copies of `rank` through the devices, None where that is not asked
        for; callable from any thread."""
        attaches = {r: trainer.attach for r, trainer in list(self._s.trainers.items())}
        if self._protocol.state.phase != "open" or not attaches:
            return None
        ranks = sorted(attaches)
        path = attaches[ranks[0]].redundancy.path
        return ranks[rank % len(ranks)] if path == "device" else None

    def _tell_trainer(self, rank: int, message: Any, descriptors: tuple[int, ...]) -> None:
        """Sends to a trainer, from any thread; takes the descriptors over."""

        def tell() -> None:
            trainer = self._s.trainers.get(rank)
            if trainer is not None:
                self._send(trainer, message, descriptors)
            for fd in descriptors:
                os.close(fd)

        self.post(tell)

    def _fence(self, fence: p.FenceTrainer) -> None:
        """Send to the fenced trainers only, not to their successors."""
        for trainer in [*self._s.trainers.values(), *self._s.replaced]:
            if (trainer.rank, trainer.attach.incarnation) == (fence.rank, fence.incarnation):
                self._send(trainer, fence)

    def _grant(self, grant: p.GrantSlot) -> None:
        self._replicas.overwritten(grant.rank, grant.slot)
        self._shards.granted(grant)
        self._to_trainer(grant)

    def _to_trainer(self, instruction: Any) -> None:
        trainer = self._s.trainers.get(instruction.rank)
        if trainer is None:
            return
        if isinstance(instruction, p.RestoreShard):
            if instruction.source.kind == "memory":
                self._lend_neighbours(trainer, instruction)
            elif instruction.source.kind == "gather" and self._gathering is not None:
                self._send(trainer, self._gathering.began(trainer.rank))
            elif len(instruction.readers) > 1:
                self._lend_reading_memory(trainer, instruction)
        elif isinstance(instruction, p.Resume | p.StartFresh):  # all have read
            self._end_gathering()
            self._reading.close()
        self._send(trainer, instruction)

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None

    def _lend_chunks(self, trainer: Trainer, wanted: wire.ChunksWanted) -> None:
        """Lend the chunks that a rank gathers, from here or brought here."""

        def send(lent: wire.ChunksLent, arena: Arena | None) -> None:
            fd = None if arena is None else arena.fd
            self._send(trainer, lent, () if fd is None else (fd,))

        gathering = self._gathering
        if gathering is None or gathering.attempt != (wanted.term, wanted.attempt):
            refusal = f"nothing is gathered in attempt {wanted.attempt}"
            send(wire.ChunksLent(rank=trainer.rank, number=wanted.number, refusal=refusal), None)
        else:
            gathering.wanted(wanted, lambda *lent: self.post(lambda: send(*lent)))

    def _lend_reading_memory(self, trainer: Trainer, order: p.RestoreShard) -> None:
        """Lend memory in which ranks read once from storage the bytes that several of them need."""
        fd = self._reading.lend(order)
        if fd is not None:
            lent = wire.ReadingMemory(rank=trainer.rank, term=order.term, attempt=order.attempt)
            self._send(trainer, lent, (fd,))

    def _lend_neighbours(self, trainer: Trainer, order: p.RestoreShard) -> None:
        """State that ranks of a node share is stored by one of them: each needs the slots of all.

        Its own shard is among them when it was fetched from another node.
        """
        found: dict[int, tuple[Arena, int]] = {}
        here = {rank for rank, node in enumerate(self._protocol.state.nodes) if node == self._node}
        for rank in sorted(here | set(self._memory.ranks)):
            if rank == trainer.rank and not order.source.copied:
                continue
            memory = self._memory.of(rank)
            arena = memory.holding(order.generation, self._run_id)
            replica = self._replicas.holding(rank, order.generation)
            if arena is not None and arena.fd is not None and rank != trainer.rank:
                found[rank] = arena, memory.image_capacity
            elif replica is not None:
                found[rank] = replica.arena, replica.image_bytes
        lent = wire.NeighbourSlots(
            rank=trainer.rank, generation=order.generation, ranks=tuple(found),
            image_bytes=tuple(capacity for _, capacity in found.values()),
        )  # fmt: skip
        self._send(trainer, lent, tuple(a.fd for a, _ in found.values() if a.fd is not None))

    def _send_to(self, rank: int, message: Any, descriptors: tuple[int, ...]) -> None:
        if rank in self._s.trainers:
            self._send(self._s.trainers[rank], message, descriptors)

    def _to_all(self, instruction: Any) -> None:
        for trainer in list(self._s.trainers.values()):
            self._send(trainer, instruction)

    def _send(self, trainer: Trainer, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        try:
            trainer.connection.send(message, descriptors)
        except OSError:
            # Its end is seen as a closed connection by the loop; nothing to do here.
            self._log(f"rank {trainer.rank} is not reachable: {type(message).__name__}")

    # ------------------------------------------------------------------ telling

    def _answer_status(self, connection: wire.Connection) -> None:
        gathered = 0 if self._gathering is None else self._gathering.total_bytes
        status = wire.Status(
            pid=os.getpid(),
            term=self._s.term,
            trainers=tuple(sorted(self._s.trainers)),
            memory_committed=self._s.memory_committed,
            durable=self._s.durable,
            draining=self._leave_when_drained,
            slots_bytes=self._memory.total_bytes + self._replicas.total_bytes + gathered,
            protected=self._s.protected,
            peers=self._peers.connected,
            claimed_by=self._s.claimed_by,
            sealing=self._boundary.is_active,
        )
        with contextlib.suppress(OSError):
            connection.send(status)

    def _retired(self, generation: Generation, step: int, freed: int) -> None:
        self.post(lambda: self._journal.retired(generation, step, freed))

    def _disk_failed(self, reason: str) -> None:
        wall = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._say_standing(self._standing.failed(time.monotonic(), wall, reason))

    def _say_standing(self, text: str) -> None:
        """To a person, through one trainer of this node; and to status.json."""
        if not text:
            return
        self._log(text)
        if self._standing.degraded:
            self._journal.degraded("checkpoint", text)
        for rank in sorted(self._s.trainers)[:1]:
            self._send(self._s.trainers[rank], wire.StorageStands(rank=rank, text=text))
        self._next_status_s = 0.0

    def _look_for_hangs(self, now_s: float) -> None:
        """Do the ranks of this node make progress?"""
        try:
            ranks = {
                rank: Watched(pid=trainer.pid, memory=self._memory.of(rank))
                for rank, trainer in self._s.trainers.items()
                if not trainer.leaving and not self._boundary.is_active
            }
            alone = all(len(ranks) == self._world_size(rank) for rank in ranks)
            self._hangs.look(now_s, ranks, alone=alone, kill=self._ends_stuck)
        except Exception as error:
            self._log(f"ranks are not watched: {type(error).__name__}: {error}")

    def _ends_stuck(self) -> bool:
        """Whether the policy in force wants a stuck rank ended."""
        goal = _read(self._run_directory, "goal.json", Goal) or Goal()
        return goal.restart.stuck == "restart"

    def _tell_stuck(self, text: str, where: str) -> None:
        """On the thread that gathered the evidence."""

        def tell() -> None:
            self._log(text)
            self._journal.degraded("progress", text)
            for trainer in self._s.trainers.values():
                if not status_of(trainer.pid).get("State", "").startswith(("T", "t")):
                    said = wire.StorageStands(rank=trainer.rank, text=text, launcher_tells=True)
                    self._send(trainer, said)
                    return

        self.post(tell)

    def _write_status(self, now_s: float) -> None:
        """How it stands, and how it ended where no launcher of ours says so."""
        node = self._protocol.state
        coordinates = bool(node.nodes) and self._node == node.coordinator
        if not (coordinates and self._s.term) or now_s < self._next_status_s:
            return
        self._next_status_s = now_s + STATUS_S
        ended = self._s.ended
        state: Literal["running", "finished", "failed", "interrupted"] = "running"
        if not self._s.trainers:
            if ended is None or ended.launched:
                return
            state = _ENDS.get(ended.leaving, "failed")
        steps = [self._memory.of(rank).cell(CELL_STEP) for rank in self._s.trainers]
        names = [generation.name for generation in sorted(self._coordinator.state.catalogue)]
        held = bool(self._s.durable or (self._s.memory_committed and state != "finished"))
        status = RunStatus(
                state=state, exit_code=None, restarts=0,
                last_step=max(steps, default=ended.step if ended else None),
                last_durable=self._s.durable_name or (names[-1] if names else None),
                last_protected=self._s.protected_name,
                unprotected_because=self._s.unprotected, degraded=self._standing.degraded,
                protected=held, report=None, reason="" if not ended or steps else ended.note,
        )  # fmt: skip
        self._status.write(status)
        self._endpoint.show(status)

    def _degrade(self, what: str, reason: str) -> None:
        self._log(f"degraded: {what}: {reason}")
        self._journal.degraded(what, reason)
        if what == "health":
            self._to_all(wire.StateSuspect(reason=reason))

    def _log(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        with contextlib.suppress(OSError, ValueError):  # its log is on a disk that may be full
            print(
                f"{stamp} [{threading.current_thread().name}] {text}", file=sys.stderr, flush=True
            )


_ENDS: dict[str, Literal["finished", "interrupted"]] = {
    "finished": "finished", "signal": "interrupted",
}  # fmt: skip
"""By the last word of a trainer; without one it died."""


def _may_replace(new: p.TrainerAttached, old: p.TrainerAttached) -> bool:
    """Of two live processes with one rank the later round of the launch is right.

    Of two running ones that come to a new keeper, the newer term is right.
    """
    if new.term is not None and old.term is not None:
        return new.term > old.term
    same_launch = new.incarnation.launch_id == old.incarnation.launch_id
    return same_launch and new.incarnation != old.incarnation


def _who(trainer: Trainer) -> str:
    """For a person who has to end it."""
    told = f"pid {trainer.pid}, launch {trainer.attach.incarnation}"
    # In another pid namespace than ours neither of the two is seen.
    orphan = pid_start(trainer.pid) and not pid_start(trainer.launcher_pid)
    return f"{told}, whose launcher is dead" if orphan else told


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end, as of its `connect`."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _is_ready(fd: int) -> bool:
    """Whether there is something to read."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _without_figures(reason: str) -> str:
    """Remove figures, so that two rounds that fail for the same reason give one message."""
    return re.sub(r"[\d.]+", "#", reason)


def _may_say(
    node: int, message: p.WireMessage, ranks: tuple[int, ...], nodes: tuple[int, ...]
) -> bool:
    """Whether a message may come from `node`; `ranks`: node of every rank, at the coordinator."""
    if not isinstance(message, p.TO_COORDINATOR):
        return bool(nodes) and node == min(nodes)
    if isinstance(message, p.RankAttached):
        rank, ranks = message.attach.rank, message.attach.nodes
    elif isinstance(message, p.CopySealed | p.CopyFailed):
        return True  # about shards of others; the coordinator knows whose it asked for
    elif isinstance(message, p.RankSealed):
        rank = message.shard.rank
    elif isinstance(message, p.Relayed) and isinstance(message.event, p.PlanPrepared | p.PlanLate):
        rank = message.event.rank
    elif hasattr(message, "rank"):
        rank = message.rank
    else:
        return True
    return not ranks or (0 <= rank < len(ranks) and ranks[rank] == node)


def retention_in_force(run_directory: str) -> Retention:
    """Return the goal's retention; fewer if the plan in force says that its quota holds no more."""
    goal = _read(run_directory, "goal.json", Goal) or Goal()
    if goal.limits.disk_bytes is None:
        return goal.retention
    decision = None
    with contextlib.suppress(AutockptError):  # of another version: its plan is not in force
        decision = _read(run_directory, "decision.json", Decision)
    return goal.retention if decision is None else decision.plan.retention.at_most(goal.retention)


def _read(run_directory: str, name: str, kind: type[_Record]) -> _Record | None:
    path = os.path.join(run_directory, name)
    try:
        with open(path, "rb") as file:
            return from_json(kind, file.read(), where=path)
    except OSError:
        return None
