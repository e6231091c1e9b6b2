"""The cluster of all tests here, and a job for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.job import Job


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Started once.  Skips where it cannot be."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[Job]:
    """A job that is cancelled when its test ends."""
    made = Job(cluster, tmp_path)
    yield made
    made.end()
