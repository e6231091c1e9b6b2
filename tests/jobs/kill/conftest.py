"""One zygote for all kill tests."""

from collections.abc import Iterator

import pytest

from tests.jobs.kill.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks trainers; one import of torch for the whole session."""
    zygote = Zygote()
    yield zygote
    zygote.close()
