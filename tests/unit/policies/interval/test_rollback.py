"""When a training goes back, how often, and which data it leaves out then."""

import math
import random

import pytest

from autockpt.policies.interval.rollback import (
    LEAST,
    LossWatch,
    batches_to_drop,
    rollbacks_beyond,
)
from autockpt.values.failure import RollbackRecord


def record(step: int, began: int, *, dropped: int = 0, skips: bool = True) -> RollbackRecord:
    """One rollback."""
    return RollbackRecord(
        step=step, began_step=began, dropped=dropped, skips=skips, reason="the loss is nan"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_one_at_once(loss: float) -> None:
    """Also the first one."""
    assert str(loss) in LossWatch().observe(loss)


def test_a_jump_is_told_from_the_noise_of_a_training() -> None:
    """A loss that falls from 10 to 2 with 20 % noise never jumps; ten times the median does."""
    chance, watch = random.Random(4), LossWatch()
    for step in range(2000):
        loss = (2.0 + 8.0 * math.exp(-step / 300)) * chance.uniform(0.8, 1.2)
        assert watch.observe(loss) == ""
    assert "the median of the 64 before it" in watch.observe(20.0)


def test_the_first_losses_are_no_measure() -> None:
    """Too few to know the spread."""
    watch = LossWatch()
    for _ in range(LEAST - 1):
        assert watch.observe(1.0) == ""
    assert watch.observe(100.0) == ""


def test_data_is_left_out_up_to_the_spike_and_no_further() -> None:
    """From the checkpoint at 10 to the spike at 14; nothing where a newer one is resumed."""
    spike = (record(14, 0),)
    assert batches_to_drop(spike, 10) == 4
    assert batches_to_drop(spike, 14) == 0
    assert batches_to_drop(spike, 20) == 0
    assert batches_to_drop((record(14, 0, skips=False),), 10) == 0
    assert batches_to_drop((), 10) == 0


def test_a_second_spike_leaves_out_what_the_first_did_as_well() -> None:
    """The process from 10 had left out 4, and trained 3 before it met the next one."""
    assert batches_to_drop((record(14, 0), record(13, 10, dropped=4)), 10) == 7
    # A checkpoint of that process has the data behind the four.
    assert batches_to_drop((record(14, 0), record(13, 10, dropped=4)), 12) == 1


def test_rollbacks_count_until_a_good_checkpoint_is_beyond_them() -> None:
    """Two from beyond 10; the older one was passed."""
    records = (record(8, 0), record(14, 10), record(13, 10))
    assert rollbacks_beyond(records, 10) == 2
    assert rollbacks_beyond(records, 13) == 0
