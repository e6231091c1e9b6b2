"""The inputs of a decision as a value that is stored with it and read back."""

from dataclasses import replace

from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.cost_model.expectation import (
    contradicted,
    declared_mtbf_s,
    habit_promise,
    habit_steps,
    rate_band,
    rate_shape,
    split_rates,
)
from autockpt.policies.cost_model.waste import ENVELOPE
from autockpt.policies.interval.choose import tiers_of
from autockpt.policies.interval.nesting import Tiers
from autockpt.values.decision_inputs import DecisionInputs, Habit
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Choice, Decision, Expected
from autockpt.values.profile import Estimate, FailureRates, RecoveryTimes
from autockpt.values.units import format_duration, format_fraction

SAMPLED = ("iteration_s", "stall_s", "copy_s", "persist_s")
"""Costs of which it is known how often they were measured."""


def inputs_of(
    costs: Costs,
    failures: FailureRates,
    recovery: RecoveryTimes,
    goal: Goal,
    *,
    memory_on: bool,
    habit: Habit | None = None,
) -> DecisionInputs:
    """Return the inputs of a decision with these costs and rates."""
    tiers = tiers_of(costs, split_rates(failures, goal, recovery), memory_on=memory_on)
    return DecisionInputs(
        iteration_s=costs.iteration_s,
        memory=tiers.memory,
        disk=tiers.disk,
        costs={name: _sampled(costs, name) for name in SAMPLED},
        failures=failures,
        recovery=recovery,
        rate_shape=rate_shape(failures, goal),
        declared_mtbf_s=declared_mtbf_s(failures, goal),
        boundary_s=costs.boundary_s,
        habit=habit,
    )


def tiers_from(inputs: DecisionInputs) -> Tiers:
    """The waste function that a decision was made with."""
    return Tiers(
        iteration_s=inputs.iteration_s, memory=inputs.memory, disk=inputs.disk,
        boundary_s=inputs.boundary_s,
    )  # fmt: skip


def decided_again(
    decision: Decision,
    plan: CheckpointPlan,
    choices: tuple[Choice, ...],
    expected: Expected,
    inputs: DecisionInputs,
    goal: Goal,
) -> Decision:
    """The decision after a change of its plan: promise, inputs and the habit are of now."""
    old = decision.inputs
    before = old.habit if old is not None else None
    stale: tuple[str, ...] = ()
    if old is not None:
        stale = doubts(old.failures, old.recovery, goal, decision.expected.waste)
    changed = replace(
        decision,
        plan=plan,
        choices=tuple(_settled(choice, expected.waste) for choice in choices),
        expected=expected,
        inputs=inputs,
        warnings=(
            *(said for said in decision.warnings if said not in stale),
            *doubts(inputs.failures, inputs.recovery, goal, expected.waste),
        ),
    )
    if before is None:
        return replace(changed, current=None)
    now = Habit(
        disk=replace(
            before.disk,
            restart_s=inputs.disk.restart_s,
            restore_s=inputs.disk.restore_s,
            failures_per_s=inputs.failures_per_s,
        ),
        interval_steps=habit_steps(inputs.iteration_s),
        persist_s=before.persist_s,
    )
    band = rate_band(inputs.failures, goal)
    return replace(
        changed,
        inputs=replace(inputs, habit=now),
        current=habit_promise(now, inputs.iteration_s, band),
    )


MEMORY_ENDS = {
    "step": "Slurm ends the step, its keepers too, when a node is lost: no node's memory serves "
    "that failure",
    "rank": "when a rank dies the other ranks fail, the step ends, and its keepers with it: "
    "memory serves no failure; `srun --ntasks-per-node=1 autockpt run --nproc-per-node N` "
    "restarts ranks within the step",
}
"""Warnings of plans by `FailureRates.memory_ends_with`."""


def doubts(
    failures: FailureRates, recovery: RecoveryTimes, goal: Goal, waste: float
) -> tuple[str, ...]:
    """Return the assumptions behind a promise of `waste`, besides measurements, in sentences."""
    said = []
    assumed = [
        f"{name} {format_duration(part.value_s)}"
        for name, part in (
            ("detection", recovery.detect),
            ("restart", recovery.restart),
            ("restore from memory", recovery.restore_memory),
            ("restore from disk", recovery.restore_disk),
        )
        if part.source == "assumed"
    ]
    if assumed:
        said.append(f"assumed, not measured: {', '.join(assumed)}")
    if ended := MEMORY_ENDS.get(failures.memory_ends_with):
        said.append(ended)
    if why := contradicted(failures, goal):
        said.append(why)
    if goal.failures.mtbf_s is None and not failures.per_node.events + failures.per_job.events:
        said.append(
            "no failure of this job or machine is on record; the rate is a prior, and the band of "
            "the expected waste says how little that is"
        )
    if waste > ENVELOPE:
        said.append(
            f"the expected waste of {format_fraction(waste)} is beyond the "
            f"{format_fraction(ENVELOPE)} up to which the model is good to 1 % of time; the "
            "simulator is not bound by that"
        )
    return tuple(said)


def _settled(choice: Choice, waste: float) -> Choice:
    """A choice that stays: the plan's waste is that of now, its runner-up's is not known."""
    if choice.chosen_waste in (None, waste):
        return choice
    numbers = {**choice.numbers, "waste": waste} if "waste" in choice.numbers else choice.numbers
    return replace(choice, chosen_waste=waste, runner_up_waste=None, numbers=numbers)


def _sampled(costs: Costs, name: str) -> Estimate:
    n = costs.samples.get(name, 0)
    return Estimate(value_s=getattr(costs, name), source="measured" if n else "derived", n=n)
