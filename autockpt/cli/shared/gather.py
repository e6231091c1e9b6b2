"""Everything that a report shows, read from a run directory; and the report files written there."""

import shlex
import threading
from typing import TYPE_CHECKING

from autockpt.cli.shared.prospects import risk_of, search_of
from autockpt.cli.shared.versions import versions
from autockpt.launch.elastic.signals import Interrupted
from autockpt.policies.restart.faulty_node import faulty_node
from autockpt.run_directory import RunDirectory, RunInfo, utc_now
from autockpt.values.errors import AutockptError, ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Decision
from autockpt.values.record import to_data

if TYPE_CHECKING:
    from pathlib import Path

    from autockpt.cli.shared.plan_choice import Scale
    from autockpt.reports.analysis.replication import Protection
    from autockpt.reports.analysis.what_if import WhatIfCurve
    from autockpt.reports.data import RunData
    from autockpt.reports.model import ReportModel
    from autockpt.values.status import DegradedTier, RunStatus


def run_data(run: RunDirectory) -> "RunData":
    """Return the files of the run, as values.  Raises ConfigError when a record cannot be read."""
    import platform
    import time

    from autockpt.reports.data import RunData

    info, status = run.read_info(), run.read_status()
    profile, decision, goal = run.read_profile(), run.read_decision(), run.read_goal()
    events, thinned_ranks = run.events_for_report()
    written_s = run.status_written_s()
    origins = run.failure_origins()
    argv = () if info is None else _argv(info)
    return RunData(
        title=run.path.name,
        command=f"autockpt {info.mode} {shlex.join(argv)}" if info else "",
        argv=argv,
        created=utc_now(),
        versions=dict(info.versions) if info and info.versions else versions(),
        hosts=(platform.node(),),
        profile=profile,
        decision=decision,
        events=tuple(events),
        thinned_ranks=thinned_ranks,
        failures=run.failures(),
        faulty=faulty_node(origins.began, origins.nodes),
        goal=goal or Goal(),
        redundancy=plan_of(run, goal).redundancy,
        plan_yaml=run.plan_text(),
        protected=info is None or info.mode == "profile" or (run.attached and not run.unprotected),
        begins=_begins(run, info, status),
        what_if=what_if_of(decision),
        status=to_data(status) if status else {},
        resume=_resume(run, info) if info and info.mode == "run" else "",
        train=_train(run, info, goal) if info and info.mode == "profile" and profile else "",
        silent_s=None if written_s is None else max(0.0, time.time() - written_s),
        risk=risk_of(decision),
        search=search_of(run),
    )


def _begins(run: RunDirectory, info: RunInfo | None, status: "RunStatus | None") -> bool:
    if info is None or info.mode == "profile" or run.attached or run.unprotected:
        return False
    return status is None or status.state == "running"


def _resume(run: RunDirectory, info: RunInfo) -> str:
    """The command that goes on with the run, typed in the directory where it was started."""
    from autockpt.cli.shared.plan_choice import launch_words

    place = shlex.quote(_typed(run.path, info))
    return f"autockpt run --run-dir {place} {launch_words(_scale(info))}{shlex.join(_argv(info))}"


def _train(run: RunDirectory, info: RunInfo, goal: Goal | None) -> str:
    """The command that `autockpt profile` ends with, typed in the same directory.

    "" where a variable of the environment is wrong: the run itself will say so.
    """
    from autockpt.cli.shared.plan_choice import launch_words, policy_words, run_under
    from autockpt.launch.script import Script

    scale, place = _scale(info), _typed(run.profile_path, info)
    script = Script(target=info.script, module=info.module, args=info.args, shown=info.script)
    try:
        policy = policy_words(goal or Goal(), scale)
    except ConfigError:
        return ""
    return run_under(place, policy, launch_words(scale).split(), script)


def _scale(info: RunInfo) -> "Scale":
    from autockpt.cli.shared.plan_choice import Scale

    return Scale(world_size=info.nodes * info.ranks_per_node, nodes=info.nodes)


