"""The plan of a start, decided from profile, goal and all logs before the first iteration.

One rule serves `autockpt run`, its dry run, and rank 0 of every start, restart and resume.
Failures on record and costs that earlier processes of the run have observed count at once.
"""

import contextlib
import copy
import os
from dataclasses import dataclass, replace

from autockpt import new_files
from autockpt.policies.codec_speeds import CodecAtSpeed, codecs_by_speed
from autockpt.policies.cost_model.costs import Costs, profile_costs
from autockpt.policies.redundancy.link_speeds import (
    SchemeBySpeed,
    exchanges_by_speed,
    profiled_s_per_gb,
    schemes_by_speed,
)
from autockpt.policies.redundancy.peer_costs import peer_costs
from autockpt.policies.staging.shares import as_stored
from autockpt.policies.staging.write_path import best_ways, choose_write
from autockpt.profiles.assemble import derive_recovery
from autockpt.profiles.failures import estimate_rates, estimate_recovery
from autockpt.profiling.facts.failure_history import FailureEvidence, failure_evidence
from autockpt.run_directory import RunDirectory
from autockpt.tuner.online.controller import Controller, begin, go_on
from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.observed import Observed
from autockpt.tuner.online.proposals import PlanProposal
from autockpt.tuner.online.watches.exchange import ExchangeWatch
from autockpt.values.decision_inputs import DecisionInputs
from autockpt.values.errors import AutockptError
from autockpt.values.failure import without_progress
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Decision, Expected, WriteWay
from autockpt.values.profile import Estimate, FailureRates, Profile
from autockpt.values.record import from_json, to_json

MEMORY = "memory.json"
"""In the directory of the controller's recordings: the memory of the newest process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The memory and the plan that a start begins with."""

    memory: Memory
    """Of the controller, before it was asked."""
    proposal: PlanProposal | None = None
    """None: the plan stays."""
    applies: bool = True
    """False: the policy only observes."""
    promise: tuple[Expected, DecisionInputs] | None = None
    """Of the newest plan by all that is known; None: its costs are not."""

    @property
    def plan(self) -> CheckpointPlan:
        """The plan of the start."""
        if self.proposal is None or not self.applies:
            return self.memory.plan
        return self.proposal.plan


def decide_start(
    run: RunDirectory,
    goal: Goal,
    plan: CheckpointPlan,
    profile: Profile | None,
    *,
    nodes: int,
    evidence: FailureEvidence | None = None,
) -> Start:
    """The start of a run whose newest plan is `plan`; no process of the run trains now.

    Raises StorageError where the logs cannot be read.
    """
    known = evidence or failure_evidence(os.fspath(run.path), nodes=nodes, starting=True)
    prior, rates, recovery = None, known.rates, known.recovery
    codecs: tuple[CodecAtSpeed, ...] = ()
    ways: tuple[WriteWay, ...] = ()
    exchange = ExchangeWatch()
    schemes: tuple[SchemeBySpeed, ...] = ()
    if profile is not None:
        codecs, ways = codecs_by_speed(profile, goal), best_ways(profile, goal.pins)
        measured = as_stored(with_evidence(profile, known), goal)
        rates, recovery = measured.failures, measured.recovery
        # Which failures other nodes' memory serves is of this machine, too.
        profile = as_stored(replace(profile, failures=rates), goal)
        prior = plan_costs(profile, goal, plan)
        exchange = ExchangeWatch(
            table=exchanges_by_speed(profile, goal, plan.redundancy),
            profiled_s_per_gb=profiled_s_per_gb(profile, plan.redundancy),
        )
        schemes = schemes_by_speed(profile, goal, plan.redundancy)
    memory = begin(
        plan=plan, failures=rates, recovery=recovery, prior=prior,
        codecs=codecs, ways=ways, exchange=exchange, schemes=schemes,
        barren=without_progress(known.lives),
    )  # fmt: skip
    former = read_memory(run)
    if former is not None:
        memory = go_on(former, memory)
    controller = Controller(copy.deepcopy(memory), goal=goal)
    proposal = controller.start()
    return Start(
        memory=memory, proposal=proposal, applies=controller.mode == "on",
        promise=controller.promise(),
    )  # fmt: skip


def knows_more(seen: Observed, decision: Decision) -> bool:
    """Whether a start knows of failures or costs that the decision does not have."""
    if decision.inputs is None:
        return False
    before, now = decision.inputs.failures, seen.failures
    same = before.per_node.events == now.per_node.events
    return seen.sealed > 0 or not same or before.per_job.events != now.per_job.events


def undecided(plan: CheckpointPlan, *, nodes: int) -> Start:
    """The start with a plan as it is, where nothing is known beside it."""
    rates, recovery = estimate_rates((), nodes=nodes), estimate_recovery(())
    return Start(memory=begin(plan=plan, failures=rates, recovery=recovery))


def with_evidence(profile: Profile, known: FailureEvidence, *, starting: bool = True) -> Profile:
    """Return the profile with the evidence of the logs; its own evidence stays where it is more.

    `starting`: the job runs here.  Otherwise it is planned, and outside of a job step the profile
    says what ends a node's memory.

    Restores that no log has follow from its links and its storage, as they did when it was taken.
    """
    before, now = profile.failures, known.rates
    more = _events(now) > _events(before)
    recovery = derive_recovery(
        known.recovery, profile.state.restored_bytes or profile.state.total_bytes,
        profile.links, profile.storage, ranks=profile.fingerprint.ranks_per_node,
    )  # fmt: skip
    measured = profile.recovery
    newer = {
        name: getattr(recovery, name)
        for name in ("detect", "restart", "restore_memory", "restore_disk", "restore_peer")
        if _says_more(getattr(recovery, name), getattr(measured, name))
    }
    end = now.memory_ends_with
    if end == "node" and not starting:
        end = before.memory_ends_with
    failures = replace(now if more else before, memory_ends_with=end)
    return replace(profile, failures=failures, recovery=replace(measured, **newer))


def plan_costs(profile: Profile, goal: Goal, plan: CheckpointPlan) -> Costs:
    """Return the cost of a checkpoint under this plan, by the profile."""
    write = choose_write(profile, goal)
    costs = profile_costs(profile, plan.staging, write=write.measure)
    return replace(costs, peers=peer_costs(profile, plan.redundancy))


def write_memory(run: RunDirectory, memory: Memory) -> None:
    """Keep what a controller remembers for the next process.  Raises OSError.

    Not durable: it survives a process, and the loss of a machine costs a few estimates.
    """
    new_files.make_directory(run.controller, new_files.PRIVATE_DIRECTORY)
    path = run.controller / MEMORY
    temporary = path.with_name(f".{MEMORY}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", opener=new_files.private) as file:
        file.write(to_json(memory) + "\n")
    os.replace(temporary, path)


def read_memory(run: RunDirectory) -> Memory | None:
    """Return the memory of the newest process; None where it is missing or unreadable."""
    with contextlib.suppress(AutockptError, OSError, UnicodeDecodeError):
        text = (run.controller / MEMORY).read_text(encoding="utf-8")
        return from_json(Memory, text, where=MEMORY)
    return None


def _events(rates: FailureRates) -> int:
    return rates.per_node.events + rates.per_job.events


_WORTH = {"measured": 2, "derived": 1, "assumed": 0}


def _says_more(now: Estimate | None, before: Estimate | None) -> bool:
    """The logs have what the profile has not, or more of it."""
    if now is None or before is None:
        return before is None and now is not None
    return (_WORTH[now.source], now.n) > (_WORTH[before.source], before.n) and (
        now.source == "measured" or now.source != before.source
    )
