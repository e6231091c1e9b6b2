"""Data of a report: everything the caller read from the run directory, as values.

Nothing here opens a file or reads a clock; the command line gathers, this room shows.
"""

from dataclasses import dataclass, field
from typing import Any

from autockpt.reports.analysis.risk import Risk
from autockpt.reports.analysis.search import SearchHistory
from autockpt.reports.analysis.what_if import WhatIfCurve
from autockpt.values.failure import FailureRecord, FaultyNode
from autockpt.values.goal import Goal
from autockpt.values.plan import Decision
from autockpt.values.profile import FailureRates, Profile, RecoveryTimes
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from autockpt.values.telemetry import Event


def reckoned_with(
    profile: Profile | None, decision: Decision | None
) -> tuple[FailureRates, RecoveryTimes] | None:
    """Failure rates and recovery times behind the plan in force; a profile's where none is."""
    if decision is not None and decision.inputs is not None:
        return decision.inputs.failures, decision.inputs.recovery
    return None if profile is None else (profile.failures, profile.recovery)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run or one profile, as found on disk.  With no events the report is about the profile."""

    title: str
    """Name of the run, usually its directory or the script's name."""
    command: str = ""
    """The command as the user typed it, to be copied and run again."""
    argv: tuple[str, ...] = ()
    """The same, split; empty: only `command` is known."""
    created: str = ""
    """UTC time of the report in ISO 8601, for people."""
    versions: dict[str, str] = field(default_factory=dict)
    """autockpt, torch, python, driver, ... -> version."""
    hosts: tuple[str, ...] = ()
    """Host names that `redact` must hide; never shown by themselves."""
    profile: Profile | None = None
    decision: Decision | None = None
    """The decision in force when the run began."""
    events: tuple[Event, ...] = ()
    """Telemetry of all ranks; the events of one rank stand in the order they were written."""
    thinned_ranks: int = 0
    """So many ranks tell nothing of their iterations and copies here: their logs are too long."""
    failures: tuple[FailureRecord, ...] = ()
    """Interruptions of this run."""
    faulty: FaultyNode | None = None
    """The node that began more of them than chance explains."""
    plan_yaml: str = ""
    """The plan as written, with a comment for each automatic value."""
    policy_diff: str = ""
    """Unified diff from the current policy to the new one, "" when there was none."""
    protected: bool = True
    """False: the script never attached, so the run could lose everything."""
    begins: bool = False
    """It has no end, and has not attached so far: it may do so yet."""
    goal: Goal = field(default_factory=Goal)
    """The policy in force."""
    redundancy: Redundancy = NO_REDUNDANCY
    """The newest plan's redundancy on other nodes."""
    what_if: WhatIfCurve | None = None
    """The waste function's inputs and its own result for the plan."""
    resume: str = ""
    """The command that goes on with this run; "": it is not known."""
    train: str = ""
    """The command that trains under the plan of this profile; "": it is not known."""
    silent_s: float | None = None
    """Age of the run's status when this was read, seconds; None: it has none."""
    status: dict[str, Any] = field(default_factory=dict)
    """status.json as it was read, e.g. {"state": "finished"}."""
    risk: Risk | None = None
    """The plan over what is not known of the failures, simulated."""
    search: SearchHistory | None = None
    """The newest search of the way to write."""

    @property
    def interruptions_per_s(self) -> float:
        """As the plan reckons with: declared by the policy, else estimated; 0 when neither is."""
        if self.what_if is not None:
            return 1.0 / self.what_if.point["mtbf_s"]
        known = reckoned_with(self.profile, self.decision)
        return 0.0 if known is None else known[0].interruptions_per_s
