"""The trainer's end of the keeper: one connection, one listening thread, reconnects by itself.

The training thread only reads plain attributes and sends small messages; it never waits here unless
it asks to.  When the keeper dies the link starts a new one and hands the slots over.  Until then no
grants come, and saves are skipped.
"""

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.listener import KeeperListener
from autockpt.executors.keeper.client.saves import SaveHandle, Saves
from autockpt.executors.keeper.launch import connect, ensure_keeper, keeper_status
from autockpt.executors.keeper.slots import BOARD_BYTES
from autockpt.executors.linux.memory import Arena, swing_bytes
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places import account
from autockpt.values.errors import AutockptError, CorruptCheckpointError, ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.redundancy import Redundancy

CONNECT_ATTEMPTS = 5
RECONNECT_PAUSE_S = 0.2
RECONNECT_ATTEMPTS = 50
REFUSED_S = 1.0
"""A connection that lived shorter was refused (another version, a broken keeper)."""
REFUSALS = 5
GATHER_S = Deadlines().restore_s
"""After so long a keeper has brought the chunks of a shard, or says why not.  A large shard takes
long; when the attempt to restore ends, the keeper refuses missing chunks."""


@dataclass(slots=True)
class RestoreBuffers:
    """Memory of the keeper for one order to restore."""

    neighbours: dict[int, tuple[Arena, int]]
    """By rank of this node its slot with the generation to restore, and the image's capacity."""
    reading: Arena | None = None
    """Memory in which ranks of this node read from storage together."""
    gathering: wire.GatheringBegan | None = None
    """The shards to gather."""

    def close(self) -> None:
        """The restore is over."""
        for arena, _ in self.neighbours.values():
            arena.close()
        if self.reading is not None:
            self.reading.close()


