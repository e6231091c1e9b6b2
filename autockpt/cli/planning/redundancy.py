"""`autockpt redundancy`: what copies and parity in the memory of other nodes survive and cost."""

import click

from autockpt.cli.shared.options import Command, Whole, common
from autockpt.console import Console

EXAMPLES = """
autockpt redundancy --nodes 64
autockpt redundancy --domains racks.csv                  # node,power,rack: what of it may be lost
autockpt redundancy --profile runs/train-20260101-120000 # with the losses that it knows of
autockpt redundancy --markdown                           # the table of docs/concepts/redundancy.md
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.option(
    "--nodes",
    type=Whole(min=2, max=100_000),
    multiple=True,
    metavar="N",
    help="Nodes of the job (repeatable; default: 8 to 4,096).",
)
@click.option("--domains", metavar="FILE", help="Failure domains: CSV, YAML or topology.conf.")
@click.option("--profile", metavar="FILE", help="Nodes and losses of a measured job.")
@click.option("--markdown", is_flag=True, help="As a table for a document.")
@common
def redundancy(
    console: Console,
    nodes: tuple[int, ...],
    domains: str | None,
    profile: str | None,
    markdown: bool,
) -> None:
    """Compare schemes: memory, traffic, and how often lost nodes are recovered from memory.

    Exact figures for losses that strike anywhere; with --domains also for whole domains.
    """
    from autockpt.cli.planning import redundancy_text

    asked = redundancy_text.asked(nodes, domains, profile)
    rows = asked.rows()
    console.object("redundancy", redundancy_text.as_object(asked, rows))
    if markdown:
        console.result(redundancy_text.markdown(rows).rstrip())
        return
    console.table(*redundancy_text.columns(rows))
    for line in redundancy_text.legend(asked):
        console.result(line)
