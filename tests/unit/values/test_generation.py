"""The line of history that a start continues, from the records of all starts."""

import pytest

from autockpt.values.generation import SCRATCH, Generation, Line


def at(term: int, step: int) -> Generation:
    return Generation(term=term, step=step)


STARTS = [(4, "step 60 (term 3)"), (3, "step 50 (term 1)"), (2, SCRATCH), (1, SCRATCH)]
"""Term 1 began from scratch; term 2 began anew; term 3 went back to term 1, term 4 goes on."""


@pytest.mark.parametrize(
    ("generation", "holds"),
    [(at(4, 90), True), (at(3, 60), True), (at(3, 70), False), (at(2, 10), False),
     (at(1, 50), True), (at(1, 300), False)],
)  # fmt: skip
def test_a_line_holds_what_leads_to_its_newest_start(generation: Generation, holds: bool) -> None:
    """What a failure, a rollback or a fresh start left behind is not on it."""
    line = Line.of(STARTS)
    assert (line.term, line.is_whole, line.resumed_step) == (4, True, 60)
    assert line.holds(generation) == holds
    assert line.names(str(generation)) == holds


def test_what_is_not_known_counts() -> None:
    """Records of an older version, lost or damaged ones take no checkpoint from anybody."""
    assert Line.of([]).holds(at(7, 1))
    for resumed in ("", "step ?"):
        line = Line.of([(4, "step 60 (term 3)"), (3, resumed)])
        assert not line.is_whole
        assert line.holds(at(2, 300))
        assert not line.holds(at(3, 70))
    assert Line.of([(2, SCRATCH)]).resumed_step == 0
    assert Line.of([(2, "")]).resumed_step is None
