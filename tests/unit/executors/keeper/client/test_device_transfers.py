"""Copies through emulated devices: two keepers' replica slots and their trainers in one process."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.device_transfers import Exchanges
from autockpt.executors.keeper.replication import device_transfers as of_keepers
from autockpt.executors.keeper.replication import replica_slots as replicas_module
from autockpt.executors.keeper.replication.device_transfers import KeeperExchanges
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.replication.shard_fetch import ShardFetch
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network import device_path
from autockpt.executors.network.device_path import DeviceLinks
from autockpt.executors.protocol import messages as p
from tests.unit.executors.network.transfer.ends import (
    CHUNK,
    GENERATION,
    HOST,
    PATIENCE_S,
    RUN,
    SECRET,
    Image,
    identity,
)

LINKS = DeviceLinks(interface="lo", bytes_per_s=1e9)
NBYTES = 40 * CHUNK + 9


class Node:
    """A keeper's replica slots, and the trainer of its one rank with a sealed shard."""

    def __init__(self, rank: int, peers: dict[int, "Node"], links: DeviceLinks | None) -> None:
        self.rank, self.peers = rank, peers
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.told: list[Any] = []
        self.coming: list[p.ShardComing] = []
        self.copied: list[bool] = []
        """Of every shard that came, whether through the devices."""
        self.logged: list[str] = []
        self.warned: list[str] = []
        self.rate = 0.0
        self.memory = MemoryTable()
        self.image = Image(NBYTES, seed=rank, rank=rank)
        table = self.memory.allocate(
            SlotsWanted(rank=rank, image_bytes=NBYTES, chunk_bytes=CHUNK, slots=2)
        )
        table.image(0, NBYTES)[:] = self.image.view
        table.seal(0, self.image.index)
        self.slots = table.slots
        self.deaf = False
        """The trainer hears nothing."""
        self.trainer = Exchanges(
            rank, host=HOST, links=links, slots=lambda: self.slots,
            send=lambda message: self.posted.put(lambda: self.exchanges.heard(message)),
            degraded=self.warned.append,
        )  # fmt: skip
        self.exchanges = KeeperExchanges(self._to_trainer)
        self.replicas = ReplicaSlots(
            run_id=RUN, memory=self.memory, post=self.posted.put, tell=self._tell,
            address=lambda node: (HOST, self.peers[node].port), rate=lambda: self.rate,
            restoring=lambda: False, copied=lambda *said: self.copied.append(said[-1]),
            receiver=lambda _: self.rank, exchanges=self.exchanges,
            log=self.logged.append,
        )  # fmt: skip
        self.port = self.replicas.open(SECRET, identity(rank), HOST)
        peers[rank] = self

    def _tell(self, event: Any) -> None:
        (self.coming if isinstance(event, p.ShardComing) else self.told).append(event)

    def _to_trainer(self, rank: int, message: Any, descriptors: tuple[int, ...]) -> None:
        if self.deaf:
            for fd in descriptors:
                os.close(fd)
            return
        match message:
            case wire.ReceiveShard():
                self.trainer.receive(message, Arena.attach(*descriptors))
            case wire.SendShard():
                self.trainer.send(message)
            case wire.AbandonExchange():
                self.trainer.abandon(message)

    def fetch(self, other: int, slot: int = 0) -> None:
        """A copy of what the other one has."""
        index = self.peers[other].image.index
        shard = p.HeldShard(
            rank=other, slot=0, generation=GENERATION, step=index.step, world_size=4,
            root=index.root, layout_digest=index.layout_digest, bytes=index.image_bytes,
            chunk_bytes=CHUNK,
        )  # fmt: skip
        sources = (p.ShardCopy(node=other, shard=shard),)
        self.replicas.fetch(p.FetchShard(shard=shard, slot=slot, sources=sources))

    def holds(self, other: int) -> bool:
        """The copy is here, to the bit."""
        replica = self.replicas.holding(other, GENERATION)
        return replica is not None and replica.arena.view[:NBYTES] == self.peers[other].image.view

    def close(self) -> None:
        """Ends all."""
        self.replicas.close()
        for memory in self.memory.ranks.values():
            memory.close_slots()
        for rank in range(2):
            self.replicas.free(p.FreeReplicas(rank=rank))


