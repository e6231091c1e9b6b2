"""`autockpt explain`: every decision of a run, its reason, its turning points, and its outcome."""

from typing import TYPE_CHECKING

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

if TYPE_CHECKING:
    from autockpt.run_directory import RunDirectory

EXAMPLES = """
autockpt explain runs/train-20260101-120000
autockpt explain runs/train-20260101-120000 disk.interval
autockpt explain runs/train-20260101-120000 --replay
autockpt explain runs/train-20260101-120000 --json
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("run_dir")
@click.argument("decision", required=False)
@click.option("--replay", is_flag=True, help="Play the recorded controller again: same answers?")
@common
def explain(console: Console, run_dir: str, decision: str | None, replay: bool) -> None:
    """Print the decisions of RUN_DIR, or one DECISION, with reasons and outcome.

    A DECISION is a choice of the plan, as disk.interval, or a change during the run, as v2.
    """
    from autockpt.cli.reports.explanation import explanation
    from autockpt.cli.reports.explanation_text import print_explanation, print_some
    from autockpt.run_directory import RunDirectory
    from autockpt.values.record import to_data

    run = RunDirectory.open(run_dir)
    if replay:
        _replay(console, run)
        return
    explained = explanation(run)
    if decision is None:
        print_explanation(console, explained)
    else:
        explained = explained.only(decision)
        print_some(console, explained, numbers=True)
    console.object("explain", to_data(explained))
    console.next(["autockpt", "report", run_dir])


def _replay(console: Console, run: "RunDirectory") -> None:
    """Exit code 1 where an answer differs."""
    from autockpt.cli.reports.explanation import replayed
    from autockpt.cli.reports.explanation_text import print_replay
    from autockpt.values.record import to_data

    played = replayed(run)
    console.object("explain", {"replay": to_data(played)})
    print_replay(console, played)
    if played.difference is not None:
        raise click.exceptions.Exit(1)
