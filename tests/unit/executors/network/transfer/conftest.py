"""Ends that are closed when a test is over."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.executors.network.transfer.ends import End, Image

Start = Callable[..., End]
Make = Callable[..., Image]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts nodes by number."""
    made: list[End] = []

    def begin(node: int, **settings: Any) -> End:
        made.append(End(node, **settings))
        return made[-1]

    yield begin
    for end in made:
        end.close()


@pytest.fixture
def image() -> Iterator[Make]:
    """Makes images by size."""
    made: list[Image] = []

    def begin(nbytes: int, **settings: Any) -> Image:
        made.append(Image(nbytes, **settings))
        return made[-1]

    yield begin
    for one in made:
        one.source.revoke("the test is over")
        one.view.release()
        one.arena.close()
