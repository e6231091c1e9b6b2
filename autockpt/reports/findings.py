"""What should be done next?  One check per idea; each says problem, evidence, fix and saving.

A check that does not apply returns None; one that passed returns a finding with `passed` and folds
away.  Ids are stable: scripts and the documentation refer to them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autockpt.reports.analysis.accounting import Accounting, Restore
from autockpt.reports.analysis.degradation import degraded_tiers
from autockpt.reports.analysis.promises import FACTOR, Promise
from autockpt.reports.analysis.replication import Protection
from autockpt.reports.analysis.saves import Saves, waits
from autockpt.reports.data import RunData, reckoned_with
from autockpt.values.failure import lives_of
from autockpt.values.plan import Decision
from autockpt.values.profile import Profile
from autockpt.values.redundancy import GENERATIONS
from autockpt.values.telemetry import Degraded, LossyRestored, ReplicasDisagreed
from autockpt.values.units import format_bytes, format_duration, format_fraction

SKIPPED_SHARE = 0.05
"""Share of due checkpoints that may be skipped without a finding."""
STALL_SHARE = 0.01
"""Share of time blocked by checkpoints that is worth a look."""
SLOWDOWN_SHARE = 0.01
"""The same for time lost to slower iterations."""
MEMORY_SHARE = 0.8
"""Part of the available host memory that slots may take without a warning."""
FEW_SAMPLES = 5
"""Fewer samples of an iteration have no spread."""
SPREAD = 1.3
"""p90 over p10 of the iteration time above which the measurement is called unstable."""
INEXACT = (
    "carried values",
    "data",
    "gradients",
    "iterations",
    "left out",
    "loop",
    "position",
    "replay",
)
"""`Degraded.what` after which a resume may train otherwise."""

Severity = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, or one check that passed."""

    id: str
    """Stable, e.g. saves-skipped; also the anchor in the page."""
    severity: Severity
    title: str
    """The problem in a few words, or what is fine."""
    evidence: str
    """The numbers."""
    fix: str = ""
    """Action for the user; "" when passed."""
    saving: float | None = None
    """Estimated fraction of time that the fix gives back; None: not known."""
    passed: bool = False


BARREN = 3
"""Starts in a row of which nothing was kept, and the job may never come further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the checks look at."""

    data: RunData
    accounting: Accounting | None
    restores: Sequence[Restore]
    saves: Saves | None
    promises: Sequence[Promise]
    protection: Protection | None = None


def findings(facts: Facts) -> tuple[Finding, ...]:
    """All findings: problems by severity and saving, then what passed."""
    found = [finding for check in CHECKS if (finding := check(facts)) is not None]
    order = {"high": 0, "medium": 1, "low": 2}
    return tuple(sorted(found, key=lambda f: (f.passed, order[f.severity], -(f.saving or 0.0))))


def unprotected(facts: Facts) -> Finding | None:
    """The script never attached."""
    if facts.data.protected:
        return Finding(id="protected", severity="low", title="The state of the script is protected",
                       evidence="the script attached; its state is checkpointed",
                       passed=True)  # fmt: skip
    if facts.data.begins:
        return None
    if facts.data.status.get("state") in ("failed", "interrupted"):
        return Finding(
            id="unprotected",
            severity="high",
            title="Nothing was checkpointed",
            evidence="the script ended before it called autockpt.attach",
            fix="let it come to autockpt.attach, in front of its loop",
        )
    wall_s = facts.accounting.wall_s if facts.accounting else 0.0
    at_stake = f"{format_duration(wall_s)} of training were" if wall_s else "all training is"
    return Finding(
        id="unprotected",
        severity="high",
        title="Nothing was checkpointed",
        evidence=f"the script never called autockpt.attach; {at_stake} at stake in a failure",
        fix="add the lines that autockpt run printed; the top of this report shows their form",
    )


