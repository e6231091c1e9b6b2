"""A live run, a zygote for what needs a process of its own, and a small file system to fill."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.kill.zygote import Zygote
from tests.support.live import Live


@pytest.fixture
def live(
    new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, forked_keepers: None
) -> Iterator[Live]:
    """A run directory, and trainings in this process on it."""
    run = Live(new_run(), monkeypatch)
    yield run
    run.leave()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks trainers; one import of torch for all."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "autockpt-test", str(place)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
