"""The end of a run: its exit code, status.json, the report, and the printed summary.

The exit code comes first, and in bounded time: an announced end leaves seconds, and the telemetry
of weeks takes minutes to read.  Views for people follow, and none of them changes the code.
"""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autockpt.cli.jobs.script_hints import advice
from autockpt.cli.shared.gather import report_within
from autockpt.cli.shared.plan_choice import Scale, command_line, launch_words
from autockpt.console import Console
from autockpt.job_directory import own_runs
from autockpt.launch.elastic.request import Ending
from autockpt.launch.elastic.signals import Interrupted, signals_raise, signals_wait
from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError
from autockpt.values.exit_codes import (
    ANNOUNCED,
    LEFT_OUT,
    NOTHING_DURABLE,
    REFUSED_AGAIN,
    SAVED_REQUEUE,
)
from autockpt.values.record import to_data
from autockpt.values.status import RunStatus

if TYPE_CHECKING:
    from autockpt.reports.analysis.replication import Protection
    from autockpt.values.status import DegradedTier


REPORT_S = 60.0
"""The report is waited for so long: telemetry of days on a usual machine."""
LEAST_REPORT_S = 1.0
"""Though the end is announced for now: most reports are there by then."""
MARGIN_S = 0.5
"""Before the announced end: to say how it went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The logs of a run when this launch began, and other jobs' runs beside it."""

    logged: Mapping[str, int]
    """As `RunDirectory.log_ends`."""
    own_runs: tuple[Path, ...] = ()


def before(run: RunDirectory) -> Before:
    """Of an earlier launch, or nothing."""
    return Before(
        logged=run.log_ends(),
        own_runs=tuple(own_runs(run.path)),
    )


def finish(
    run: RunDirectory, ending: Ending, script: Script, console: Console, began: Before
) -> int:
    """Write status and report, say how it went; the exit code of the command.

    A signal that comes now ends only the report: how the training went stands by then.
    """
    if ending.exit_code == LEFT_OUT:  # the job goes on, and its other launchers tell its end
        console.warn(ending.reason)
        return ending.exit_code
    if not ending.joined:
        return ending.exit_code
    try:
        with signals_raise():
            with signals_wait():
                ending = _judged(run, ending, began, console)
                if ending.limit is not None:
                    ending.limit.exit_code = ending.exit_code
            _tell(run, ending, script, console, began)
    except Interrupted as interrupted:
        console.warn(f"{interrupted} came when the training was over ({ending.state})")
    except BrokenPipeError:  # the reader of --json has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (AutockptError, OSError) as error:
        console.warn(f"the end of the run could not be shown whole: {error}")
    return ending.exit_code


def _tell(
    run: RunDirectory, ending: Ending, script: Script, console: Console, began: Before
) -> None:
    status = _status(run, ending)
    is_whole = _write(run, status, console)
    report, why_not = report_within(run, _report_s(ending))
    if report is None:
        console.warn(f"no report was written: {why_not}")
        status = replace(status, report=None)
        _write(run, status, console)
    own = [path for path in own_runs(run.path) if path not in began.own_runs]
    was_there = status.state == "finished" or run.has_attached_since(began.logged)
    at_step = status.last_step if was_there else None
    _say(
        run,
        status,
        script,
        console,
        own,
        at_step=at_step,
        is_whole=is_whole,
        over=ending.over,
        lost="" if report is None else report.losses,
    )
    console.object("run", {"run_dir": str(run.path), **to_data(status)})


def _report_s(ending: Ending) -> float:
    """How long the report may take."""
    if ending.limit is None:
        return REPORT_S
    left_s = ending.limit.by_s - time.monotonic() - MARGIN_S
    return max(LEAST_REPORT_S, min(REPORT_S, left_s))


def _write(run: RunDirectory, status: RunStatus, console: Console) -> bool:
    """False: the directory took no status, and so perhaps no events before it either."""
    try:
        run.write_status(status)
        return True
    except AutockptError as error:
        console.warn(
            "status.json does not tell how the run ended, and the logs may lack its last steps: "
            f"{error}"
        )
        return False


def note(run: RunDirectory, ending: Ending, console: Console) -> None:
    """Write the status as far as it is known before the last copies are made."""
    if ending.joined and ending.exit_code != LEFT_OUT:
        try:
            _write(run, replace(_status(run, ending), report=None), console)
        except (AutockptError, OSError) as error:
            console.warn(f"status.json does not tell how the run ended: {error}")


def _judged(run: RunDirectory, ending: Ending, began: Before, console: Console) -> Ending:
    """The ending with its true exit code; that of the script where the logs cannot be read."""
    try:
        return _corrected(run, ending, began)
    except (AutockptError, OSError) as error:
        console.warn(f"whether all is durable is not known: {error}")
        return ending


