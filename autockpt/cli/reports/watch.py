"""`autockpt watch RUN`: a live view of a run in the terminal, until the run ends."""

import shutil
import sys
import time
from typing import TYPE_CHECKING

import click

from autockpt.cli.shared.options import Command, Seconds, common
from autockpt.console import Console

if TYPE_CHECKING:
    from autockpt.cli.reports.watch_text import LiveView
    from autockpt.run_directory import RunDirectory

EXAMPLES = """
autockpt watch runs/train-20260101-120000
autockpt watch runs/train-20260101-120000 --every 10 | cat    # prints once
"""
REDRAW = "\x1b[H\x1b[J"
"""Cursor home, clear to the end."""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("run_dir")
@click.option(
    "--every", type=Seconds(min=0.1), default=2.0, show_default=True, metavar="SECONDS",
    help="Between two looks.",
)  # fmt: skip
@common
def watch(console: Console, run_dir: str, every: float) -> None:
    """Show RUN_DIR until it ends: trained, saved, protected, at risk, decisions, restarts.

    Without a terminal it prints the view once.
    """
    from autockpt.cli.reports.watch_text import lines
    from autockpt.run_directory import RunDirectory
    from autockpt.values.record import to_data

    run = RunDirectory.open(run_dir)
    view = _look(run)
    live = sys.stdout.isatty() and not console.json
    while live:
        width, height = shutil.get_terminal_size()
        text = "\n".join(lines(view, width)[: max(1, height - 1)])
        print(f"{REDRAW}{text}", flush=True)
        if view.has_ended:
            return
        time.sleep(every)
        view = _look(run)
    console.object("watch", {"status": to_data(view.status) if view.status else None})
    console.result("\n".join(lines(view, shutil.get_terminal_size().columns)))


def _look(run: "RunDirectory") -> "LiveView":
    """Read status and the newest events; a file that is missing yet is no error."""
    from autockpt.cli.reports.watch_text import LiveView

    status, written_s = run.read_status(), run.status_written_s()
    return LiveView(
        title=run.path.name,
        status=status,
        status_age_s=0.0 if written_s is None else max(0.0, time.time() - written_s),
        events=run.recent_events(),
        failures=run.failures(),
        line=run.line(),
    )