def _argv(info: RunInfo) -> tuple[str, ...]:
    """The script and its arguments, typed where the run was started."""
    from pathlib import Path

    script = ("-m", info.script) if info.module else (_typed(Path(info.script), info),)
    return (*script, *info.args)


def _typed(path: "Path", info: RunInfo) -> str:
    """A path as one would type it where the run was started: relative when it is inside."""
    import os

    place = os.path.relpath(path, info.cwd) if info.cwd else str(path)
    return str(path) if place.startswith("..") else place


def plan_of(run: RunDirectory, goal: Goal | None) -> CheckpointPlan:
    """Return the newest plan of a run; without one, the plan of a run without a profile."""
    from autockpt.policies.default_plan import plan_without_profile

    return run.read_plan() or plan_without_profile(goal or Goal())


def tiers_of(run: RunDirectory) -> "tuple[Protection | None, tuple[DegradedTier, ...]]":
    """(what the other nodes hold of a run, its tiers that are degraded now).

    Of long logs the ends decide.  Raises ConfigError when a record cannot be read.
    """
    from autockpt.reports.analysis.degradation import degraded_tiers
    from autockpt.reports.analysis.replication import protection

    events = run.late_events()
    copies = protection(events, plan_of(run, run.read_goal()).redundancy)
    return copies, degraded_tiers(events)


def lacking_of(run: RunDirectory) -> str:
    """The sentence about values that the newest checkpoints of a run lack; "": they lack none.

    Raises ConfigError when a record cannot be read.
    """
    from autockpt.reports.analysis.degradation import lacking

    return lacking(run.late_events())


def what_if_of(decision: Decision | None) -> "WhatIfCurve | None":
    """The waste function at the plan, from the inputs that decided it; None: they are not known."""
    if decision is None or decision.inputs is None:
        return None
    from autockpt.policies.cost_model.inputs import tiers_from
    from autockpt.reports.analysis.what_if import what_if

    memory_steps = decision.plan.tier("memory").interval_steps
    disk_steps = decision.plan.tier("disk").interval_steps
    if not disk_steps:
        return None
    tiers = tiers_from(decision.inputs)
    memory_s, disk_s = tiers.periods_s(memory_steps, disk_steps)
    parts = tiers.waste(memory_steps, disk_steps)
    return what_if(
        memory=tiers.memory,
        disk=tiers.disk,
        memory_period_s=memory_s,
        disk_period_s=disk_s,
        waste=parts.total,
        mtbf_assumed=decision.inputs.rate_assumed,
        boundary=parts.boundary,
    )


def write_report(run: RunDirectory) -> "ReportModel":
    """Write report.html.  Raises AutockptError when something cannot be read."""
    from autockpt.reports import model
    from autockpt.reports.html import html

    built = model.build(run_data(run))
    run.write_text(run.report.name, html.render(built))
    return built


def try_report(run: RunDirectory) -> "tuple[ReportModel | None, str]":
    """`write_report` at the end of a run: (the report or None, why not); never raises."""
    try:
        return write_report(run), ""
    except AutockptError as error:
        return None, str(error)
    except Exception as error:
        from autockpt.console import save_traceback

        return None, f"{type(error).__name__}: {error} (traceback: {save_traceback(error)})"


def report_within(run: RunDirectory, within_s: float) -> "tuple[ReportModel | None, str]":
    """As `try_report`, and not waited for any longer than `within_s`, or than a signal lets it.

    The telemetry of weeks takes minutes to read, and the end of a job must not wait for that.
    Call it on the main thread, where signals raise Interrupted (`signals_raise`).
    """
    found: list[tuple[ReportModel | None, str]] = []
    work = threading.Thread(
        target=lambda: found.append(try_report(run)), name="autockpt-report", daemon=True
    )
    later = f"it can be written later: autockpt report {shlex.quote(str(run.path))}"
    try:
        work.start()
        work.join(within_s)
    except Interrupted as interrupted:
        return None, f"{interrupted} came; {later}"
    return found[0] if found else (None, f"reading the run takes over {within_s:.0f} s; {later}")
