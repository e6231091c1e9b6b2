"""`autockpt pull URL PATH`: a checkpoint back from an object store."""

import click

from autockpt.cli.checkpoints import remote
from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt pull s3://bucket/run-7 runs/again      # then: autockpt run --run-dir runs/again train.py
autockpt pull s3://bucket/run-7 runs/again --generation ckpt-t0001-step-00000400
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("url")
@click.argument("path", metavar="RUN_DIR|DIR")
@click.option("--generation", metavar="NAME", help="Which one; otherwise the newest good one.")
@common
def pull(console: Console, url: str, path: str, generation: str | None) -> int:
    """Bring a checkpoint back from URL into a run directory, new or the one that is there.

    Every byte is compared with its digest.  A copy that is damaged is set aside in `quarantine/`,
    and the next older one is brought.
    """
    from autockpt.values.errors import OptionError

    if "://" in path and "://" not in url:
        raise OptionError(f"{url} {path}: expected URL before PATH: autockpt pull {path} {url}")
    return remote.pull(console, url, path, generation)
