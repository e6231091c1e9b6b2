"""`autockpt gc` removes what dead runs left behind; `autockpt pin` keeps a checkpoint."""

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt gc --dry-run                        # folders of keepers that are gone
autockpt gc runs/train-20260101-120000       # and what a dead run left in its directory
autockpt gc s3://bucket/run                  # and in an object store
"""
PIN_EXAMPLES = """
autockpt pin runs/train-20260101-120000 before-the-long-run
autockpt pin runs/train-20260101-120000 paper --generation ckpt-t0001-step-00000400
autockpt pin runs/train-20260101-120000 paper --remove
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="[RUN_DIR|DIR|URL]", required=False)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@common
def gc(console: Console, path: str | None, dry_run: bool) -> None:
    """Remove leftovers: unfinished checkpoints, temporary and spare files, folders of dead keepers.

    It never removes a checkpoint or foreign files.  It refuses a directory that a live run holds
    (exit code 73).
    """
    from autockpt.executors.storage.directory.directory import CheckpointDirectory
    from autockpt.executors.storage.maintenance import dead_keepers, leftovers, remove
    from autockpt.integrations.places import find_place
    from autockpt.values.errors import StorageError
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes

    found = dead_keepers()
    if path is not None:
        directory = CheckpointDirectory(find_place(path, in_store=True).directory)
        newest = directory.highest_term()
        directory.require_unheld()
        term = newest.term if newest else None
        found += leftovers(directory.path, newest_term=term, warn=console.warn)
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


@click.command(cls=Command, examples=PIN_EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|URL")
@click.argument("name", metavar="NAME")
@click.option("--generation", help="The checkpoint; the newest good one by default.")
@click.option("--remove", is_flag=True, help="Take the pin away: the policy decides again.")
@common
def pin(console: Console, path: str, name: str, generation: str | None, remove: bool) -> None:
    """Keep a checkpoint under a name: it is never deleted, also by a run that is training now.

    Other commands take the name in place of the checkpoint's own.
    """
    import os

    from autockpt.executors.storage.directory.directory import CheckpointDirectory
    from autockpt.executors.storage.directory.marks import require_pin_name
    from autockpt.integrations.places import find_place, generation_folder
    from autockpt.values.errors import AutockptError, OptionError
    from autockpt.values.generation import Generation

    if remove and generation is not None:
        raise OptionError("--remove takes the name alone; leave --generation out")
    if not remove:
        require_pin_name(name)
    directory = CheckpointDirectory(find_place(path, in_store=True).directory)
    if remove:
        kept, what = directory.unpin(name), "is not pinned any more"
    else:
        kept = Generation.from_name(os.path.basename(generation_folder(path, generation)))
        directory.pin(kept, name)
        what = f"is pinned as {name} and stays"
        try:
            what += _missing_state(directory.generation_path(kept))
        except (AutockptError, OSError) as error:  # the pin stands all the same
            console.warn(f"{kept.name}: its COMMIT cannot be read: {error}")
    console.object("pin", {"name": name, "generation": kept.name, "pinned": not remove})
    console.say(f"{kept.name} {what}")


def _missing_state(folder: str) -> str:
    """Whether a pinned checkpoint lacks its optimizer state.  Raises AutockptError, OSError."""
    import os

    from autockpt.executors.protocol.messages import holds_weights_only
    from autockpt.executors.storage.directory.records import (
        COMES_BACK,
        comes_back,
        read_commit,
    )

    commit = read_commit(os.path.join(folder, "COMMIT"))
    if not holds_weights_only(commit.records):
        return ""
    if comes_back(folder, commit):
        return f"; it holds weights only now, and {COMES_BACK}"
    return "; it holds weights only, for keep.weights_only has dropped its optimizer state"
