"""`autockpt restore --dry-run PATH SCRIPT`: the load plan of a restore, and whether it fits.

The script runs up to its call of `autockpt.attach`.  Headers are read, and no tensor.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from autockpt.cli.shared.options import WRAPPING, Command, common, find_script, script_arguments
from autockpt.console import Console
from autockpt.launch import environment
from autockpt.values.errors import ConfigError, OptionError

if TYPE_CHECKING:
    from autockpt.executors.restore.plan.load_plan import LoadPlan, PlannedTensor
    from autockpt.executors.storage.directory.records import CommitFile

EXAMPLES = """
autockpt restore --dry-run runs/mine train.py --lr 1e-3             # the newest checkpoint
autockpt restore --dry-run --tensors runs/mine train.py             # every tensor
torchrun --nproc-per-node 8 -m -- autockpt restore --dry-run runs/mine train.py
"""


@click.command(cls=Command, examples=EXAMPLES, context_settings=WRAPPING)
@click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
@click.option("--generation", metavar="NAME", help="This checkpoint instead of the newest one.")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.argument("path", metavar="RUN_DIR|DIR|URL")
@script_arguments
@common
def restore(
    console: Console,
    path: str,
    script: str,
    args: tuple[str, ...],
    module: bool,
    dry_run: bool,
    generation: str | None,
    tensors: bool,
) -> Callable[[], int]:
    """Print the plan of a restore into SCRIPT's state: its sources, and whether it fits.

    SCRIPT runs up to its call of autockpt.attach and ends there.  Under torchrun every rank prints
    its own plan.  Exit code 78: the checkpoint does not fit.
    """
    from autockpt.cli.jobs.worker import run_here
    from autockpt.executors.restore.plan.load_plan import PlanMade
    from autockpt.executors.storage.places.choose import absolute
    from autockpt.integrations.places import generation_folder

    if not dry_run:
        raise OptionError(
            "a restore happens in the script, when it calls autockpt.attach: `autockpt run` "
            "resumes a run; add --dry-run to see what it would read"
        )
    folder = generation_folder(path, generation)
    run = run_here(find_script(script, module, args))
    for name in environment.ALL:
        os.environ.pop(name, None)
    variables = {environment.MODE: "restore-plan", environment.PLAN_FOR: absolute(folder)}
    os.environ.update(variables)

    def planned() -> int:
        try:
            run()
        except PlanMade as made:
            return _shown(console, folder, made.plan, tensors=tensors)
        raise ConfigError(
            f"{script}: ended without a call of autockpt.attach, so its state is not known; "
            "`autockpt run SCRIPT` prints the lines to add"
        )

    return planned


def _shown(console: Console, folder: str, plan: "LoadPlan", *, tensors: bool) -> int:
    """Prints a plan; the exit code."""
    from autockpt.executors.storage.directory.records import read_commit
    from autockpt.launch.rank_env import rank_and_world

    commit = read_commit(os.path.join(folder, "COMMIT"))
    rank, world_size = rank_and_world(os.environ)
    shards = [_shard(plan, commit, shard) for shard in sorted(plan.bytes_by_shard())]
    rows = [_tensor(tensor) for tensor in plan.tensors]
    facts = {
        "checkpoint": folder,
        "step": commit.step,
        "written by": f"{commit.world_size} ranks",
        "restored by": f"rank {rank} of {world_size}",
        "tensors": len(plan.tensors),
        "resharded": sum(tensor.resharded for tensor in plan.tensors),
        "compared": len(plan.compared),
        "as built": ", ".join(plan.as_built) or "none",
        "built later": len(plan.awaited or ()),
        "progress": f"merged from {len(plan.merged)} ranks" if plan.merged else "its own",
        "fits": "no" if plan.refusals else "yes",
    }
    console.object(
        "restore",
        {**facts, "shards": shards, "contents": rows, "refusals": list(plan.refusals)},
    )
    for key, value in facts.items():
        console.result(f"{key:<13} {value}")
    console.result("")
    console.table(
        ("shard", "file", "bytes", "tensors"), ([*map(str, shard.values())] for shard in shards)
    )
    if tensors:
        console.result("")
        headers = ("tensor", "dtype", "shape", "goes to", "how", "from shards")
        console.table(headers, ([*map(str, row.values())] for row in rows))
    for refusal in plan.refusals:
        console.result(f"\ndoes not fit: {refusal}")
    return ConfigError.exit_code if plan.refusals else 0


def _shard(plan: "LoadPlan", commit: "CommitFile", shard: int) -> dict[str, Any]:
    """One source of a plan: its file, the bytes and the tensors taken from it."""
    return {
        "shard": shard,
        "file": commit.records[shard].get("file"),
        "bytes": plan.bytes_by_shard()[shard],
        "tensors": sum(
            any(read.piece.shard == shard for read in tensor.parts()) for tensor in plan.tensors
        ),
    }


def _tensor(tensor: "PlannedTensor") -> dict[str, Any]:
    """One tensor of a plan: where it comes from and goes to."""
    shards = sorted({read.piece.shard for read in tensor.parts()})
    return {
        "name": tensor.name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "target": "the live tensor" if tensor.live else "new memory",
        "how": _how(tensor),
        "shards": shards,
    }


def _how(tensor: "PlannedTensor") -> str:
    if not tensor.reads:
        return "missing"
    if tensor.copies:
        return f"mean of {len(tensor.copies)} copies"
    return "resharded" if tensor.resharded else "as it was saved"