class KeeperClient:
    """Connection of one rank to the keeper of its node."""

    def __init__(
        self,
        run_directory: str,
        node: int,
        *,
        checkpoints: str,
        attach: p.TrainerAttached,
        launcher_pid: int,
        control_host: str = "",
        launched: bool = False,
        awaits: bool = False,
    ) -> None:
        self._run_directory = run_directory
        self._node = node
        self._checkpoints = checkpoints
        self._attach = attach
        self._launcher_pid = launcher_pid
        self._control_host = control_host
        self._launched = launched
        """By `autockpt run`, which says itself how the run ended."""
        self._awaits = awaits
        """By its launcher, which starts ranks again."""
        self._connection: wire.Connection | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._connected_s = 0.0
        self._refusals = 0
        self.rank = attach.rank
        self.world_size = attach.world_size
        self.board = Arena.create_shared(BOARD_BYTES, name=f"autockpt-board-r{attach.rank}")
        self.slots: list[Arena] = []
        self.chunk_bytes = 0
        self.image_bytes = 0
        """Image capacity of the slots."""
        self.window_bytes = 0
        """The one slot is a window that images stream through; 0: slots hold them whole."""
        self._unmapped_bytes = 0
        """Of the slots that are gone and not replaced yet."""
        self.blocking = False
        """The training waits until an image is through."""
        self.note = ""
        """Why there is less than was asked for; empty: there is not."""
        self._run_id = ""
        """The run that the slots are of; the next keeper may find its directory emptied."""
        self.given_s = 0.0
        """When slots came last, CLOCK_MONOTONIC."""
        self._lent = RestoreBuffers({})
        """Given since the last order to restore: for the next one."""
        self._chunks_lent: dict[int, tuple[wire.ChunksLent, Arena | None]] = {}
        """Answers to requests that no caller has taken."""
        self._requests = itertools.count()
        self._unanswered: set[int] = set()
        self._lent_for: dict[tuple[int, int], RestoreBuffers] = {}
        """By term and attempt of an order that is not yet begun."""
        self._wanted: wire.SlotsWanted | None = None
        self._restored = attach.term is not None
        """Slots are for saves now: nothing waits for them, and no save shall fault."""
        self.slots_refused = ""
        self.no_room_s: float | None = None
        """CLOCK_MONOTONIC when the newest request for slots was refused because the host had no
        room.  None: it was not, or the policy does not allow slots."""
        self.slots_changed = 0
        """Counts replacements of the slots; 0: none ever came."""
        self.records: list[Arena] = []
        """Records of boundaries, for the keeper to read if this process dies."""
        self.saves = Saves()
        self.news = threading.Condition()
        """Notified after every message."""
        self.restore_orders: queue.Queue[Any] = queue.Queue()
        """RestoreShard, Resume, StartFresh, RestoreRefused, AttachRefused for the main thread."""
        self.listener = KeeperListener()
        """Set before `open`."""
        self.fenced = ""
        self._thread = threading.Thread(target=self._listen, name="autockpt-link", daemon=True)

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Starts the keeper if needed and says hello.  Raises AutockptError."""
        status = keeper_status(self._run_directory, self._node)
        if status is None or status.claimed_by is None or not status.slots_bytes:
            # Here and not in the keeper: the script gets the reason, and at once.  Where the memory
            # of a run is, nothing is asked of a storage that may hang.
            CheckpointDirectory(self._checkpoints).require_writable()
        self._connect()
        self._thread.start()

    def _connect(self) -> None:
        for attempt in range(CONNECT_ATTEMPTS):
            ensure_keeper(
                self._run_directory, self._node, checkpoints=self._checkpoints, run_id=self._run_id
            )
            connection: wire.Connection | None = None
            try:
                connection = connect(self._run_directory, self._node)
                self._say_hello(connection)
                break
            except OSError as error:
                if connection is not None:
                    connection.close()
                # It answered a moment ago: the keeper of a run that has just ended was leaving.
                if attempt + 1 == CONNECT_ATTEMPTS:
                    raise AutockptError(f"keeper of node {self._node}: {error}") from error
        self._connection = connection
        self._connected_s = time.monotonic()
        if self._wanted is not None and not self.slots:
            self.send(self._wanted)  # a keeper that died before it could answer

    def _say_hello(self, connection: wire.Connection) -> None:
        with self._lock:
            connection.send(*self._hello())
            if self.records:
                connection.send(*self._records_given())

    def give_records(self, records: list[Arena]) -> bool:
        """Shows the keeper where this rank records its boundaries; replaces the ones before."""
        with self._lock:
            former, self.records = self.records, records
            for record in former:
                record.close()
            connection = self._connection
            if connection is None:
                return False
            try:
                connection.send(*self._records_given())
            except OSError:
                return False
        return True

    def _records_given(self) -> tuple[wire.RecordsGiven, tuple[int, ...]]:
        held = tuple(record.fd for record in self.records if record.fd is not None)
        return wire.RecordsGiven(rank=self.rank), held

    def _hello(self) -> tuple[wire.Hello, tuple[int, ...]]:
        """With the board and the slots."""
        # A window holds no image, and whoever takes it over would fill it with pages.
        arenas = [] if self.window_bytes else self.slots
        held = [arena.fd for arena in arenas if arena.fd is not None]
        hello = wire.Hello(
            wire_version=wire.WIRE_VERSION,
            pid=os.getpid(),
            rank=self.rank,
            attach=replace(self._attach, plan_held=self.listener.get_plan_held()),
            launcher_pid=self._launcher_pid,
            slots_held=len(held),
            slot_chunk_bytes=self.chunk_bytes,
            slot_image_bytes=self.image_bytes,
            control_host=self._control_host,
            launched=self._launched,
            awaits=self._awaits,
            account=account.handed_over() if is_store_url(self._checkpoints) else None,
        )
        assert self.board.fd is not None
        return hello, (self.board.fd, *held)

    def want_rate(self, redundancy: Redundancy) -> None:
        """Copies leave at the rate of this plan from now on, also under a later keeper."""
        rate = redundancy.rate_bytes_per_s
        wanted = replace(self._attach.redundancy, rate_bytes_per_s=rate)
        # The rate of a scheme that the next start takes is not for the one in force.
        if wanted == redundancy and wanted != self._attach.redundancy:
            self._attach = replace(self._attach, redundancy=wanted)
            self.send(wire.RateWanted(rank=self.rank, bytes_per_s=rate))

    def agreed_on(self, redundancy: Redundancy) -> None:
        """All ranks take this scheme of copies with a coming plan; a new keeper should know.

        A plan without copies, and another path, wait for the next start.
        """
        before = self._attach.redundancy
        if redundancy.scheme != "none":
            now = replace(
                redundancy, path=before.path, schedule=before.schedule,
                rate_bytes_per_s=before.rate_bytes_per_s,
            )  # fmt: skip
            self._attach = replace(self._attach, redundancy=now)

    def running_as(
        self, term: int, plan_version: int, plan_apply_step: int | None, *, attempt: int
    ) -> None:
        """Set the fields that a re-attach after a keeper's death reports."""
        self._attach = replace(
            self._attach, term=term, attempt=attempt, plan_version=plan_version,
            plan_apply_step=plan_apply_step,
        )  # fmt: skip

    def close(self) -> None:
        """Closes the connection; slots stay with the keeper."""
        self._closing = True
        connection, self._connection = self._connection, None
        if connection is not None:
            import socket

            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        if connection is not None:
            connection.close()

    def disown(self) -> None:
        """In a forked child: closes what it inherited; connection and slots are the parent's."""
        self._closing = True
        self._lock, self.news = threading.Lock(), threading.Condition()  # held by whom is gone
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        for arena in (*self.slots, *self.records):
            arena.let_go()
        self.records = []
        # What a device has registered only its own process may unmap.
        self.slots = [arena for arena in self.slots if arena.pinned]

    # ------------------------------------------------------------------ sending

    def send(self, message: Any) -> bool:
        """Sends from any thread; False when the keeper is not there."""
        connection = self._connection
        if connection is None:
            return False
        try:
            with self._lock:
                connection.send(message)
        except OSError:
            return False
        return True

    def want_slots(
        self,
        *,
        image_bytes: int,
        chunk_bytes: int,
        slots: int,
        limit_bytes: int | None,
        may_stream: bool = False,
    ) -> None:
        """Asks for slots; they come later as `slots`, or `slots_refused` says why not.

        `may_stream`: where no image fits, a window comes instead (`window_bytes`).  The old slots
        go first, or the host would need room for both; no copy may still write into them.
        """
        self._replace_slots([])
        swing = max(0, swing_bytes() - self._unmapped_bytes)  # the old slots were no training's
        self.chunk_bytes = chunk_bytes
        self.slots_refused, self.no_room_s = "", None
        self._wanted = wire.SlotsWanted(
            rank=self.rank, image_bytes=image_bytes, chunk_bytes=chunk_bytes, slots=slots,
            limit_bytes=limit_bytes, may_stream=may_stream, swing_bytes=swing,
        )  # fmt: skip
        self.send(self._wanted)

    def want_another_slot(self, *, slots: int, limit_bytes: int | None) -> None:
        """Asks for one beside those it has, while they are fewer than `slots`; those stay."""
        self.send(
            wire.SlotsWanted(
                rank=self.rank, image_bytes=self.image_bytes, chunk_bytes=self.chunk_bytes,
                slots=slots, limit_bytes=limit_bytes, swing_bytes=swing_bytes(), more=True,
            )
        )  # fmt: skip

    def want_chunks(
        self,
        order: p.RestoreShard,
        shard: int,
        chunks: tuple[int, ...],
        *,
        elsewhere: bool = False,
        stored: bool = False,
        alone: bool = False,
    ) -> int:
        """Asks for chunks of a shard that is gathered; the number of the request."""
        number = next(self._requests)
        wanted = wire.ChunksWanted(
            rank=self.rank, term=order.term, attempt=order.attempt, shard=shard, chunks=chunks,
            number=number, elsewhere=elsewhere, stored=stored, alone=alone,
        )  # fmt: skip
        self._unanswered.add(number)
        self.send(wanted)
        return number

    def take_chunks(self, number: int) -> tuple[wire.ChunksLent, Arena]:
        """The answer to a request, and the memory; the caller closes it.

        Raises CorruptCheckpointError when there is none, and LostShardError where asking again is
        in vain.
        """
        if not self.wait_until(lambda: number in self._chunks_lent, GATHER_S):
            raise CorruptCheckpointError(f"memory: no answer of the keeper in {GATHER_S:.0f} s")
        lent, arena = self._chunks_lent.pop(number)
        if arena is None and lent.lost is not None:
            raise wire.LostShardError(f"memory: {lent.refusal}", lent.lost)
        if arena is None:
            raise CorruptCheckpointError(f"memory: {lent.refusal}")
        return lent, arena

    def ask(self, generation: Generation, *, disk: bool) -> SaveHandle:
        """Asks for a slot; the handle shows the answer, which may never come."""
        save = self.saves.ask(generation, disk=disk)
        if not self._request(save):
            self.saves.forget_request(save)
        return save

    def ask_for_disk(self, save: SaveHandle) -> None:
        """A save that was asked for memory alone is to be durable as well."""
        save.disk = True
        self._request(save)

    def _request(self, save: SaveHandle) -> bool:
        request = p.SaveRequested(
            rank=self.rank, generation=save.generation, step=save.step, disk=save.disk
        )
        return self.send(request)

    def withdraw(self, save: SaveHandle, reason: str) -> None:
        """Give a save up, and its slot back: no copy writes into it any more."""
        self.saves.change(save, "withdrawn")
        self.send(wire.SnapshotTorn(rank=self.rank, generation=save.generation, reason=reason))

    def report_copied(self, save: SaveHandle, proofs: tuple[p.ReplicaProof, ...]) -> None:
        """Every byte is in the slot and proven.  Memory may keep what is discarded for disk."""
        self.saves.change(save, "copied")
        self.send(wire.SnapshotCopied(rank=self.rank, generation=save.generation, replicas=proofs))

    def wait_over(self, generation: Generation, timeout_s: float) -> bool:
        """Waits until it is durable or discarded; False when time ran out."""
        return self.wait_until(lambda: self.saves.is_over(generation), timeout_s)

    @property
    def has_other_nodes(self) -> bool:
        """Ranks of the job run on other nodes, too."""
        return len(set(self._attach.nodes)) > 1

    @property
    def connected(self) -> bool:
        """The keeper is there."""
        return self._connection is not None

    def wait_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for news until `done()`; its last value."""
        deadline = time.monotonic() + timeout_s
        with self.news:
            while not done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.news.wait(min(left, 0.5))
        return True

    # ------------------------------------------------------------------ listening

    def _listen(self) -> None:
        while not self._closing:
            connection = self._connection
            if connection is None:
                return
            try:
                for message, descriptors in connection.receive():
                    self._received(message, descriptors)
            except (EOFError, OSError, ProtocolError) as error:
                if self._is_closing():
                    break
                self._lost(connection, str(error) or "connection closed")
        connection = self._connection
        if connection is not None:
            connection.close()

    def _is_closing(self) -> bool:
        """Set by the training thread while ours waited."""
        return self._closing

    def _lost(self, connection: wire.Connection, reason: str) -> None:
        """The keeper died: start another one and hand it our slots."""
        self._connection = None
        connection.close()
        with self.news:
            while self._unanswered:
                number = self._unanswered.pop()
                refused = wire.ChunksLent(rank=self.rank, number=number, refusal="its keeper died")
                self._chunks_lent[number] = refused, None
            self.saves.report_keeper_lost("its keeper died")
            self.news.notify_all()
        if self.fenced:
            return
        if self.window_bytes:  # the next keeper makes one of its own
            self._replace_slots([])
        lived_s = time.monotonic() - self._connected_s
        self._refusals = self._refusals + 1 if lived_s < REFUSED_S else 0
        if self._refusals < REFUSALS and self._reconnect(reason):
            return
        self.listener.on_keeper_lost(f"no keeper takes us ({reason}); training goes on unprotected")
        self._refuse_restore(
            f"the keeper of node {self._node} closes every connection ({reason}); see "
            f"logs/keeper-{self._node:03d}.log in {self._run_directory}"
        )

    def give_up_restore(self) -> None:
        """Another rank has died, perhaps before its keeper knew it; callable from any thread."""
        self._refuse_restore("another rank has died")

    def _refuse_restore(self, reason: str) -> None:
        self.restore_orders.put(
            p.RestoreRefused(
                rank=self.rank, incarnation=self._attach.incarnation, retryable=True, reason=reason
            )
        )

    def _reconnect(self, reason: str) -> bool:
        """Starts a keeper and says hello, again and again for a while."""
        if self._attach.term is not None or self._refusals > 1:
            # Else nothing was lost: it was the leaving keeper of a run that has just ended.
            self.listener.on_keeper_lost(f"the keeper is gone ({reason}); starting a new one")
        for _ in range(RECONNECT_ATTEMPTS):
            if self._closing:
                return True
            time.sleep(RECONNECT_PAUSE_S * self._refusals)
            with contextlib.suppress(AutockptError, OSError):
                self._connect()
                with self.news:
                    self.news.notify_all()
                return True
            time.sleep(RECONNECT_PAUSE_S)
        return False

    def _received(self, message: Any, descriptors: list[int]) -> None:
        if isinstance(message, wire.SlotsGiven):
            self._take_slots(message, descriptors)
        elif isinstance(message, wire.NeighbourSlots):
            arenas = [Arena.attach(fd, fault=False) for fd in descriptors]
            slots = zip(message.ranks, arenas, message.image_bytes, strict=True)
            self._lend(RestoreBuffers({rank: (arena, size) for rank, arena, size in slots}))
        elif isinstance(message, wire.ReadingMemory):
            self._lend(RestoreBuffers({}, Arena.attach(*descriptors)))
        elif isinstance(message, wire.GatheringBegan):
            self._lend(RestoreBuffers({}, gathering=message))
        elif isinstance(message, wire.ChunksLent):
            arenas = [Arena.attach(fd, fault=False) for fd in descriptors]
            self._unanswered.discard(message.number)
            self._chunks_lent[message.number] = message, arenas[0] if arenas else None
        elif isinstance(message, wire.ReceiveShard):
            self.listener.receive_shard(message, Arena.attach(*descriptors, fault=False))
        elif isinstance(message, wire.SealBoundary):
            of_dead = [Arena.attach(fd, fault=False) for fd in descriptors]
            self.listener.seal_boundary(message, of_dead)
        else:
            for fd in descriptors:
                os.close(fd)
        with self.news:
            self._note(message)
        self._tell(message)
        with self.news:
            self.news.notify_all()
        if isinstance(message, p.Resume | p.StartFresh):
            self._restored = True
            for arena in [] if self.window_bytes else self.slots:
                arena.fault()

    def _lend(self, lent: RestoreBuffers) -> None:
        self._lent.close()
        self._lent = lent

    def take_lent(self, order: p.RestoreShard) -> RestoreBuffers:
        """Return the memory that came with an order; the caller closes it.

        Other orders have their own: a newer one may arrive, with what belongs to it, while an older
        one is still being carried out.
        """
        with self.news:
            return self._lent_for.pop((order.term, order.attempt), RestoreBuffers({}))

    def _take_slots(self, given: wire.SlotsGiven, descriptors: list[int]) -> None:
        self.chunk_bytes, self._run_id = given.chunk_bytes, self._run_id or given.run_id
        known = 0
        if given.image_bytes == self.image_bytes and _same_memory(self.slots, descriptors):
            known = len(self.slots)
            for fd in descriptors[:known]:
                os.close(fd)
            if known == len(descriptors):
                return
        # A restore goes before the page tables, which take longer than it.
        fault = self._restored and not given.window_bytes
        slots = [Arena.attach(fd, fault=fault) for fd in descriptors[known:]]
        self.image_bytes, self.note = given.image_bytes, given.note
        if known:
            with self._lock:
                self.slots = [*self.slots, *slots]
        else:
            self._replace_slots(slots)
        self.window_bytes, self.blocking = given.window_bytes, given.blocking
        self.given_s = time.monotonic()
        self.slots_changed += 1

    def _replace_slots(self, slots: list[Arena]) -> None:
        """Let go of the old slots: they are free when the keeper and the last copy have too."""
        with self._lock:  # not while they are handed to a keeper
            former, self.slots = self.slots, slots
            if slots or former:
                gone = self.window_bytes or sum(arena.nbytes for arena in former)
                self._unmapped_bytes = 0 if slots else gone
            self.window_bytes = 0
            for arena in former:
                arena.let_go()

    def _note(self, message: Any) -> None:
        saves = self.saves
        match message:
            case p.GrantSlot(generation=generation, slot=slot):
                saves.grant(generation, slot)
            case p.SkipSave(generation=generation, reason=reason):
                saves.refuse(generation, reason)
            case p.DiscardSnapshot(generation=generation, reason=reason):
                saves.revoke(generation, reason)
            case p.StartPersist(generation=generation):
                saves.start_writing(generation)
            case wire.SlotsRefused(reason=reason, passing=passing):
                self.no_room_s = time.monotonic() if passing else None
                self.slots_refused = reason
                self._replace_slots([])  # they did not fit, and the keeper has let them go
            case p.FenceTrainer(reason=reason):
                self.fenced = reason
            case p.RestoreShard(term=term, attempt=attempt):
                self._lent_for[term, attempt], self._lent = self._lent, RestoreBuffers({})
                self.restore_orders.put(message)
            case p.Resume(lineage=lineage) | p.StartFresh(lineage=lineage):
                self._attach = replace(self._attach, lineage=lineage)  # for a later keeper
                self.restore_orders.put(message)
            case p.RestoreRefused() | p.AttachRefused():
                self.restore_orders.put(message)

    def _tell(self, message: Any) -> None:
        """Calls the listener, without a lock: it may send."""
        saves, listener = self.saves, self.listener
        match message:
            case p.AnnounceMemoryCommitted(generation=generation):
                saves.memory_committed = generation
                listener.on_memory_committed(generation)
            case p.AnnounceDispute(generation=generation, dispute=dispute):
                listener.on_dispute(generation, dispute)
            case p.AnnounceDurable(generation=generation):
                save = saves.report_durable(generation, time.monotonic())
                if save is not None:
                    listener.on_durable(save)
            case p.AnnounceDropped(generation=generation, reason=reason):
                listener.on_discarded(saves.drop(generation, reason), reason)
            case p.PreparePlan() | p.ApplyPlan() | p.AbortPlan():
                listener.on_plan_message(message)
            case wire.CopiesArrived(generation=generation):
                save = saves.get(generation)
                if save is not None:
                    listener.on_copies_arrived(save, message)
            case wire.StorageStands():
                listener.on_storage_stands(message)
            case wire.StateSuspect(reason=reason):
                listener.on_state_suspect(reason)
            case wire.SendShard():
                listener.send_shard(message)
            case wire.AbandonExchange():
                listener.abandon_transfer(message)


def _same_memory(slots: list[Arena], descriptors: list[int]) -> bool:
    """The slots are the first of what came."""
    mine = [os.fstat(arena.fd).st_ino for arena in slots if arena.fd is not None]
    return mine == [os.fstat(fd).st_ino for fd in descriptors[: len(slots)]]
