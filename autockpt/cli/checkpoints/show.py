"""`autockpt show PATH [GENERATION]`: contents of one checkpoint."""

import contextlib
import os
from typing import TYPE_CHECKING, Any

import click

from autockpt.cli.checkpoints import archive
from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

if TYPE_CHECKING:
    from autockpt.executors.image.container import StoredPart
    from autockpt.executors.storage.directory.records import CommitFile
    from autockpt.reports.analysis.replication import Protection
    from autockpt.values.status import DegradedTier

EXAMPLES = """
autockpt show runs/train-20260101-120000                  # the newest one
autockpt show checkpoints ckpt-t0001-step-00000400 --tensors
autockpt show s3://bucket/run-7
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|ARCHIVE|URL")
@click.argument("generation", required=False)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@common
def show(console: Console, path: str, generation: str | None, tensors: bool) -> None:
    """Show what a checkpoint holds: step, lineage, shards and, with --tensors, every tensor."""
    from autockpt.executors.storage.directory.records import lossy_mark
    from autockpt.integrations.places import (
        choose,
        damaged_since,
        find_place,
        read_beside_run,
    )
    from autockpt.reports.analysis.replication import facts
    from autockpt.values.record import to_data

    if archive.is_archive(path):
        archive.show(console, path, generation, tensors=tensors)
        return
    place = find_place(path, in_store=True)
    folder, commit, shards = read_beside_run(
        lambda: os.path.join(place.directory, choose(place, generation)),
        _contents,
        named=bool(generation or place.generation),
    )
    name = os.path.basename(folder)
    shown = {
        "generation": name,
        "step": commit.step,
        "term": commit.generation.term,
        "resumed from": commit.parent.name if commit.parent else "the beginning",
        "ranks": commit.world_size,
        "health": commit.health,
        "lossy": lossy_mark(commit.records) or "no",
        "holds": _held(folder, commit),
        "run": commit.run_id,
        "directory": folder,
    }
    copies, degraded = _tiers(path, console)
    told = {"copies": copies and to_data(copies), "degraded": to_data(degraded)}
    console.object("show", {**shown, "shards": shards, **told})
    for key, value in shown.items():
        console.result(f"{key:<13} {value}")
    if copies is not None:
        console.result("\nother nodes")
        for key, value in facts(copies):
            console.result(f"{key:<22} {value}")
    for tier in degraded:
        console.warn(str(tier))
    if not (generation or place.generation):
        for newer in damaged_since(place.directory, name):
            console.warn(
                f"{newer.name} is newer and {newer.state}: {newer.detail or 'it is marked'}"
            )
    console.result("")
    console.table(
        ("rank", "file", "stored", "tensors", "codec", "chunks"),
        ([str(shard[key]) for key in _COLUMNS] for shard in shards),
    )
    if tensors:
        for shard in shards:
            console.result(f"\nrank {shard['rank']}")
            console.table(
                ("tensor", "dtype", "shape", "bytes", "part of"),
                (
                    (row["name"], row["dtype"], str(row["shape"]), str(row["bytes"]), _part(row))
                    for row in shard["contents"]
                ),
            )
    console.next(["autockpt", "verify", path, *([] if place.generation else [name])])


def _held(folder: str, commit: "CommitFile") -> str:
    """Which state the shards of a commit hold."""
    from autockpt.executors.protocol.messages import holds_weights_only
    from autockpt.executors.storage.directory.records import COMES_BACK, comes_back

    if not holds_weights_only(commit.records):
        return "the whole state"
    with contextlib.suppress(OSError):
        if comes_back(folder, commit):
            return f"weights only; {COMES_BACK}"
    return "weights only"


def _tiers(path: str, console: Console) -> "tuple[Protection | None, tuple[DegradedTier, ...]]":
    """(what other nodes hold in memory, tiers that are degraded), where the path is a run's.

    A checkpoint is shown also where the run's records cannot be read.
    """
    from autockpt.cli.shared.gather import tiers_of
    from autockpt.run_directory import RunDirectory
    from autockpt.values.errors import AutockptError

    run = RunDirectory(path)
    try:
        return tiers_of(run) if run.exists else (None, ())
    except AutockptError as error:
        console.warn(f"tiers not shown: {error}")
        return None, ()


_COLUMNS = ("rank", "file", "stored_bytes", "tensors", "codec", "chunks")


def _part(row: dict[str, Any]) -> str:
    """Which boxes of which whole, for people."""
    return f"{row['of']} {' '.join(row['boxes'])}" if "of" in row else ""


def _contents(folder: str) -> "tuple[str, CommitFile, list[dict[str, Any]]]":
    """(folder, its commit, what each shard holds)."""
    from autockpt.executors.storage.directory.records import read_commit

    commit = read_commit(os.path.join(folder, "COMMIT"))
    return folder, commit, [_shard(folder, commit, rank) for rank in range(len(commit.records))]


def _shard(folder: str, commit: "CommitFile", rank: int) -> dict[str, Any]:
    """Return the contents of a shard's index and header; both are checked against the commit."""
    from autockpt.executors.image.container import header_bytes, read_header
    from autockpt.executors.linux.memory import Arena
    from autockpt.executors.storage.catalogue import open_shard

    record = commit.records[rank]
    source = open_shard(folder, record, commit)
    index = source.index
    buffer = Arena.anonymous(source.room_bytes)
    try:
        head = bytes(source.read(0, buffer.view))
        wanted = header_bytes(memoryview(head), index.image_bytes)
        chunk = 1
        while len(head) < wanted:
            head += bytes(source.read(chunk, buffer.view))
            chunk += 1
        header = read_header(head[:wanted], index.image_bytes)
    finally:
        source.close()
        buffer.close()
    rows = [
        {
            "name": name,
            "dtype": header.true_dtypes.get(name, tensor.dtype),
            "shape": list(tensor.shape),
            "bytes": tensor.stop - tensor.start,
            **_part_of(header.parts.get(name)),
        }
        for name, tensor in sorted(header.tensors.items())
    ]
    return {
        "rank": rank,
        "file": record.get("file"),
        "stored_bytes": record.get("bytes"),
        "tensors": len(rows),
        "codec": index.codec,
        "chunks": len(index.digests),
        "root": index.root,
        "aliases": header.aliases,
        "contents": rows,
    }


def _part_of(part: "StoredPart | None") -> dict[str, Any]:
    """The whole tensor's shape and the boxes of it; nothing for a whole one."""
    if part is None:
        return {}
    return {"of": list(part.global_shape), "boxes": [str(box) for box in part.boxes]}
