"""`autockpt ls PATH`: the checkpoints of a run or a directory."""

import time
from typing import TYPE_CHECKING

import click

from autockpt.cli.checkpoints import archive, remote
from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

if TYPE_CHECKING:
    from autockpt.executors.storage.catalogue import GenerationRecord

EXAMPLES = """
autockpt ls runs/train-20260101-120000
autockpt ls /mnt/checkpoints --json
autockpt ls s3://bucket/run-7
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|ARCHIVE|URL")
@common
def ls(console: Console, path: str) -> None:
    """List the checkpoints of a run, a checkpoint directory or an object store, oldest first."""
    from autockpt.executors.storage.catalogue import list_generations
    from autockpt.integrations.places import find_place
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes

    if remote.is_url(path):
        remote.ls(console, path)
        return
    if archive.is_archive(path):
        archive.ls(console, path)
        return
    place = find_place(path)
    records = list_generations(place.directory)
    console.object("ls", {"directory": place.directory, "generations": to_data(records)})
    if not records:
        console.say(f"{place.directory}: no checkpoints")
        return
    console.table(
        ("generation", "step", "ranks", "size", "written", "state", "health", "note"),
        (
            (
                record.name,
                str(record.step) if record.step >= 0 else "-",
                str(record.world_size) if record.world_size else "-",
                format_bytes(record.bytes) if record.bytes else "-",
                when(record.created_s),
                record.state,
                record.health or "-",
                "; ".join(_notes(record)),
            )
            for record in records
        ),
    )
    console.next(f"autockpt show {path}   (or: autockpt verify {path})")


def _notes(record: "GenerationRecord") -> list[str]:
    """Pin, reported values and remarks."""
    pin = [f"pinned as {record.pinned}"] if record.pinned else []
    values = [f"{name} {value:.6g}" for name, value in record.metrics.items()]
    return [*pin, *values, *([record.detail] if record.detail else [])]


def when(created_s: float) -> str:
    """Local time, for people."""
    if not created_s:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_s))
