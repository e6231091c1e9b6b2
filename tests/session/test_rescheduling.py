"""A decision after its schedules were compared: what was seen beside what was expected."""

from dataclasses import replace

from autockpt.policies.decide import decide
from autockpt.session.mind import _renewed
from autockpt.tuner.proposals import PlanProposal, with_schedule
from autockpt.values.goal import Goal
from tests.fakes.profiles import example_profile, example_windows


def test_the_staging_names_the_winner_and_keeps_what_was_expected() -> None:
    """The other choices stay as they were; another kind of change leaves the staging alone."""
    decision = decide(example_profile(**example_windows(lengths_s=(0.3, 0.2))), Goal())
    staging = decision.choice("staging")
    assert staging is not None
    assert decision.plan.staging.compare
    seen = {"windows_observed_s": 0.3, "lazy_observed_s": 0.1}
    offer = PlanProposal(
        plan=with_schedule(decision.plan, "blocking"), kind="schedule", reason="seen: blocking",
        numbers=seen,
    )  # fmt: skip
    renewed = _renewed(staging, offer)
    assert renewed.chosen == staging.chosen.replace(staging.chosen.split(",")[0], "blocking", 1)
    assert renewed.reason.startswith("seen: blocking; expected were windows ")
    assert ", lazy " in renewed.reason
    assert renewed.numbers == {**staging.numbers, **seen}
    assert renewed.runner_up.endswith(", as before")
    assert _renewed(staging, replace(offer, kind="retune")) == staging
    for choice in decision.choices:
        if choice.name != "staging":
            assert _renewed(choice, offer) == choice
