"""Writes and reads of the target directory, over writers x chunk x direct, with the real mover.

Configurations are measured in rounds, the likeliest first, in an order shuffled anew.  When the
budget ends, all begun configurations have about as many samples.  A write counts until the fsync
returned, a read starts cold.  Files are unnamed (`clean.probe_file`), space and time are bounded.
"""

import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from autockpt.profiles.probes.clean import probe_file
from autockpt.profiles.samples import StorageSample, StorageSamples
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.units import format_bytes

PAGE_BYTES = 4096
SAMPLE_LIMIT_BYTES = 128 * 2**20
"""Part of a large state that a sample writes; throughput is flat long before."""
SAMPLE_S = 0.6
"""A single write should not take longer: slow storage gets a smaller sample."""
SPACE_SHARE = 0.25
"""At most this part of the free space is written to."""


class Writer(Protocol):
    """Writes an image to `path` and makes it durable; the result knows its `total_s`."""

    def __call__(
        self, path: str, image: memoryview, *, writers: int, chunk_bytes: int, direct: bool
    ) -> Any: ...


class Reader(Protocol):
    """Fills `into` from the start of a file; returns seconds."""

    def __call__(
        self, path: str, into: memoryview, *, readers: int, chunk_bytes: int, direct: bool
    ) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfiguration:
    """One way to write or read."""

    writers: int
    chunk_bytes: int
    direct: bool


def write_grid() -> list[StorageConfiguration]:
    """All ways to write, the default (2 writers, 8 MiB, direct) and its neighbours first."""
    grid = [
        StorageConfiguration(writers=writers, chunk_bytes=chunk * 2**20, direct=direct)
        for writers, chunk, direct in itertools.product((2, 1, 4), (8, 32, 1), (True, False))
    ]
    return sorted(grid, key=_distance)


def read_grid() -> list[StorageConfiguration]:
    """All ways to read, likeliest first."""
    grid = [
        StorageConfiguration(writers=readers, chunk_bytes=8 * 2**20, direct=direct)
        for readers, direct in itertools.product((2, 1, 4), (True, False))
    ]
    return sorted(grid, key=_distance)


def _distance(way: StorageConfiguration) -> int:
    """How many choices differ from the default."""
    return (way.writers != 2) + (way.chunk_bytes != 8 * 2**20) + (not way.direct)


