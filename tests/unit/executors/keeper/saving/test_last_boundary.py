"""Which boundary is sealed after a death, if any: a pure choice."""

from autockpt.executors.keeper.saving.last_boundary import FOLLOW_S, REACH_S, choose
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
