"""`autockpt run`: train under the plan, survive failures, report."""

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autockpt.cli.shared.options import (
    RUN_NAMES,
    WRAPPING,
    Command,
    check_launch,
    common,
    find_script,
    given_names,
    launch_options,
    launch_settings,
    policy_options,
    profile_options,
    repeated,
    script_arguments,
)
from autockpt.console import Console
from autockpt.launch import environment
from autockpt.values.errors import ConfigError

if TYPE_CHECKING:
    from autockpt.cli.jobs.preparation import Request

EXAMPLES = """
autockpt run train.py --lr 1e-3                          # one process
autockpt run --nproc-per-node 8 train.py --lr 1e-3       # eight ranks on this node
autockpt run -m package.train --lr 1e-3                  # a module
autockpt run --run-dir runs/mine train.py                # again: resumes where it was
autockpt run --policy builtin:checkfreq --set disk.writers=4 train.py
autockpt run --dry-run train.py                          # what would happen, and why
torchrun --nproc-per-node 8 -m -- autockpt run train.py  # under your own launcher
srun --ntasks-per-node=1 autockpt run --nproc-per-node 8 train.py  # several nodes under Slurm
"""


@click.command(cls=Command, examples=EXAMPLES, context_settings=WRAPPING)
@policy_options
@profile_options
@click.option(
    "--run-dir", metavar="DIR", help="Where the run lives; resumes the one that is there."
)
@click.option("--fresh", is_flag=True, help="Start from scratch; keep old checkpoints.")
@click.option(
    "--resume-from",
    metavar="NAME",
    help="Roll back to this checkpoint, or to that of this step or with this pin.",
)
@click.option(
    "--same-job", is_flag=True, help="Resume the run in --run-dir, though it had other arguments."
)
@click.option("--dry-run", is_flag=True, help="Print policy, plan and promise; touch nothing.")
@launch_options
@script_arguments
@common
def run(
    console: Console,
    script: str,
    args: tuple[str, ...],
    module: bool,
    policy: str | None,
    settings: tuple[str, ...],
    profile: str | None,
    no_profile: bool,
    run_dir: str | None,
    fresh: bool,
    resume_from: str | None,
    same_job: bool,
    dry_run: bool,
    **launching: Any,
) -> int | Callable[[], int]:
    """Train SCRIPT with ARGS, protected: restarts after failures, resumes, explains itself.

    Options stand before SCRIPT; everything after it is the script's own.  The exit code is the
    script's own, 128 + n after signal n.
    """
    from autockpt.cli.jobs.pods import launching_in_pods
    from autockpt.cli.jobs.preparation import Request, check, check_environment
    from autockpt.cli.jobs.slurm import TASK_VARIABLE, launching_on_nodes
    from autockpt.job_directory import SAME_JOB

    launching, given = launch_settings(launching), given_names(launching)
    if environment.LAUNCHER_PID not in os.environ and not (fresh or resume_from):  # the user's own
        fresh = os.environ.get(environment.FRESH) == "1"
        resume_from = None if fresh else os.environ.get(environment.RESUME_FROM) or None
    launching = launching_in_pods(os.environ, launching, given)
    on_nodes = launching_on_nodes(os.environ, launching, given)
    if on_nodes is not None:
        launching = on_nodes
        del os.environ[TASK_VARIABLE]  # from here on a launcher, and no rank of srun
    request = Request(
        script=find_script(script, module, args),
        policy=policy,
        settings=settings,
        profile=profile,
        use_profile=not no_profile,
        run_dir=run_dir,
        fresh=fresh,
        resume_from=resume_from,
        launching=launching,
        same_job=same_job or os.environ.get(SAME_JOB) == "1",
    )
    check_launch(request.launching)
    check(request, same_job=same_job)
    for warning in check_environment(os.environ):
        console.warn(warning)
    for option in misplaced(run, script, args):
        console.say(
            f"warning: {option} stands behind {script} and is an argument of the script; options "
            "of autockpt stand before it",
            verbosity=-1,
        )
    if dry_run:
        return _dry_run(request, console)
    foreign = environment.foreign_launcher(os.environ)
    if foreign is not None:
        from autockpt.cli.jobs.worker import as_worker

        if foreign == environment.BY_RANK and given:
            raise ConfigError(_not_a_launcher(given))
        return as_worker(request, foreign, console)
    return _launch(request, console)


def _not_a_launcher(given: Collection[str]) -> str:
    options = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in given))
    return (
        f"{options}: a launcher's, but RANK and WORLD_SIZE in the environment say that another "
        "launcher has started this process as one of its ranks. To launch from here, unset them: "
        "env -u RANK -u WORLD_SIZE autockpt run ...; to be that rank, leave the options out"
    )


