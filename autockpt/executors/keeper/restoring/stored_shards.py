"""Shards in an object store that ranks of several nodes need: each chunk is read there by one node.

That node is the one of the rank that wrote the shard, which needs all of it.  Replicas are divided
by the nodes that have one.  If there are more or fewer ranks now, the nodes divide shards or chunks
evenly.  The other nodes fetch the chunks from its keeper while it reads them.  If it fails, or
sends nothing for a while, a node reads what is missing from the store itself.  Every chunk is
compared with its digest where it comes from the store, and again at each node that receives it.

The chunks stay in memory of the keeper until all ranks have read.  Where that memory is not there,
requests are refused, and ranks read from the store themselves.

The keeper's loop calls the public methods unless they say otherwise.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from autockpt.executors.image.container import ImageIndex, trailer_capacity, write_trailer
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.replication.shard_fetch import time_for
from autockpt.executors.linux.memory import Arena, page_align, require_headroom
from autockpt.executors.network.transfer.events import FetchEnd, TransferFailed
from autockpt.executors.network.transfer.frames import Subject, Want, numbers_of, spans_of
from autockpt.executors.network.transfer.session import Loan
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.network.transfer.transfer import Transfer
from autockpt.executors.storage.catalogue import READERS, ShardFileSource, open_shard
from autockpt.executors.storage.directory.records import CommitFile, read_commit
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.units import format_bytes

REQUESTS = 4
"""Requests of ranks that are answered at a time: each waits for some chunks of one shard.  More
would lengthen the queues of the nodes that read."""
SILENCE_S = 120.0
"""A node that reads for others sends a chunk within this time, or they read it themselves."""
PATIENCE_S = 40.0
"""A node that reads for others says so when no chunk of a shard came for this long."""
TRIES = 3
"""A node that many call at once closes some of the connections: they are made again."""
PAUSE_S = 0.5
"""The most between two of them."""
RUN = 4
"""Chunks in a row that one node reads of a shard that all nodes divide."""
ORDER_S = 10.0
"""The order to restore comes to all nodes at about the same time."""
OVER = "the restore is over"

Answer = Callable[[wire.ChunksLent, Arena | None], None]


def readers_of(shard: int, layouts: Sequence[str], nodes: Sequence[int]) -> list[int]:
    """The nodes that divide the reading of a shard.

    `layouts`: layout digests of all shards; `nodes`: of every rank now.  As many ranks as wrote it
    need their own shards or replicas of them.  Of another number, all may need few replicas.
    """
    replicas = [one for one, layout in enumerate(layouts) if layout == layouts[shard]]
    if len(layouts) == len(nodes):
        return sorted({nodes[one] for one in replicas})
    if len(set(layouts)) < len(layouts):
        return sorted(set(nodes))
    return [nodes[shard * len(nodes) // len(layouts)]]


class _Image(ImageSource):
    """A shard that is lent while its chunks still come."""

    def __init__(self, shard: "_StoredShard") -> None:
        assert shard.arena.fd is not None
        image = shard.arena.view[: shard.index.image_bytes]
        super().__init__(shard.arena.fd, image, shard.index, "stored")
        self._shard = shard

    def await_chunk(self, number: int) -> None:
        """Returns when it is there.  Raises AutockptError."""
        self._shard.wait_for((number,), PATIENCE_S)


class _StoredShard:
    """One shard, and the chunks of it that are here."""

    def __init__(self, source: ShardFileSource) -> None:
        """Raises OSError without descriptors or address space."""
        # As it is in memory: chunks are decoded, and the root is the same.
        self.index: ImageIndex = replace(source.index, codec="none", stored=(), base=None)
        self.capacity = page_align(self.index.image_bytes)
        trailer = trailer_capacity(self.capacity, self.index.chunk_bytes)
        self.arena = Arena.create_sparse(
            self.capacity + trailer, name=f"autockpt-stored-r{self.index.rank}"
        )
        write_trailer(self.arena.view[self.capacity :], self.index)
        self.lent = _Image(self)
        self._source = source
        self.bytes_from_store = self.bytes_from_nodes = 0
        self._here: set[int] = set()
        self._coming: set[int] = set()
        self._failed: dict[int, str] = {}
        self._changed = threading.Condition()
        self._came_s = 0.0
        """When the last chunk came, CLOCK_MONOTONIC."""
        self._over = False

    def claim(self, chunks: Iterable[int]) -> list[int]:
        """Return the chunks that no thread brings yet; the caller brings them from now on.

        Raises NoRoomError without memory for them, AutockptError when the restore is over.
        """
        with self._changed:
            if self._over:
                raise AutockptError(OVER)
            new = sorted(set(chunks) - self._here - self._coming)
            if new:
                nbytes = len(new) * self.index.chunk_bytes
                require_headroom(nbytes, what=f"chunks of rank {self.index.rank}")
            self._coming.update(new)
            for number in new:
                self._failed.pop(number, None)
            return new

    def missing(self, chunks: Iterable[int]) -> list[int]:
        """Return the chunks that have not come."""
        with self._changed:
            return sorted(set(chunks) - self._here)

    def place(self, number: int, nbytes: int) -> memoryview:
        """Memory of a chunk, for a transfer."""
        start, stop = self.index.chunk_range(number)
        return self.arena.view[start:stop]

    def keep(self, number: int, chunk: memoryview) -> None:
        """It came from another node, and its digest is right."""
        self._note(number)
        self.bytes_from_nodes += len(chunk)

    def _note(self, number: int) -> None:
        with self._changed:
            self._here.add(number)
            self._coming.discard(number)
            self._came_s = time.monotonic()
            self._changed.notify_all()

    def drop(self, number: int, chunk: memoryview) -> None:
        """It will come in another way."""

    def fail(self, chunks: Iterable[int], reason: str) -> None:
        """They do not come; another request may try again."""
        with self._changed:
            for number in set(chunks) - self._here:
                self._coming.discard(number)
                self._failed[number] = reason
            self._changed.notify_all()

    def read(self, number: int) -> None:
        """Reads a claimed chunk from the store, on any thread."""
        if self._over:
            return
        place = self.place(number, 0)
        try:
            if self._source.index.stored:
                buffer = Arena.anonymous(self._source.room_bytes)
                data = self._source.read(number, buffer.view)
                np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(data, np.uint8))
            else:
                self._source.read(number, place)
        except Exception as error:  # somebody waits for it, whatever went wrong
            self.fail((number,), str(error) or type(error).__name__)
            return
        self.bytes_from_store += len(place)
        self._note(number)

    def wait_for(self, chunks: Sequence[int], patience_s: float) -> None:
        """Returns when all of them are here; raises AutockptError when none comes for so long."""

        def settled() -> bool:
            return self._over or all(n in self._here or n in self._failed for n in chunks)

        began_s = time.monotonic()
        with self._changed:
            while not settled():
                left_s = max(began_s, self._came_s) + patience_s - time.monotonic()
                if left_s <= 0:
                    raise StorageError(f"no chunk came for {patience_s:.0f} s")
                self._changed.wait(left_s)
            if self._over:
                raise AutockptError(OVER)
            reasons = {self._failed[n] for n in chunks if n in self._failed}
        if reasons:
            raise StorageError("; ".join(sorted(reasons)))

    @property
    def total_bytes(self) -> int:
        """Memory of the chunks that are here or come."""
        return (len(self._here) + len(self._coming)) * self.index.chunk_bytes

    def close(self) -> None:
        """End all waits and loans; threads that still read find it over."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self.lent.revoke(OVER)
        self.arena.close()
        self._source.close()


