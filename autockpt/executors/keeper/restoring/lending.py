"""Memory that the keeper lends to trainers for a restore: slots, gathered chunks, read buffers."""

from collections.abc import Callable, Sequence

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.restoring.shard_gather import Gathering
from autockpt.executors.keeper.restoring.shared_buffers import SharedBuffers
from autockpt.executors.keeper.restoring.stored_shards import StoredShards
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.keeper.trainers.trainers import Trainer, Trainers
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p


class RestoreLending:
    """Sends the memory that an order to restore refers to, before the order itself."""

    def __init__(
        self,
        *,
        run_id: str,
        node: int,
        memory: MemoryTable,
        replicas: ReplicaSlots,
        trainers: Trainers,
        stored: StoredShards,
        post: Callable[[Callable[[], None]], None],
        log: Callable[[str], None],
    ) -> None:
        self._run_id = run_id
        self._node = node
        self._memory = memory
        self._replicas = replicas
        self._trainers = trainers
        self._post = post
        self._gathering: Gathering | None = None
        self._stored = stored
        self._reading = SharedBuffers(log)

    @property
    def gathered_bytes(self) -> int:
        """Memory of gathered chunks, and of chunks that are passed on."""
        gathered = 0 if self._gathering is None else self._gathering.total_bytes
        return gathered + self._stored.total_bytes

    def expect_readers(self, ranks: int) -> None:
        """Prepares for so many ranks of this node to read from storage."""
        self._reading.prepare(ranks)

    def gather(self, serve: p.ServeShards) -> None:
        """Gathers shards for ranks of another world size, instead of an earlier attempt's."""
        self._end_gathering()
        self._gathering = Gathering(
            serve, run_id=self._run_id, node=self._node, memory=self._memory,
            replicas=self._replicas,
        )  # fmt: skip

    def lend(self, trainer: Trainer, order: p.RestoreShard, nodes: Sequence[int]) -> None:
        """Lends the memory of an order; `nodes`: the node of every rank."""
        self._stored.begin((order.term, order.attempt), order.generation, nodes)
        if order.source.kind == "memory":
            self._lend_neighbours(trainer, order, nodes)
        elif order.source.kind == "gather" and self._gathering is not None:
            self._trainers.send(trainer, self._gathering.began(trainer.rank))
        elif len(order.readers) > 1:
            self._lend_buffers(trainer, order)

    def lend_chunks(self, trainer: Trainer, wanted: wire.ChunksWanted) -> None:
        """Lends the chunks that a rank gathers, from here or brought here."""

        def send(lent: wire.ChunksLent, arena: Arena | None) -> None:
            fd = None if arena is None else arena.fd
            self._trainers.send(trainer, lent, () if fd is None else (fd,))

        def answer(lent: wire.ChunksLent, arena: Arena | None) -> None:
            self._post(lambda: send(lent, arena))

        gathering = self._gathering
        if wanted.stored:
            self._stored.wanted(wanted, answer)
        elif gathering is None or gathering.attempt != (wanted.term, wanted.attempt):
            refusal = f"nothing is gathered in attempt {wanted.attempt}"
            send(wire.ChunksLent(rank=trainer.rank, number=wanted.number, refusal=refusal), None)
        else:
            gathering.wanted(wanted, answer)

    def close(self) -> None:
        """Takes all of it back: every rank has read, or the keeper leaves."""
        self._end_gathering()
        self._reading.close()
        self._stored.close()

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None

    def _lend_buffers(self, trainer: Trainer, order: p.RestoreShard) -> None:
        """Memory in which ranks read once from storage the bytes that several of them need."""
        fd = self._reading.lend(order)
        if fd is not None:
            lent = wire.ReadingMemory(rank=trainer.rank, term=order.term, attempt=order.attempt)
            self._trainers.send(trainer, lent, (fd,))

    def _lend_neighbours(
        self, trainer: Trainer, order: p.RestoreShard, nodes: Sequence[int]
    ) -> None:
        """State that ranks of a node share is stored by one of them: each needs the slots of all.

        Its own shard is among them when it was fetched from another node.
        """
        found: dict[int, tuple[Arena, int]] = {}
        here = {rank for rank, node in enumerate(nodes) if node == self._node}
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
        self._trainers.send(
            trainer, lent, tuple(a.fd for a, _ in found.values() if a.fd is not None)
        )
