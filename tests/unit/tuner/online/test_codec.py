"""Codecs in a run: given up where they make checkpoints late, taken back where they did not."""

from dataclasses import replace

import pytest

from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.proposals import intervals_of, with_codec
from autockpt.values.goal import Goal, Limits, Pins
from autockpt.values.plan import CheckpointPlan
from autockpt.values.record import from_json, to_json
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.tuner.online.test_controller import HOUR, plan

PLANES = {"parameters": "planes", "moments": "planes"}
PROMISED_S = 5.0
"""Until durable without any codec, by the profile."""


def controller(goal: Goal, *, profiled: bool = True) -> Controller:
    """Of an encoding plan whose intervals are pinned."""
    memory = begin(
        plan=with_codec(plan(), PLANES),
        failures=example_failures(mtbf_s=20 * HOUR),
        recovery=example_recovery(),
        prior=costs(persist_s=PROMISED_S) if profiled else None,
    )
    pins = replace(goal.pins, memory_interval_steps=60, disk_interval_steps=600)
    return Controller(memory, goal=replace(goal, pins=pins))


def trained(
    encoded_s: float,
    plain_s: float,
    *,
    goal: Goal | None = None,
    profiled: bool = True,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[Controller, list[CheckpointPlan]]:
    """A day with checkpoints that are durable after these; the plans that changed the codec."""
    tuned = controller(goal or Goal(), profiled=profiled)
    job = FakeJob(
        stall_s=0.1,
        noise=noise,
        seed=seed,
        persist_of=lambda now: encoded_s if now.tier("disk").codec else plain_s,
    )
    job.run(tuned, until_s=24 * HOUR)
    return tuned, [p.plan for p in job.proposals if p.kind == "codec"]


def test_encoding_that_makes_checkpoints_late_is_given_up() -> None:
    """Later than promised without, and truly faster without: for good, at the same intervals."""
    tuned, changes = trained(6.5, 5.0)
    assert [change.tier("disk").codec for change in changes] == [{}]
    assert tuned.plan.tier("disk").codec == {}
    assert tuned.memory.trial is not None
    assert tuned.memory.trial.durable_s == pytest.approx(6.5)


def test_the_reason_has_the_numbers_and_nothing_else_changes() -> None:
    """What was promised, what was seen, and in how many checkpoints."""
    job = FakeJob(stall_s=0.1, persist_of=lambda now: 6.5)
    tuned = controller(Goal())
    before = tuned.plan
    while not job.proposals:
        job.run(tuned, until_s=job.now_s + 60.0, apply=False)
    found = job.proposals[0]
    assert found.kind == "codec"
    assert "with planes checkpoints are durable after 6.5 s (mean of 8)" in found.reason
    assert "promised 5 s without" in found.reason
    assert intervals_of(found.plan) == intervals_of(before)
    assert found.plan == with_codec(before, {})


def test_on_slower_storage_the_codec_comes_back_and_stays() -> None:
    """Both are later than promised: bytes as they are most of all, which one trial shows."""
    tuned, changes = trained(9.0, 11.0)
    assert [change.tier("disk").codec for change in changes] == [{}, PLANES]
    assert tuned.plan.tier("disk").codec == PLANES


@pytest.mark.parametrize("encoded_s", [4.0, 5.0, 5.1])
def test_encoding_that_keeps_its_promise_stays(encoded_s: float) -> None:
    """Within 3 % of what was promised without it."""
    assert trained(encoded_s, 5.0)[1] == []


@pytest.mark.slow
def test_noise_alone_changes_nothing() -> None:
    """A fifth faster than without, 40 % noise, on eight seeds."""
    assert not any(trained(4.0, 5.0, noise=0.4, seed=seed)[1] for seed in range(8))


@pytest.mark.parametrize(
    ("goal", "profiled"),
    [
        (Goal(pins=Pins(codec="planes")), True),
        (Goal(limits=Limits(disk_bytes=10**12)), True),
        (Goal(pins=Pins(retune=False)), True),
        (Goal(), False),
    ],
    ids=["pinned", "for room", "not re-tuned", "nothing promised"],
)
def test_a_codec_that_is_not_ours_to_change_stays(goal: Goal, profiled: bool) -> None:
    """Somebody asked for it, or nobody knows better."""
    assert trained(9.0, 5.0, goal=goal, profiled=profiled)[1] == []


def test_a_trial_survives_its_file() -> None:
    """A recording may begin in the middle of one."""
    tuned, _ = trained(6.5, 5.0)
    assert from_json(Memory, to_json(tuned.memory)) == tuned.memory
    assert replace(tuned.memory, trial=None) != tuned.memory
