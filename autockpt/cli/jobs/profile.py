"""`autockpt profile`: measure a job, then write a profile, a plan and a report."""

import contextlib
import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from autockpt.cli.shared.options import (
    LAUNCH_NAMES,
    WRAPPING,
    Command,
    check_launch,
    common,
    find_script,
    launch_options,
    launch_settings,
    policy_options,
    repeated,
    script_arguments,
)
from autockpt.console import Console
from autockpt.launch import environment
from autockpt.launch.script import Script
from autockpt.values.errors import AutockptError, StaleProfileError

if TYPE_CHECKING:
    from autockpt.cli.jobs.tune_text import Found
    from autockpt.cli.shared.plan_choice import Scale
    from autockpt.launch.elastic.request import Ending
    from autockpt.run_directory import RunDirectory

EXAMPLES = """
autockpt profile train.py --lr 1e-3                      # also a script that knows no autockpt
autockpt profile --nproc-per-node 8 train.py --lr 1e-3
autockpt profile --out runs/measured -m package.train
"""


@click.command(cls=Command, examples=EXAMPLES, context_settings=WRAPPING)
@policy_options
@click.option("--out", metavar="DIR", help="Where to write (default: a new one under runs/).")
@click.option("--tune", "tuning", is_flag=True, help="Then search the best write (autockpt tune).")
@launch_options
@script_arguments
@common
def profile(
    console: Console,
    script: str,
    args: tuple[str, ...],
    module: bool,
    policy: str | None,
    settings: tuple[str, ...],
    out: str | None,
    tuning: bool,
    **launching: Any,
) -> int | Callable[[], int]:
    """Run SCRIPT for some iterations, measure it and this machine, and decide.

    The script is stopped when enough was seen; its cleanup code (finally, atexit) runs.  Options
    stand before SCRIPT; everything after it is the script's own.
    """
    from autockpt.cli.jobs.preparation import goal_of, own, prepare, require_found, scale_of
    from autockpt.run_directory import RunDirectory

    found = find_script(script, module, args)
    options = launch_settings(launching)
    check_launch(options)
    scale = scale_of(options)
    if environment.foreign_launcher(os.environ) is not None:
        return _as_worker(found, out, policy, settings, scale, console, tuning=tuning)
    goal = goal_of(out, policy, settings, scale)
    if out is not None:
        require_found(RunDirectory(out), goal)
    with own(found, out, options) as run:
        prepare(run, found, "profile", goal, scale)
        _measure(run, found, options, console)
        tuned = _tune(console, run, policy, settings) if tuning else None
        return _conclude(run, found, console, tuned)


def _measure(
    run: "RunDirectory", script: Script, options: dict[str, Any], console: Console
) -> None:
    """Launch the script in mode profile.  Raises when it wrote no profile."""
    from autockpt.launch.elastic.request import Launch
    from autockpt.launch.elastic.torchelastic import launch

    before = run.profile_path.stat().st_mtime_ns if run.profile_path.exists() else 0
    ending = launch(Launch(run=run, script=script, mode="profile", **options), console)
    written = run.profile_path.exists() and run.profile_path.stat().st_mtime_ns != before
    with contextlib.suppress(OSError):  # it holds something, or was never made
        os.rmdir(run.checkpoints())
    if not written:
        raise _no_profile(ending)


def _no_profile(ending: "Ending") -> Exception:
    """Why there is no profile; the exit code is the script's own where it failed by itself."""
    if ending.state == "interrupted":
        reason = f"interrupted ({ending.reason})"
    elif ending.exit_code:
        reason = f"the script failed first ({ending.reason})"
    else:
        reason = "the script ended before enough iterations were seen; give it more steps"
    error = StaleProfileError(f"no profile was written: {reason}")
    if ending.exit_code:
        error.exit_code = ending.exit_code
    return error


def _tune(
    console: Console, run: "RunDirectory", policy: str | None, settings: tuple[str, ...]
) -> "Found | None":
    """Return the result of a search, None (and a warning) where it could not be carried out."""
    from autockpt.cli.jobs.tune import DEFAULTS, search

    try:
        return search(
            console,
            {**DEFAULTS, "run_dir": str(run.path), "policy": policy, "settings": settings},
        )
    except AutockptError as error:
        console.warn(f"not tuned: {error}")
        return None


def _conclude(run: "RunDirectory", script: Script, console: Console, tuned: "Found | None") -> int:
    """Decide from the profile, write plan and report, print the verdict."""
    from autockpt.cli.jobs import tune_text
    from autockpt.cli.jobs.outcome import shown
    from autockpt.cli.shared import plan_choice
    from autockpt.cli.shared.decision_text import plan_object, promise, verdict
    from autockpt.cli.shared.gather import try_report
    from autockpt.reports.remarks import grouped
    from autockpt.values.goal import Goal
    from autockpt.values.record import to_data

    measured = plan_choice.read_profile(str(run.path))
    goal = run.read_goal() or Goal()
    decision = plan_choice.decide(measured, goal)
    plan_choice.write(run, decision)
    report, why_not = try_report(run)
    console.object(
        "profile",
        {
            "run_dir": str(run.path),
            "profile": to_data(measured),
            **plan_object(decision.plan, decision),
            "report": None if report is None else str(run.report),
            **({"tune": tune_text.as_object(*tuned)} if tuned else {}),
        },
    )
    console.styled(verdict(decision), "bold")
    for line in promise(decision.expected):
        console.result(line)
    for warning in grouped((*measured.warnings, *decision.warnings)):
        console.result(f"warning: {warning}")
    console.result(f"profile   {shown(run.profile_path)}")
    console.result(f"plan      {shown(run.path / 'plan.yaml')}")
    if report is None:
        console.warn(f"no report was written: {why_not}")
    else:
        console.result(f"report    {shown(run.report)}")
    if tuned is not None:
        tune_text.print_found(console, *tuned)
    scale = plan_choice.Scale(
        world_size=measured.fingerprint.world_size, nodes=measured.fingerprint.nodes
    )
    words = tune_text.policy_words(*tuned) if tuned is not None else []
    words = words or plan_choice.policy_words(goal, scale)
    launch = repeated(LAUNCH_NAMES)
    console.next(plan_choice.run_under(shown(run.profile_path), words, launch, script))
    return 0


def _as_worker(
    script: Script,
    out: str | None,
    policy: str | None,
    settings: tuple[str, ...],
    scale: "Scale",
    console: Console,
    *,
    tuning: bool,
) -> Callable[[], int]:
    """Under torchrun or Slurm: profile in this rank; the plan is made afterwards."""
    from autockpt.cli.jobs.preparation import goal_of, prepare, require_found
    from autockpt.cli.jobs.worker import first, run_here
    from autockpt.cli.shared import plan_choice
    from autockpt.run_directory import RunDirectory
    from autockpt.values.errors import ConfigError

    if out is None:
        raise ConfigError("under torchrun or Slurm all ranks need one place: add --out DIR")
    place = out

    def lead(launch_id: str) -> None:
        goal = goal_of(place, policy, settings, scale)
        require_found(RunDirectory(place), goal)
        prepare(RunDirectory.create(place), script, "profile", goal, scale, launch_id)
        words = ["plan", "--profile", place, *plan_choice.policy_words(goal, scale)]
        command = shlex.join(["autockpt", *(["tune", place] if tuning else words)])
        console.next(command, note="is for when it is over")

    first(place, scale, lead)
    variables = {environment.RUN_DIR: os.path.abspath(out), environment.MODE: "profile"}
    os.environ.update(variables)
    return run_here(script)
