"""`autockpt drill`: cause faults on a job of one's own, and compare what follows with the plan."""

import os
import random
from typing import TYPE_CHECKING

import click

from autockpt.cli.drill.fault import FAULTS
from autockpt.cli.shared.options import (
    WRAPPING,
    Command,
    Seconds,
    check_ranks,
    common,
    find_script,
    policy_options,
    profile_options,
    repeated,
    script_arguments,
)
from autockpt.console import Console
from autockpt.values.errors import ConfigError, OptionError

if TYPE_CHECKING:
    from autockpt.cli.drill.outcome import Outcome
    from autockpt.run_directory import RunDirectory

EXAMPLES = """
autockpt drill train.py --lr 1e-3                        # every fault, one after another
autockpt drill --fault rank --fault node train.py        # these two
autockpt drill --exact train.py                          # and compare with an undisturbed run
autockpt drill --nproc-per-node 8 --policy policy.yaml train.py
"""
BROKEN = 1
"""Exit code when a promise was broken."""
PASSED_ON = ("policy", "settings", "profile", "no_profile", "nproc_per_node")


@click.command(cls=Command, examples=EXAMPLES, context_settings=WRAPPING)
@click.option(
    "--fault", "names", type=click.Choice(list(FAULTS)), multiple=True,
    help="Only this one (repeatable); default: all of them.",
)  # fmt: skip
@click.option("--exact", is_flag=True, help="Train once more without faults; compare every byte.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the instants.")
@click.option(
    "--patience", type=Seconds(min=1.0), default=300.0, show_default=True, metavar="S",
    help="Longest wait for one thing, seconds; for a checkpoint, beside the plan's interval.",
)  # fmt: skip
@click.option("--run-dir", metavar="DIR", help="A new directory for the drill; default: runs/.")
@policy_options
@profile_options
@click.option("--nproc-per-node", default="1", show_default=True, metavar="N", help="Ranks.")
@script_arguments
@common
def drill(
    console: Console,
    names: tuple[str, ...],
    exact: bool,
    seed: int,
    patience: float,
    run_dir: str | None,
    script: str,
    args: tuple[str, ...],
    module: bool,
    policy: str | None,
    settings: tuple[str, ...],
    profile: str | None,
    no_profile: bool,
    nproc_per_node: str,
) -> int:
    """Train SCRIPT with ARGS in a directory of its own, and cause faults while it trains.

    Ranks, keeper and launcher of this one job get signals and limits; nothing else is touched.  The
    job has to train for longer than the drill; it is ended at the end.  Exit code 1 when a promise
    was broken, 69 when the job did not run as it has to without any fault.
    """
    from autockpt.cli.drill.job import DrilledJob
    from autockpt.cli.drill.procedure import Drill, differences
    from autockpt.run_directory import RunDirectory
    from autockpt.values.record import to_data

    check_ranks(nproc_per_node)
    if profile and no_profile:
        raise OptionError("--profile and --no-profile contradict each other; drop one")
    found = find_script(script, module, args)
    run = RunDirectory(_new_directory(run_dir, found.target))
    options = [*repeated(PASSED_ON), *_own_place(run, policy, settings)]
    target = [*(["-m"] if module else []), found.target, *args]
    outcomes: list[Outcome] = []
    differs: str | None = None
    with DrilledJob(run, options, target) as job:
        console.say(f"run directory: {run.path}; the job's own output: {job.log}")
        drilling = Drill(job, random.Random(seed), patience)
        for fault in FAULTS.values():
            if names and fault.name not in names:
                continue
            console.say(f"{fault.name}: behind the next checkpoint, {fault.done}")
            outcomes.append(drilling.cause(fault))
            console.say(f"{fault.name}: {outcomes[-1].note}")
        if exact:
            step = drilling.trained()
            console.say(f"exact: training once more without faults, up to step {step}")
            differs = differences(job, step, patience)
    equal = None if differs is None else not differs
    body = {"run_dir": str(run.path), "outcomes": to_data(outcomes), "equal": equal}
    console.object("drill", body)
    console.table(
        ("fault", "lost", "promised", "recovery", "promised", "from", "promise"),
        (_row(one) for one in outcomes),
    )
    if differs is not None:
        console.result(differs or f"every byte of step {step} is that of a run without faults")
    console.next(["autockpt", "report", str(run.path)])
    return BROKEN if differs or any(one.verdict == "broken" for one in outcomes) else 0


def _new_directory(named: str | None, script: str) -> str:
    from autockpt.run_directory import default_path

    path = named or f"{default_path(script)}-drill"
    if os.path.exists(path):
        raise ConfigError(
            f"--run-dir {path}: is there already; a drill needs a directory of its own"
        )
    return os.path.abspath(path)


def _own_place(run: "RunDirectory", policy: str | None, settings: tuple[str, ...]) -> list[str]:
    """A drill has a place of its own for checkpoints, and no object store."""
    from autockpt.cli.shared.plan_choice import read_goal

    goal = read_goal(policy, settings)
    words: list[str] = []
    if goal.is_in_store:
        raise ConfigError(
            f"disk.path: {goal.storage_path} is in an object store, and a drill needs a directory; "
            "name one: --set disk.path=DIR"
        )
    if goal.storage_path is not None:
        words += ["--set", f"disk.path={goal.storage_path.rstrip('/')}-{run.path.name}"]
    if goal.remote.url is not None:
        words += ["--set", "remote.url=null"]
    return words


def _row(one: "Outcome") -> tuple[str, ...]:
    from autockpt.values.units import format_duration

    def steps(value: int | None) -> str:
        return "-" if value is None else f"{value} steps"

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_duration(value)

    most = one.promised.lost_steps
    return (
        one.fault, steps(one.lost_steps), "-" if most is None else f"at most {most}",
        seconds(one.recovery_s), seconds(one.promised.recovery_s), one.source or "-", one.verdict,
    )  # fmt: skip
