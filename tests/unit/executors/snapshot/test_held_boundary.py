"""A boundary that is held: what it becomes when another rank is dead, and when it is refused."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.keeper.saving import boundary_record as records
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.held_boundary import HeldBoundary
from autockpt.values.generation import Generation
from tests.unit.executors.snapshot.test_replica_check import Replica, job
from tests.unit.executors.states import step

G = Generation(term=1, step=7)


@contextmanager
def held(rank: Replica) -> Iterator[tuple[HeldBoundary, Arena, records.RecordHead]]:
    """The boundary of now, and its record."""
    made: list[Arena] = []

    def room(layout: Layout) -> Arena:
        made.append(Arena.create_sparse(records.record_bytes(layout.image_bytes), name="record"))
        return made[-1]

    found = rank.shooter.hold({"step": 7}, room)
    assert isinstance(found, HeldBoundary)
    layout = found.recipe.layout
    head = records.RecordHead(
        generation=G, image_bytes=layout.image_bytes, boundary_end=layout.boundary_end,
        layout_digest=layout.digest, replicas=found.digest, own_ranges=found.plan.own_ranges,
    )  # fmt: skip
    records.write_head(made[0], head)
    with ExitStack() as stack:
        stack.callback(made[0].close)
        yield found, made[0], head


def image_of(rank: Replica) -> bytes:
    """What the rank itself would save now."""
    rank.shooter.begin(rank.arena, {"step": 7}, lazy=False)
    rank.shooter.fence()
    assert rank.shooter.layout is not None
    return bytes(rank.arena.view[: rank.shooter.layout.image_bytes])


def empty_slot(head: records.RecordHead) -> Arena:
    """As a keeper would grant it."""
    return Arena.create_shared(head.image_bytes, name="slot")


@pytest.mark.parametrize("count", [2, 4])
def test_a_survivor_writes_what_the_dead_rank_would_have_saved(count: int) -> None:
    """Every byte, though the forward pass has changed buffers and random state since."""
    with job([0] * count) as ranks:
        for dead in ranks:
            survivor = ranks[(dead.rank + 1) % count]
            with held(dead) as (_, record, head), held(survivor) as (kept, _, theirs):
                wanted = image_of(dead)
                assert head.replicas == theirs.replicas
                torch.manual_seed(99)
                survivor.model(torch.randn(5, 40))
                slot = empty_slot(head)
                records.fill_slot(slot, head, record)
                assert kept.copy_for(dead.rank, slot, survivor.state) == ""
                assert kept.changed() == []
                assert bytes(slot.view[: head.image_bytes]) == wanted
                slot.close()


def test_its_own_image_is_that_of_the_boundary() -> None:
    """Buffers come from the record: the forward pass behind it has changed them."""
    with job([0, 0]) as ranks, held(ranks[0]) as (kept, _, head):
        wanted = image_of(ranks[0])
        ranks[0].model(torch.randn(5, 40))
        slot = empty_slot(head)
        kept.copy_into(slot)
        assert bytes(slot.view[: head.image_bytes]) == wanted
        slot.close()


def test_a_step_behind_the_boundary_is_found() -> None:
    """Also where no hook has told of it."""
    with job([0, 0]) as ranks, held(ranks[0]) as (kept, _, _):
        step(ranks[0].model, ranks[0].optimizer)
        assert kept.changed()


def test_an_image_of_another_form_is_refused() -> None:
    """A rank whose tensors are others is not written by guess."""
    with job([0, 0]) as ranks, held(ranks[0]) as (kept, _, _):
        ranks[1].model[2] = torch.nn.Linear(30, 4)
        ranks[1].shooter.close()
        other = Replica(1, [0, 0])
        other.model[0].weight.data = other.model[0].weight.data.double()  # type: ignore[operator,union-attr]
        with held(other) as (_, record, head):
            slot = empty_slot(head)
            records.fill_slot(slot, head, record)
            assert "another form" in kept.copy_for(1, slot, ranks[0].state)
            slot.close()
        other.shooter.close()


def test_a_state_that_nobody_else_holds_is_not_held() -> None:
    """One rank alone, or ranks of different nodes, go on as they always did."""
    with job([0, 1]) as ranks:
        found = ranks[0].shooter.hold({"step": 7}, lambda layout: pytest.fail("asked"))
        assert found == "no other rank of this node holds what this one holds"
