"""What all tests of jobs share: one zygote a session, and live runs."""

from collections.abc import Callable, Iterator

import pytest

from tests.jobs.kill.zygote import Zygote
from tests.support.live import Live


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks trainers; one import of torch for the whole session."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def live(
    new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, forked_keepers: None
) -> Iterator[Live]:
    """A run directory, and trainings in this process on it."""
    run = Live(new_run(), monkeypatch)
    yield run
    run.leave()