class _Reading:
    """The shards of one generation, each opened when it is asked for first."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._commit: CommitFile | None = None
        self._shards: dict[int, Future[_StoredShard]] = {}
        self._over = False

    def open(self, number: int) -> _StoredShard:
        """On any thread but the keeper's.  Raises AutockptError or OSError."""
        with self._lock:
            if self._over:
                raise AutockptError(OVER)
            opened = self._shards.get(number)
            if opened is None:
                made = self._shards[number] = Future()
        if opened is not None:
            return opened.result()
        try:
            made.set_result(self._open(number))
        except BaseException as error:
            with self._lock:
                self._shards.pop(number, None)
            made.set_exception(error)
        if self._is_over():  # it may have come too late for `close`
            made.result().close()
        return made.result()

    def _is_over(self) -> bool:
        """Set by the keeper's thread while ours opened."""
        return self._over

    def _open(self, number: int) -> _StoredShard:
        commit = self._commit
        if commit is None:
            commit = self._commit = read_commit(os.path.join(self._folder, "COMMIT"))
        if not 0 <= number < len(commit.records):
            raise AutockptError(f"{self._folder}: has no shard {number}")
        source = open_shard(self._folder, commit.records[number], commit)
        try:
            shard = _StoredShard(source)
        except BaseException:
            source.close()
            raise
        return shard

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layout digests of all shards, once one is open."""
        records = () if self._commit is None else self._commit.records
        return tuple(str(record.get("layout_digest") or n) for n, record in enumerate(records))

    @property
    def opened(self) -> list[_StoredShard]:
        """The open shards."""
        with self._lock:
            made = list(self._shards.values())
        return [one.result() for one in made if one.done() and one.exception() is None]

    def close(self) -> None:
        """Let all of them go."""
        with self._lock:
            self._over = True
        for shard in self.opened:
            shard.close()


class StoredShards:
    """A node's part in a restore from an object store."""

    def __init__(
        self,
        checkpoints: str,
        *,
        node: int,
        replicas: ReplicaSlots,
        log: Callable[[str], None],
    ) -> None:
        self._checkpoints, self._node = checkpoints, node
        self._replicas, self._log = replicas, log
        self._lock = threading.Lock()
        self._begun = threading.Condition(self._lock)
        self._attempt: tuple[int, int] | None = None
        """Term and attempt of the order."""
        self._generation: Generation | None = None
        self._reading: _Reading | None = None
        self._nodes: tuple[int, ...] = ()
        self._silent: set[int] = set()
        """Nodes that did not send what they were to read."""
        self._transfers: set[Transfer] = set()
        self._requests: ThreadPoolExecutor | None = None
        self._readers: ThreadPoolExecutor | None = None

    # ------------------------------------------------------------------ the keeper's loop

    def begin(self, attempt: tuple[int, int], generation: Generation, nodes: Sequence[int]) -> None:
        """Ranks of this node will ask for its shards; `nodes`: of every rank now.

        Chunks of the same generation stay from an earlier attempt.
        """
        if attempt == self._attempt:
            return
        if generation != self._generation:
            self.close()
        with self._begun:
            self._attempt, self._nodes, self._silent = attempt, tuple(nodes), set()
            if self._reading is None:
                self._generation = generation
                self._reading = _Reading(os.path.join(self._checkpoints, generation.name))
                self._requests = ThreadPoolExecutor(REQUESTS, "autockpt-stored")
                self._readers = ThreadPoolExecutor(READERS, "autockpt-read-store")
            self._begun.notify_all()

    def wanted(self, message: wire.ChunksWanted, answer: Answer) -> None:
        """Brings chunks; `answer` is called once, maybe on another thread."""
        reading, requests = self._reading, self._requests
        if reading is None or requests is None or self._attempt != (message.term, message.attempt):
            answer(_refused(message, OVER), None)
        else:
            requests.submit(self._serve, reading, message, answer)

    def close(self) -> None:
        """Every rank has read: nothing is lent any more."""
        with self._lock:
            reading, self._reading = self._reading, None
            generation, self._generation = self._generation, None
            pools = self._requests, self._readers
            self._requests = self._readers = None
            transfers, self._transfers = list(self._transfers), set()
            self._attempt, self._silent = None, set()
        if reading is None:
            return
        for transfer in transfers:
            transfer.abort(OVER)
        reading.close()
        for pool in pools:
            if pool is not None:
                pool.shutdown(wait=False)  # requests that wait are refused
        read = sum(shard.bytes_from_store for shard in reading.opened)
        sent = sum(shard.bytes_from_nodes for shard in reading.opened)
        if read or sent:
            self._log(
                f"{generation}: {format_bytes(read)} read from the store, {format_bytes(sent)} "
                "taken from other nodes that read them there"
            )

    @property
    def total_bytes(self) -> int:
        """Memory of the chunks."""
        reading = self._reading
        return 0 if reading is None else sum(shard.total_bytes for shard in reading.opened)

    # ------------------------------------------------------------------ on other threads

    def loan(self, want: Want) -> Loan | str:
        """Lends a shard to another node, and begins to read the chunks that it wants."""
        try:
            shard = self._current(want.generation, ORDER_S).open(want.rank)
            if shard.index.root == want.root:
                Subject.of(shard.index, "stored").require_spans(want.chunks)
                self._read(shard, shard.claim(numbers_of(want.chunks)))
        except (AutockptError, OSError) as error:
            return str(error)
        return Loan(source=shard.lent, deadline_s=time_for(shard.index.image_bytes))

    def _current(self, generation: Generation, within_s: float) -> _Reading:
        """The reading of a generation, which begins with this node's order to restore it.

        Raises AutockptError.
        """
        with self._begun:
            self._begun.wait_for(lambda: self._generation == generation, within_s)
            if self._reading is None or self._generation != generation:
                raise AutockptError(f"node {self._node} does not restore {generation} now")
            return self._reading

    def _serve(self, reading: _Reading, message: wire.ChunksWanted, answer: Answer) -> None:
        try:
            shard = self._bring(reading, message)
        except Exception as error:  # a rank waits for the answer, whatever went wrong
            answer(_refused(message, str(error) or type(error).__name__), None)
            return
        lent = wire.ChunksLent(
            rank=message.rank, number=message.number, image_bytes=shard.capacity, node=self._node
        )
        answer(lent, shard.arena)

    def _bring(self, reading: _Reading, message: wire.ChunksWanted) -> _StoredShard:
        shard = reading.open(message.shard)
        chunks = shard.claim(message.chunks)
        if message.alone:
            self._read(shard, chunks)
        else:
            self._divide(reading, shard, chunks, again=False)
        shard.wait_for(message.chunks, SILENCE_S + PATIENCE_S)
        return shard

    def _divide(
        self, reading: _Reading, shard: _StoredShard, chunks: Sequence[int], *, again: bool
    ) -> None:
        """Has claimed chunks read by the nodes whose turn it is.

        `again`: a node did not send them; where a second one does not, this node reads them.
        """
        number = shard.index.rank
        sought = readers_of(number, reading.layouts, self._nodes)
        readers = [node for node in sought if node not in self._silent]
        readers = readers or sorted(set(self._nodes) - self._silent) or [self._node]
        by_reader: dict[int, list[int]] = {}
        for chunk in chunks:
            reader = readers[(number + chunk // RUN) % len(readers)]
            by_reader.setdefault(reader, []).append(chunk)
        # Its own first: it may have to wait for the address of another node.
        for reader in sorted(by_reader, key=lambda node: node != self._node):
            if reader == self._node:
                self._read(shard, by_reader[reader])
            else:
                self._fetch(reading, shard, by_reader[reader], reader, again=again, tries=TRIES)

    def _read(self, shard: _StoredShard, chunks: Sequence[int]) -> None:
        """Has claimed chunks read from the store."""
        readers = self._readers
        for number in chunks:
            try:
                if readers is None:
                    raise RuntimeError(OVER)
                readers.submit(shard.read, number)
            except RuntimeError:
                shard.fail(chunks, OVER)
                return

    def _fetch(
        self,
        reading: _Reading,
        shard: _StoredShard,
        chunks: list[int],
        node: int,
        *,
        again: bool,
        tries: int,
    ) -> None:
        """Has claimed chunks fetched from the node that reads them."""

        def failed(reason: str) -> None:
            self._leave_out(node, reason)
            missing = shard.missing(chunks)
            if again:
                self._read(shard, missing)
            else:
                self._divide(reading, shard, missing, again=True)

        def ended(event: FetchEnd) -> None:
            with self._lock:
                self._transfers = {one for one in self._transfers if not one.done.is_set()}
            if isinstance(event, TransferFailed) and event.fault == "broken" and tries > 1:
                time.sleep(random.uniform(0.0, PAUSE_S))  # on its thread, which has nothing else
                missing = shard.missing(chunks)
                self._fetch(reading, shard, missing, node, again=again, tries=tries - 1)
            elif isinstance(event, TransferFailed):
                failed(event.reason)

        try:
            transfer = self._replicas.fetch_stored(
                node, shard.index, shard, spans_of(chunks), ended, silence_s=SILENCE_S
            )
        except (AutockptError, OSError) as error:
            failed(str(error))
            return
        with self._lock:
            self._transfers.add(transfer)

    def _leave_out(self, node: int, reason: str) -> None:
        """It is not asked any more in this attempt."""
        with self._lock:
            known = node in self._silent or self._reading is None
            self._silent.add(node)
        if not known:
            self._log(f"node {node} does not pass on what it reads from the store: {reason}")


def _refused(message: wire.ChunksWanted, reason: str) -> wire.ChunksLent:
    return wire.ChunksLent(rank=message.rank, number=message.number, refusal=reason)
