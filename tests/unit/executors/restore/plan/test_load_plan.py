"""A load plan can be read before anything is restored: sources, resharding, and what is missing."""

import os
from pathlib import Path

import pytest
import torch

from autockpt.executors.restore.plan.load_plan import LoadPlan
from autockpt.executors.restore.reader import plan_restore, restore_shards
from autockpt.executors.restore.shard_sources import shards_on_disk
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import ShardFileSource
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.simulated import Rank, save


def planned(folder: str, rank: Rank, number: int, world_size: int) -> LoadPlan:
    """The plan of one rank."""
    return plan_restore(shards_on_disk(folder, number, world_size), rank.state)


def test_a_plan_names_the_shard_of_every_byte(tmp_path: Path) -> None:
    """As it was saved: all of it from the shard of this rank."""
    ranks = [Rank(r, (0, 0)) for r in range(2)]
    for rank in ranks:
        rank.place = None  # nothing is left out of a shard
    plan = planned(save(str(tmp_path), ranks), Rank(1, (0, 0), seed=99), 1, 2)
    state = ranks[1].state.tensors
    assert (plan.refusals, plan.merged, plan.exact) == ((), (), True)
    assert {tensor.name for tensor in plan.tensors} >= set(state)
    assert not any(tensor.resharded for tensor in plan.tensors)
    taken = plan.bytes_by_shard()
    assert set(taken) == {1}
    assert taken[1] >= sum(tensor.nbytes for tensor in state.values())


def test_a_plan_for_other_ranks_takes_shared_tensors_from_several_shards(tmp_path: Path) -> None:
    """Two ranks stored a half each of what both had."""
    folder = save(str(tmp_path), [Rank(r, (0, 0)) for r in range(2)])
    plan = planned(folder, Rank(0, (0,), seed=99), 0, 1)
    assert set(plan.bytes_by_shard()) == {0, 1}
    assert (plan.merged, plan.exact) == ((0, 1), False)


def test_planning_reads_no_tensor_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers have digests of their own; no chunk is read for them."""
    folder = save(str(tmp_path), [Rank(0, (0,), width=4000)])
    new = Rank(0, (0,), seed=99, width=4000)
    was = new.contents()

    def read(self: ShardFileSource, chunk: int, memory: memoryview) -> memoryview:
        raise AssertionError(f"chunk {chunk} of {os.path.basename(self.path)} was read")

    monkeypatch.setattr(ShardFileSource, "read", read)
    assert planned(folder, new, 0, 1).refusals == ()
    assert new.contents() == was


def test_a_plan_lists_everything_that_does_not_fit(tmp_path: Path) -> None:
    """A restore stops at the first misfit and says it; the plan has all of them."""
    folder = save(str(tmp_path), [Rank(0, (0,))])
    other = torch.nn.Sequential(
        torch.nn.Linear(40, 65), torch.nn.BatchNorm1d(65), torch.nn.Linear(65, 3, bias=False)
    )
    state = LiveState.of(model=other)
    plan = plan_restore(shards_on_disk(folder, 0, 1), state)
    assert len(plan.refusals) == 8  # the name, and seven tensors of another shape
    assert "checkpoint has 1 tensors the model has not, first 'model.2.bias'" in plan.refusals[0]
    assert any("model.0.weight: is (65, 40)" in refusal for refusal in plan.refusals)
    missing = {tensor.name for tensor in plan.tensors if not tensor.reads}
    assert {"model.0.weight", "model.2.weight"} <= missing
    with pytest.raises(ConfigError, match=r"first 'model\.2\.bias'"):
        restore_shards(shards_on_disk(folder, 0, 1), state)