class StorageProbe:
    """Measures one directory; `image` is page-aligned, faulted memory with the job's own bytes.

    Raises StorageError when not even the first file can be written.
    """

    def __init__(
        self, directory: str, image: memoryview, *, write: Writer, read: Reader, seed: int = 0
    ) -> None:
        self.directory = directory
        self.warnings: list[str] = []
        self._write, self._read = write, read
        self._order = random.Random(seed)
        self._image = self._fit_space(image)
        self.named = not self._takes_open_files()
        """The mover cannot write to an open file: probe files have names until they are gone."""

    def run(
        self,
        *,
        write_s: float,
        read_s: float,
        rounds: int = 4,
        writes: Sequence[StorageConfiguration] = (),
        reads: Sequence[StorageConfiguration] = (),
    ) -> StorageSamples:
        """Everything within the two budgets; the grids default to the whole ones."""
        empty_s = [self.write_once(self._image[:PAGE_BYTES], _DEFAULT).seconds for _ in range(3)]
        self._fit_time()
        samples = self._sweep("write", writes or write_grid(), write_s, rounds)
        samples += self._sweep("read", reads or read_grid(), read_s, rounds)
        return StorageSamples(
            samples=tuple(samples), empty_write_s=tuple(empty_s), warnings=tuple(self.warnings)
        )

    def write_once(self, image: memoryview, way: StorageConfiguration) -> StorageSample:
        """One durable file."""
        with self._file() as path:
            return self._timed_write(path, image, way)

    def _timed_write(
        self, path: str, image: memoryview, way: StorageConfiguration
    ) -> StorageSample:
        began = time.perf_counter()
        self._write(
            path, image, writers=way.writers, chunk_bytes=way.chunk_bytes, direct=way.direct
        )
        return _sample("write", way, len(image), time.perf_counter() - began)

    def _read_once(self, path: str, way: StorageConfiguration) -> StorageSample:
        drop_cache(path)
        began = time.perf_counter()
        self._read(
            path, self._image, readers=way.writers, chunk_bytes=way.chunk_bytes, direct=way.direct
        )
        return _sample("read", way, len(self._image), time.perf_counter() - began)

    def _sweep(
        self,
        operation: Literal["write", "read"],
        grid: Sequence[StorageConfiguration],
        budget_s: float,
        rounds: int,
    ) -> list[StorageSample]:
        """Rounds over the grid; the first goes in the given order, a budget cuts its tail off."""
        began = time.perf_counter()
        samples: list[StorageSample] = []
        ways = list(grid)
        with contextlib.ExitStack() as stack:
            path = ""
            if operation == "read":
                path = stack.enter_context(self._file())
                self._timed_write(path, self._image, _DEFAULT)
            for number in range(rounds):
                order = ways if number == 0 else self._order.sample(ways, len(ways))
                for way in order:
                    if samples and time.perf_counter() - began > budget_s:
                        break
                    if operation == "read":
                        samples.append(self._read_once(path, way))
                    else:
                        samples.append(self.write_once(self._image, way))
                if number == 0:
                    ways = ways[: len(samples)]
        if len(ways) < len(grid):
            self.warnings.append(
                f"storage {operation}: {len(grid) - len(ways)} of {len(grid)} configurations were "
                f"not measured within {budget_s:.0f} s; the storage is slow or busy, rerun "
                "`autockpt profile` when it is quiet"
            )
        return samples

    @contextlib.contextmanager
    def _file(self) -> Iterator[str]:
        """A probe file; falls back to named ones when the mover cannot take an open file."""
        try:
            with probe_file(self.directory, named=self.named) as path:
                yield path
        except OSError as error:
            raise StorageError(
                f"{self.directory}: cannot write a probe file: {error.strerror}; name another "
                "directory for the checkpoints or fix its permissions"
            ) from error

    def _takes_open_files(self) -> bool:
        """Whether the mover writes to a path under /proc/self/fd."""
        try:
            with probe_file(self.directory) as path:
                self._timed_write(path, self._image[:PAGE_BYTES], _DEFAULT)
        except (AutockptError, OSError):
            return False
        return True

    def _fit_space(self, image: memoryview) -> memoryview:
        """The part of `image` that the free space allows."""
        try:
            stat = os.statvfs(self.directory)
        except OSError as error:
            raise StorageError(f"{self.directory}: {error.strerror}") from error
        allowed = int(stat.f_bavail * stat.f_frsize * SPACE_SHARE)
        size = min(len(image), SAMPLE_LIMIT_BYTES, max(PAGE_BYTES, allowed))
        if size < min(len(image), SAMPLE_LIMIT_BYTES):
            self.warnings.append(
                f"storage: {self.directory} has room for a sample of {format_bytes(size)} only; "
                "free some space and rerun `autockpt profile`"
            )
        return image[: size // PAGE_BYTES * PAGE_BYTES]

    def _fit_time(self) -> None:
        """Shrinks the sample until one default write takes about `SAMPLE_S`; also a warm-up."""
        pilot = self._image[: 16 * 2**20]
        seconds = self.write_once(pilot, _DEFAULT).seconds
        rate = len(pilot) / max(seconds, 1e-6)
        size = max(len(pilot), int(rate * SAMPLE_S))
        if size < len(self._image):
            self._image = self._image[: size // PAGE_BYTES * PAGE_BYTES]


_DEFAULT = StorageConfiguration(writers=2, chunk_bytes=8 * 2**20, direct=True)


def _sample(
    operation: Literal["write", "read"], way: StorageConfiguration, nbytes: int, seconds: float
) -> StorageSample:
    return StorageSample(
        operation=operation,
        direct=way.direct,
        writers=way.writers,
        chunk_bytes=way.chunk_bytes,
        bytes=nbytes,
        seconds=max(seconds, 1e-9),
    )


def drop_cache(path: str) -> None:
    """Asks the kernel to forget the file's pages; they are clean, they were made durable."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