Make = Callable[..., dict[int, Node]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Two nodes, with little patience."""
    monkeypatch.setattr(device_path, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(of_keepers, "LISTENS_S", 0.5)
    peers: dict[int, Node] = {}

    def nodes(links: DeviceLinks | None = LINKS) -> dict[int, Node]:
        for rank in range(2):
            Node(rank, peers, links)
        return peers

    yield nodes
    for node in peers.values():
        node.close()


def run(nodes: dict[int, Node], done: Callable[[], bool]) -> None:
    """The loops of both keepers, in turn, until it is done."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, [(n.told, n.logged) for n in nodes.values()]
        for node in nodes.values():
            while not node.posted.empty():
                node.posted.get()()
        time.sleep(0.001)


def test_both_nodes_have_what_the_other_one_has(make: Make) -> None:
    """At once in both directions, three rounds by the same two paths, and nothing by TCP."""
    nodes = make()
    for turn in range(3):
        for rank in range(2):
            nodes[rank].fetch(1 - rank, slot=turn % 2)
        run(nodes, lambda turn=turn: all(len(n.told) == turn + 1 for n in nodes.values()))  # type: ignore[misc]
    run(nodes, lambda: not any(node.exchanges._under_way for node in nodes.values()))
    for rank, node in nodes.items():
        assert {type(answer) for answer in node.told} == {p.ShardFetched}
        assert node.holds(1 - rank)
        assert node.copied == [True] * 3
        assert not node.warned
        assert sorted(way for way, _ in node.trainer._pairs) == ["from", "to"]


def test_the_rate_of_the_plan_is_kept(make: Make) -> None:
    """40 chunks at 100 a second."""
    nodes = make()
    nodes[0].rate = 100.0 * CHUNK
    began = time.monotonic()
    nodes[1].fetch(0)
    run(nodes, lambda: bool(nodes[1].told))
    assert time.monotonic() - began > 0.3
    assert nodes[1].copied == [True]


def test_an_exchange_that_goes_on_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper does not see the bytes, and knows that it has not ended."""
    monkeypatch.setattr(replicas_module, "COMING_S", 0.0)
    nodes = make()
    nodes[0].rate = 100.0 * CHUNK
    nodes[1].fetch(0)
    run(nodes, lambda: bool(nodes[1].told))
    marks = [word.mark for word in nodes[1].coming]
    assert marks
    assert marks == sorted(marks)
    assert nodes[1].copied == [True]


@pytest.mark.parametrize(
    "deaf", [pytest.param(0, id="sender", marks=pytest.mark.slow), pytest.param(1, id="receiver")]
)
def test_a_trainer_that_does_not_answer_costs_a_timeout(make: Make, deaf: int) -> None:
    """Then the copy comes from host memory, and it is said."""
    nodes = make()
    nodes[deaf].deaf = True
    nodes[1].fetch(0)
    run(nodes, lambda: bool(nodes[1].told))
    assert nodes[1].holds(0)
    assert nodes[1].copied == [False]
    assert any("from host memory: " in line for line in nodes[1].logged)


def test_without_a_device_copies_come_from_host_memory(make: Make) -> None:
    """The plan asks for what is not there: said once, by the trainer."""
    nodes = make(None)
    for turn in range(2):
        nodes[1].fetch(0, slot=turn)
        run(nodes, lambda turn=turn: len(nodes[1].told) == turn + 1)  # type: ignore[misc]
    assert nodes[1].holds(0)
    assert nodes[1].copied == [False, False]
    (warning,) = nodes[1].warned
    assert "only emulated devices" in warning


def test_bytes_that_rot_on_the_way_are_not_sealed(make: Make) -> None:
    """The digests are those of the memory that the copy stands in."""
    nodes = make()
    nodes[0].memory.of(0).image(0, NBYTES)[5 * CHUNK] ^= 1
    nodes[1].fetch(0)
    run(nodes, lambda: bool(nodes[1].told))
    (failed,) = nodes[1].told
    assert isinstance(failed, p.FetchFailed)
    assert nodes[1].replicas.holding(0, GENERATION) is None


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.4])
def test_an_aborted_fetch_leaves_its_memory_to_the_trainer(make: Make, pause_s: float) -> None:
    """The next one has other memory, and whatever the trainer still writes is not in it."""
    nodes = make(DeviceLinks(interface="lo", bytes_per_s=20.0 * CHUNK))
    node = nodes[1]
    node.fetch(0)
    until = time.monotonic() + pause_s
    run(nodes, lambda: time.monotonic() > until)
    former = node.replicas._replicas.get((0, 0, False))
    exchanging = any(b.exchange is not None for b in node.replicas._fetches.values())
    assert exchanging or pause_s < 0.4
    node.replicas.abort(p.AbortFetch(rank=0, generation=GENERATION, slot=0, reason="test"))
    node.fetch(0)
    run(nodes, lambda: bool(node.told))
    assert [type(answer) for answer in node.told] == [p.ShardFetched]
    assert node.holds(0)
    if exchanging:
        assert node.replicas._replicas[0, 0, False] is not former
    later = time.monotonic() + 0.3
    run(nodes, lambda: time.monotonic() > later)
    assert node.holds(0)


@pytest.mark.parametrize("late", [False, True], ids=["asked", "looked up"])
@pytest.mark.slow
def test_a_fetch_that_is_aborted_as_it_starts_ends_quietly(
    make: Make, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Its thread holds memory that is discarded: it neither raises nor writes."""
    nodes = make(DeviceLinks(interface="lo", bytes_per_s=20.0 * CHUNK))
    node = nodes[1]
    started: list[ShardFetch] = []
    raised: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))

    def abort() -> None:
        node.replicas.abort(p.AbortFetch(rank=0, generation=GENERATION, slot=0, reason="test"))

    def start(fetch: ShardFetch, *words: Any) -> bool:
        started.append(fetch)
        if len(started) == 1 and not late:
            abort()
        return real_start(fetch, *words)

    def find(other: int) -> tuple[str, int]:
        if len(started) == 1 and late:
            abort()
        return real_find(other)

    real_start, real_find = ShardFetch.start, node.replicas._find
    monkeypatch.setattr(ShardFetch, "start", start)
    monkeypatch.setattr(node.replicas, "_find", find)
    node.fetch(0)
    run(nodes, lambda: bool(started) and started[0].is_over())
    node.fetch(0)
    run(nodes, lambda: bool(node.told))
    assert node.holds(0)
    assert not raised