def degraded(facts: Facts) -> Finding | None:
    """Something of autockpt failed while the training went on."""
    events = [event for event in facts.data.events if isinstance(event, Degraded)]
    if not facts.data.events:
        return None
    tiers = [t for t in degraded_tiers(facts.data.events) if t.tier != "other nodes"]
    if tiers:
        names = " and ".join(dict.fromkeys(tier.tier for tier in tiers))
        return Finding(
            id="degraded",
            severity="high",
            title=f"In the end this was degraded: {names}",
            evidence="; ".join(str(tier) for tier in tiers),
            fix="remove the cause, which is the last error; run autockpt doctor",
        )
    if not events:
        return Finding(id="degraded", severity="high", title="No part of autockpt failed",
                       evidence="no degraded event in the telemetry", passed=True)  # fmt: skip
    inexact = [event for event in events if event.what in INEXACT]
    told = inexact or events
    names = ", ".join(dict.fromkeys(event.what for event in told))
    title = "A resume may train otherwise" if inexact else "Degraded during the run"
    return Finding(
        id="degraded",
        severity="high" if inexact else "low" if names == "keeper" else "medium",
        title=f"{title}: {names}",
        evidence=f"{_times(len(told))}; the first: {told[0].reason}",
        fix=f"look up {names} under Degraded in docs/troubleshooting.md",
    )


def _times(count: int) -> str:
    return "one event" if count == 1 else f"{count} events"


def replicas_disagree(facts: Facts) -> Finding | None:
    """Ranks that held the same state to the bit did not any more."""
    events = [event for event in facts.data.events if isinstance(event, ReplicasDisagreed)]
    if not events:
        return None
    first = next((event for event in events if event.named), events[0])
    return Finding(
        id="replicas-disagree",
        severity="high",
        title=f"Silent corruption: replicas disagreed at step {events[0].step}",
        evidence=f"{len(events)} suspect checkpoints; {first.reason}",
        fix=f"test the memory and devices of node {first.nodes} before they are used again; "
        "failures.replicas: restore goes back to the last checkpoint on which all agreed",
    )


def lossy(facts: Facts) -> Finding | None:
    """The training went on from a state that an archive had only nearly kept."""
    events = [event for event in facts.data.events if isinstance(event, LossyRestored)]
    if not events:
        return None
    first = events[0]
    return Finding(
        id="lossy-restore",
        severity="high",
        title=f"LOSSY: step {first.step} was restored from a lossy archive",
        evidence=f"checkpoint {first.generation}: {first.lost}",
        fix="go on from a lossless checkpoint where one is left; else read the quality figures of "
        "docs/internals/compression_lossy.md before comparing this run with others",
    )


def copies_missing(facts: Facts) -> Finding | None:
    """The plan wants copies on other nodes, and in the end they were not there."""
    copies = facts.protection
    if copies is None:
        return None
    newest = "never" if copies.newest_step is None else f"up to step {copies.newest_step}"
    evidence = f"copied {newest}, {copies.protected} checkpoints in all"
    if copies.newest_step is not None and not copies.degraded:
        return Finding(id="copies", severity="high", title="Checkpoints survive a lost node",
                        evidence=evidence, passed=True)  # fmt: skip
    return Finding(
        id="copies",
        severity="high",
        title="The loss of a node would be served by the disk",
        evidence=f"{evidence}; {copies.degraded or 'no copy was ever complete'}",
        fix="look into logs/keeper-*.log of the nodes: the network between them, and their memory",
    )


def persist_failed(facts: Facts) -> Finding | None:
    """Checkpoints did not reach the disk."""
    saves = facts.saves
    if saves is None or not saves.sealed:
        return None
    if not saves.failed:
        return Finding(id="persist-failed", severity="high",
                       title="Every checkpoint that began became durable",
                       evidence=f"{saves.disk_committed} checkpoints on disk",
                       passed=True)  # fmt: skip
    return Finding(
        id="persist-failed",
        severity="high",
        title=f"{saves.failed} checkpoint{'s' * (saves.failed > 1)} did not become durable",
        evidence=f"{saves.disk_committed} others did. {_reason(saves)}",
        fix="where the storage is the reason, check its free space and its health; "
        "older checkpoints are untouched",
    )


