"""Copies and parities in the memory of other nodes: damaged, stale, lost while they are read.

The keepers' own replica slots and transfers over loopback, all nodes in one process.  What is
restored, and from where, is the protocol's choice, made again without a source that was bad.
"""

import contextlib
import functools
import gc
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.keeper.replication.device_transfers import KeeperExchanges
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.coordinator.replicating import parities_of
from autockpt.executors.protocol.coordinator.state import ParityRanks
from autockpt.executors.protocol.selection import Choice, Question, Strike, choose
from autockpt.executors.restore.shard_sources import SlotSource
from autockpt.values.errors import CorruptCheckpointError
from autockpt.values.generation import Generation
from tests.campaigns.corruption import damage
from tests.campaigns.framework import require
from tests.campaigns.job import no_leak
from tests.unit.executors.network.transfer.ends import CHUNK, HOST, RUN, SECRET, identity

OLD, NEW = Generation(term=1, step=7), Generation(term=2, step=7)
"""Durable, and of an earlier incarnation; protected in memory only."""
CHAIN = (p.TermParent(term=2, parent=OLD), p.TermParent(term=1, parent=None))
PATIENCE_S = 20.0
MOST_ATTEMPTS = 16
WITHIN_S = 0.02
"""A case's transfers take about as long: a kill within it hits most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How memory is protected."""

    name: str
    nodes: int
    losses: int
    """Of a parity set; 0: every node copies the rank of the one before it."""


WAYS = (
    Way(name="copies", nodes=3, losses=0),
    Way(name="xor", nodes=3, losses=1),
    Way(name="xor", nodes=4, losses=1),
    Way(name="rs", nodes=4, losses=2),
)


