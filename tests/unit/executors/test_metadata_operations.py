"""What a save asks of the metadata of a file system: counted, few, and the same for any state."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autockpt.values.generation import Generation
from tests.campaigns.faults import MOVING, Call, Layer
from tests.campaigns.job import Job, Shape

FIRST, SECOND = Generation(term=1, step=1), Generation(term=1, step=2)
ONCE, BY_RANK = 11, 7
"""Names made, opened, looked up or removed: for a generation, and for each rank of it."""


class Counting:
    """A rule that spoils nothing."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
        self.names[call.name] += 1
        return real(*args, **more)


def operations(path: Path, shape: Shape) -> Counter[str]:
    """Of the second save of a job, by name; a descriptor that is closed asks for nothing."""
    job, rule = Job(path=str(path), shape=shape), Counting()
    job.start()
    job.save(FIRST, None)
    with Layer(rule).armed():
        job.save(SECOND, FIRST)
    return Counter({name: count for name, count in rule.names.items() if name != "close"})


@pytest.mark.parametrize("world", [1, 3])
def test_metadata_operations_are_few_and_do_not_grow_with_the_state(
    world: int, tmp_path: Path
) -> None:
    """A hundred times the chunks are written, and nothing else is asked for more often."""
    small = operations(tmp_path / "small", Shape(world=world, chunks=1))
    large = operations(tmp_path / "large", Shape(world=world, chunks=100))
    assert large["pwrite"] >= 50 * world
    for one in (small, large):
        assert one["fsync"] == 3 + 3 * world
        asked = {name: n for name, n in one.items() if name not in (*MOVING, "fsync")}
        assert sum(asked.values()) == ONCE + BY_RANK * world, asked
