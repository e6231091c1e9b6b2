"""Whether windows are used: bytes against gaps, the worst rank first, with reasons and numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.cost_model.costs import copy_link
from autockpt.policies.decide import decide
from autockpt.policies.policy_file import load_policy
from autockpt.policies.staging.idle_windows import WindowFit, fit_windows
from autockpt.values.goal import Goal, Limits, Pins
from autockpt.values.plan import Choice
from autockpt.values.profile import InterferenceMeasure, LinkTraffic, Profile
from tests.support.profiles import distribution, example_profile, example_windows


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


def measured(windows_s: float, blocking_s: float, **changed: object) -> Profile:
    """A job on which the profile took each schedule in turn; lazy copies cost it 0.2 s."""
    quiet = distribution(0.0)
    works = (
        InterferenceMeasure(work="snapshot_copy", slowdown=distribution(0.2), busy_s=0.1),
        InterferenceMeasure(work="snapshot_windows", slowdown=quiet, busy_s=0.1,
                            stall_s=distribution(windows_s)),
        InterferenceMeasure(work="snapshot_blocking", slowdown=quiet, busy_s=0.1,
                            stall_s=distribution(blocking_s)),
    )  # fmt: skip
    return example_profile(
        interference=works, **{**example_windows(lengths_s=(0.3, 0.2)), **changed}
    )


def test_what_was_measured_decides_and_the_prediction_stays_beside_it() -> None:
    """Windows were expected to cost little, and cost more than waiting."""
    schedule, choice = staging_of(measured(windows_s=0.9, blocking_s=0.05))
    assert schedule == "blocking"
    assert "measured in turn" in choice.reason
    assert choice.numbers["windows_cost_s"] == pytest.approx(0.9)
    assert choice.numbers["windows_predicted_s"] < 0.5
    assert choice.numbers["blocking_cost_s"] == pytest.approx(0.05)
    assert staging_of(measured(windows_s=0.01, blocking_s=0.9))[0] == "windows"


def test_windows_are_tried_in_the_run_against_the_best_other_schedule() -> None:
    """The expected best first; what is hopeless is not tried."""
    compared = decide(noisy(**example_windows(lengths_s=(0.3, 0.2))), Goal()).plan.staging.compare
    assert compared[0] == "windows"
    assert len(compared) >= 2
    hopeless = decide(measured(windows_s=0.9, blocking_s=0.05), Goal()).plan.staging
    assert hopeless.compare == ()
    close = decide(measured(windows_s=0.06, blocking_s=0.05), Goal()).plan.staging
    assert close.compare[:2] == ("blocking", "windows")


def test_a_stall_that_is_not_allowed_is_not_tried() -> None:
    """limits.stall, and the objective that avoids stalls."""
    profile = measured(windows_s=0.01, blocking_s=0.02)
    assert "blocking" in decide(profile, Goal()).plan.staging.compare
    strict = Goal(limits=Limits(stall_s=0.015))
    assert "blocking" not in decide(profile, strict).plan.staging.compare
    assert "blocking" not in decide(profile, Goal(objective="stall")).plan.staging.compare
    profile = measured(windows_s=0.06, blocking_s=0.05)
    assert "windows" in decide(profile, Goal()).plan.staging.compare
    strict = Goal(limits=Limits(stall_s=0.055))
    assert decide(profile, strict).plan.staging.compare == ()


@pytest.mark.parametrize("pins", [Pins(schedule="windows"), Pins(retune=False),
                                  Pins(retune="observe")])  # fmt: skip
def test_a_plan_that_must_not_change_compares_nothing(pins: Pins) -> None:
    """It would never learn, or not be allowed to act on it."""
    assert (
        decide(measured(windows_s=0.01, blocking_s=0.02), Goal(pins=pins)).plan.staging.compare
        == ()
    )


def on_gpu(profile: Profile) -> Profile:
    """The same job on a GPU."""
    gpus = replace(profile.fingerprint, gpus=("H200",))
    (link,) = (replace(link, link="device_to_host_pinned") for link in profile.links
               if link.link == "host_copy")  # fmt: skip
    return replace(profile, fingerprint=gpus, links=(*profile.links, link))


def test_on_a_gpu_windows_are_chosen_only_where_they_were_measured() -> None:
    """The prediction knows nothing of how far the host is ahead of the device."""
    guessed = on_gpu(noisy(**example_windows(lengths_s=(0.3, 0.2))))
    schedule, choice = staging_of(guessed)
    assert schedule != "windows"
    assert "only where the profile measured" in choice.reason
    assert "windows" not in decide(guessed, Goal()).plan.staging.compare
    assert staging_of(on_gpu(measured(windows_s=0.01, blocking_s=0.9)))[0] == "windows"


def test_traffic_of_the_training_takes_room_on_a_gpus_bus() -> None:
    """Half of PCIe is in use: half of the bytes fit."""
    free = on_gpu(noisy(**example_windows(lengths_s=(0.3, 0.2))))
    traffic = LinkTraffic(
        link="pcie", device="GPU 0", sent_bytes_per_s=8e9, received_bytes_per_s=0.0,
        capacity_bytes_per_s=16e9, seconds=5.0,
    )  # fmt: skip
    busy = replace(free, traffic=(traffic,))
    assert fit_of(busy).room_bytes == pytest.approx(fit_of(free).room_bytes / 2, rel=0.01)
    assert "50% of the bus in use" in fit_of(busy).sentence
    assert busy.used("pcie") == 0.5
    assert busy.used("network") is None
