"""The guard refuses to endanger the last good checkpoint, whatever a plan says."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.protocol.messages import CatalogueEntry
from autockpt.executors.storage.guard import check_deletions, check_reduction, is_good
from autockpt.values.errors import GuardError
from autockpt.values.generation import Generation


def g(step: int) -> Generation:
    """One generation."""
    return Generation(term=1, step=step)


def entry(step: int, **marks: object) -> CatalogueEntry:
    """A verified good commit, unless said otherwise."""
    values: dict[str, object] = {"verified": True} | marks
    return CatalogueEntry(generation=g(step), step=step, world_size=1, **values)  # type: ignore[arg-type]


def test_older_ones_may_go() -> None:
    """A newer good and verified one stays."""
    check_deletions((entry(1), entry(2), entry(3)), (g(1), g(2)))
    check_deletions((entry(1), entry(2)), ())


def test_what_others_are_differences_to_may_not_go() -> None:
    """Until they go too."""
    chain = (entry(1), entry(2, records=({"base": g(1).name},)), entry(3))
    with pytest.raises(
        GuardError, match=r"step 1 \(term 1\): others that stay are stored as differences to it"
    ):
        check_deletions(chain, (g(1),))
    check_deletions(chain, (g(1), g(2)))


@pytest.mark.parametrize(
    ("catalogue", "deletions", "message"),
    [
        ((entry(1),), (g(1),), "step 1 (term 1): is the newest good checkpoint"),
        ((entry(1), entry(2)), (g(1), g(2)), "step 1 (term 1): is the newest good"),
        ((entry(1), entry(2)), (g(2),), "step 2 (term 1): is the newest good"),
        ((entry(1), entry(2, corrupt=True)), (g(1),), "step 1 (term 1): is the newest good"),
        ((entry(1), entry(2, health="suspect")), (g(1),), "step 1 (term 1): is the newest good"),
        ((entry(1), entry(2, quarantined=True)), (g(1),), "step 1 (term 1): is the newest good"),
        ((entry(1), entry(2, verified=False)), (g(1),), "no verified checkpoint would stay"),
        ((entry(1), entry(2)), (g(3),), "step 3 (term 1): has no COMMIT of this run"),
        ((), (g(1),), "has no COMMIT"),
        ((entry(1, quarantined=True), entry(2)), (g(1),), "quarantined by a person"),
        ((entry(1, pinned="paper"), entry(2)), (g(1),), "is pinned as 'paper' and stays"),
    ],
)
def test_what_would_endanger_the_last_good_one_is_refused(
    catalogue: tuple[CatalogueEntry, ...], deletions: tuple[Generation, ...], message: str
) -> None:
    """And the message says which and why."""
    with pytest.raises(GuardError, match=re.escape(message)):
        check_deletions(catalogue, deletions)


def test_what_is_no_good_may_go_at_any_time() -> None:
    """A corrupt or suspect commit protects nobody."""
    check_deletions((entry(1), entry(2, corrupt=True, verified=False)), (g(2),))
    check_deletions((entry(1), entry(2, health="bad", verified=False)), (g(2),))
    check_deletions((entry(1, corrupt=True, verified=False),), (g(1),))


MARKS = st.fixed_dictionaries(
    {
        "verified": st.booleans(),
        "corrupt": st.booleans(),
        "quarantined": st.booleans(),
        "pinned": st.sampled_from(["", "paper"]),
        "health": st.sampled_from(["good", "suspect", "bad"]),
    }
)


@given(marks=st.lists(MARKS, max_size=6), chosen=st.sets(st.integers(0, 6)))
def test_whatever_passes_leaves_the_newest_good_one(
    marks: list[dict[str, object]], chosen: set[int]
) -> None:
    """For every catalogue and every wish."""
    catalogue = tuple(entry(i, **each) for i, each in enumerate(marks))
    deletions = tuple(g(i) for i in sorted(chosen))
    try:
        check_deletions(catalogue, deletions)
    except GuardError:
        return
    good = [one for one in catalogue if is_good(one)]
    staying = [one for one in good if one.generation not in deletions]
    assert good[-1:] == staying[-1:]
    assert any(one.verified for one in staying) or not any(one.verified for one in good)
    assert not any(one.pinned for one in catalogue if one.generation in deletions)
    assert not any(one.quarantined for one in catalogue if one.generation in deletions)


WEIGHTS = ({"weights_only": True},)


def test_weights_are_no_checkpoint_to_fall_back_on() -> None:
    """A whole one has to stay."""
    with pytest.raises(GuardError, match="newest good checkpoint"):
        check_deletions((entry(1), entry(2, records=WEIGHTS)), (g(1),))


def test_optimizer_state_goes_below_two_whole_ones_only() -> None:
    """Whatever a plan says."""
    check_reduction((entry(1), entry(2), entry(3)), g(1))
    for third in ({"verified": False}, {"records": WEIGHTS}, {"health": "suspect"}):
        with pytest.raises(GuardError, match="1 verified ones are newer, expected 2"):
            check_reduction((entry(1), entry(2), entry(3, **third)), g(1))
    for marks, said in (({"pinned": "a"}, "pinned as 'a'"), ({"quarantined": True}, "by a person")):
        with pytest.raises(GuardError, match=f"{said} and stays whole"):
            check_reduction((entry(1, **marks), entry(2), entry(3)), g(1))
    with pytest.raises(GuardError, match="stored as differences to it"):
        check_reduction((entry(1), entry(2, records=({"base": g(1).name},)), entry(3)), g(1))
    with pytest.raises(GuardError, match="has no COMMIT"):
        check_reduction((entry(2), entry(3)), g(1))
