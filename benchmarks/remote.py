"""`make bench-remote`: copies of a checkpoint into an object store and back, over what bytes need.

One generation of random bytes (512 MiB, two shards) and `file://` as the store, on the file system
that also holds the checkpoint: both ends share one disk, and no network hides what the code costs.
The floors move the same bytes between the same places: a plain read and write of 8 MiB at a time
with one fsync a file for `push`; for `pull` the same and then a read of what was written that
compares every chunk's digest, because that is what `pull` promises.  All take turns; what is read
is not in the page cache, and ratios are taken within a round.
"""

import argparse
import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.catalogue import verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.remote import Objects, RemoteCopies
from autockpt.values.generation import Generation
from benchmarks.harness import Row, parse, publish, row
from tests.unit.executors.checkpoints import commit_images

SHARDS = 2
PART = 8 * 2**20
GENERATION = Generation(term=1, step=1)
PUSH_TARGET, PULL_TARGET = 1.3, 1.3


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(prog="bench-remote")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="of the checkpoint")
    args = parse(parser, rounds=1, mib=16)
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-remote-", dir=".") as folder:
        directory = checkpoint(Path(folder, "checkpoints"), args.mib * 2**20)
        source = directory.generation_path(GENERATION)
        for number in range(args.rounds):
            steps = rounds_of(directory, source, Path(folder, f"round-{number}"))
            for name, work in steps.items():
                drop(folder)
                began = time.perf_counter()
                work()
                samples.setdefault(name, []).append(time.perf_counter() - began)
            shutil.rmtree(Path(folder, f"round-{number}"))
    publish("remote", rows(samples), settings=vars(args), smoke=args.smoke)


def checkpoint(path: Path, nbytes: int) -> CheckpointDirectory:
    """One committed generation of random bytes."""
    directory = CheckpointDirectory(str(path))
    run_id = directory.open()
    directory.claim(run_id, "bench", 0, force=False)
    images = []
    for rank in range(SHARDS):
        arena = Arena.anonymous(nbytes // SHARDS)
        arena.view[: nbytes // SHARDS] = random.Random(rank).randbytes(nbytes // SHARDS)
        images.append(arena.view[: nbytes // SHARDS])
    commit_images(directory, run_id, GENERATION, images)
    directory.write_decision(1, 1, None, "bench")
    return directory


def rounds_of(
    directory: CheckpointDirectory, source: str, folder: Path
) -> dict[str, Callable[[], object]]:
    """What takes turns, in this order: a pull needs what a push has left."""
    copies = RemoteCopies(Objects((folder / "store").absolute().as_uri()))
    back, plain = folder / "back", folder / "plain"

    def read_back() -> None:
        plain_copy(source, plain / GENERATION.name)
        result = verify_generation(str(plain), GENERATION.name)
        if not result.ok:
            raise SystemExit(result.problems[0])

    return {
        "plain copy": lambda: plain_copy(source, folder / "copied"),
        "push": lambda: copies.push(directory, GENERATION),
        "plain copy, read back": read_back,
        "pull": lambda: copies.pull(str(back)),
    }


def plain_copy(source: str, target: Path) -> None:
    """Every file, read and written in turn, and made durable."""
    target.mkdir(parents=True)
    for name in os.listdir(source):
        with open(Path(source, name), "rb") as reader, open(target / name, "wb") as writer:
            while piece := reader.read(PART):
                writer.write(piece)
            writer.flush()
            os.fsync(writer.fileno())


def drop(folder: str) -> None:
    """Nothing under `folder` is in the page cache."""
    os.sync()
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows(samples: dict[str, list[float]]) -> list[Row]:
    """Ratios of each round."""

    def over(name: str, floor: str, target: float) -> Row:
        ratios = [a / b for a, b in zip(samples[name], samples[floor], strict=True)]
        return row(name, f"over {floor}", ratios, unit="ratio", at_most=target)

    return [
        over("push", "plain copy", PUSH_TARGET),
        over("pull", "plain copy, read back", PULL_TARGET),
    ]


if __name__ == "__main__":
    main()
