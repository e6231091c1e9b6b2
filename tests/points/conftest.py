"""A live run that leaves nothing behind."""

from collections.abc import Callable, Iterator

import pytest

from tests.points.live import Live


@pytest.fixture
def live(new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A run directory, and trainings in this process on it."""
    run = Live(new_run(), monkeypatch)
    yield run
    run.leave()
