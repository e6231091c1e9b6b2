"""Whether windows are used: bytes against gaps, the worst rank first, with reasons and numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.costs import copy_link
from autockpt.policies.decide import decide
from autockpt.policies.policy_file import load_policy
from autockpt.policies.windows import WindowFit, fit_windows
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import Choice
from autockpt.values.profile import InterferenceMeasure, Profile
from tests.fakes.profiles import distribution, example_profile, example_windows


def fit_of(profile: Profile) -> WindowFit:
    """The fit that a decision would use."""
    fit = fit_windows(profile, copy_link(profile))
    assert fit is not None
    return fit


def staging_of(profile: Profile, goal: Goal | None = None) -> tuple[str, Choice]:
    """(schedule of the plan, its choice)."""
    decision = decide(profile, goal or Goal())
    choice = decision.choice("staging")
    assert choice is not None
    return decision.plan.staging.schedule, choice


def noisy(**changed: object) -> Profile:
    """A job whose copies cost it 20 % of an iteration."""
    measure = InterferenceMeasure(work="snapshot_copy", slowdown=distribution(0.2), busy_s=0.1)
    return example_profile(interference=(measure,), **changed)


def test_windows_that_take_a_checkpoint_are_used_with_reason_and_numbers() -> None:
    """Half of an iteration idles, the copy needs a fraction of that."""
    schedule, choice = staging_of(noisy(**example_windows(lengths_s=(0.3, 0.2))))
    assert schedule == "windows"
    assert "2 windows of rank 0" in choice.reason
    assert "a whole checkpoint in every iteration" in choice.reason
    assert choice.numbers["window_share"] == 1.0
    assert choice.numbers["window_iterations"] == 1
    assert choice.numbers["windows_cost_s"] < choice.numbers["lazy_cost_s"]


def test_schedules_without_gaps_stay_lazy_and_say_why() -> None:
    """A zero-bubble pipeline."""
    schedule, choice = staging_of(noisy(**example_windows(lengths_s=(0.0003,))))
    assert schedule != "windows"
    assert "too little" in choice.reason
    none, choice = staging_of(noisy(**example_windows(lengths_s=())))
    assert none != "windows"
    assert "copied beside the compute" in choice.reason


def test_a_job_without_a_pipeline_is_not_told_of_windows() -> None:
    """Nothing was measured, nothing is said."""
    schedule, choice = staging_of(noisy())
    assert schedule != "windows"
    assert "window" not in choice.reason


def test_pinned_windows_without_measurement_are_learned_by_the_run() -> None:
    """`builtin:baft` on a profile without a pipeline."""
    schedule, choice = staging_of(noisy(), load_policy("builtin:baft").goal)
    assert schedule == "windows"
    assert "learns them in its first iterations" in choice.reason


def test_the_rank_with_the_least_room_decides() -> None:
    """Ranks of a pipeline have different gaps."""
    roomy, tight = (
        example_windows(rank=0, lengths_s=(0.3,)), example_windows(rank=1, lengths_s=(0.01,))
    )  # fmt: skip
    both = {key: roomy[key] + tight[key] for key in roomy}
    assert fit_of(example_profile(**both)).rank == 1


def test_windows_that_move_are_said_to_move() -> None:
    """The 10th percentile is what counts, and a sentence warns of the scatter."""
    fields = example_windows(lengths_s=(0.2,))
    moving = replace(distribution(0.2), p10=0.05)
    bubbles = (replace(fields["bubbles"][0], length_s=moving),)
    fit = fit_of(example_profile(**{**fields, "bubbles": bubbles}))
    assert fit.idle_s == 0.05
    assert "move by more than half" in fit.sentence


@given(
    lengths=st.lists(st.floats(0.0, 0.5), max_size=12), extra=st.floats(0.0, 0.5),
)  # fmt: skip
def test_room_follows_gemini_and_grows_with_every_window(
    lengths: list[float], extra: float
) -> None:
    """k = ceil(S / (B gamma sum usable)); another window never makes room smaller."""
    profile = example_profile(**example_windows(lengths_s=tuple(lengths)))
    fit = fit_of(profile)
    link = profile.link("host_copy")
    assert link is not None
    usable_s = sum(max(0.0, b.length_s.p10 - link.alpha_s) for b in profile.bubbles)
    room = link.bytes_per_s * usable_s / (1 + fit.margin)
    assert fit.room_bytes == pytest.approx(room, abs=1)
    if fit.room_bytes:
        assert fit.iterations == math.ceil(profile.state.total_bytes / fit.room_bytes)
    more = fit_of(example_profile(**example_windows(lengths_s=(*lengths, extra))))
    assert more.room_bytes >= fit.room_bytes


def test_a_pin_keeps_windows_away() -> None:
    """`staging.schedule: lazy` is obeyed."""
    profile = noisy(**example_windows(lengths_s=(0.3, 0.2)))
    assert staging_of(profile, Goal(pins=Pins(schedule="lazy")))[0] == "lazy"


def test_on_gpus_windows_are_not_chosen_and_a_pin_says_so() -> None:
    """A side stream copies there; nothing holds its copies back."""
    gpus = replace(example_profile().fingerprint, gpus=("H200",))
    profile = noisy(fingerprint=gpus, **example_windows(lengths_s=(0.3, 0.2)))
    assert staging_of(profile)[0] != "windows"
    _, choice = staging_of(profile, load_policy("builtin:baft").goal)
    assert "only host copies move in windows" in choice.reason
