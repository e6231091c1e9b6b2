"""A file system and an object store keep the same contract."""

import itertools
from pathlib import Path

import pytest

from tests.contracts.place_contract import PlaceContract
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

__all__ = ["endpoint", "s3"]

_places = itertools.count()


class TestFileSystem(PlaceContract):
    """A directory."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        """It is not there yet."""
        return str(tmp_path / "checkpoints")


class TestObjectStore(PlaceContract):
    """Its library, on files: no folders, no renames, puts on a condition."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        """A prefix."""
        return f"file://{tmp_path}/a store/run"


@pytest.mark.slow
class TestS3(PlaceContract):
    """Over HTTP, with the protocol of S3."""

    @pytest.fixture
    def path(self, s3: None) -> str:
        """A prefix each."""
        return f"s3://bucket/places/{next(_places)}"