def saves_skipped(facts: Facts) -> Finding | None:
    """Checkpoints were due and did not start, usually because the last one still ran."""
    saves = facts.saves
    if saves is None or not saves.sealed:
        return None
    due = saves.sealed + saves.skipped
    share = saves.skipped / due
    if share <= SKIPPED_SHARE:
        return Finding(id="saves-skipped", severity="medium", title="Checkpoints start when due",
                       evidence=f"{saves.skipped} of {due} skipped", passed=True)  # fmt: skip
    slow = "" if saves.durable is None else (
        f"; a checkpoint needs {format_duration(saves.durable.p50_s)} to become durable"
    )  # fmt: skip
    return Finding(
        id="saves-skipped",
        severity="medium",
        title=f"{format_fraction(share)} of the due checkpoints were skipped",
        evidence=f"{saves.skipped} of {due}{slow}. {_reason(saves)}",
        fix="use faster storage or let the interval grow: set the disk interval to auto",
    )


def snapshots_discarded(facts: Facts) -> Finding | None:
    """State changed while it was copied."""
    saves = facts.saves
    if saves is None or not saves.sealed:
        return None
    if not saves.discarded:
        return Finding(id="snapshots-discarded", severity="medium", passed=True,
                       title="No state changed while it was copied",
                       evidence=f"{saves.sealed} snapshots proven unchanged")  # fmt: skip
    return Finding(
        id="snapshots-discarded",
        severity="medium",
        title=f"{saves.discarded} snapshots were discarded",
        evidence=f"state changed while it was copied. {_reason(saves)}",
        fix="call ckpt.wait_for_staging() before the code that changes it. Without it, the tensor "
        "is copied at the iteration boundary from now on, at the price of a longer stall",
    )


def stall(facts: Facts) -> Finding | None:
    """Training is blocked too long."""
    accounting, saves = facts.accounting, facts.saves
    if accounting is None or saves is None or saves.stall is None:
        return None
    if accounting.wall_s <= 0:
        return None
    share = accounting.stall_s / accounting.wall_s
    seen = (
        f"{format_duration(saves.stall.p50_s)} median, {format_duration(saves.stall.p95_s)} p95, "
        f"{format_fraction(share)} of the time"
    )
    if share <= STALL_SHARE:
        return Finding(id="stall", severity="medium", title="Checkpoints hardly block training",
                       evidence=seen, passed=True)  # fmt: skip
    title = f"Checkpoints block training for {format_fraction(share)} of the time"
    if waits(facts.data.decision):
        return Finding(
            id="stall", severity="medium", title=title, saving=share / 2,
            evidence=f"{seen}; training waits until they are durable",
            fix="staging.persist: async writes them while the training goes on",
        )  # fmt: skip
    boundary = saves.boundary_share > 0.5
    where = "copying at the boundary" if boundary else "waiting for the copy to end"
    return Finding(
        id="stall",
        severity="medium",
        title=title,
        evidence=f"{seen}; most of it {where}",
        fix=_shorter_stall(facts.data.decision)
        if boundary
        else "the copy takes longer than forward and backward: a longer interval costs least",
        saving=share / 2,
    )


def _shorter_stall(decision: Decision | None) -> str:
    """Advice where most of the stall is copying at the boundary."""
    if decision is None:
        return "profile the job (`autockpt profile`): intervals then follow from measured costs"
    if decision.plan.staging.compare:
        return "wait, because the run tries ways of copying in turn and keeps the cheapest"
    if decision.plan.staging.schedule == "lazy":
        return (
            "most of the state is copied beside the training already; lengthen the intervals, or "
            "see under Memory how much is copied inside the stall"
        )
    return "pin staging.schedule: lazy in the policy, which copies beside the training"


