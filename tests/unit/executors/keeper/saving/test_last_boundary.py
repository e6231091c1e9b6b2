"""Which boundary is sealed after a death, if any, and what the dead rank's slot then holds."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.saving import boundary_record as records
from autockpt.executors.keeper.saving.last_boundary import FOLLOW_S, REACH_S, LastBoundary, choose
from autockpt.executors.keeper.server import Keeper
from autockpt.executors.keeper.slots import BOARD_BYTES, CELL_HELD, MemoryTable
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.values.generation import Generation


def at(*steps: int) -> list[Generation]:
    """Boundaries that a dead rank has recorded."""
    return [Generation(term=3, step=step) for step in steps]


def test_survivors_at_the_dead_ranks_boundary_seal_it_at_once() -> None:
    """The usual case: they wait in a collective."""
    assert choose([at(11, 12)], [12, 12, 12], 0.0) == at(12)[0]


def test_a_survivor_within_its_step_is_waited_for() -> None:
    """It comes to the boundary that the dead rank had reached, or time is up."""
    assert choose([at(11, 12)], [0], 0.0) is None
    assert choose([at(11, 12)], [12, 0], REACH_S / 2) is None
    assert "begun a step" in str(choose([at(11, 12)], [12, 0], REACH_S))


def test_survivors_one_boundary_behind_may_follow_first() -> None:
    """Then the boundary that they hold is sealed: all of them hold it whole."""
    assert choose([at(11, 12)], [11, 11], 0.0) is None
    assert choose([at(11, 12)], [11, 11], FOLLOW_S) == at(11)[0]
    assert choose([at(11, 12)], [11, 12], FOLLOW_S) is None


def test_a_survivor_ahead_of_the_record_makes_it_impossible() -> None:
    """Random state and buffers of the dead rank at that boundary are in no memory."""
    assert "ahead" in str(choose([at(11, 12)], [13], 0.0))
    assert "ahead" in str(choose([at(11, 12)], [12, 13], 0.0))


def test_several_dead_ranks_need_a_boundary_that_all_have_recorded() -> None:
    """The newest of them."""
    assert choose([at(11, 12), at(10, 11)], [11], FOLLOW_S) == at(11)[0]
    assert "no record" in str(choose([at(11), at(12)], [12], 0.0))
    assert "no record" in str(choose([], [12], 0.0))


G = Generation(term=3, step=12)
IMAGE = bytes(4096) + b"shared part".ljust(4096, b".") + b"own.".ljust(4096, b"-")
"""Boundary group, a part that others hold too, and a step count that none of them holds."""
HEAD = records.RecordHead(
    generation=G, image_bytes=len(IMAGE), boundary_end=4096, layout_digest="ab", replicas="cd",
    own_ranges=((8192, 8196),),
)  # fmt: skip


class Node:
    """Two ranks of one node; rank 1 has recorded a boundary that rank 0 holds."""

    def __init__(self, *, began: wire.SnapshotBegan | None = None) -> None:
        self.memory, self.sent, self.copied = MemoryTable(), list[Any](), list[Any]()
        self.told, self.lost = list[tuple[Generation | None, str]](), list[int]()
        self.slot = Arena.create_shared(len(IMAGE), name="slot")
        self.record = Arena.create_sparse(records.record_bytes(len(IMAGE)), name="record")
        self.record.view[:4096], self.record.view[8192:8196] = IMAGE[:4096], IMAGE[8192:8196]
        records.write_head(self.record, HEAD)
        for rank in range(2):
            self.memory.of(rank).take_board(Arena.create_shared(BOARD_BYTES, name="board"))
        board = self.memory.of(0).board
        assert board is not None
        board.view.cast("Q")[CELL_HELD] = G.step
        self.memory.of(1).slots = [self.slot]
        self.memory.of(1).take_records([self.record])
        slots = SimpleNamespace(writing=lambda _: SimpleNamespace(doomed=False, index=0))
        self.state = SimpleNamespace(
            nodes=(0, 0), phase="open", ranks=[SimpleNamespace(slots=slots)] * 2,
            memory_committed=None,
        )  # fmt: skip
        begun = {0: snapshot(0), **({1: began} if began else {})}
        shards = SimpleNamespace(
            began=lambda rank, _: begun.get(rank), snapshot_copied=self.copied.append,
            snapshot_began=lambda message: begun.update({message.rank: message}),
        )  # fmt: skip
        self.boundary = LastBoundary(
            state=lambda: cast(Any, self.state), memory=self.memory, shards=cast(Any, shards),
            tell=lambda event: None,
            send=lambda rank, order, descriptors: self.sent.append(order),
            lost=lambda gone: self.lost.append(gone.rank),
            report=lambda generation, ranks, took_s, reason: self.told.append((generation, reason)),
        )  # fmt: skip
        self.trainers: dict[int, Any] = {
            rank: SimpleNamespace(rank=rank, leaving="") for rank in range(2)
        }

    def close(self) -> None:
        """Gives its memory back."""
        self.slot.close()
        for rank in range(2):
            self.memory.of(rank).take_board(None)

    def die(self) -> bool:
        """Rank 1 is killed; whether the loss is put off."""
        return self.boundary.put_off(self.trainers[1], self.trainers)

    def survive(self) -> None:
        """Rank 0 writes what it shares with the dead one."""
        self.slot.view[4096:8192] = IMAGE[4096:8192]
        self.boundary.answered(
            wire.BoundarySealed(rank=0, generation=G, ranks=(1,), replicas=(), refusal="")
        )


def snapshot(rank: int, layout: str = "ab") -> wire.SnapshotBegan:
    """An ordinary save of the same boundary has begun."""
    return wire.SnapshotBegan(
        rank=rank, generation=G, step=G.step, slot=0, image_bytes=len(IMAGE), boundary_end=4096,
        layout_digest=layout, writers=1, chunk_bytes=4096, direct_io=False, streaming=True,
        codec="none",
    )  # fmt: skip


@pytest.fixture(params=["not begun", "begun"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """Before or behind the beginning of the dead rank's own save of that boundary."""
    made = Node(began=snapshot(1) if request.param == "begun" else None)
    made.slot.view[:] = b"x" * len(IMAGE)  # of the checkpoint before
    if request.param == "begun":
        made.slot.view[:4096] = IMAGE[:4096]  # its copy thread had come so far
    yield made
    made.close()


