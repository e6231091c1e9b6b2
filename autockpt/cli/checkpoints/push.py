"""`autockpt push PATH URL`: the newest checkpoint into an object store."""

import click

from autockpt.cli.checkpoints import remote
from autockpt.cli.shared.options import Command, Whole, common
from autockpt.console import Console

EXAMPLES = """
autockpt push runs/train-20260101-120000 s3://bucket/run-7          # once
autockpt push runs/train-20260101-120000 s3://bucket/run-7 --follow # beside a live run
autockpt push checkpoints file:///mnt/nfs/run-7 --keep 5 --rate '50 MB/s'
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|GENERATION")
@click.argument("url")
@click.option("--follow", is_flag=True, help="Go on with what a live run writes, until SIGTERM.")
@click.option(
    "--keep",
    type=Whole(min=1),
    default=3,
    show_default=True,
    help="Newest good copies that stay, with what they are stored as differences to.",
)
@click.option("--rate", metavar="RATE", help="Most that is sent, e.g. '50 MB/s'.")
@common
def push(console: Console, path: str, url: str, follow: bool, keep: int, rate: str | None) -> int:
    """Copy the newest good checkpoint of PATH to URL: s3://, gs://, az:// or file://.

    A copy counts when all of it is there.  Of two directories that continue the same run, the
    replaced one copies nothing any more (exit code 70).  Keys stand in the environment, as the
    store's own tools read them.  `remote.url` in a policy makes `autockpt run` do it.
    """
    from autockpt.values.errors import ConfigError, OptionError
    from autockpt.values.goal import RemoteWish
    from autockpt.values.policy_keys.kinds import Rate
    from autockpt.values.policy_keys.paths import is_store_url

    if "://" in path and "://" not in url:
        raise OptionError(f"{path} {url}: expected PATH before URL: autockpt push {url} {path}")
    if is_store_url(path):
        raise ConfigError(
            f"{path}: is in an object store already, and copies are made from a directory: "
            f"`autockpt pull {path} RUN_DIR` brings the newest checkpoint to one"
        )
    try:
        limit = None if rate is None else Rate("50 MB/s").read(rate)
    except (ValueError, ConfigError) as error:
        raise OptionError(f"--rate {rate}: {error}") from None
    wish = RemoteWish(url=url, keep_last=keep, rate_bytes_per_s=limit)
    return remote.push(console, remote.Request(source=path, wish=wish, follow=follow))
