"""`autockpt ls PATH`: the checkpoints of a run or a directory."""

import os
from typing import TYPE_CHECKING

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
    """Print a line for each run: state, newest step, newest durable step, restarts."""
    rows = []
    for run in runs:
        info, status, step = run.read_info(), run.read_status(), run.newest_step()
        durable = run.durable_step()
        rows.append({
            "run": run.path.name,
            "started": info.created if info else None,
            "state": status.state if status else "unknown",
            "step": step,
            "durable": durable,
            "restarts": status.restarts if status else len(run.failures()),
            "command": info.command if info else "",
        })  # fmt: skip
    console.object("ls", {"directory": path, "runs": rows})
    console.table(
        ("run", "started (UTC)", "state", "step", "durable", "restarts"),
        [
            tuple("-" if row[key] is None else str(row[key])
                  for key in ("run", "started", "state", "step", "durable", "restarts"))
            for row in rows
        ],
    )  # fmt: skip
    console.next(["autockpt", "report", os.path.join(path, runs[-1].path.name)])


def _notes(record: "GenerationRecord") -> list[str]:
    """Pin, dropped state, reported values and remarks."""
    pin = [f"pinned as {record.pinned}"] if record.pinned else []
    values = [f"{name} {value:.6g}" for name, value in record.metrics.items()]
    weights = ["weights only"] if record.weights_only else []
    return [*pin, *weights, *values, *([record.detail] if record.detail else [])]
