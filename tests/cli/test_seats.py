"""Nodes keep their numbers when others are replaced."""

from hypothesis import given
from hypothesis import strategies as st

from autockpt.cli.seats import Claim, seats

NEW = Claim()


def held(seat: int) -> Claim:
    """A launcher that sat there."""
    return Claim(held=seat)


def test_a_first_start_takes_the_order_of_the_rendezvous() -> None:
    """Nobody claims anything."""
    assert seats([NEW] * 4) == (0, 1, 2, 3)


def test_survivors_stay_and_a_replacement_takes_the_empty_seat() -> None:
    """Node 1 was lost; its replacement sorts last, so the rendezvous moved 2 and 3 down."""
    assert seats([held(0), held(2), held(3), NEW]) == (0, 2, 3, 1)


def test_a_new_launcher_follows_its_dead_one_to_the_keeper() -> None:
    """Also past another newcomer; a seat that somebody holds is not taken from him."""
    assert seats([NEW, Claim(kept=(0,)), held(2)]) == (1, 0, 2)
    assert seats([Claim(kept=(2, 0)), NEW, held(2)]) == (0, 1, 2)


def test_a_seat_that_is_no_more_is_no_claim() -> None:
    """Two nodes go on without the third: the numbers stay below two."""
    assert sorted(seats([held(2), held(1)])) == [0, 1]
    assert seats([held(2), held(1)])[1] == 1


@given(
    st.lists(
        st.builds(
            Claim,
            held=st.none() | st.integers(0, 9),
            kept=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
        min_size=1, max_size=9,
    )
)  # fmt: skip
def test_every_seat_has_one_node_and_who_sits_stays(claims: list[Claim]) -> None:
    """A permutation; the first who claims to sit somewhere that exists does."""
    found = seats(claims)
    assert sorted(found) == list(range(len(claims)))
    for number, claim in enumerate(claims):
        first = [c.held for c in claims].index(claim.held) == number
        if first and claim.held is not None and claim.held < len(claims):
            assert found[number] == claim.held
