"""`autockpt simulate`: weeks of a job under every strategy, on failures drawn or recorded."""

from typing import Any

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt simulate --nodes 512 --mtbf '6 h' --storage '2 GB/s shared'
autockpt simulate --nodes 2048 --mtbf '3 h 5 min' --length '54 d'
autockpt simulate --nodes 64 --trace failures.csv --spares 2
autockpt simulate --profile runs/train-20260101-120000                  # your own job
autockpt simulate --profile profile.json --nodes 128 --restart '2 min'  # what if
autockpt simulate --nodes 256 --node-mtbf '250 d' --strategy auto --strategy mine.yaml
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.option("--nodes", type=int, metavar="N", help="Nodes of the job (default: the profile's).")
@click.option("--length", metavar="DURATION", help="Wall time to simulate (default 30 d).")
@click.option("--mtbf", metavar="DURATION", help="Between interruptions of the whole job.")
@click.option("--node-mtbf", metavar="DURATION", help="The same of one node.")
@click.option("--trace", metavar="CSV", help="Recorded outages: columns node, start, end.")
@click.option("--spares", type=int, metavar="N", help="With --trace: nodes that can step in.")
@click.option("--process-share", metavar="PERCENT", help="Interruptions that memory survives.")
@click.option("--burst", metavar="PERCENT", help="Node failures that take several of a domain.")
@click.option("--domain", type=int, metavar="N", help="Nodes that share a failure domain (16).")
@click.option(
    "--assumed-mtbf", metavar="DURATION", help="MTBF that strategies reckon with instead."
)
@click.option("--profile", metavar="FILE", help="Costs of a measured job, or its directory.")
@click.option("--iteration", metavar="DURATION", help="One iteration (default 5 s).")
@click.option("--state", metavar="SIZE", help="State that a node saves (default 3 GB).")
@click.option("--copy", metavar="RATE", help="Devices to host memory of a node (20 GB/s).")
@click.option("--disk", metavar="RATE", help="A node's share of the storage (0.5 GB/s).")
@click.option("--storage", metavar="RATE shared", help="Of the whole file system: '2 GB/s shared'.")
@click.option("--network", metavar="RATE", help="A node to a peer (10 GB/s without --profile).")
@click.option("--idle", metavar="PERCENT", help="Of an iteration the network idles (50 %).")
@click.option("--slowdown", metavar="PERCENT", help="Of training by background work (5 %).")
@click.option("--detect", metavar="DURATION", help="To notice a failure (1 min).")
@click.option("--restart", metavar="DURATION", help="To start again, without restore (10 min).")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME|FILE",
    help="A preset, a policy file or a rule (repeatable; default: all presets and rules).",
)
@click.option("--runs", type=int, metavar="N", help="Independent histories (default 10).")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all chance.")
@click.option("--html", metavar="FILE", help="Also write a page with a chart there.")
@common
def simulate(console: Console, **options: Any) -> None:
    """Compare strategies on the same failures: goodput, lost work, and where jobs came back from.

    Without --profile the job is described by its iteration, its state and its bandwidths.
    Definitions and validity: docs/internals/simulation.md.
    """
    from autockpt.cli.planning import simulation_input, simulation_text
    from autockpt.tuner.simulation.compare import compare

    asked = simulation_input.read(options)
    strategies, skipped = simulation_input.strategies(asked)
    with console.progress("simulate", unit="histories") as progress:
        found = compare(strategies, asked.histories, progress.at)
    console.object("simulate", simulation_text.as_object(asked, found, skipped))
    if options["html"] is not None:  # before a reader such as `head` may close the pipe
        _write_page(options["html"], simulation_text.as_page(asked, found, _command()))
        console.say(f"{options['html']} written")
    simulation_text.print_found(console, asked, found)
    simulation_text.say_alike(console, found)
    for reason in skipped:
        console.warn(f"left out: {reason}")
    for summary in found:
        for warning in summary.warnings:
            console.warn(warning)
    measured = ["autockpt", "plan", "--profile", options["profile"]]
    console.next(measured if options["profile"] else "autockpt profile SCRIPT")


def _write_page(file: str, text: str) -> None:
    from pathlib import Path

    from autockpt.run_directory import RunDirectory

    RunDirectory(Path(file).parent).write_text(Path(file).name, text)


def _command() -> str:
    """The command line, as a shell takes it: with it the page can be made again."""
    import shlex

    given = []
    for name, value in click.get_current_context().params.items():
        source = click.get_current_context().get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or value is True:
            continue
        option = "--strategy" if name == "strategies" else f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, tuple) else (value,):
            given += [option, str(each)]
    return shlex.join(["autockpt", "simulate", *given])
