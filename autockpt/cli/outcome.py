"""The end of a run: status.json, the report, and what is printed about both."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from autockpt.cli.advice import advice
from autockpt.cli.console import Console
from autockpt.cli.decisions import Scale, command_line, launch_words
from autockpt.cli.gather import try_report
from autockpt.cli.launch import Ending
from autockpt.cli.options import Script
from autockpt.job_directory import own_runs
from autockpt.run_directory import RunDirectory, RunStatus
from autockpt.values.errors import AutockptError
from autockpt.values.record import to_data

if TYPE_CHECKING:
    from autockpt.reports.protection import Protection
    from autockpt.values.degradation import DegradedTier


def finish(run: RunDirectory, ending: Ending, script: Script, console: Console) -> int:
    """Write status and report, say how it went; the exit code of the command."""
    status = _status(run, ending)
    run.write_status(status)
    report, why_not = try_report(run)
    if report is None:
        console.warn(f"no report was written: {why_not}")
        status = replace(status, report=None)
        run.write_status(status)
    _say(run, status, script, console)
    console.object("run", {"run_dir": str(run.path), **to_data(status)})
    return ending.exit_code


def note(run: RunDirectory, ending: Ending) -> None:
    """Write the status as far as it is known before the last copies are made."""
    run.write_status(replace(_status(run, ending), report=None))


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
        protected=run.attached and not run.unprotected,
        report=str(run.report),
        reason=ending.reason,
        error=ending.error,
    )


def _tiers(run: RunDirectory) -> "tuple[Protection | None, tuple[DegradedTier, ...]]":
    from autockpt.cli.gather import tiers_of

    try:
        return tiers_of(run)
    except AutockptError:
        return None, ()  # the report will say what cannot be read


def shown(path: str | os.PathLike[str]) -> str:
    """A path as one would type it here: relative when it is inside the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _say(run: RunDirectory, status: RunStatus, script: Script, console: Console) -> None:
    if status.state == "finished" and not status.protected:
        path = script.target if not script.module else script.shown
        console.block(advice(path))
    elif not status.protected:
        console.warn(f"UNPROTECTED: {script.shown} had not called autockpt.attach")
    parts: list[str] = [status.state]
    if status.reason:
        parts.append(f"({status.reason})")
    if status.last_step is not None:
        parts.append(f"at step {status.last_step}")
    if status.restarts:
        parts.append(f"after {status.restarts} restart{'s' * (status.restarts > 1)}")
    console.say(" ".join(parts))
    if status.last_durable:
        console.say(f"newest durable checkpoint: {status.last_durable}")
    if status.last_protected:
        console.say(f"newest checkpoint that survives the loss of a node: {status.last_protected}")
    if status.last_remote:
        console.say(f"newest checkpoint in the object store: {status.last_remote}")
    for tier in status.degraded:
        console.warn(str(tier))
    for own in own_runs(run.path):
        console.say(f"another job was started in it, with a run of its own: {shown(own)}")
    if status.report:
        console.say(f"report: {shown(run.report)}")
    info = run.read_info()
    ranks, nodes = (info.ranks_per_node, info.nodes) if info else (1, 1)
    if status.state == "finished":
        console.next(f"autockpt explain {shown(run.path)}")
    else:
        words = launch_words(Scale(world_size=ranks * nodes, nodes=nodes))
        console.next(
            f"autockpt run --run-dir {shown(run.path)} {words}{command_line(script)}   (resumes)"
        )
