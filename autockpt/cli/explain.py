"""`autockpt explain`: every decision of a run, its reason, and what came of it."""

import click

from autockpt.cli.console import Console
from autockpt.cli.options import Command, common

EXAMPLES = """
autockpt explain runs/train-20260101-120000
autockpt explain runs/train-20260101-120000 --json
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("run_dir")
@common
def explain(console: Console, run_dir: str) -> None:
    """Print the decisions of RUN_DIR in the order they were taken, with reasons and outcome."""
    from autockpt.cli.decision_text import print_decision, print_plan
    from autockpt.cli.gather import run_data
    from autockpt.reports.model import build
    from autockpt.run_directory import RunDirectory
    from autockpt.values.record import to_data
    from autockpt.values.units import format_duration

    run = RunDirectory.open(run_dir)
    model = build(run_data(run))
    plan, decision = run.read_plan(), run.read_decision()
    console.object(
        "explain",
        {
            "decision": to_data(decision),
            "changes": to_data(model.changes),
            "promises": to_data(model.promises),
            "restores": to_data(model.restores),
        },
    )
    if not model.protected:
        console.result("UNPROTECTED: the script never called autockpt.attach; no plan was followed")
    elif decision is not None:
        print_decision(console, decision)
    elif plan is not None:
        print_plan(console, plan)
    for change in model.changes:
        console.result(f"\nfrom step {change.step}: {change.reason}")
    for restore in model.restores:
        console.result(
            f"\nresumed at step {restore.step} from {restore.source}, "
            f"{restore.lost_steps} iterations lost, {format_duration(restore.restore_s)} to restore"
        )
    console.next(f"autockpt report {run_dir}")