def _corrected(run: RunDirectory, ending: Ending, began: Before) -> Ending:
    """A training that ended well without any durable checkpoint did not end well.

    One that had an announced end and has saved all of it should be started again.
    """
    if ending.exit_code in ANNOUNCED and _is_saved(run):
        return replace(ending, exit_code=SAVED_REQUEUE, reason=f"{ending.reason}; all is durable")
    if ending.exit_code or not _has_trained(run, began) or not _wants_disk(run):
        return ending
    if run.has_committed_since(began.logged):
        return ending
    return replace(ending, exit_code=NOTHING_DURABLE, reason="nothing that it trained is durable")


def _has_trained(run: RunDirectory, began: Before) -> bool:
    """Whether this launch came further than the checkpoint that it went on from."""
    is_attached = run.has_attached_since(began.logged)
    return is_attached and (run.newest_step() or 0) > run.resumed_step()


def _is_saved(run: RunDirectory) -> bool:
    step, durable = run.newest_step(), run.durable_step()
    return step is not None and durable is not None and durable >= step


def _wants_disk(run: RunDirectory) -> bool:
    """The plan in force has checkpoints on disk."""
    try:
        plan = run.read_plan()
    except AutockptError:
        plan = None
    return plan is None or bool(plan.tier("disk").interval_steps)


def _is_attached(run: RunDirectory) -> bool:
    return run.attached and not run.unprotected


def _status(run: RunDirectory, ending: Ending) -> RunStatus:
    durable, (copies, degraded) = run.newest_durable(), _tiers(run)
    remote = run.newest_remote()
    return RunStatus(
        state=ending.state,
        exit_code=ending.exit_code,
        restarts=ending.restarts,
        last_step=run.newest_step(),
        last_durable=durable.name if durable else None,
        last_protected=(copies.newest_generation or None) if copies else None,
        last_remote=remote.name if remote else None,
        unprotected_because=copies.degraded if copies else "",
        degraded=degraded,
        lacking=_lacking(run),
        protected=_is_attached(run) and (durable is not None or not _wants_disk(run)),
        report=str(run.report),
        reason=ending.reason,
        error=ending.error,
    )


def _tiers(run: RunDirectory) -> "tuple[Protection | None, tuple[DegradedTier, ...]]":
    from autockpt.cli.shared.gather import tiers_of

    try:
        return tiers_of(run)
    except AutockptError:
        return None, ()  # the report will say what cannot be read


def _lacking(run: RunDirectory) -> str:
    from autockpt.cli.shared.gather import lacking_of

    try:
        return lacking_of(run)
    except AutockptError:
        return ""


def shown(path: str | os.PathLike[str]) -> str:
    """A path as one would type it here: relative when it is inside the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _say(
    run: RunDirectory,
    status: RunStatus,
    script: Script,
    console: Console,
    own: Sequence[Path],
    *,
    at_step: int | None,
    is_whole: bool,
    over: bool,
    lost: str,
) -> None:
    attached = _is_attached(run)
    if status.state == "finished" and not attached:
        path = script.target if not script.module else script.shown
        console.block(advice(path))
    elif not attached:
        # It may have the line: it ended before, while it imported its modules, say.
        console.warn(f"{script.shown} ended before autockpt was attached")
    parts: list[str] = [status.state]
    if status.reason:
        parts.append(f"({status.reason})")
    if at_step is not None:
        kept = status.state == "finished" and run.durable_step() == at_step
        if is_whole:
            parts.append(f"at step {at_step}{' (durable)' * kept}")
        else:
            parts.append(f"at step {at_step} or later")
    if status.restarts:
        parts.append(f"after {status.restarts} restart{'s' * (status.restarts > 1)}")
    console.say(" ".join(parts))
    if lost:
        console.say(lost)
    is_newest = is_whole and run.durable_step() == status.last_step
    if status.last_durable and not is_newest and (status.state == "finished" or not lost):
        console.say(f"newest durable checkpoint: {status.last_durable}")
    if status.last_protected:
        console.say(f"newest checkpoint that survives the loss of a node: {status.last_protected}")
    if status.last_remote:
        console.say(f"newest checkpoint in the object store: {status.last_remote}")
    if attached and not status.last_step and status.state == "finished":
        console.warn("nothing was trained: the loop had no iteration")
    elif attached and not status.protected and status.last_step:
        console.warn("nothing of this training is durable; look at the disk before it is needed")
    if status.lacking:
        console.warn(status.lacking)
    for tier in status.degraded:
        console.warn(str(tier))
    for other in own:
        console.say(f"another job was started in it, with a run of its own: {shown(other)}")
    if status.report:
        console.say(f"report: {shown(run.report)}")
    info = run.read_info()
    ranks, nodes = (info.ranks_per_node, info.nodes) if info else (1, 1)
    if status.state == "finished":
        console.next(["autockpt", "explain", shown(run.path)])
    else:
        words = launch_words(Scale(world_size=ranks * nodes, nodes=nodes))
        stored = status.last_durable or status.last_remote
        then = "resumes" if stored else "begins anew: nothing is durable"
        then = REFUSED_AGAIN.get(status.exit_code or 0, then)
        then = "goes on where the script ended its training" if over else then
        place = shlex.quote(shown(run.path))
        console.next(f"autockpt run --run-dir {place} {words}{command_line(script)}", note=then)
