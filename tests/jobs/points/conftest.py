"""A live run that leaves nothing behind, and a zygote for what shows only with several ranks."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.jobs.kill.conftest import zygote
from tests.support.live import Live

__all__ = ["live", "zygote"]


@pytest.fixture
def live(
    new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, forked_keepers: None
) -> Iterator[Live]:
    """A run directory, and trainings in this process on it."""
    run = Live(new_run(), monkeypatch)
    yield run
    run.leave()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Iterations of milliseconds also where other processes compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
