"""`autockpt convert SOURCE DESTINATION --to FORMAT`: into the formats of others, and from them."""

import click

from autockpt.cli.shared.options import Command, Whole, common, require_local
from autockpt.cli.shared.quantities import positive
from autockpt.console import Console

EXAMPLES = """
autockpt convert runs/train-20260101-120000 weights --to safetensors   # the newest good one
autockpt convert runs/train-20260101-120000 weights --to safetensors --max-shard-size 2GB
autockpt convert runs/train-20260101-120000 out/checkpoint-400 --to hf
autockpt convert checkpoints dcp --to dcp --generation ckpt-t0001-step-00000400
autockpt convert runs/train-20260101-120000 state.pt --to torch --force
autockpt convert weights runs/tuned --to autockpt   # then: autockpt run --run-dir runs/tuned ...
autockpt convert runs/train-20260101-120000 history --to archive --codec excp   # LOSSY
autockpt convert history runs/again --to autockpt --generation ckpt-t0001-step-00000400
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("source", metavar="RUN_DIR|DIR|GENERATION|FILE")
@click.argument("destination")
@click.option(
    "--to",
    "target",
    type=click.Choice(["safetensors", "hf", "dcp", "torch", "autockpt", "archive"]),
    required=True,
    help="safetensors and dcp make a directory, hf one that Trainer of Hugging Face resumes from, "
    "torch one file, autockpt a run to go on from, archive the history of a run.",
)
@click.option("--generation", metavar="NAME", help="Which one; otherwise the newest good one.")
@click.option(
    "--include-optimizer",
    "everything",
    is_flag=True,
    help="safetensors: also the optimizer and so on.",
)
@click.option("--max-shard-size", metavar="SIZE", help="safetensors: of one file (default 5 GB).")
@click.option(
    "--rank", type=Whole(min=0), help="Only what is in one rank's image; otherwise of all."
)
@click.option(
    "--codec",
    type=click.Choice(["none", "excp", "excp-published", "quantised"]),
    default="none",
    show_default=True,
    help="archive: all but `none` are LOSSY, and every restore says so.",
)
@click.option(
    "--full-every",
    type=Whole(1, 64),
    metavar="N",
    help="archive: one of N is lossless (default 8).",
)
@click.option("--follow", is_flag=True, help="archive: go on with what a live run writes.")
@click.option("--force", is_flag=True, help="Replace an export that is there already.")
@common
def convert(
    console: Console,
    source: str,
    destination: str,
    target: str,
    generation: str | None,
    everything: bool,
    max_shard_size: str | None,
    rank: int | None,
    codec: str,
    full_every: int | None,
    follow: bool,
    force: bool,
) -> int | None:
    """Export one checkpoint to DESTINATION, or make a run directory from an exported one.

    The formats are safetensors, a directory of torch.distributed.checkpoint, and one file of
    torch.save.  `autockpt run --run-dir` resumes a run directory made from one.

    --to archive adds every good checkpoint of a run that is newer than the archive.  With --codec
    excp or quantised it is LOSSY: restored values are close to the trained ones.

    Every chunk is compared with its digest on the way; a damaged checkpoint exports nothing.
    """
    from autockpt.cli.checkpoints import archive as archives

    require_local(destination)
    if target == "archive":
        return archives.add(
            console,
            archives.Request(
                source=source, destination=destination, generation=generation, codec=codec,
                full_every=full_every, follow=follow,
            ),
        )  # fmt: skip
    if codec != "none" or full_every is not None or follow:
        raise click.UsageError("--codec, --full-every and --follow belong to --to archive")
    if archives.is_archive(source):
        return archives.bring_back(console, source, destination, target, generation, force=force)
    from autockpt.integrations.formats.convert.export import MAX_SHARD_BYTES, export
    from autockpt.integrations.formats.convert.import_checkpoint import TARGET, import_tree
    from autockpt.integrations.formats.tree.loading import read_from
    from autockpt.integrations.places import generation_folder, names_one, read_beside_run
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes, parse_size_bytes

    sizes = {"max_shard_size": max_shard_size}
    limit = int(positive(sizes, "max_shard_size", parse_size_bytes, MAX_SHARD_BYTES))
    if target == TARGET:
        with console.progress("convert") as progress:
            done = read_from(
                source,
                lambda found: import_tree(
                    found.tree, destination, lossy=found.lossy, models=found.models,
                    known_nan=found.known_nan, left_out=found.left_out, force=force,
                    progress=progress.at,
                ),
                generation=generation, rank=rank, whole=True,
            )  # fmt: skip
    else:
        with console.progress("convert") as progress:
            folder, done = read_beside_run(
                lambda: generation_folder(source, generation),
                lambda found: (found, export(
                    found, destination, target, everything=everything, rank=rank,
                    max_shard_bytes=limit, force=force, progress=progress.at,
                )),
                named=names_one(source, generation),
            )  # fmt: skip
    console.object("convert", to_data(done))
    console.result(
        f"{done.generation} (step {done.step}) -> {destination}: {done.tensors} tensors, "
        f"{format_bytes(done.bytes)}, as {target}"
    )
    for what in done.left_out:
        console.say(f"left out: {what}")
    if done.lossy:
        console.warn(f"LOSSY: {done.lossy}; its values differ from the trained ones")
    if target == TARGET:
        console.next(["autockpt", "run", "--run-dir", destination, "SCRIPT"])
        return None
    if target == "hf":
        console.next(f"trainer.train(resume_from_checkpoint={destination!r})")
        return None
    only = [] if target == "dcp" or everything else ["--only", "model"]
    console.next(["autockpt", "diff", folder, destination, *only])
    return None