def test_a_trainer_that_dies_ends_its_exchanges(make: Make) -> None:
    """At once; the copy comes from host memory."""
    nodes = make(DeviceLinks(interface="lo", bytes_per_s=10.0 * CHUNK))
    nodes[1].fetch(0)
    run(nodes, lambda: any(b.exchange is not None for b in nodes[1].replicas._fetches.values()))
    nodes[1].exchanges.trainer_gone(1)
    run(nodes, lambda: bool(nodes[1].told))
    assert nodes[1].holds(0)
    assert nodes[1].copied == [False]
    assert any("is gone" in line for line in nodes[1].logged)


def test_an_own_slot_that_is_used_again_is_not_sent(make: Make) -> None:
    """The snapshot has the right of way: its fetch ends, and nothing half-way is sealed."""
    nodes = make(DeviceLinks(interface="lo", bytes_per_s=20.0 * CHUNK))
    nodes[1].fetch(0)
    run(nodes, lambda: bool(nodes[0].exchanges._under_way))
    began = time.monotonic()
    nodes[0].replicas.overwritten(0, 0)
    assert time.monotonic() - began < 0.5
    nodes[0].memory.of(0).clear(0)
    run(nodes, lambda: bool(nodes[1].told))
    (failed,) = nodes[1].told
    assert isinstance(failed, p.FetchFailed)
    assert nodes[1].replicas.holding(0, GENERATION) is None


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every exchange ends."""
    before = threading.active_count()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before