def misplaced(command: click.Command, script: str, args: Sequence[str]) -> list[str]:
    """Options of `command` among the arguments of a script that does not mention them."""
    ours = {option for parameter in command.params for option in parameter.opts}
    given = [arg.partition("=")[0] for arg in args]
    found = [name for name in given if name.startswith("--") and name in ours]
    if not found:
        return []
    try:
        source = Path(script).read_text("utf-8", "replace")
    except OSError:
        return []  # a module, or another program
    return [name for name in found if name not in source and _as_name(name) not in source]


def _as_name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _launch(request: "Request", console: Console) -> int:
    from autockpt.cli.checkpoints.remote import bring_back, copiers
    from autockpt.cli.jobs import outcome
    from autockpt.cli.jobs.preparation import (
        beside_a_live_job,
        check_directory,
        goal_for,
        launch_of_nodes,
        own,
        placed,
        prepare,
        profile_of,
        require_free,
        scale_of,
        write_decision,
    )
    from autockpt.launch.elastic.request import Launch
    from autockpt.launch.elastic.signals import Interrupted, signals_raise
    from autockpt.launch.elastic.torchelastic import launch
    from autockpt.launch.sidecars.archiver import archivers
    from autockpt.launch.sidecars.sidecar import beside
    from autockpt.values.errors import DirectoryBusyError

    request, scale = placed(request, console), scale_of(request.launching)
    goal = goal_for(request, scale)
    check_directory(request, goal)
    found = profile_of(request, scale, console)
    with contextlib.ExitStack() as owning:
        try:
            run = owning.enter_context(own(request.script, request.run_dir, request.launching))
        except DirectoryBusyError:
            elsewhere = beside_a_live_job(request, console)
            if elsewhere is None:
                raise
            return _launch(elsewhere, console)
        launch_id = ""
        if scale.nodes > 1:
            launch_id = launch_of_nodes(request.launching)
            require_free(run, goal, launch_id)
        prepare(run, request.script, "run", goal, scale, launch_id, anew=request.takes)
        if not request.fresh:
            bring_back(run, goal, console)
        console.say(f"run directory: {outcome.shown(run.path)}")
        console.say(f"plan: {write_decision(run, request, goal, found, scale.nodes)}")
        wanted = Launch(
            run=run,
            script=request.script,
            mode="run",
            resume_from=request.resume_from,
            fresh=request.fresh,
            profile_in_place=request.use_profile,
            notice_s=goal.failures.notice_s,
            faulty_node=goal.restart.faulty_node,
            standby=goal.restart.standby,
            caches=goal.restart.caches,
            **request.launching,
        )
        followers = [*archivers(run, goal.archive, console), *copiers(run, goal.remote)]
        began, ending = outcome.before(run), None
        with signals_raise():
            try:
                with beside(run, followers, console) as patience:
                    ending = launch(wanted, console)
                    patience.by_s = ending.keeper_by_s
                    if followers or ending.keeper_by_s is not None:  # who waits may be killed
                        outcome.note(run, ending, console)
            except Interrupted:
                if ending is None:
                    raise
                # It ends the waiting for the copies, and changes nothing of how the job ended.
            return outcome.finish(run, ending, request.script, console, began)


def _dry_run(request: "Request", console: Console) -> int:
    from autockpt.cli.jobs.preparation import (
        check_directory,
        goal_for,
        placed,
        profile_of,
        scale_of,
    )
    from autockpt.cli.shared import plan_choice
    from autockpt.cli.shared.decision_text import plan_object, print_decision, print_plan
    from autockpt.policies.default_plan import plan_while_measured, plan_without_profile
    from autockpt.run_directory import RunDirectory, default_path
    from autockpt.values.record import to_data

    request, scale = placed(request, console), scale_of(request.launching)
    goal = goal_for(request, scale)
    check_directory(request, goal)
    found = profile_of(request, scale, console)
    run_dir = request.run_dir or str(default_path(request.script.target))
    if found.profile is None:
        unmeasured = plan_while_measured if request.use_profile else plan_without_profile
        plan, decision = unmeasured(goal), None
    else:
        decided = plan_choice.decide_now(
            RunDirectory(run_dir), found.profile, goal, nodes=scale.nodes, starting=False
        )
        decision, plan = decided.decision, decided.decision.plan
    console.object(
        "run",
        {
            "dry_run": True,
            "goal": to_data(goal),
            **plan_object(plan, decision),
            "profile": found.where or None,
            "run_dir": os.path.abspath(run_dir),
        },
    )
    console.result(f"policy    {goal.policy}, objective {goal.objective}")
    none = f"{found.why_not}; measured while it runs" if request.use_profile else "none is taken"
    console.result(f"profile   {found.where or none}")
    console.result(f"files     would be written to {run_dir}/; nothing was touched")
    if decision is None:
        print_plan(console, plan)
    else:
        print_decision(console, decision)
    console.next(plan_choice.next_run(repeated(RUN_NAMES), request.script))
    return 0
