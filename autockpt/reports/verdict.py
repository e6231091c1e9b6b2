"""The head of a report: the outcome, its cost, the loss and the next step.

Every number comes from the Decision or the Accounting that the rest of the page shows; nothing is
computed a second way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autockpt.reports.analysis.accounting import Accounting, Restore
from autockpt.reports.analysis.ending import RunEnding
from autockpt.reports.analysis.promises import Promise
from autockpt.reports.analysis.saves import Age
from autockpt.reports.data import RunData, reckoned_with
from autockpt.reports.findings import SPREAD, Finding
from autockpt.values.arguments import HIDDEN
from autockpt.values.exit_codes import REFUSED_AGAIN
from autockpt.values.plan import CheckpointPlan, Decision
from autockpt.values.profile import Profile
from autockpt.values.status import DegradedTier
from autockpt.values.units import format_duration, format_fraction

FEW_ITERATIONS = 20
"""Fewer measured iterations than this lower the confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The story of a run or a profile in a few sentences, in the order of reading."""

    headline: str
    """One sentence: the state or end of a run, or the plan of a profile."""
    cost: str = ""
    """Where the time went or will go."""
    lost: str = ""
    """The work that failures took or can take."""
    assumed: str = ""
    """The quantities behind the plan without a measurement, in words."""
    next_step: str = ""
    """The next action."""
    command: str = ""
    """The command of `next_step`; "": it has none."""
    detail: str = ""
    """The comparison with the plan, and the circumstances of an end."""
    confidence: Literal["high", "medium", "low"]
    confidence_reason: str
    tone: Literal["good", "warn", "bad"]

    def lines(self) -> tuple[tuple[str, str], ...]:
        """(label, text) of the sentences under the headline; empty ones are left out."""
        said = (("Cost", self.cost), ("Lost", self.lost), ("Assumed", self.assumed),
                ("Next", self.next_step))  # fmt: skip
        return tuple((label, text) for label, text in said if text)


def without_disk(verdict: Verdict, disk: DegradedTier, *, opens: bool) -> Verdict:
    """The same with the news that checkpoints did not reach the disk in the end; `opens`: first."""
    news = f"No checkpoint has reached the disk{f' since {disk.since}' if disk.since else ''}."
    return replace(
        verdict,
        headline=f"{news} {verdict.headline}" if opens else f"{verdict.headline} {news}",
        detail=f"The last error: {disk.because}. {verdict.detail}".rstrip(),
        next_step="Mend the storage first: the last error is below.",
        tone="bad",
    )


def advised(verdict: Verdict, data: RunData, ended: RunEnding | None, found: Sequence[Finding]
            ) -> Verdict:  # fmt: skip
    """The verdict with its assumptions and the next step: of the end, else of the worst finding."""
    verdict = replace(verdict, assumed=_assumed(data) if data.protected else "")
    if not verdict.next_step:
        step, command = _next_step(data, ended, found)
        verdict = replace(verdict, next_step=step, command=command)
    if HIDDEN not in verdict.command:
        return verdict
    return replace(verdict, next_step=f"{verdict.next_step} Put your own value for {HIDDEN}.")


def profile_verdict(data: RunData, ended: RunEnding | None = None) -> Verdict:
    """The head of a profile, or of a run that ended before it trained."""
    if ended is not None and ended.state != "finished":
        return _unfinished(ended, None)
    decision, profile = data.decision, data.profile
    level, reason = confidence(profile, decision=decision)
    if data.begins:
        return Verdict(
            headline="The script has not called autockpt.attach so far.",
            next_step="Look again soon. If it trains already, autockpt run prints at its end the "
            "lines that it lacks.",
            confidence="high",
            confidence_reason="no rank has written an event",
            tone="warn",
        )
    if not data.protected:
        return Verdict(
            headline="This run was not protected.",
            lost=NOT_PROTECTED,
            confidence="high",
            confidence_reason="no telemetry was written",
            tone="bad",
        )
    if decision is None:
        return Verdict(
            headline="Measured, not decided yet." if profile else "Nothing was measured.",
            next_step="Run autockpt plan to turn this profile into a plan."
            if profile
            else "Run autockpt profile with your training script.",
            confidence=level,
            confidence_reason=reason,
            tone="warn",
        )
    expected, current = decision.expected, decision.current
    headline = f"Checkpoint {_intervals(decision.plan, profile)}."
    band = f"{format_fraction(expected.waste_low)} to {format_fraction(expected.waste_high)}"
    cost = detail = ""
    if current is None:
        headline += f" Expect to lose {format_fraction(expected.waste)} of the time."
        cost = f"90 % of all such runs lose {band} of their time."
    else:
        verb = "falls" if expected.waste < current.waste else "goes"
        headline += (
            f" Lost time {verb} from {format_fraction(current.waste)} "
            f"to {format_fraction(expected.waste)}."
        )
        cost = (
            f"{worth(current.waste - expected.waste, profile)} 90 % of all such runs lose {band} "
            "of their time."
        ).strip()
        detail = (
            "Compared with a blocking checkpoint every 30 minutes, which stalls training for "
            f"{format_duration(current.stall_s)}."
        )
    recovery = (
        f"A failure costs {format_duration(expected.recovery_memory_s)} where the memory of the "
        f"node survives, else {format_duration(expected.recovery_disk_s)}, in the mean."
    )
    return Verdict(
        headline=headline,
        cost=cost,
        lost=recovery,
        next_step="Train under this plan.",
        command=data.train,
        detail=detail,
        confidence=level,
        confidence_reason=reason,
        tone="good",
    )


def run_verdict(
    data: RunData,
    accounting: Accounting,
    restores: Sequence[Restore],
    ages: Sequence[Age],
    ended: RunEnding | None = None,
    promises: Sequence[Promise] = (),
    *,
    step: int = 0,
) -> Verdict:
    """The head of a run; `step` is the newest that was trained."""
    level, reason = confidence(data.profile, accounting)
    told = _outcome(data, ended, step)
    if not data.protected:
        finished = ended is None or ended.state == "finished"
        unprotected = f"{format_duration(accounting.wall_s)} were trained unprotected."
        return Verdict(
            headline=f"{told} {unprotected}",
            lost=NOT_PROTECTED if finished or ended is None else ended.loss,
            detail="" if ended is None else ended.circumstances,
            confidence=level,
            confidence_reason=reason,
            tone="bad",
        )
    said = _achieved(data, accounting, restores, ages, ended, promises)
    verdict = replace(said, headline=told, confidence=level, confidence_reason=reason)
    if ended is None or ended.state == "finished":
        return verdict
    return _unfinished(ended, verdict)


NOT_PROTECTED = (
    "No checkpoint was taken, because the script never attached. A failure would have cost all "
    "of the run."
)
LIVE_S = 60.0
"""A run that trains replaces its status every ten seconds: an older one has no writer any more."""


def _outcome(data: RunData, ended: RunEnding | None, step: int) -> str:
    """The end, or the state of a run without one."""
    if ended is not None:
        return ended.headline
    at = f" at step {step}" if step else ""
    if _is_live(data):
        return f"Still running{at}."
    silent_s = data.silent_s
    since = f"{format_duration(silent_s)} ago" if silent_s is not None else "not dated"
    return f"No end was told: it may still run. The last word{at} is {since}."


def _is_live(data: RunData) -> bool:
    """Of a run without an end: it still writes its status."""
    return data.silent_s is not None and data.silent_s <= LIVE_S


def _unfinished(ended: RunEnding, achieved: Verdict | None) -> Verdict:
    """The end and its loss; earlier losses come after."""
    achieved = achieved or Verdict(
        headline="", confidence="high", confidence_reason="said by the launcher", tone="bad"
    )
    lost = " ".join(part for part in (ended.loss, achieved.lost) if part)
    detail = " ".join(part for part in (ended.circumstances, achieved.detail) if part)
    clean = ended.state == "interrupted" and not ended.lost_steps
    return replace(
        achieved, headline=ended.headline, lost=lost, detail=detail, tone="warn" if clean else "bad"
    )


def _achieved(
    data: RunData,
    accounting: Accounting,
    restores: Sequence[Restore],
    ages: Sequence[Age],
    ended: RunEnding | None,
    promises: Sequence[Promise],
) -> Verdict:
    """Cost, loss and the comparison with the plan."""
    return Verdict(
        headline="",
        cost=_cost(accounting),
        lost=losses(restores, ages, nothing=ended is None or ended.state == "finished"),
        detail=_against_plan(data, promises),
        confidence="high",
        confidence_reason="measured",
        tone="good" if accounting.goodput >= 0.9 else "warn",
    )


def _cost(accounting: Accounting) -> str:
    """Every second of the run, by purpose; "": it trained nothing."""
    if not accounting.steps:
        return ""
    saves_s = accounting.stall_s + accounting.slowdown_s
    parts = [f"checkpoints {_of(saves_s, accounting)}"]
    if accounting.lost_s > 0:
        parts.append(f"lost work {_of(accounting.lost_s, accounting)}")
    if accounting.down_s > 0:
        parts.append(f"down time {_of(accounting.down_s, accounting)}")
    if accounting.other_s > 0:
        parts.append(f"start-up and the like {_of(accounting.other_s, accounting)}")
    productive = _of(accounting.productive_s, accounting)
    cost = (
        f"Of {format_duration(accounting.wall_s)}, {productive} went into training that counts; "
        f"{', '.join(parts)}."
    )
    if accounting.left_s > 0:
        left = format_duration(accounting.left_s)
        cost += f" Another {left} were left with --resume-from, and are not counted."
    return cost


def _of(seconds: float, accounting: Accounting) -> str:
    share = seconds / accounting.wall_s if accounting.wall_s > 0 else 0.0
    return f"{format_duration(seconds)} ({format_fraction(share)})"


def losses(restores: Sequence[Restore], ages: Sequence[Age], *, nothing: bool) -> str:
    """Describe the losses at failures, and the largest that one could have caused."""
    failures = [restore for restore in restores if restore.failed_at_s is not None]
    unkept = [r for r in restores if r.failed_at_s is None and r.lost_steps]
    parts = []
    if failures:
        deaths = sum(restore.deaths for restore in failures)
        times = "One failure" if deaths == 1 else f"{deaths} failures"
        steps = sum(restore.lost_steps for restore in failures)
        lost_s, down_s = (sum(getattr(r, n) for r in failures) for n in ("lost_s", "down_s"))
        took = f" ({format_duration(lost_s)})" if lost_s > 0 else ""
        again = f"{_steps(steps)}{took} trained again"
        told = f": {again}, {format_duration(down_s)} down" if steps else ""
        if lost_s + down_s > 0:
            starts = " of all starts" if any(r.new_launch for r in restores) else ""
            parts.append(f"{times}{starts} cost {format_duration(lost_s + down_s)} in all{told}.")
    if unkept:
        steps, lost_s = sum(r.lost_steps for r in unkept), sum(r.lost_s for r in unkept)
        parts.append(
            f"{_steps(steps)} ({format_duration(lost_s)}) were trained before an end and not kept."
        )
    if not parts and nothing:
        parts.append("Nothing: no failure.")
    if ages:
        *others, last = (
            f"{format_duration(a.worst_s)} from {'the ' * (a.tier == 'object store')}{a.tier}"
            for a in ages
        )
        at_stake = f"{', '.join(others)} and {last}" if others else last
        parts.append(f"Work not yet recoverable was at most {at_stake}.")
    return " ".join(parts)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def is_early(promises: Sequence[Promise]) -> bool:
    """The plan in force has made too few checkpoints to be judged."""
    return any(p.name == "checkpoint_waste" and p.verdict == "not yet" for p in promises)


def _against_plan(data: RunData, promises: Sequence[Promise]) -> str:
    """The loss that the plan in force expects, and the one since it applies."""
    if data.decision is None:
        return ""
    expects = f"The plan in force expects to lose {format_fraction(data.decision.expected.waste)}"
    seen = next((p.observed for p in promises if p.name == "waste"), None)
    if seen is None:
        return f"{expects}."
    if is_early(promises):
        return f"{expects}; it made too few checkpoints to be judged."
    return f"{expects}; since it applies {format_fraction(seen)} was lost."


def _next_step(data: RunData, ended: RunEnding | None, found: Sequence[Finding]) -> tuple[str, str]:
    """(what to do, the command for it)."""
    if ended is not None and ended.state != "finished":
        return _again(ended), data.resume
    if not data.protected:
        return "Add the lines that autockpt run printed; then start it again.", ""
    if ended is None and not _is_live(data):
        return "If it no longer runs, start it again.", data.resume
    worst = next((f for f in found if not f.passed and f.severity != "low"), None)
    if worst is not None:
        return f"{worst.title}: {worst.fix}.", ""
    return "Nothing, while it runs." if ended is None else "Nothing: no problem was found.", ""


def _again(ended: RunEnding) -> str:
    """The effect of the same command, as the launcher tells it at the end of the run."""
    refused = REFUSED_AGAIN.get(ended.exit_code or 0)
    if refused is not None:
        return f"The same command {refused}."
    resumes = (
        f"it resumes at step {ended.durable_step}" if ended.durable_step is not None
        else "it begins at step 0, because nothing is durable"
    )  # fmt: skip
    first = "Correct the error. Then start" if ended.state == "failed" else "Start"
    return f"{first} the same run again: {resumes}."


def _assumed(data: RunData) -> str:
    """The figures of the plan that are neither measured nor declared."""
    known = reckoned_with(data.profile, data.decision)
    if known is None:
        return ""
    rates, recovery = known
    inputs = data.decision.inputs if data.decision else None
    declared = inputs is not None and inputs.declared_mtbf_s is not None
    parts = []
    if not declared and not rates.per_node.events + rates.per_job.events:
        mtbf_s = 1.0 / data.interruptions_per_s if data.interruptions_per_s > 0 else None
        often = f"a failure every {format_duration(mtbf_s)}" if mtbf_s else "a rate of failures"
        parts.append(f"{often}, because none was on record")
    times = {
        "to notice a failure": recovery.detect,
        "to restart": recovery.restart,
        "to restore from memory": recovery.restore_memory,
        "to restore from disk": recovery.restore_disk,
    }
    parts += [
        f"{format_duration(estimate.value_s)} {what}"
        for what, estimate in times.items()
        if estimate.source == "assumed"
    ]
    return f"The plan reckons with {'; '.join(parts)}." if parts else ""


def confidence(
    profile: Profile | None,
    accounting: Accounting | None = None,
    *,
    decision: Decision | None = None,
) -> tuple[Literal["high", "medium", "low"], str]:
    """How far to trust the figures, and why not further."""
    if accounting is not None and accounting.other_s < -1e-6 * max(1.0, accounting.wall_s):
        return "low", "the telemetry contradicts itself"
    if accounting is not None:
        return "high", "the times above are measured"
    if profile is None:
        return "low", "no profile"
    doubts = []
    if profile.iteration_s.n < FEW_ITERATIONS:
        doubts.append(f"only {profile.iteration_s.n} iterations measured")
    if profile.iteration_s.p10 > 0 and profile.iteration_s.p90 > SPREAD * profile.iteration_s.p10:
        doubts.append("iteration times vary")
    rates, recovery = reckoned_with(profile, decision) or (profile.failures, profile.recovery)
    if not rates.per_node.events + rates.per_job.events:
        doubts.append("the failure rate is assumed")
    if recovery.restart.source == "assumed":
        doubts.append("the restart time is assumed")
    if not doubts:
        return "high", f"{profile.iteration_s.n} iterations and past failures measured"
    return ("medium" if len(doubts) < 3 else "low"), ", ".join(doubts)


def worth(saved: float, profile: Profile | None) -> str:
    """A saved fraction of time in the user's unit, as a sentence; "" when nothing is saved."""
    if saved <= 0 or profile is None:
        return ""
    fingerprint = profile.fingerprint
    if fingerprint.gpus:
        count, unit, machine = fingerprint.world_size, "GPU-hours", "GPUs"
    else:
        count, unit, machine = fingerprint.nodes, "machine-hours", "machines"
    on = f"on {count} {machine}" if count != 1 else f"on one {machine[:-1]}"
    hours = saved * 24.0 * count
    if hours < 1.0:
        return f"Saves {hours * 60:.2g} {unit.replace('hours', 'minutes')} a day {on}."
    return f"Saves {hours:.3g} {unit} a day {on}."


def interval_text(steps: int, iteration_s: float | None) -> str:
    """An interval for people, as time where it is known: steps mean little to most."""
    if iteration_s is None or iteration_s <= 0:
        return "every step" if steps == 1 else f"every {steps} steps"
    return f"every {format_duration(steps * iteration_s)}"


def _intervals(plan: CheckpointPlan, profile: Profile | None) -> str:
    """Where to and how often; tiers of one interval share it."""
    iteration_s = profile.iteration_s.p50 if profile else None
    tiers: dict[int, list[str]] = {}
    for tier in plan.tiers:
        if tier.interval_steps:
            tiers.setdefault(tier.interval_steps, []).append(tier.tier)
    parts = [
        f"to {' and '.join(names)} {interval_text(steps, iteration_s)}"
        for steps, names in tiers.items()
    ]
    return " and ".join(parts) if parts else "nothing: all tiers are off"