def size_of(rank: int) -> int:
    """No two images are equally long."""
    return (3 * CHUNK, 4 * CHUNK + 77, CHUNK + 1, CHUNK // 2)[rank]


@functools.cache
def image_of(generation: Generation, rank: int) -> bytes:
    """The reference."""
    return random.Random(f"{generation}/{rank}").randbytes(size_of(rank))


@functools.cache
def index_of(generation: Generation, rank: int, world: int) -> ImageIndex:
    """What its owner sealed it with."""
    image = memoryview(image_of(generation, rank))
    digests = tuple(chunk_digest(image[at : at + CHUNK]) for at in range(0, len(image), CHUNK))
    return ImageIndex(
        run_id=RUN, generation=generation, step=generation.term, rank=rank, world_size=world,
        layout_digest="layout", image_bytes=len(image), chunk_bytes=CHUNK, digests=digests,
    )  # fmt: skip


def shard_of(generation: Generation, rank: int, world: int) -> p.HeldShard:
    """As its owner reports it."""
    index = index_of(generation, rank, world)
    return p.HeldShard(
        rank=rank, slot=int(generation == NEW), generation=generation, step=index.step,
        world_size=world, root=index.root, layout_digest="layout", bytes=index.image_bytes,
        chunk_bytes=CHUNK,
    )  # fmt: skip


Key = tuple[int, int, bool]
"""(rank, replica slot, whether of its parity)."""


class Loop:
    """What a keeper's threads ask of it.  Of a dead one it is carried out by who asks: nobody else
    would, and its threads, which a dead process has not, would wait for the answer."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False

    def post(self, ask: Callable[[], None]) -> None:
        """From any thread."""
        self._asked.put(ask)
        if self._ended:
            self.turn()

    def turn(self) -> None:
        """Carries out what was asked."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()()

    def end(self) -> None:
        """The keeper is dead."""
        self._ended = True
        self.turn()


class Node:
    """A keeper's replica slots, the slots of its one rank, and what its protocol would report."""

    def __init__(self, rank: int, peers: "dict[int, Node]", *, world: int, empty: bool) -> None:
        self.rank, self.world, self._peers = rank, world, peers
        self.memory = MemoryTable()
        self.owned: list[p.HeldShard] = []
        self._orders: dict[Key, p.FetchShard] = {}
        if not empty:
            self._fill()
        self.start()

    def _fill(self) -> None:
        slots = self.memory.allocate(
            SlotsWanted(rank=self.rank, image_bytes=size_of(self.rank), chunk_bytes=CHUNK, slots=2)
        )
        for generation in (OLD, NEW):
            shard = shard_of(generation, self.rank, self.world)
            slots.image(shard.slot, shard.bytes)[:] = image_of(generation, self.rank)
            slots.seal(shard.slot, index_of(generation, self.rank, self.world))
            self.owned.append(shard)

    def start(self) -> None:
        """A keeper, with the slots that its trainer kept and no replicas."""
        self.loop = Loop()
        self.replicas_held: dict[Key, p.HeldShard] = {}
        self.failed: dict[Key, p.FetchFailed] = {}
        self.replicas = ReplicaSlots(
            run_id=RUN, memory=self.memory, post=self.loop.post, tell=self._heard,
            address=lambda node: (HOST, self._peers[node].port), rate=lambda: 0.0,
            restoring=lambda: False, copied=lambda *_: None, receiver=lambda _: None,
            exchanges=KeeperExchanges(lambda *_: None), log=lambda text: None,
        )  # fmt: skip
        self.port = self.replicas.open(SECRET, identity(self.rank), HOST)

    def fetch(self, order: p.FetchShard) -> None:
        """Begins one."""
        self._orders[key_of(order)] = order
        self.replicas.fetch(order)

    def _heard(self, event: p.NodeEvent) -> None:
        if isinstance(event, p.ShardComing):
            return
        if isinstance(event, p.ShardFetched):
            key = (event.shard.rank, event.shard.slot, event.shard.parity is not None)
            self.replicas_held[key] = event.shard
        else:
            assert isinstance(event, p.FetchFailed), event
            key = (event.rank, event.slot, event.parity)
            self.failed[key] = event
        del self._orders[key]

    @property
    def busy(self) -> bool:
        """Some fetch has no answer yet."""
        return bool(self._orders)

    def abort(self) -> None:
        """Every fetch that is under way, as when an incarnation ends."""
        for (rank, slot, parity), order in list(self._orders.items()):
            generation = order.shard.generation
            self.replicas.abort(
                p.AbortFetch(rank=rank, generation=generation, slot=slot, reason="", parity=parity)
            )
        self._orders.clear()

    def end(self) -> None:
        """The keeper dies, and the replicas with it."""
        self.abort()
        self.replicas.close()
        self.loop.end()
        self.replicas.overwritten(self.rank)
        for rank in range(self.world):
            for parity in (False, True):
                self.replicas.free(p.FreeReplicas(rank=rank, parity=parity))

    def end_trainer(self) -> None:
        """The slots go when nobody holds them any more."""
        self.memory.of(self.rank).close_slots()
        self.owned.clear()

    def arena_of(self, shard: p.HeldShard) -> Arena:
        """The memory that holds it."""
        key = (shard.rank, shard.slot, shard.parity is not None)
        if shard in self.owned:
            return self.memory.of(self.rank).slots[shard.slot]
        return self.replicas._replicas[key].arena

    def read(self, shard: p.HeldShard) -> bytes | None:
        """As a trainer reads it; None when what is there is something else, or damaged."""
        if shard in self.owned:
            index = self.memory.of(self.rank).sealed().get(shard.slot)
        else:
            index = self.replicas._replicas[shard.rank, shard.slot, False].index()
        if index is None or (index.generation, index.root) != (shard.generation, shard.root):
            return None
        chunks, arena = SlotSource(self.arena_of(shard), index), self.arena_of(shard)
        try:
            return b"".join(bytes(chunks.read(n, arena)) for n in range(len(index.digests)))
        except CorruptCheckpointError:
            return None


def key_of(order: p.FetchShard) -> Key:
    """Where it goes."""
    return order.shard.rank, order.slot, order.shard.parity is not None


@dataclass(slots=True)
class Blow:
    """A process that dies while others fetch from it, or it from them."""

    node: int
    at_s: float
    whole: bool
    """The node with all its memory, not the keeper alone."""
    struck: bool = False


@dataclass(slots=True)
class Cluster:
    """The nodes of one case."""

    way: Way
    nodes: dict[int, Node] = field(default_factory=dict)
    damaged: set[tuple[int, Generation, Key, bool]] = field(default_factory=set)
    """(node, generation, key, whether it is its own slot)."""

    def __post_init__(self) -> None:
        for rank in range(self.world):
            self.nodes[rank] = Node(rank, self.nodes, world=self.world, empty=False)

    @property
    def world(self) -> int:
        """One rank a node."""
        return self.way.nodes

    # ------------------------------------------------------------------ what happens

    def wait(self, blow: Blow | None = None) -> bool:
        """The loops of all keepers, until every fetch has its answer; False when it was struck."""
        began = time.monotonic()
        while any(node.busy for node in self.nodes.values()):
            waited = time.monotonic() - began
            require(waited < PATIENCE_S, f"no answer to a fetch in {waited:.0f} s")
            if blow is not None and not blow.struck and waited >= blow.at_s:
                self.strike(blow)
                return False
            for node in self.nodes.values():
                node.loop.turn()
            time.sleep(0.0005)
        return True

    def strike(self, blow: Blow) -> None:
        """It dies; what others had asked of it, and everybody of everybody, is called off."""
        blow.struck = True
        self.lose(blow.node, whole=blow.whole)
        for node in self.nodes.values():
            node.abort()

    def lose(self, rank: int, *, whole: bool) -> None:
        """A keeper dies and is started again, alone or on another machine."""
        node = self.nodes[rank]
        node.end()
        self.damaged = {d for d in self.damaged if d[0] != rank or (d[3] and not whole)}
        if whole:
            node.end_trainer()
            self.nodes[rank] = Node(rank, self.nodes, world=self.world, empty=True)
        else:
            node.start()

    def protect(self, generation: Generation, blow: Blow | None = None) -> None:
        """A round of copies or parities; again what a death undid."""
        for _ in range(2):
            for holder, order in self._orders(generation):
                if key_of(order) not in self.nodes[holder].replicas_held:
                    self.nodes[holder].fetch(order)
            if self.wait(blow) and not any(node.failed for node in self.nodes.values()):
                return
            for node in self.nodes.values():
                node.failed.clear()
        require(False, f"{generation} could not be protected")

    def _orders(self, generation: Generation) -> list[tuple[int, p.FetchShard]]:
        shards = {r: shard_of(generation, r, self.world) for r in range(self.world)}
        slot = int(generation == NEW)
        if not self.way.losses:
            return [
                ((r + 1) % self.world, self._copy(shard, r, slot)) for r, shard in shards.items()
            ]
        each = ParityRanks(ranks=tuple(shards), losses=self.way.losses)
        orders = []
        for parity in parities_of(each, shards):
            others = (r for r in shards if r != parity.rank)
            sources = tuple(p.ShardCopy(node=r, shard=shards[r]) for r in others)
            orders.append((parity.rank, p.FetchShard(shard=parity, slot=slot, sources=sources)))
        return orders

    @staticmethod
    def _copy(shard: p.HeldShard, node: int, slot: int) -> p.FetchShard:
        return p.FetchShard(shard=shard, slot=slot, sources=(p.ShardCopy(node=node, shard=shard),))

    def harm(self, rng: random.Random) -> str:
        """Damages one thing that is held somewhere; what it was."""
        held = [
            (node, shard)
            for node in self.nodes.values()
            for shard in (*node.owned, *node.replicas_held.values())
        ]
        node, shard = rng.choice(held)
        view, stale = node.arena_of(shard).view, b""
        twins = [s for n, s in held if n is node and s != shard and s.rank == shard.rank]
        for twin in twins:
            if (twin.parity is None) == (shard.parity is None):
                stale = bytes(node.arena_of(twin).view)
        whole = bytes(view)
        bad, how = damage(whole, stale or whole, rng)
        view[:] = bad[: len(view)].ljust(len(view), b"\0")
        key, own = (shard.rank, shard.slot, shard.parity is not None), shard in node.owned
        if bytes(view) != whole:
            self.damaged.add((node.rank, shard.generation, key, own))
        return f"{'own' if own else 'parity' if shard.parity else 'copy'} {how}"

    # ------------------------------------------------------------------ what must hold

    def must_be_new(self) -> bool:
        """Every shard of NEW is whole somewhere, or its set has lost no more than it stands.

        A damaged parity is found when it is used, which may be too late for another one.
        """
        bad = {(node, key, own) for node, generation, key, own in self.damaged if generation == NEW}
        own = {
            n.rank
            for n in self.nodes.values()
            for s in n.owned
            if s.generation == NEW and (n.rank, (s.rank, s.slot, False), True) not in bad
        }
        replicas = {
            (n.rank, key)
            for n in self.nodes.values()
            for key, s in n.replicas_held.items()
            if s.generation == NEW and (n.rank, key, False) not in bad
        }
        copied = {key[0] for _, key in replicas if not key[2]}
        left = own & {key[0] for _, key in replicas if key[2]}
        spoiled = any(key[2] for _, key, _ in bad)
        enough = self.way.losses and self.world - len(left) <= self.way.losses and not spoiled
        return bool(enough) or own | copied == set(range(self.world))

    def restore(self, blow: Blow | None = None) -> Generation | None:
        """As the coordinator does it; None when somebody died meanwhile."""
        struck: set[Strike] = set()
        for attempt in range(MOST_ATTEMPTS):
            choice = choose(self._question(struck))
            require(choice is not None, f"nothing is left to restore, struck {struck}")
            assert choice is not None
            bad = self._attempt(choice, 2 + attempt, blow)
            if bad is None:
                return None
            if not bad:
                return choice.generation
            struck |= {(r, choice.generation, choice.sources[r].name) for r in bad}
        require(False, f"{MOST_ATTEMPTS} attempts, struck {sorted(struck)}")
        return None

    def _question(self, struck: set[Strike]) -> Question:
        held = [
            (node.rank, shard)
            for node in self.nodes.values()
            for shard in (*node.owned, *node.replicas_held.values())
        ]
        shards = [(node, shard) for node, shard in held if shard.parity is None]
        indexes = [index_of(OLD, rank, self.world) for rank in range(self.world)]
        entry = p.CatalogueEntry(
            generation=OLD, step=OLD.term, world_size=self.world, parent=None,
            records=tuple({"file": str(i.rank), "root": i.root} for i in indexes),
            layout_digests=(), verified=True,
        )  # fmt: skip
        return Question(
            world_size=self.world, nodes=tuple(range(self.world)), chain=CHAIN,
            memory=tuple(shard for node, shard in shards if shard.rank == node),
            copies=tuple(
                p.ShardCopy(node=node, shard=shard) for node, shard in shards if shard.rank != node
            ),
            parities=tuple(
                p.ShardCopy(node=node, shard=shard) for node, shard in held if shard.parity
            ),
            committed=(entry,), struck=frozenset(struck),
        )  # fmt: skip

    def _attempt(self, choice: Choice, slot: int, blow: Blow | None) -> set[int] | None:
        """Ranks whose source was bad; None when somebody died."""
        for rank, source in enumerate(choice.sources):
            if source.brought:
                assert source.shard is not None
                order = p.FetchShard(shard=source.shard, slot=slot, sources=source.brought)
                self.nodes[rank].fetch(order)
        if not self.wait(blow):
            return None
        bad = set()
        for rank, source in enumerate(choice.sources):
            if source.kind != "disk" and not self._is_right(choice, rank, slot):
                bad.add(rank)
        for node in self.nodes.values():
            node.failed.clear()
        return bad

    def _is_right(self, choice: Choice, rank: int, slot: int) -> bool:
        node, source = self.nodes[rank], choice.sources[rank]
        if source.brought:
            shard = node.replicas_held.get((rank, slot, False))
        else:
            held = node.replicas_held.values() if source.copied else node.owned
            shard = next(s for s in held if (s.slot, s.rank) == (source.slot, rank))
        found = None if shard is None else node.read(shard)
        if found is None:
            require(shard is None or not source.brought, f"rank {rank}: sealed and unreadable")
            return False
        wrong = f"rank {rank}, {choice.generation} from {source.kind}: other bytes"
        require(found == image_of(choice.generation, rank), wrong)
        return True

    def close(self) -> None:
        """Everything."""
        for node in self.nodes.values():
            node.end()
            node.end_trainer()


class PeerMemory:
    """Damage to own slots, copies and parities; nodes lost before, keepers while it is read."""

    claim = "what other nodes hold comes back to the bit, or an older generation does"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        Cluster(WAYS[0]).close()  # what is loaded at the first use is no leak

    def run(self, number: int, rng: random.Random) -> str:
        """One cluster: protected, harmed, restored."""
        way = WAYS[number % len(WAYS)]
        with no_leak():
            cluster = Cluster(way)
            try:
                return f"{way.name}: {self._play(cluster, rng)}"
            finally:
                cluster.close()
                _until_threads_end()
                gc.collect()  # transfers that were cut still refer to memory, in circles

    def _play(self, cluster: Cluster, rng: random.Random) -> str:
        cluster.protect(OLD)
        cluster.protect(NEW, _blow(cluster, rng, whole=False) if rng.random() < 0.3 else None)
        harm = [cluster.harm(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
        for rank in rng.sample(range(cluster.world), rng.choice((0, 1, 1, 2))):
            cluster.lose(rank, whole=rng.random() < 0.8)
        blow = _blow(cluster, rng, whole=rng.random() < 0.5) if rng.random() < 0.4 else None
        due = cluster.must_be_new()
        restored = cluster.restore(blow)
        if restored is None:
            due = cluster.must_be_new()
            restored = cluster.restore()
        told = f"{', '.join(harm) or 'whole'}; restored {restored}"
        require(restored == NEW or (restored == OLD and not due), f"{told}, expected {NEW}")
        return f"{'new' if restored == NEW else 'old'}{', struck' if blow and blow.struck else ''}"

    def close(self) -> None:
        """Nothing."""


def _blow(cluster: Cluster, rng: random.Random, *, whole: bool) -> Blow:
    return Blow(rng.randrange(cluster.world), rng.uniform(0.0, WITHIN_S), whole)


def _until_threads_end() -> None:
    """Threads of transfers that were cut end by themselves."""
    until_s = time.monotonic() + PATIENCE_S
    while any("autockpt" in thread.name for thread in threading.enumerate()):
        require(time.monotonic() < until_s, f"threads left: {threading.enumerate()}")
        time.sleep(0.001)
