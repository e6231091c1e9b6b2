"""The archiver of a run, as far as the launcher goes."""

import contextlib

from autockpt.cli.beside import beside
from autockpt.cli.console import Console
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Archiving

NAME = "archive"


def archiver_beside(
    run: RunDirectory, wish: Archiving, console: Console
) -> contextlib.AbstractContextManager[None]:
    """Archives what the run commits, as long as the block lasts; then what is left."""
    if wish.codec is None:
        return contextlib.nullcontext()
    if wish.lossy and wish.codec != "none":
        console.say(
            f"LOSSY archive of every checkpoint ({wish.codec}) in {run.path / NAME}; what a "
            "restart resumes from stays exact"
        )
    command = [
        "convert", str(run.path), str(run.path / NAME), "--to", "archive", "--codec",
        str(wish.codec), "--full-every", str(wish.full_every), "--follow",
    ]  # fmt: skip
    return beside(run, "archiver", command, console)