def slowdown(facts: Facts) -> Finding | None:
    """Background work makes iterations longer."""
    accounting = facts.accounting
    if accounting is None or accounting.wall_s <= 0 or not accounting.steps:
        return None
    share = accounting.slowdown_s / accounting.wall_s
    seen = f"{format_fraction(share)} of the time, {format_duration(accounting.slowdown_s)} in all"
    if share <= SLOWDOWN_SHARE:
        return Finding(id="slowdown", severity="medium", title="Writing hardly slows iterations",
                       evidence=seen, passed=True)  # fmt: skip
    return Finding(
        id="slowdown",
        severity="medium",
        title="Background copies and writes slow the training",
        evidence=seen,
        fix="fewer writers, a longer disk interval, or cores that the training does not use",
        saving=share / 2,
    )


def restart(facts: Facts) -> Finding | None:
    """At failures, coming back costs more than the work lost."""
    accounting = facts.accounting
    failures = [r for r in facts.restores if r.failed_at_s is not None]
    if accounting is None or not failures or accounting.wall_s <= 0:
        return None
    down_s, lost_s = accounting.down_s, accounting.lost_s
    seen = f"{format_duration(down_s)} down, {format_duration(lost_s)} of work lost"
    share = down_s / accounting.wall_s
    if down_s <= 2 * lost_s or share < 0.002:
        return Finding(id="restart", severity="medium", title="Restarts are not the main cost",
                       evidence=seen, passed=True)  # fmt: skip
    parts = {
        "detection": accounting.detect_s,
        "the restart of the processes": accounting.restart_s,
        "the restore": accounting.restore_s,
    }
    worst = max(parts, key=lambda name: parts[name])
    return Finding(
        id="restart",
        severity="medium",
        title="Coming back costs more than the work lost",
        evidence=f"{seen} in {len(failures)} failures; {format_duration(parts[worst])} of it is "
        f"{worst}",
        fix="checkpoint no more often; shorten imports and set-up before the first iteration",
        saving=(down_s - lost_s) / accounting.wall_s / 2,
    )


def restored_from_disk(facts: Facts) -> Finding | None:
    """A failure of a process fell back to disk although memory is a tier."""
    decision = facts.data.decision
    if decision is None or not decision.plan.tier("memory").interval_steps:
        return None
    lost = [r for r in facts.restores if r.what in ("trainer", "keeper") and r.source == "disk"]
    mine = [r for r in facts.restores if r.what in ("trainer", "keeper")]
    if not mine:
        return None
    if not lost:
        return Finding(id="restored-from-disk", severity="medium", passed=True,
                       title="Process failures were restored from memory",
                       evidence=f"{len(mine)} of {len(mine)}")  # fmt: skip
    return Finding(
        id="restored-from-disk",
        severity="medium",
        title=f"{len(lost)} process failures were restored from disk",
        evidence=f"of {len(mine)}; the memory tier did not survive them",
        fix="run autockpt doctor: it probes which deaths the memory survives under this launcher",
    )


def no_progress(facts: Facts) -> Finding | None:
    """Starts in a row ended before anything of them was kept."""
    lives = lives_of(facts.data.failures)
    rows = [tuple(row) for kept, row in itertools.groupby(lives, lambda one: one.kept) if not kept]
    worst = max(rows, key=len, default=())
    if len(worst) < BARREN:
        return None
    shortest, longest = (pick(one.trained_s for one in worst) for pick in (min, max))
    lost_s = sum(one.trained_s for one in worst)
    return Finding(
        id="no-progress",
        severity="high",
        title=f"{len(worst)} starts in a row ended before a checkpoint",
        evidence=f"after {format_duration(shortest)} to {format_duration(longest)} of training, of "
        f"which nothing was kept: {format_duration(lost_s)} together",
        fix="the next start saves within a third of the shortest of them; find out what ends the "
        "job so soon (logs/ in the run directory), or pin a shorter disk.interval",
    )


def node_that_fails(facts: Facts) -> Finding | None:
    """One node began more interruptions than chance explains."""
    found = facts.data.faulty
    if found is None:
        return None
    return Finding(
        id="faulty-node",
        severity="high",
        title=f"node {found.node} ends the job again and again",
        evidence=found.sentence,
        fix="look at that machine, or leave it out; with failures.faulty_node: leave and --nnodes "
        "MIN:MAX its launcher leaves by itself, unless the nodes meet there, and the others go on",
    )


