"""`autockpt diff A B`: what differs between two checkpoints."""

from typing import TYPE_CHECKING

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

if TYPE_CHECKING:
    from autockpt.integrations.formats.tree.diff import Comparison, Difference
    from autockpt.integrations.formats.tree.lazy_tree import Tree
    from autockpt.integrations.formats.tree.loading import Source

EXAMPLES = """
autockpt diff checkpoints/ckpt-t0001-step-00000400 checkpoints/ckpt-t0001-step-00000800
autockpt diff runs/train-20260101-120000 weights --only model   # a run and an export of it
autockpt diff runs/a runs/b --json | jq '.groups'
"""
DIFFERENT = 1
"""Exit code, as of diff(1)."""
SHOWN = 40


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("a")
@click.argument("b")
@click.option("--only", metavar="PART", multiple=True, help="model, optimizer, ... (repeatable).")
@common
def diff(console: Console, a: str, b: str, only: tuple[str, ...]) -> int:
    """Compare two checkpoints by name: of a run (its newest good one), a generation, safetensors,
    a file of torch.save, or a directory of torch.distributed.checkpoint.

    Exit code 0 when they hold the same, 1 when they differ.  -v lists every difference.
    """
    from autockpt.executors.storage.directory.records import lossy_notice
    from autockpt.integrations.formats.tree.diff import compare
    from autockpt.integrations.formats.tree.lazy_tree import tensors_of
    from autockpt.integrations.formats.tree.loading import read_from
    from autockpt.values.errors import ConfigError
    from autockpt.values.record import to_data

    def compared(from_a: "Source", from_b: "Source") -> "Comparison":
        left, right = _parts(from_a.tree, only), _parts(from_b.tree, only)
        if only and not left and not right:
            raise ConfigError(f"neither has {', '.join(only)}; there are: {', '.join(from_a.tree)}")
        for path, source in ((a, from_a), (b, from_b)):
            if source.lossy:
                console.warn(lossy_notice(path, source.lossy))
        total = sum(tensor.nbytes for tensor in tensors_of(left))
        with console.progress("diff") as progress:
            return compare(left, right, tell=lambda nbytes: progress.add(nbytes, total))

    found = read_from(a, lambda from_a: read_from(b, lambda from_b: compared(from_a, from_b)))
    console.object("diff", {"a": a, "b": b, **to_data(found)})
    console.table(
        ("", "equal", "changed", "other", "max difference", "relative"),
        (
            (g.name, str(g.equal), str(g.changed), str(g.other), _number(g.max_abs),
             _number(g.max_relative))
            for g in found.groups
        ),
    )  # fmt: skip
    shown = found.differences if console.verbosity > 0 else found.differences[:SHOWN]
    for difference in shown:
        console.result(f"{difference.kind:<8} {difference.name}: {_told(difference)}")
    if len(shown) < len(found.differences):
        console.say(f"{len(found.differences) - len(shown)} more differences; -v lists them")
    return 0 if found.equal else DIFFERENT


def _parts(tree: "Tree", only: tuple[str, ...]) -> "Tree":
    return {name: value for name, value in tree.items() if not only or name in only}


def _told(difference: "Difference") -> str:
    if difference.kind == "values":
        return (
            f"{difference.a}: {difference.elements} elements, by {_number(difference.max_abs)} "
            f"({_number(difference.max_relative)} relative)"
        )
    if difference.kind in ("only-a", "only-b"):
        return difference.a or difference.b
    return f"{difference.a} -> {difference.b}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
