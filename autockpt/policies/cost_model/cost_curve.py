"""The cost model behind a plan that was decided: for what-if curves and for the simulator."""

from dataclasses import replace
from functools import partial

from autockpt.policies.codec import choose_codec, choose_writing
from autockpt.policies.cost_model.costs import Costs, profile_costs
from autockpt.policies.cost_model.expectation import rates_of
from autockpt.policies.interval.choose import tiers_of
from autockpt.policies.interval.nesting import Tiers
from autockpt.policies.redundancy.peer_costs import peer_costs
from autockpt.policies.staging.shares import as_stored
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import Profile


def costs_of_plan(profile: Profile, goal: Goal, plan: CheckpointPlan) -> Costs:
    """Return the cost of one checkpoint of this plan, as `decide` computed it."""
    profile = as_stored(profile, goal)
    write, _ = choose_writing(profile, goal)
    disk = plan.tier("disk")
    steps = disk.interval_steps if "delta" in disk.codec.values() else None
    choose = partial(choose_codec, profile, goal, write=write.measure, writers=write.writers)
    codec = choose(delta_steps=steps)
    if codec.codec != disk.codec:  # not for time: for a quota or a price
        codec = choose(smallest=True)
    encoding = codec.encoding if disk.codec else None
    costs = profile_costs(profile, plan.staging, write=write.measure, encoding=encoding)
    return replace(costs, peers=peer_costs(profile, plan.redundancy))


def tiers_of_plan(profile: Profile, goal: Goal, plan: CheckpointPlan) -> Tiers:
    """Costs and failure rates of the plan's tiers; `Tiers.waste` gives w at any intervals."""
    memory_on = plan.tier("memory").interval_steps > 0
    return tiers_of(
        costs_of_plan(profile, goal, plan), rates_of(profile, goal), memory_on=memory_on
    )
