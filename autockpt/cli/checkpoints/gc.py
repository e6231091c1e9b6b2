"""`autockpt gc [PATH]`: remove what dead runs left behind, and nothing else."""

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt gc --dry-run                        # folders of keepers that are gone
autockpt gc runs/train-20260101-120000       # and what a dead run left in its directory
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="[RUN_DIR|DIR]", required=False)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@common
def gc(console: Console, path: str | None, dry_run: bool) -> None:
    """Remove leftovers: unfinished checkpoints, temporary and spare files, folders of dead keepers.

    A checkpoint is never removed, what somebody else put there neither; a directory that a live run
    holds is refused (exit code 73).
    """
    from autockpt.executors.storage.directory import CheckpointDirectory
    from autockpt.executors.storage.maintenance import dead_keepers, leftovers, remove
    from autockpt.integrations.places import find_place
    from autockpt.values.errors import StorageError
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes

    found = dead_keepers()
    if path is not None:
        directory = CheckpointDirectory(find_place(path).directory)
        directory.require_unheld()
        found += leftovers(directory.path)
    for one in found:
        if not dry_run:
            try:
                remove(one)
            except OSError as error:
                raise StorageError(f"{one.path}: cannot be removed: {error.strerror}") from error
        console.result(f"{one.kind:<11} {format_bytes(one.bytes):>9}  {one.path}")
    console.object("gc", {"dry_run": dry_run, "removed": to_data(found)})
    total = format_bytes(sum(one.bytes for one in found))
    console.say(f"{len(found)} leftovers, {total}{', nothing removed' if dry_run else ' removed'}")
