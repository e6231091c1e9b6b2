"""`autockpt pin PATH NAME`: keep a checkpoint that the policy would let go."""

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt pin runs/train-20260101-120000 before-the-long-run
autockpt pin runs/train-20260101-120000 paper --generation ckpt-t0001-step-00000400
autockpt pin runs/train-20260101-120000 paper --remove
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR")
@click.argument("name", metavar="NAME")
@click.option("--generation", help="The checkpoint; the newest good one by default.")
@click.option("--remove", is_flag=True, help="Take the pin away: the policy decides again.")
@common
def pin(console: Console, path: str, name: str, generation: str | None, remove: bool) -> None:
    """Keep a checkpoint under a name: it is never deleted, also by a run that is training now.

    Other commands take the name in place of the checkpoint's own.
    """
    import os

    from autockpt.executors.storage.directory import CheckpointDirectory
    from autockpt.integrations.places import find_place, generation_folder
    from autockpt.values.errors import ConfigError
    from autockpt.values.generation import Generation

    directory = CheckpointDirectory(find_place(path).directory)
    if remove:
        if generation is not None:
            raise ConfigError("--remove takes the name alone; leave --generation out")
        kept = directory.unpin(name)
    else:
        kept = Generation.from_name(os.path.basename(generation_folder(path, generation)))
        directory.pin(kept, name)
    what = "is not pinned any more" if remove else f"is pinned as {name} and stays"
    console.object("pin", {"name": name, "generation": kept.name, "pinned": not remove})
    console.say(f"{kept.name} {what}")
