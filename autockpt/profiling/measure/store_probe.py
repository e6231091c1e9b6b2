"""Writes to and reads from an object store, timed: latency from one page, the rate from a sample.

A store is asked one way, as a save and a restore ask it: parts of 8 MiB, four at once.  Writers,
O_DIRECT and chunks make no difference there.  An object of a probe is removed when it was measured.
If a profile is killed, the next one on that machine removes its objects.
"""

import contextlib
import itertools
import os
import re
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Literal

from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.images import read_stored, write_stored
from autockpt.executors.storage.places.object_store import PART_BYTES
from autockpt.profiles.probes.storage import PAGE_BYTES, SAMPLE_LIMIT_BYTES, SAMPLE_S
from autockpt.profiles.samples import StorageSample, StorageSamples
from autockpt.values.plan import WRITERS

PREFIX = ".autockpt-probe-"
PILOT_BYTES = 2 * PART_BYTES
LEAST_SAMPLES, MOST_SAMPLES = 2, 8
_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-([0-9a-f]{8})-\d+")
_counter = itertools.count()


@contextlib.contextmanager
def probe_object(url: str) -> Iterator[str]:
    """The URL of an object that is not there yet, and is removed behind the block."""
    path = f"{url}/{PREFIX}{os.getpid()}-{host_name()}-{next(_counter)}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            place_of(url).remove(path)


def sweep(url: str) -> None:
    """Removes objects of probes on this machine whose process is gone."""
    place = place_of(url)
    with contextlib.suppress(OSError):
        for found in filter(None, map(_NAME.fullmatch, place.names(url))):
            if found[2] == host_name() and not os.path.exists(f"/proc/{found[1]}"):
                place.remove(f"{url}/{found[0]}")


def measure(url: str, image: memoryview, *, write_s: float, read_s: float) -> StorageSamples:
    """Samples of `image` within about the two budgets, seconds.

    Raises StorageError, OSError.
    """
    sweep(url)
    with probe_object(url) as path:
        empty_s = [write_stored(path, image[:PAGE_BYTES]) for _ in range(3)]
        pilot = image[:PILOT_BYTES]
        moved_s = max(1e-6, write_stored(path, pilot) - statistics.median(empty_s))
        fitting = int(len(pilot) / moved_s * SAMPLE_S) // PAGE_BYTES * PAGE_BYTES
        sample = image[: min(SAMPLE_LIMIT_BYTES, max(len(pilot), fitting))]
        writes = list(_timed(lambda: write_stored(path, sample), write_s))
        into = memoryview(bytearray(len(sample)))
        reads = list(_timed(lambda: read_stored(path, into), read_s))
    samples = [_sample("write", len(sample), seconds) for seconds in writes]
    samples += [_sample("read", len(sample), seconds) for seconds in reads]
    return StorageSamples(samples=tuple(samples), empty_write_s=tuple(empty_s))


def _timed(move: Callable[[], float], budget_s: float) -> Iterator[float]:
    began = time.monotonic()
    for number in range(MOST_SAMPLES):
        if number >= LEAST_SAMPLES and time.monotonic() - began > budget_s:
            return
        yield move()


def _sample(operation: Literal["write", "read"], nbytes: int, seconds: float) -> StorageSample:
    return StorageSample(
        operation=operation, direct=False, writers=WRITERS, chunk_bytes=PART_BYTES, bytes=nbytes,
        seconds=max(seconds, 1e-9),
    )  # fmt: skip


def host_name() -> str:
    """This machine in eight hex digits: process ids mean nothing on another machine."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"
