"""`autockpt failures`: read a record of failures, and keep it for later decisions."""

import click

from autockpt import new_files
from autockpt.cli.shared.options import Command, Whole, common
from autockpt.cli.shared.quantities import positive
from autockpt.console import Console

EXAMPLES = """
sacct -P -a -X -D -S now-90days -o JobID,State,Start,End,ElapsedRaw,NNodes,NodeList > s.txt
autockpt failures s.txt --save           # later profiles and runs in here reckon with it
journalctl -k -o short-iso > kernel.log; autockpt failures kernel.log
autockpt failures outages.csv --nodes 64 --observed '30 d'
autockpt failures runs/train-20260101-120000
autockpt failures s3://bucket/run        # of the run whose checkpoints are there
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("file")
@click.option(
    "--format",
    "form",
    type=click.Choice(["sacct", "xid", "csv", "log", "kept"]),
    help="Instead of recognising it.",
)
@click.option("--nodes", type=Whole(min=1), metavar="N", help="Nodes that were watched.")
@click.option("--observed", metavar="DURATION", help="How long they were watched.")
@click.option("--save", is_flag=True, help="Keep it under runs/failures/ for later decisions.")
@common
def failures(
    console: Console,
    file: str,
    form: str | None,
    nodes: int | None,
    observed: str | None,
    save: bool,
) -> None:
    """Read Slurm's accounting, a kernel log, a CSV or our own log; estimate how often what fails.

    The estimate is a prior updated by the record.  With --save, profiles and runs under runs/ use
    it; `autockpt plan --failures FILE` uses it once.
    """
    from autockpt.cli.failures.failure_text import as_object, print_history
    from autockpt.cli.shared.failure_import import read_failures
    from autockpt.values.units import parse_duration_s

    lengths = {"observed": observed}
    observed_s = positive(lengths, "observed", parse_duration_s, 0.0) if observed else None
    history = read_failures(file, form=form, nodes=nodes, observed_s=observed_s)
    kept = _save(file, history) if save else None
    console.object("failures", {**as_object(history, nodes=nodes), "kept": kept})
    print_history(console, history, nodes=nodes)
    if kept is not None:
        console.say(f"kept in {kept}; remove the file to forget it")
    console.next(["autockpt", "plan", "--profile", "runs/RUN", "--failures", file])


def _save(file: str, history: object) -> str:
    """Write the history beside the runs; the same file read again replaces it."""
    import hashlib
    import os

    from autockpt.run_directory import FAILURES, RUNS, RunDirectory, local_path
    from autockpt.values.errors import ConfigError, StorageError
    from autockpt.values.record import to_json

    path = os.path.abspath(local_path(file))
    if os.path.commonpath([path, os.path.abspath(RUNS)]) == os.path.abspath(RUNS):
        raise ConfigError(f"--save: {file} is under {RUNS}/, whose failures are read anyway")
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    name = f"{os.path.basename(path)}-{digest}.json"
    folder = os.path.join(RUNS, FAILURES)
    try:
        new_files.make_directory(folder)
    except OSError as error:
        raise StorageError(f"--save: cannot make {folder}: {error.strerror}") from error
    RunDirectory(folder).write_text(name, to_json(history) + "\n")
    return os.path.join(folder, name)
