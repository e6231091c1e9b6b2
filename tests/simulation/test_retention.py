"""Which commits are deleted: worked examples, then properties."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.protocol import retention as rules
from autockpt.executors.protocol.messages import CatalogueEntry, TermParent
from autockpt.executors.protocol.retention import (
    counts,
    deletions,
    metrics_of,
    reductions,
    unpinned,
)
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention

CHAIN = (
    TermParent(term=2, parent=Generation(term=1, step=5)),
    TermParent(term=1, parent=None),
)


def entry(term: int, step: int, **more: object) -> CatalogueEntry:
    """A good commit; one second and one step per step."""
    base = CatalogueEntry(
        generation=Generation(term=term, step=step),
        step=step + 10 * term,
        world_size=1,
        created_s=step + 100.0 * term,
        verified=True,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def gone(entries: list[CatalogueEntry], keep_last: int, **more: object) -> list[str]:
    """Return 'term-step' of each that is deleted."""
    retention = Retention(keep_last=keep_last, **more)  # type: ignore[arg-type]
    return [f"{g.term}-{g.step}" for g in deletions(entries, retention, chain=CHAIN)]


def test_the_newest_stay_and_the_rest_goes() -> None:
    """Keep two of four."""
    assert gone([entry(1, s) for s in (1, 2, 3, 4)], 2) == ["1-1", "1-2"]


def test_what_was_not_read_back_pushes_nothing_out() -> None:
    """The two newest are unverified: the two before them are the last known good ones."""
    new = [entry(1, s, verified=False) for s in (3, 4)]
    assert gone([entry(1, 1), entry(1, 2), *new], 2) == []


def test_suspect_saves_cannot_expire_the_last_good_one() -> None:
    """NaN for hours: the good one stays."""
    nan = [entry(1, s, health="suspect") for s in (2, 3, 4, 5)]
    assert gone([entry(1, 1), *nan], 1) == []


def test_abandoned_commits_do_not_count_and_go_when_newer_ones_stand() -> None:
    """(1, 9) was left behind at (1, 5); it counts for nothing, and (2, 1) lets it go."""
    assert gone([entry(1, 5), entry(1, 9)], 1) == []
    assert gone([entry(1, 5), entry(1, 9), entry(2, 1)], 1) == [
        "1-5",
        "1-9",
    ]


def difference(step: int, base: int) -> CatalogueEntry:
    """A commit whose shards need those of an older one."""
    return entry(1, step, records=({"base": Generation(term=1, step=base).name},))


def test_bases_stay_as_long_as_somebody_needs_them() -> None:
    """Directly or through others; a chain that nobody keeps goes as a whole."""
    chain = [entry(1, 1), difference(2, 1), difference(3, 2), difference(4, 3)]
    assert gone(chain, 1) == []
    assert gone([*chain, entry(1, 5)], 1) == [
        "1-1",
        "1-2",
        "1-3",
        "1-4",
    ]
    assert gone([*chain, entry(1, 5)], 2) == []


def test_the_base_of_a_save_under_way_stays() -> None:
    """And what that needs."""
    entries = [entry(1, 1), difference(2, 1), entry(1, 3)]
    pinned = frozenset({Generation(term=1, step=2)})
    assert deletions(entries, Retention(keep_last=1), chain=CHAIN, pinned=pinned) == ()


def test_a_base_that_is_no_generation_needs_nothing() -> None:
    """A COMMIT is somebody else's text."""
    odd = [entry(1, 1, records=({"base": "../x"}, {"base": 7}, {"base": ""})), entry(1, 2)]
    assert gone(odd, 1) == ["1-1"]


def test_quarantined_and_pinned_ones_stay() -> None:
    """A person, or a delta, still needs them."""
    entries = [entry(1, 1, quarantined=True), entry(1, 2), entry(1, 3), entry(1, 4)]
    assert gone(entries, 1) == ["1-2", "1-3"]
    pinned = frozenset({Generation(term=1, step=2)})
    kept = deletions(entries, Retention(keep_last=1), chain=CHAIN, pinned=pinned)
    assert list(kept) == [Generation(term=1, step=3)]


