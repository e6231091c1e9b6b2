"""`autockpt metrics`: the state of a run for Prometheus, and a dashboard with alert rules."""

from pathlib import Path

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt metrics runs/train-20260101-120000            # Prometheus text of status.json
autockpt metrics --mixin monitoring                    # dashboard, alert rules, runbook
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("run_dir", required=False)
@click.option("--mixin", metavar="DIR", help="Write dashboard.json, alerts.yaml and runbook.md.")
@common
def metrics(console: Console, run_dir: str | None, mixin: str | None) -> None:
    """Print the state of RUN_DIR as Prometheus text, or write a mixin.

    `autockpt report --format prometheus` has more metrics. It reads all telemetry, which takes
    longer.
    """
    if (run_dir is None) == (mixin is None):
        raise click.UsageError("Give RUN_DIR, or --mixin DIR.")
    if run_dir is not None:
        _print_status(console, run_dir)
    if mixin is not None:
        _write_mixin(console, Path(mixin))


def _print_status(console: Console, run_dir: str) -> None:
    from autockpt.executors.keeper.standing.status_file import exposition
    from autockpt.run_directory import RunDirectory
    from autockpt.values.errors import ConfigError

    run = RunDirectory.open(run_dir)
    status = run.read_status()
    if status is None:
        raise ConfigError(
            f"{run.path / 'status.json'}: not there. The keeper writes it while the run "
            "trains; look again then"
        )
    text = exposition(status, run.path.name, written_s=run.status_written_s())
    console.object("metrics", {"text": text})
    console.result(text.rstrip("\n"))


def _write_mixin(console: Console, folder: Path) -> None:
    from autockpt import new_files
    from autockpt.reports.formats.mixin import files
    from autockpt.run_directory import RunDirectory
    from autockpt.values.errors import ConfigError, StorageError

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--mixin {folder}: is a file, expected a directory")
    try:
        new_files.make_directory(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}") from error
    target = RunDirectory(folder)
    for name, text in files().items():
        target.write_text(name, text)
        console.result(str(folder / name))
    console.object("metrics", {"mixin": str(folder), "files": sorted(files())})
