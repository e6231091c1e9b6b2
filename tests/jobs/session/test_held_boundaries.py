"""A rank that holds its boundaries: what it says where it cannot, and that no error leaves it."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.saving import boundary_record as records
from autockpt.executors.keeper.slots import BOARD_BYTES, CELL_HELD
from autockpt.executors.linux.memory import Arena
from autockpt.session.boundaries import last_boundary
from autockpt.session.boundaries.last_boundary import BoundaryHolder
from autockpt.session.saving import Saver
from autockpt.values.errors import NoRoomError
from autockpt.values.generation import Generation
from tests.unit.executors.snapshot.test_replica_check import Replica, job

G = Generation(term=1, step=7)
PATIENCE_S = 60.0
MADE: list[Arena] = []


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Records are given back at the end."""
    yield
    while MADE:
        MADE.pop().close()


class Client:
    """A keeper that grants the slot at once."""

    def __init__(self, slot: Arena) -> None:
        self.board = Arena.anonymous(BOARD_BYTES)
        self.slots, self.window_bytes, self.image_bytes = [slot], 0, slot.nbytes
        self.records, self.sent = list[Arena](), list[wire.BoundarySealed]()
        self.withdrawn, self.copied = list[str](), 0
        self.saves = SimpleNamespace(get=lambda _: None, begin=lambda save, disk: 0)

    def give_records(self, made: list[Arena]) -> bool:
        """As of the real one."""
        self.records = made
        MADE.extend(made)
        return True

    def ask(self, generation: Generation, *, disk: bool) -> object:
        """A request that is answered."""
        return SimpleNamespace(generation=generation, is_answered=True, disk=disk)

    def wait_until(self, done: Any, timeout_s: float) -> bool:
        """There is nothing to wait for."""
        return bool(done())

    def withdraw(self, save: object, reason: str) -> None:
        """The slot is given back."""
        self.withdrawn.append(reason)

    def report_copied(self, save: object, proofs: object) -> None:
        """The slot holds the state."""
        self.copied += 1

    def send(self, message: wire.BoundarySealed) -> None:
        """To the keeper."""
        self.sent.append(message)