def limits(facts: Facts) -> Finding | None:
    """A limit of the user decided, not the optimum."""
    decision = facts.data.decision
    if decision is None:
        return None
    bound = [choice for choice in decision.choices if choice.binding]
    if not bound:
        return Finding(id="limits", severity="low", title="No limit keeps the plan from its best",
                       evidence=f"{len(decision.choices)} choices, all free",
                       passed=True)  # fmt: skip
    names = ", ".join(f"{choice.name} ({choice.binding})" for choice in bound)
    costs = [
        choice.chosen_waste - choice.runner_up_waste
        for choice in bound
        if choice.chosen_waste is not None and choice.runner_up_waste is not None
    ]
    return Finding(
        id="limits",
        severity="low",
        title="A limit decided, not the optimum",
        evidence=names,
        fix="relax the limit in the policy if it is not a hard one",
        saving=max((cost for cost in costs if cost > 0), default=None),
    )


def memory_tight(facts: Facts) -> Finding | None:
    """Slots take most of the host memory that is left."""
    profile, decision = facts.data.profile, facts.data.decision
    if profile is None or decision is None:
        return None
    needed = slots_bytes_of(profile, decision)
    available = profile.memory.host_available_bytes
    if profile.memory.cgroup_available_bytes is not None:
        available = min(available, profile.memory.cgroup_available_bytes)
    seen = f"{format_bytes(needed)} in slots of {format_bytes(available)} available on a node"
    if available <= 0 or needed <= MEMORY_SHARE * available:
        return Finding(id="memory-tight", severity="medium", title="Host memory suffices",
                       evidence=seen, passed=True)  # fmt: skip
    return Finding(
        id="memory-tight",
        severity="high" if needed > available else "medium",
        title="Host memory is tight",
        evidence=seen,
        fix="set limits.host_memory, or raise the limit of the container",
    )


def unstable(facts: Facts) -> Finding | None:
    """The iteration time varied while it was measured."""
    profile = facts.data.profile
    if profile is None or profile.iteration_s.p10 <= 0 or profile.iteration_s.n < FEW_SAMPLES:
        return None
    ratio = profile.iteration_s.p90 / profile.iteration_s.p10
    seen = (
        f"{profile.iteration_s.n} samples of an iteration, "
        f"p10 {format_duration(profile.iteration_s.p10)}, "
        f"p90 {format_duration(profile.iteration_s.p90)}"
    )
    if ratio <= SPREAD:
        return Finding(id="unstable", severity="low", title="The measurement is stable",
                       evidence=seen, passed=True)  # fmt: skip
    return Finding(
        id="unstable",
        severity="low",
        title="Iteration times vary",
        evidence=f"{seen}, a factor of {ratio:.2g}",
        fix="profile again on a quiet machine, or with more iterations",
    )


def assumed(facts: Facts) -> Finding | None:
    """The failure rate or the restart time is an assumption."""
    known = reckoned_with(facts.data.profile, facts.data.decision)
    if known is None:
        return None
    rates, recovery = known
    times = {
        "detection": recovery.detect,
        "restart": recovery.restart,
        "restore from memory": recovery.restore_memory,
        "restore from disk": recovery.restore_disk,
    }
    guesses = [name for name, estimate in times.items() if estimate.source == "assumed"]
    events = rates.per_node.events + rates.per_job.events
    curve = facts.data.what_if
    unknown = curve.mtbf_assumed if curve is not None else not events
    if not unknown and not guesses:
        said = f"{events} interruptions on record" if events else "the rate is declared"
        return Finding(id="assumed", severity="low", title="Failure rate and recovery are known",
                       evidence=said, passed=True)  # fmt: skip
    parts = []
    if unknown:
        rate = facts.data.interruptions_per_s
        mtbf = f"one interruption in {format_duration(1 / rate)}" if rate > 0 else "no interruption"
        parts.append(f"{mtbf} ({rates.per_node.source})")
    if guesses:
        parts.append("times of " + ", ".join(guesses))
    return Finding(
        id="assumed",
        severity="low",
        title="Part of the prediction rests on assumptions",
        evidence="assumed: " + "; ".join(parts),
        fix="set failures.mtbf in the policy if you know it; every run sharpens the estimate",
    )


