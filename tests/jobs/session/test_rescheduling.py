"""A decision after a change in the run: what was seen beside what was expected."""

from dataclasses import replace

from autockpt.policies.decide import decide
from autockpt.session.tuning.autotuner import _renewed
from autockpt.tuner.online.proposals import PlanProposal, with_codec
from autockpt.values.goal import Goal, Pins
from tests.support.profiles import example_profile, example_windows


def test_the_staging_names_the_winner_and_keeps_what_was_expected() -> None:
    """The other choices stay as they were; another kind of change leaves the staging alone."""
    decision = decide(example_profile(**example_windows(lengths_s=(0.3, 0.2))), Goal())
    staging = decision.choice("staging")
    assert staging is not None
    assert decision.plan.staging.compare
    seen = {"windows_observed_s": 0.3, "lazy_observed_s": 0.1}
    blocking = replace(decision.plan.staging, schedule="blocking", compare=())
    offer = PlanProposal(
        plan=replace(decision.plan, staging=blocking), kind="schedule", reason="seen: blocking",
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


def test_the_codec_says_why_it_was_given_up() -> None:
    """What it was chosen for stays in the numbers; nothing else of the decision changes."""
    decision = decide(example_profile(), Goal(pins=Pins(codec="zstd")))
    codec = decision.choice("codec")
    assert codec is not None
    offer = PlanProposal(
        plan=with_codec(decision.plan, {}), kind="codec", reason="late", numbers={"durable_s": 6.5}
    )
    renewed = _renewed(codec, offer)
    assert (renewed.chosen, renewed.reason) == ("none", "late")
    assert renewed.numbers == {**codec.numbers, "durable_s": 6.5}
    assert renewed.runner_up == f"{codec.chosen}, as before"
    assert _renewed(codec, replace(offer, kind="retune")) == codec
    for choice in decision.choices:
        if choice.name != "codec":
            assert _renewed(choice, offer) == choice
