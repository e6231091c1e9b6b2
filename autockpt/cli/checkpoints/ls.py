"""`autockpt ls PATH`: the checkpoints of a run or a directory."""

import os
from typing import TYPE_CHECKING, Any

import click

from autockpt.cli.checkpoints import archive, remote
from autockpt.cli.shared.options import Command, common
from autockpt.console import Console, local_time

if TYPE_CHECKING:
    from autockpt.executors.storage.catalogue import GenerationRecord
    from autockpt.run_directory import RunDirectory

EXAMPLES = """
autockpt ls runs                                   # the runs in that folder
autockpt ls runs/train-20260101-120000
autockpt ls /mnt/checkpoints --json
autockpt ls s3://bucket/run-7
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|ARCHIVE|URL")
@common
def ls(console: Console, path: str) -> None:
    """List checkpoints, oldest first; or the runs in a folder of runs.

    PATH is a run, a folder of runs, a checkpoint directory, an archive or an object store.
    """
    from autockpt.executors.storage.catalogue import list_generations
    from autockpt.executors.storage.maintenance import holds_copies
    from autockpt.integrations.places import find_place, runs_in
    from autockpt.run_directory import RunDirectory
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes

    if remote.is_url(path):
        path = path.rstrip("/")
    if remote.is_url(path) and holds_copies(path):
        remote.ls(console, path)
        return
    if archive.is_archive(path):
        archive.ls(console, path)
        return
    if (runs := runs_in(path)) and not RunDirectory(path).exists:
        _list_runs(console, path, runs)
        return
    place = find_place(path, in_store=True)
    records = list_generations(place.directory)
    console.object("ls", {"directory": place.directory, "generations": to_data(records)})
    if not records:
        console.say(f"{place.directory}: no checkpoints")
        return
    console.table(
        ("checkpoint", "step", "ranks", "size", "written", "state", "health", "note"),
        (
            (
                record.name,
                str(record.step) if record.step >= 0 else "-",
                str(record.world_size) if record.world_size else "-",
                format_bytes(record.bytes) if record.bytes else "-",
                local_time(record.created_s),
                record.state,
                record.health or "-",
                "; ".join(_notes(record)),
            )
            for record in records
        ),
    )
    console.next(["autockpt", "show", path])
    console.next(["autockpt", "verify", path])


def _list_runs(console: Console, path: str, runs: "list[RunDirectory]") -> None:
    """Print a line for each run: state, newest step, newest durable step, restarts.

    A run with damaged files has a line, too, and a warning names the first of them.
    """
    from autockpt.values.errors import AutockptError

    rows = []
    for run in runs:
        damage = ""
        try:
            row = _row(run)
        except AutockptError as error:
            row, damage = {**dict.fromkeys(_ROW), "state": "damaged", "command": ""}, str(error)
            console.warn(f"{run.path.name}: {error}")
        rows.append({"run": run.path.name, **row, "damage": damage})
    console.object("ls", {"directory": path, "runs": rows})
    console.table(
        ("run", "started (UTC)", "state", "step", "durable", "restarts"),
        [
            tuple("-" if row[key] is None else str(row[key]) for key in ("run", *_ROW))
            for row in rows
        ],
    )
    whole = [row["run"] for row in rows if not row["damage"]]
    if whole:
        console.next(["autockpt", "report", os.path.join(path, str(whole[-1]))])


_ROW = ("started", "state", "step", "durable", "restarts")


def _row(run: "RunDirectory") -> dict[str, Any]:
    """Raises AutockptError where a file of the run is damaged or cannot be read."""
    info, status = run.read_info(), run.read_status()
    return {
        "started": info.created if info else None,
        "state": status.state if status else "unknown",
        "step": run.newest_step(),
        "durable": run.durable_step(),
        "restarts": status.restarts if status else len(run.failures()),
        "command": info.command if info else "",
    }


def _notes(record: "GenerationRecord") -> list[str]:
    """Pin, dropped state, reported values and remarks."""
    pin = [f"pinned as {record.pinned}"] if record.pinned else []
    values = [f"{name} {value:.6g}" for name, value in record.metrics.items()]
    weights = ["weights only"] if record.weights_only else []
    return [*pin, *weights, *values, *([record.detail] if record.detail else [])]
