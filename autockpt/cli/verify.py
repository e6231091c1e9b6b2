"""`autockpt verify PATH [GENERATION]`: read checkpoints back and compare every digest."""

from typing import TYPE_CHECKING

import click

from autockpt.cli import archive
from autockpt.cli.console import Console
from autockpt.cli.options import Command, common

if TYPE_CHECKING:
    from autockpt.executors.catalogue import VerifyResult

EXAMPLES = """
autockpt verify runs/train-20260101-120000                # the newest checkpoint
autockpt verify runs/train-20260101-120000 --all
autockpt verify runs/train-20260101-120000 --repair       # set damaged ones aside
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|ARCHIVE")
@click.argument("generation", required=False)
@click.option("--all", "every", is_flag=True, help="Every committed checkpoint, not the newest.")
@click.option("--deep", is_flag=True, help="--all, and the records of the run beside them.")
@click.option("--repair", is_flag=True, help="--deep, then mend what can be, set aside the rest.")
@common
def verify(
    console: Console, path: str, generation: str | None, every: bool, deep: bool, repair: bool
) -> int:
    """Read a checkpoint back and compare every chunk with its digest; exit code 65 on damage.

    NaN in parameters or optimizer state is said, and is no damage.  --repair needs a directory that
    no run holds; it renames damaged checkpoints into quarantine/ and deletes nothing.
    """
    from autockpt.executors.catalogue import list_generations, verify_generation
    from autockpt.executors.directory import CheckpointDirectory
    from autockpt.executors.upkeep import damaged_records
    from autockpt.executors.upkeep import repair as mend
    from autockpt.integrations.places import choose, find_place
    from autockpt.values.errors import CorruptCheckpointError
    from autockpt.values.record import to_data

    if archive.is_archive(path):
        return archive.verify(console, path, generation, every=every)
    place = find_place(path)
    if repair:
        CheckpointDirectory(place.directory).require_unheld()
    if every or deep or repair:
        records = list_generations(place.directory)
        names = [record.name for record in records if record.state != "incomplete"]
    else:
        names = [choose(place, generation)]
    results = []
    for name in names:
        results.append(verify_generation(place.directory, name))
        _tell(console, results[-1])
    damages = damaged_records(place.directory) if deep or repair else []
    for damage in damages:
        console.result(f"DAMAGED  {damage.reason}")
    done = mend(place.directory, results) if repair else []
    for sentence in done:
        console.result(f"repaired {sentence}")
    bad = [result.name for result in results if not result.ok]
    ok = not bad and not damages
    console.object(
        "verify",
        {
            "directory": place.directory, "ok": ok, "results": to_data(results),
            "records": to_data(damages), "repaired": done,
        },
    )  # fmt: skip
    if not ok:
        beside = f" and {len(damages)} records" if damages else ""
        console.say(
            f"{len(bad)} of {len(results)} checkpoints{beside} damaged; a restore passes over them"
        )
        return CorruptCheckpointError.exit_code
    return 0


def _tell(console: Console, result: "VerifyResult") -> None:
    from autockpt.values.units import format_bytes

    if result.ok:
        size = format_bytes(result.bytes)
        console.result(f"ok       {result.name}: {size} in {result.shards} shards")
    else:
        console.result(f"DAMAGED  {result.name}:")
        for problem in result.problems:
            console.result(f"         {problem}")
    if result.sick:
        console.result(f"SUSPECT  {result.name}: {result.sick}; not restored by itself")