def gpus(facts: Facts) -> Finding | None:
    """A GPU that is about to fail, or that something holds back."""
    profile = facts.data.profile
    if profile is None or not profile.gpus:
        return None
    dying = [gpu.name for gpu in profile.gpus if gpu.remapping_failed]
    errors = [gpu.name for gpu in profile.gpus if gpu.ecc_uncorrected]
    slowed = [f"{gpu.name}: {', '.join(gpu.slowed_by)}" for gpu in profile.gpus if gpu.slowed_by]
    if dying or errors:
        what = f"no spare row left on {', '.join(dying)}" if dying else "uncorrected ECC errors"
        return Finding(id="gpus", severity="high", title="A GPU's memory fails",
                       evidence=f"{what}; {len(errors)} of {len(profile.gpus)} had such errors "
                       "since the driver was loaded",
                       fix="drain the node and have it checked; it will interrupt the job again",
                       )  # fmt: skip
    if slowed:
        return Finding(id="gpus", severity="medium", title="A GPU is slowed down",
                       evidence="; ".join(slowed),
                       fix="look at cooling and power limit; one slow GPU slows all")  # fmt: skip
    return Finding(id="gpus", severity="low", title="GPUs run freely",
                   evidence=f"{len(profile.gpus)} without errors", passed=True)  # fmt: skip


def promises_broken(facts: Facts) -> Finding | None:
    """The run did not do what the plan promised."""
    compared = [promise for promise in facts.promises if promise.verdict != "not yet"]
    if not compared:
        return None
    broken = [promise for promise in compared if promise.verdict == "broken"]
    if not broken:
        return Finding(id="promises", severity="medium", title="The plan kept its promises",
                       evidence=f"{len(compared)} figures within a factor of {FACTOR:g} or better",
                       passed=True)  # fmt: skip
    parts = []
    for promise in broken:
        show = format_duration if promise.unit == "s" else format_fraction
        parts.append(
            f"{promise.label.lower()} {show(promise.observed or 0.0)} for {show(promise.promised)}"
        )
    costs = [p for p in broken if p.name == "checkpoint_waste"]
    unlucky = all(promise.name == "waste" for promise in broken)
    return Finding(
        id="promises",
        severity="medium",
        title="More was lost to failures than expected"
        if unlucky
        else f"{len(broken)} of {len(compared)} promises were not kept",
        evidence="; ".join(parts) + (f"; {broken[0].note}" if unlucky else ""),
        fix="nothing to tune: the estimate of the failure rate has learnt from this run"
        if unlucky
        else "profile again: the job or the machine is no longer what was measured",
        saving=max(((p.observed or 0.0) - p.promised for p in costs), default=None),
    )


def slots_bytes_of(profile: Profile | None, decision: Decision | None) -> int:
    """Return the host memory on one node: the slots, and replicas and parity of other nodes."""
    if profile is None or decision is None:
        return 0
    ranks = max(1, profile.fingerprint.world_size // max(1, profile.fingerprint.nodes))
    images = decision.plan.slots + GENERATIONS * decision.plan.redundancy.memory_share
    return math.ceil(images * profile.state.total_bytes * ranks)


def _reason(saves: Saves) -> str:
    """The most frequent reason, as a sentence."""
    if not saves.reasons:
        return ""
    reason, count = next(iter(saves.reasons.items()))
    return f"Most often ({count}): {reason}"


CHECKS = (
    unprotected,
    degraded,
    replicas_disagree,
    lossy,
    copies_missing,
    persist_failed,
    saves_skipped,
    snapshots_discarded,
    stall,
    slowdown,
    restart,
    restored_from_disk,
    no_progress,
    node_that_fails,
    promises_broken,
    limits,
    memory_tight,
    unstable,
    gpus,
    assumed,
)