def test_one_per_interval_is_kept_from_the_oldest_on() -> None:
    """Every third second of six, and the newest."""
    entries = [entry(1, s) for s in (0, 1, 2, 3, 4, 5)]
    assert gone(entries, 1, keep_every_s=3.0) == [
        "1-1",
        "1-2",
        "1-4",
    ]
    assert gone(entries, 1, keep_every_steps=4) == [
        "1-1",
        "1-2",
        "1-3",
    ]


def valued(step: int, loss: object, **more: object) -> CatalogueEntry:
    """A commit whose first rank reported a loss."""
    return entry(2, step, records=({"metrics": {"loss": loss}}, {"metrics": {"loss": 0}}), **more)


def test_the_best_by_a_metric_stay() -> None:
    """The lowest rank counts; of two equal ones the newer is kept; of the unread the best too."""
    entries = [valued(1, 0.2), valued(2, 0.2), valued(3, 0.9), valued(4, 0.1, verified=False)]
    entries += [entry(2, 5), valued(6, 0.5)]
    assert gone(entries, 1, keep_best=1) == ["2-1", "2-3", "2-5"]
    assert gone(entries, 1, keep_best=2) == ["2-3", "2-5"]
    assert gone(entries, 1, keep_best=1, metric="max loss") == ["2-1", "2-2", "2-5"]
    assert gone(entries, 1, keep_best=9, metric="min other") == gone(entries, 1)


@pytest.mark.parametrize("odd", ["0.1", None, [], math.nan, -math.inf, {}])
def test_values_that_are_no_numbers_are_none(odd: object) -> None:
    """A COMMIT is text of another program, perhaps."""
    assert metrics_of(({"metrics": {"loss": odd}}, {"metrics": "x"}, {})) == {}


def test_what_is_kept_by_distance_has_an_age() -> None:
    """The newest stay however old they are."""
    entries = [entry(2, step) for step in (0, 3, 6, 9, 10, 11)]
    assert gone(entries, 1, keep_every_s=3.0, ttl_s=5.0) == ["2-0", "2-3", "2-10"]
    assert gone(entries, 5, keep_every_s=3.0, ttl_s=1.0) == ["2-0"]


