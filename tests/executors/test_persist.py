"""`persist` keeps the mover contract on disk and in memory, direct and buffered."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autockpt.executors.persist import run_parallel
from tests.contracts.store_contract import StoreContract


class TestDirectDisk(StoreContract):
    """The default: O_DIRECT on a disk."""

    direct = True


class TestBufferedDisk(StoreContract):
    """Through the page cache."""

    direct = False


class OnTmpfs(StoreContract):
    """A folder in memory."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        if not Path("/dev/shm").is_dir():
            pytest.skip("no tmpfs here")
        folder = Path(tempfile.mkdtemp(prefix="autockpt-test-", dir="/dev/shm"))
        yield folder
        shutil.rmtree(folder)


class TestDirectTmpfs(OnTmpfs):
    """tmpfs takes O_DIRECT at open and ignores it."""

    direct = True


class TestBufferedTmpfs(OnTmpfs):
    """Memory to memory."""

    direct = False


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_every_start_is_worked_once(workers: int) -> None:
    """Whoever works."""
    seen: list[int] = []
    run_parallel(range(0, 100, 7), seen.append, workers=workers)
    assert sorted(seen) == list(range(0, 100, 7))


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_first_failure_stops_the_hand_out_and_is_raised(workers: int) -> None:
    """When it is raised, no thread works any more."""
    begun: list[int] = []

    def work(start: int) -> None:
        begun.append(start)
        if start == 3:
            raise RuntimeError("chunk three")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="chunk three"):
        run_parallel(range(10_000), work, workers=workers)
    assert threading.active_count() == before
    assert len(begun) < 10_000