def test_the_slot_of_the_dead_rank_holds_its_own_state(node: Node) -> None:
    """A save that it had begun ended with it, in front of what no survivor holds."""
    assert node.die()
    assert [type(order) for order in node.sent] == [wire.SealBoundary]
    node.survive()
    assert [message.rank for message in node.copied] == [1]
    assert bytes(node.slot.view[:8196]) == IMAGE[:8196]
    assert node.memory.of(1).copied(0) == len(IMAGE)


def test_a_begun_save_of_another_form_is_not_completed() -> None:
    """Its places are others than those of the record."""
    node = Node(began=snapshot(1, layout="other"))
    before = bytes(node.slot.view)
    assert node.die()
    assert bytes(node.slot.view) == before
    assert (node.sent, node.lost) == ([], [1])
    assert node.told == [(G, "the image of rank 1 has another form")]
    node.close()


def test_a_death_that_seals_nothing_is_told_once() -> None:
    """With the reason; not of the ranks that the launcher ends behind it."""
    node = Node()
    records.clear_head(node.record)
    assert not node.die()
    assert node.told == [(None, "it left no whole record")]
    del node.trainers[1]
    node.memory.of(0).take_records([node.record])
    assert not node.boundary.put_off(node.trainers[0], node.trainers)
    assert len(node.told) == 1
    node.memory.of(0).records = []
    node.close()


def test_a_death_of_a_rank_that_records_nothing_is_not_told() -> None:
    """It has said why, or was never to record any."""
    node = Node()
    node.memory.of(1).records = []
    assert not node.die()
    assert node.told == []
    node.record.close()
    node.close()


@pytest.mark.parametrize(
    ("refusal", "version", "ended"),
    [
        (None, wire.WIRE_VERSION, ["the ranks have been started again"]),
        ("rank 0 is live", wire.WIRE_VERSION, []),
        (None, wire.WIRE_VERSION - 1, []),
    ],
)
def test_only_the_next_start_ends_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str | None,
    version: int,
    ended: list[str],
) -> None:
    """A second start by mistake is refused, and the survivors go on sealing."""
    (tmp_path / "run").mkdir()
    keeper = Keeper(str(tmp_path / "run"), 0, str(tmp_path / "checkpoints"))
    told: list[str] = []
    incarnation = p.Incarnation(launch_id="another", restart_round=0)
    hello = wire.Hello(
        wire_version=version, pid=1, rank=0, launcher_pid=1, slots_held=0, slot_chunk_bytes=0,
        slot_image_bytes=0, control_host="", launched=True,
        attach=p.TrainerAttached(
            rank=0, incarnation=incarnation, world_size=1, nodes=(0,), slots=0
        ),
    )  # fmt: skip
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with monkeypatch.context() as patched:
            patched.setattr(keeper._boundary, "end", told.append)
            patched.setattr(keeper._protocol, "attach_refusal", lambda attach: refusal)
            keeper._hello(wire.Connection(ours), hello, [])
        assert told == ended
        assert theirs.recv(4096), "it is refused: it brought no board, or is no next start"
        keeper._leave_when_drained = True
        listener, other = socket.socketpair()
        with listener, other:
            keeper.serve(listener)