@pytest.mark.parametrize("jump_s", [3.2e8, -3.2e8])
@pytest.mark.parametrize("at", [1, 4, 5])
def test_a_clock_that_is_wrong_for_a_while_expires_nothing(jump_s: float, at: int) -> None:
    """Ten years ahead or behind: what was kept by distance stays, or it is gone for good."""
    times = [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    times[at] += jump_s
    entries = [entry(2, step, created_s=s) for step, s in enumerate(times)]
    kept = {"2-0", "2-1", "2-2", "2-3", "2-4", "2-5"} - {*gone(entries, 1, keep_every_s=3.0)}
    with_age = gone(entries, 1, keep_every_s=3.0, ttl_s=100.0)
    assert not kept & {*with_age}


@pytest.mark.parametrize("at", [3, 17, 18, 19])
def test_a_clock_that_was_once_far_ahead_does_not_end_the_expiry(at: int) -> None:
    """What was kept before and after that goes at its time; the one with that time may stay."""
    times = [600.0 * step for step in range(30)]
    times[at] += 3.2e8
    entries = [entry(2, step, created_s=s) for step, s in enumerate(times)]
    left = set(range(30)) - {
        int(name[2:]) for name in gone(entries, 1, keep_every_s=600.0, ttl_s=5000.0)
    }
    assert left - {at} == {*range(19, 30)} - {at}


@pytest.mark.parametrize("jump_s", [3.2e8, -3.2e8])
@pytest.mark.parametrize("keep_last", [1, 2, 3])
@pytest.mark.parametrize("wrong", [{12}, {19}, {17, 18}, {28}, {29}, {27, 28}])
def test_a_clock_that_is_wrong_for_a_while_keeps_one_from_before_a_late_error(
    jump_s: float, keep_last: int, wrong: set[int]
) -> None:
    """One checkpoint per ten minutes, errors noticed within an hour: at each of them."""
    retention, kept = Retention(keep_last=keep_last, reach_s=3600.0), []
    for step in range(30):
        at_s = 600.0 * step
        kept = [*kept, entry(2, step, created_s=at_s + jump_s * (step in wrong))]
        doomed = set(deletions(kept, retention, chain=CHAIN))
        kept = [e for e in kept if e.generation not in doomed]
        assert min(e.generation.step for e in kept) <= max(0, step - 6)
        assert len(kept) <= max(2, keep_last) + 6 + len(wrong)


def test_pinned_ones_stay_with_their_bases() -> None:
    """Also where the run that deletes has not heard of the pin."""
    pinned = replace(difference(2, 1), pinned="paper")
    entries = [entry(1, 1), pinned, entry(1, 3), entry(1, 4)]
    assert gone(entries, 1) == ["1-3"]
    doomed = [one.generation for one in entries[:3]]
    assert unpinned(entries, doomed) == (Generation(term=1, step=3),)


entries_strategy = st.lists(
    st.builds(
        entry,
        st.integers(1, 2),
        st.integers(0, 9),
        verified=st.booleans(),
        corrupt=st.booleans(),
        quarantined=st.booleans(),
        pinned=st.sampled_from(("", "", "paper")),
        records=st.one_of(
            st.just(()), st.integers(0, 3).map(lambda loss: ({"metrics": {"loss": loss}},))
        ),
        health=st.sampled_from(("good", "suspect", "bad")),
        created_s=st.floats(0, 100),
    ),
    max_size=14,
    unique_by=lambda e: e.generation,
)
retentions = st.builds(
    Retention,
    keep_last=st.integers(0, 4),
    keep_every_s=st.one_of(st.none(), st.floats(1, 50)),
    keep_every_steps=st.one_of(st.none(), st.integers(1, 5)),
    reach_s=st.one_of(st.none(), st.floats(1, 50)),
    ttl_s=st.one_of(st.none(), st.floats(1, 50)),
    keep_best=st.integers(0, 3),
    metric=st.sampled_from(("min loss", "max loss")),
)


def test_a_clock_that_was_set_back_does_not_end_the_keeping() -> None:
    """Ten years back after the third: what follows is kept as before, from there on."""
    entries = [entry(2, s, created_s=s - (3.2e8 if s > 3 else 0.0)) for s in range(1, 10)]
    assert gone(entries, 1, keep_every_s=3.0) == [
        "2-2",
        "2-3",
        "2-5",
        "2-6",
        "2-8",
    ]
    assert "2-4" not in gone(entries, 1, reach_s=100.0)


@given(entries_strategy, retentions)
def test_enough_counted_ones_are_left_and_the_newest_among_them(
    entries: list[CatalogueEntry], retention: Retention
) -> None:
    """Never below keep_last counted ones, never the newest of anything."""
    doomed = set(deletions(entries, retention, chain=CHAIN))
    counted = [e.generation for e in entries if counts(e, CHAIN)]
    left = [g for g in counted if g not in doomed]
    assert len(left) >= min(max(1, retention.keep_last), len(counted))
    assert not counted or max(counted) in left
    assert not entries or max(e.generation for e in entries) not in doomed


@given(entries_strategy, retentions)
def test_the_best_and_the_pinned_are_never_deleted(
    entries: list[CatalogueEntry], retention: Retention
) -> None:
    """So many as are asked for, if there are; none that goes is better than one of them."""
    doomed = set(deletions(entries, retention, chain=CHAIN))
    assert not any(e.pinned for e in entries if e.generation in doomed)
    sign = -1 if retention.metric.startswith("max") else 1
    values = {
        e.generation: sign * e.records[0]["metrics"]["loss"]
        for e in entries
        if counts(e, CHAIN) and e.records
    }
    left = sorted(value for generation, value in values.items() if generation not in doomed)
    assert left[: retention.keep_best] == sorted(values.values())[: retention.keep_best]


@given(entries_strategy, retentions)
def test_deleting_again_deletes_nothing_more(
    entries: list[CatalogueEntry], retention: Retention
) -> None:
    """Idempotent, so a repeated instruction or a restart is harmless."""
    entries = in_order(entries)
    doomed = set(deletions(entries, retention, chain=CHAIN))
    rest = [e for e in entries if e.generation not in doomed]
    assert deletions(rest, retention, chain=CHAIN) == ()


@given(entries_strategy, retentions, st.integers(10, 20))
def test_newer_commits_never_save_an_older_one(
    entries: list[CatalogueEntry], retention: Retention, step: int
) -> None:
    """What is deleted today would be deleted after the next saves as well."""
    entries = in_order(entries)
    before = set(deletions(entries, retention, chain=CHAIN))
    newer = [entry(2, step + more) for more in range(3)]
    after = set(deletions([*entries, *newer], retention, chain=CHAIN))
    assert before <= after


def in_order(entries: list[CatalogueEntry]) -> list[CatalogueEntry]:
    """As a clock that is right has them."""
    times = sorted(entry.created_s for entry in entries)
    ordered = sorted(entries, key=lambda entry: entry.generation)
    return [replace(e, created_s=s) for e, s in zip(ordered, times, strict=True)]


@given(
    st.lists(st.floats(0.1, 30.0), min_size=1, max_size=80), st.floats(1, 100), st.integers(1, 3)
)
def test_a_checkpoint_from_before_a_late_error_is_kept(
    gaps: list[float], reach_s: float, keep_last: int
) -> None:
    """Once there was one of that age there always is, and it is little older than it has to be."""
    retention, kept, at_s = Retention(keep_last=keep_last, reach_s=reach_s), [], 0.0
    for step, gap in enumerate(gaps):
        at_s += gap
        kept = [*kept, entry(2, step, created_s=at_s)]
        doomed = set(deletions(kept, retention, chain=CHAIN))
        kept = [e for e in kept if e.generation not in doomed]
        ages = [at_s - e.created_s for e in kept]
        if at_s - gaps[0] >= reach_s:
            assert min(age for age in ages if age >= reach_s) <= 1.25 * reach_s + max(gaps)


def test_keeping_behind_errors_takes_few_checkpoints() -> None:
    """A commit a second, errors noticed after 1000 s: the last two, and six behind them."""
    retention, kept = Retention(keep_last=2, reach_s=1000.0), []
    for step in range(3000):
        kept = [*kept, entry(2, step)]
        doomed = set(deletions(kept, retention, chain=CHAIN))
        kept = [e for e in kept if e.generation not in doomed]
    assert len(kept) <= 2 + 6
    assert max(2999 - e.generation.step for e in kept) <= 1250


def reduced(entries: list[CatalogueEntry], keep_last: int, **more: object) -> list[str]:
    """Return 'term-step' of each whose optimizer state goes."""
    retention = Retention(keep_last=keep_last, weights_only=True, **more)  # type: ignore[arg-type]
    return [f"{g.term}-{g.step}" for g in rules.reductions(entries, retention, chain=CHAIN)]


WEIGHTS = ({"weights_only": True},)


def test_the_newest_two_stay_whole_with_any_policy() -> None:
    """`keep_last` more of them, if it is more."""
    entries = [entry(1, step) for step in range(1, 6)]
    assert reduced(entries, 1) == reduced(entries, 2) == ["1-1", "1-2", "1-3"]
    assert reduced(entries, 4) == ["1-1"]
    assert reduced(entries, 9) == []
    assert reductions(entries, Retention(keep_last=1), chain=CHAIN) == ()


def test_only_what_a_restart_could_use_makes_older_ones_weights() -> None:
    """Two good ones, read back, on the lineage, and whole themselves."""
    old, newest = [entry(1, 1), entry(1, 2)], entry(1, 5)
    doubtful = (
        {"verified": False}, {"health": "suspect"}, {"corrupt": True}, {"quarantined": True},
        {"records": WEIGHTS},
    )  # fmt: skip
    for marks in doubtful:
        assert reduced([*old, entry(1, 4, **marks), newest], 1) == ["1-1"], marks
    assert reduced([*old, entry(1, 9), newest], 1) == ["1-1"]  # left behind by term 2


def test_pinned_ones_bases_and_those_behind_an_error_stay_whole() -> None:
    """A person, a difference or a rollback may need all of their state."""
    entries = [entry(1, step) for step in range(1, 6)]
    pinned = [replace(entries[0], pinned="paper"), *entries[1:]]
    assert reduced(pinned, 2) == ["1-2", "1-3"]
    based = [*entries[:3], replace(entries[3], records=({"base": entries[1].generation.name},))]
    assert reduced([*based, entries[4]], 2) == ["1-1", "1-3"]
    assert reduced(entries, 2, reach_s=1.0) == ["1-1"]


def test_a_chain_of_differences_loses_its_newest_first() -> None:
    """Each is a base until the next one stands alone."""
    names = [entry(1, step).generation.name for step in range(5)]
    chain = [entry(1, s, records=({"base": names[s - 1]},)) for s in range(2, 5)]
    entries = [entry(1, 1), *chain, entry(2, 6), entry(2, 7)]
    assert reduced(entries, 2) == ["1-4"]
    entries[3] = entry(1, 4, records=WEIGHTS)
    assert reduced(entries, 2) == ["1-3"]


def test_weights_push_nothing_out_and_stay_for_their_own_reasons() -> None:
    """The best and those by distance are there for evaluation; a restart needs others."""
    weights = {"records": WEIGHTS}
    entries = [entry(1, 1), entry(1, 3, **weights), entry(1, 4, **weights), entry(1, 5)]
    assert gone(entries, 2) == []
    entries.append(entry(2, 6))
    assert gone(entries, 2) == ["1-1", "1-3", "1-4"]
    assert gone(entries, 2, keep_every_steps=2) == ["1-4"]
    valued = ({"weights_only": True, "metrics": {"loss": 0.1}},)
    entries[2] = entry(1, 4, records=valued)
    assert gone(entries, 2, keep_best=1) == ["1-1", "1-3"]


def _count_weights(entry: CatalogueEntry, chain: tuple[TermParent, ...]) -> bool:
    return entry.verified and rules.is_sound(entry, chain)


def _without_pins(entries: list[CatalogueEntry], retention: Retention, **more: object) -> object:
    """Nobody looks at the marks of persons in the catalogue."""
    return rules.deletions([replace(e, pinned="") for e in entries], retention, **more)  # type: ignore[arg-type]


def _without_quarantine(
    entries: list[CatalogueEntry], retention: Retention, **more: object
) -> object:
    return rules.deletions([replace(e, quarantined=False) for e in entries], retention, **more)  # type: ignore[arg-type]


REMOVED: dict[str, tuple[str, Callable[..., object] | int, Callable[[], None]]] = {
    "read back": ("counts", rules.is_sound, test_what_was_not_read_back_pushes_nothing_out),
    "sound": (
        "is_sound",
        lambda entry, chain: rules.on_lineage(entry.generation, chain),
        test_suspect_saves_cannot_expire_the_last_good_one,
    ),
    "lineage": (
        "on_lineage",
        lambda generation, chain: True,
        test_abandoned_commits_do_not_count_and_go_when_newer_ones_stand,
    ),
    "bases": (
        "with_bases",
        lambda generations, entries: frozenset(generations),
        test_bases_stay_as_long_as_somebody_needs_them,
    ),
    "best": ("best", lambda counted, retention: frozenset(), test_the_best_by_a_metric_stay),
    "distance": (
        "_kept_by_distance",
        lambda counted, retention: frozenset(),
        test_one_per_interval_is_kept_from_the_oldest_on,
    ),
    "behind errors": (
        "_kept_behind",
        lambda counted, retention: frozenset(),
        test_a_clock_that_was_set_back_does_not_end_the_keeping,
    ),
    "pins": ("deletions", _without_pins, test_pinned_ones_stay_with_their_bases),
    "pins on disk": (
        "unpinned",
        lambda catalogue, doomed: tuple(doomed),
        test_pinned_ones_stay_with_their_bases,
    ),
    "weights do not count": (
        "counts",
        _count_weights,
        test_weights_push_nothing_out_and_stay_for_their_own_reasons,
    ),
    "two stay whole": ("WHOLE", 1, test_the_newest_two_stay_whole_with_any_policy),
    "set aside": ("deletions", _without_quarantine, test_quarantined_and_pinned_ones_stay),
}
"""By the rule that is taken away: its function, the one in its place, the example that notices."""


@pytest.mark.parametrize("rule", REMOVED)
def test_each_rule_has_an_example_that_notices(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of what stays are removed one by one, as those of the protocol are."""
    name, other, example = REMOVED[rule]
    example()
    here = sys.modules[__name__]
    if name in ("deletions", "unpinned"):  # as these examples call them
        monkeypatch.setattr(here, name, other)
    else:
        monkeypatch.setattr(rules, name, other)
    with pytest.raises(AssertionError, match="assert"):
        example()
