"""`autockpt bubbles`: where a pipeline idles under a schedule, and what fits in there."""

from typing import Any

import click

from autockpt.cli.shared.options import Command, Whole, common
from autockpt.console import Console

EXAMPLES = """
autockpt bubbles --ranks 8 --microbatches 32 --forward '12 ms' --state '20 GB'
autockpt bubbles --schedule 1F1B --schedule ZBVZeroBubble --transfer '1 ms' --step '40 ms'
autockpt bubbles --profile runs/train-20260101-120000                    # your own pipeline
autockpt bubbles --profile profile.json --schedule 1F1B --microbatches 64  # what if
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    metavar="NAME",
    help="By torch's name (repeatable; default: all that these numbers allow).",
)
@click.option("--ranks", type=Whole(2, 256), metavar="N", help="Of a pipeline (4).")
@click.option("--microbatches", type=Whole(1, 1024), metavar="N", help="Default: twice the ranks.")
@click.option(
    "--stages-per-rank",
    type=Whole(2, 16),
    metavar="N",
    help="Where a schedule has several (2).",
)
@click.option(
    "--forward", metavar="DURATION", help="A rank's layers, one micro-batch (default 10 ms)."
)
@click.option("--backward", metavar="DURATION", help="The same (default: twice the forward).")
@click.option("--transfer", metavar="DURATION", help="Of a message to the next rank (default 0).")
@click.option("--step", metavar="DURATION", help="The optimizer's (default 0).")
@click.option("--state", metavar="SIZE", help="What a rank saves (default 3 GB).")
@click.option("--copy", metavar="RATE", help="Of a rank to host memory (default 20 GB/s).")
@click.option("--profile", metavar="FILE", help="Chunks, state and copy of a measured job.")
@common
def bubbles(console: Console, **options: Any) -> None:
    """Compare pipeline schedules: iteration, gaps, and what of a checkpoint their windows take.

    Layers are divided evenly where a profile has no times for such stages. Figures are of the rank
    with the least room. Definitions: docs/concepts/bubbles.md.
    """
    from autockpt.cli.planning import bubbles_text

    asked = bubbles_text.asked(options)
    rows, refused = bubbles_text.compared(asked)
    console.object("bubbles", bubbles_text.as_object(asked, rows, refused))
    console.table(*bubbles_text.columns(rows))
    for line in bubbles_text.legend(asked):
        console.result(line)
    for reason in refused:
        console.warn(f"left out: {reason}")
