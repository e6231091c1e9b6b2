"""`autockpt slurm init`: a commented job script."""

import re
from pathlib import Path

import click

from autockpt import new_files
from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

NAME = "autockpt.sbatch"
EXAMPLES = """
autockpt slurm init --nodes 4 --gpus 8 train.py --lr 1e-3    # writes autockpt.sbatch, commented
sbatch autockpt.sbatch
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={stem}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1        # one launcher a node; it starts the ranks and restarts them
{gpus}#SBATCH --cpus-per-task={cpus}       # all cores that the ranks of a node need
#SBATCH --time={time}
#SBATCH --requeue                  # a lost node or a preemption queues the job again
#SBATCH --open-mode=append         # a requeued job goes on in the same log
#SBATCH --output={stem}-%j.out
# {notice} s before the time limit the tasks of srun get SIGUSR1.  autockpt makes a last checkpoint
# then and ends with exit code 75.
#SBATCH --signal=USR1@{notice}

# The run directory must be on storage that all nodes see (docs/howto/storage.md).  A requeued job
# keeps its number, so it finds its own run; a fixed name goes on with one run in each new job.
RUN_DIR="${{RUN_DIR:-runs/{stem}-$SLURM_JOB_ID}}"

# --kill-on-bad-exit=0 --no-kill: when one node ends, the step does not end the launchers and the
# keepers of the other nodes; they hold checkpoints in memory.  srun takes no cores of sbatch's.
srun --kill-on-bad-exit=0 --no-kill --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    autockpt run --nproc-per-node {ranks} --run-dir "$RUN_DIR" \\
    {command}
code=$?

# 75: a signal announced the end, and all that was trained is durable.
# Other codes need a look, such as 93: restarts came no further (docs/reference/exit_codes.md).
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


class _Group(click.Group):
    """Examples first, as in every command."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from autockpt.cli.shared.options import write_examples

        write_examples(formatter, EXAMPLES)
        super().format_help(ctx, formatter)


_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", re.ASCII | re.IGNORECASE)


@click.group(cls=_Group)
def slurm() -> None:
    """Write job scripts for Slurm."""


@slurm.command(cls=Command, examples=EXAMPLES, context_settings={"ignore_unknown_options": True})
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--gpus", type=click.IntRange(min=0), default=0, help="Of each node; 0: none.")
@click.option("--ranks", type=click.IntRange(min=1), help="Of each node; one a GPU by default.")
@click.option("--cpus", type=click.IntRange(min=1), help="Of each node; 8 a rank by default.")
@click.option("--time", default="24:00:00", show_default=True, help="As sbatch takes it.")
@click.option(
    "--notice", type=click.IntRange(min=1), default=120, show_default=True, metavar="SECONDS",
    help="Time for the last checkpoint.",
)  # fmt: skip
@click.option("-o", "--output", default=NAME, show_default=True, help="The file to write.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT ARGS")
@common
def init(
    console: Console,
    nodes: int,
    gpus: int,
    ranks: int | None,
    cpus: int | None,
    time: str,
    notice: int,
    output: str,
    command: tuple[str, ...],
) -> None:
    """Write a commented job script that runs SCRIPT under autockpt; an existing file stays."""
    import shlex

    from autockpt.values.errors import ConfigError, OptionError, StorageError

    if not _TIME.fullmatch(time):
        raise OptionError(f"--time {time}: expected MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
    ranks = ranks or gpus or 1
    text = SCRIPT.format(
        stem=_stem(command), nodes=nodes, time=time, notice=notice, ranks=ranks,
        cpus=cpus or 8 * ranks, command=shlex.join(command),
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
    )  # fmt: skip
    try:
        with open(output, "x", encoding="utf-8", opener=new_files.readable) as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output}: exists already; name another file with --output") from None
    except OSError as error:
        raise StorageError(f"{output}: cannot be written: {error.strerror}") from error
    console.object("slurm init", {"file": output})
    console.result(f"{output}: nodes: {nodes}, ranks on each: {ranks}")
    if command[0] != "-m" and not Path(command[0]).exists():
        console.warn(
            f"{command[0]}: no such script here; the job looks for it where sbatch is called"
        )
    console.next(["sbatch", output])


def _stem(command: tuple[str, ...]) -> str:
    """A name for job and folder that no shell reads as something else."""
    words = command[1:] if command[0] == "-m" else command
    name = Path(words[0]).stem if words else "train"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "train"
