"""`autockpt verify PATH [GENERATION]`: read checkpoints back and compare every digest."""

import click

from autockpt.cli import archive
from autockpt.cli.console import Console
from autockpt.cli.options import Command, common

EXAMPLES = """
autockpt verify runs/train-20260101-120000                # the newest checkpoint
autockpt verify runs/train-20260101-120000 --all
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|ARCHIVE")
@click.argument("generation", required=False)
@click.option("--all", "every", is_flag=True, help="Every committed checkpoint, not the newest.")
@common
def verify(console: Console, path: str, generation: str | None, every: bool) -> int:
    """Read a checkpoint back and compare every chunk with its digest; exit code 65 on damage."""
    from autockpt.executors.catalogue import list_generations, verify_generation
    from autockpt.integrations.places import choose, find_place
    from autockpt.values.errors import CorruptCheckpointError
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes

    if archive.is_archive(path):
        return archive.verify(console, path, generation, every=every)
    place = find_place(path)
    if every:
        records = list_generations(place.directory)
        names = [record.name for record in records if record.state != "incomplete"]
    else:
        names = [choose(place, generation)]
    results = []
    for name in names:
        result = verify_generation(place.directory, name)
        results.append(result)
        if result.ok:
            console.result(
                f"ok       {name}: {format_bytes(result.bytes)} in {result.shards} shards"
            )
        else:
            console.result(f"DAMAGED  {name}:")
            for problem in result.problems:
                console.result(f"         {problem}")
    bad = [result.name for result in results if not result.ok]
    console.object(
        "verify", {"directory": place.directory, "ok": not bad, "results": to_data(results)}
    )
    if bad:
        console.say(f"{len(bad)} of {len(results)} damaged; a restore skips them by itself")
        return CorruptCheckpointError.exit_code
    return 0