class Rank:
    """Rank 0 of two with the same state."""

    def __init__(self, replica: Replica, *, nodes: tuple[int, ...] = (0, 0), **others: Any) -> None:
        self.client, self.told = Client(replica.arena), list[tuple[str, str]]()
        goal = SimpleNamespace(restart=SimpleNamespace(last_boundary="on"))
        told_job = SimpleNamespace(
            goal=goal, world_size=len(nodes), nodes=nodes, rank=0, run_directory="", node=0
        )
        rank = SimpleNamespace(
            client=self.client, job=told_job, live=SimpleNamespace(others=others),
            snapshotter=replica.shooter, rebuilding=None,
            report_degraded=lambda what, reason: self.told.append((what, reason)),
        )  # fmt: skip
        self.began = threading.Event()
        self.goes_on = threading.Event()
        position = SimpleNamespace(progress=lambda: {"step": G.step})
        saver = SimpleNamespace(report_began=self._wait)
        self.holder = BoundaryHolder(cast(Any, rank), cast(Any, position), cast(Any, saver))

    def _wait(self, save: object, layout: object) -> None:
        """Stands still within the copy."""
        self.began.set()
        assert self.goes_on.wait(PATIENCE_S)

    def hold(self, after: Any = lambda: None) -> bool:
        """At the boundary."""
        return self.holder.is_wanted() and self.holder.hold(G, None, after)

    def seal(self) -> None:
        """Another rank died, which shared nothing that this one has to write."""
        order = wire.SealBoundary(rank=0, generation=G, ranks=(), replicas=())
        self.holder.seal(order, [])

    def answer(self) -> wire.BoundarySealed:
        """The next one to the keeper."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.client.sent:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self.client.sent.pop()


@pytest.fixture
def replica() -> Iterator[Replica]:
    """Its optimizer has stepped."""
    with job([0, 0]) as ranks:
        yield ranks[0]


def test_an_error_behind_a_held_boundary_does_not_reach_the_optimizer(replica: Replica) -> None:
    """What was put off until the state changes may fail; the training goes on."""

    def fail() -> None:
        raise RuntimeError("no slot")

    rank = Rank(replica)
    assert rank.hold(fail)
    rank.holder.release()
    assert rank.told == [("snapshot", "RuntimeError: no slot")]


@pytest.mark.parametrize(
    ("nodes", "others", "window_bytes", "reason"),
    [
        ((0,), {}, 0, "no other rank"),
        ((0, 1), {}, 0, "several nodes"),
        ((0, 0), {"mine": Client}, 0, "type, which is attached"),
        ((0, 0), {}, 4096, "streams"),
    ],
)
def test_a_job_that_can_hold_none_says_so_once(
    replica: Replica, nodes: tuple[int, ...], others: dict[str, Any], window_bytes: int, reason: str
) -> None:
    """It was asked for."""
    rank = Rank(replica, nodes=nodes, **others)
    rank.client.window_bytes = window_bytes
    for _ in range(3):
        assert not rank.hold()
    assert [what for what, _ in rank.told] == ["last boundary"]
    assert reason in rank.told[0][1]


def test_a_state_of_this_rank_alone_is_said_once() -> None:
    """Ranks of two nodes are replicas of each other, and the keeper of each sees one of them."""
    with job([0, 1]) as ranks:
        rank = Rank(ranks[0])
        assert not any(rank.hold() for _ in range(3))
    ((what, reason),) = rank.told
    assert (what, "no other rank of this node" in reason) == ("last boundary", True)


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [(last_boundary, "LARGEST_BYTES", "buffers"), (records, "HEAD_BYTES", "too many places")],
)
def test_a_boundary_that_outgrows_its_record_is_said_once(
    monkeypatch: pytest.MonkeyPatch, replica: Replica, module: Any, name: str, reason: str
) -> None:
    """The keeper must not take it for held."""
    monkeypatch.setattr(module, name, 64)
    rank = Rank(replica)
    assert not any(rank.hold() for _ in range(3))
    ((what, told),) = rank.told
    assert (what, reason in told) == ("last boundary", True)
    assert rank.client.board.view.cast("Q")[CELL_HELD] == 0


def test_no_record_is_made_where_the_memory_is_not_there(
    monkeypatch: pytest.MonkeyPatch, replica: Replica
) -> None:
    """Beyond the limit of a control group it would end the training."""
    asked: list[int] = []

    def refuse(nbytes: int, *, what: str) -> None:
        asked.append(nbytes)
        raise NoRoomError(f"{what}: no memory")

    monkeypatch.setattr(last_boundary, "require_headroom", refuse)
    rank = Rank(replica)
    assert not any(rank.hold() for _ in range(3))
    assert (len(asked), rank.client.records, len(rank.told)) == (1, [], 1)
    assert replica.shooter.layout is not None
    assert asked[0] >= 2 * replica.shooter.layout.boundary_end


def test_a_copy_that_took_too_long_is_refused_and_the_next_is_not(
    monkeypatch: pytest.MonkeyPatch, replica: Replica
) -> None:
    """The training waits for the first one at most for `SEAL_S`, then changes its state."""
    monkeypatch.setattr(last_boundary, "SEAL_S", 0.01)
    rank = Rank(replica)
    assert rank.hold()
    rank.seal()
    assert rank.began.wait(PATIENCE_S)
    rank.holder.release()
    assert not rank.hold(), "its record may still be read"
    rank.goes_on.set()
    assert "by a step" in rank.answer().refusal
    assert (rank.client.copied, len(rank.client.withdrawn)) == (0, 1)
    assert rank.hold()
    rank.seal()
    assert rank.answer().refusal == ""
    assert (rank.client.copied, rank.told) == (1, [])


def test_a_seal_is_told_once() -> None:
    """The fence and the copy thread may come to it at one time; not before all is measured."""
    told: list[Any] = []
    saver: Any = Saver.__new__(Saver)
    saver._rank, saver._job = SimpleNamespace(emit=told.append), SimpleNamespace(rank=0)
    snapshot: Any = SimpleNamespace(
        lock=threading.Lock(), settled=True, judged=False, told=False, error=None, changed=[],
        boundary_stall_s=0.1, fence_stall_s=0.2, copy_s=0.0, task=SimpleNamespace(use=None),
        layout=SimpleNamespace(image_bytes=8),
    )  # fmt: skip
    save: Any = SimpleNamespace(generation=Generation(term=1, step=2), step=2)
    saver._report_sealed(save, snapshot)
    assert told == []
    snapshot.judged, snapshot.copy_s = True, 3.0
    for _ in range(2):
        saver._report_sealed(save, snapshot)
    assert [event.copy_s for event in told] == [3.0]
