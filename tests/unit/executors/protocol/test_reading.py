"""The memory that a keeper makes for the ranks of its node that read together."""

import os
import threading
from collections.abc import Iterator

import pytest

from autockpt.executors.keeper.restoring.shared_buffers import SharedBuffers
from autockpt.executors.protocol.messages import RestoreShard, ShardSource
from autockpt.values.generation import Generation

RANKS = (0, 1)


@pytest.fixture
def log() -> list[str]:
    """What the keeper's log says."""
    return []


@pytest.fixture
def reading(log: list[str]) -> Iterator[SharedBuffers]:
    """Of one keeper."""
    memory = SharedBuffers(log.append)
    yield memory
    memory.close()


def order(attempt: int = 1, readers: tuple[int, ...] = RANKS) -> RestoreShard:
    """To a rank that reads from storage."""
    return RestoreShard(
        rank=0, term=2, attempt=attempt, generation=Generation(term=1, step=4), step=4,
        source=ShardSource(kind="disk", root="r"), readers=readers,
    )  # fmt: skip


def identity(fd: int | None) -> tuple[int, int]:
    """Of the memory behind a descriptor."""
    assert fd is not None
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def test_readers_of_an_attempt_get_one_memory_and_another_attempt_another(
    reading: SharedBuffers,
) -> None:
    """What stands in the table of a failed attempt must not be read."""
    reading.prepare(len(RANKS))
    first = reading.lend(order())
    assert first is not None
    held = os.dup(first)  # its number may be given again
    assert identity(reading.lend(order())) == identity(held)
    assert identity(reading.lend(order(attempt=2))) != identity(held)
    os.close(held)


def held_descriptors() -> int:
    """Of such memory, in this process."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("autockpt-reading" in os.readlink(p) for p in paths if os.path.lexists(p))


def test_what_is_over_is_given_back(reading: SharedBuffers) -> None:
    """Lent, or only prepared and perhaps not made yet."""
    before = held_descriptors()
    assert reading.lend(order()) is not None
    assert held_descriptors() == before + 1
    reading.close()
    assert held_descriptors() == before
    reading.prepare(len(RANKS))
    reading.close()
    for thread in threading.enumerate():
        if thread.name == "autockpt-reading":
            thread.join()
    assert held_descriptors() == before


def test_memory_that_is_not_there_means_that_all_read_alone(
    reading: SharedBuffers, log: list[str]
) -> None:
    """The restore goes on."""
    assert reading.lend(order(readers=tuple(range(10**6)))) is None
    assert "every rank reads alone" in log[0]
    assert "host memory" in log[0]
