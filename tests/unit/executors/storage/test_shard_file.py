"""`persist` keeps the mover contract on disk and in memory, direct and buffered."""

import fcntl
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autockpt import new_files
from autockpt.executors.linux import direct_io
from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.shard_file import ImageFile, ImageReader, run_parallel
from autockpt.values.errors import GuardError, StorageError
from tests.contracts.store_contract import CHUNK, StoreContract


class TestDirectDisk(StoreContract):
    """The default: O_DIRECT on a disk."""

    direct = True


class TestBufferedDisk(StoreContract):
    """Through the page cache."""

    direct = False


class TestStatedAlignment(StoreContract):
    """On a file system that states what its direct I/O must be aligned to, or that it has none."""

    direct = True

    @pytest.fixture(autouse=True, params=[512, 4096, 65536, 0])
    def stated(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever it states."""
        state(monkeypatch, (request.param, request.param))


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


def state(
    patch: pytest.MonkeyPatch, alignment: tuple[int, int] | None, asked: list[int] | None = None
) -> None:
    """The file system's answer from now on; `asked` notes for which descriptors."""

    def answer(descriptor: int) -> tuple[int, int] | None:
        if asked is not None:
            asked.append(descriptor)
        return alignment

    patch.setattr(direct_io, "stated_alignment", answer)


@pytest.mark.parametrize(
    ("alignment", "objection"),
    [
        (None, ""), ((512, 512), ""), ((4, 512), ""), ((4096, 4096), ""),
        ((65536, 65536), "an alignment of 65536 B for memory and 65536 B for offsets"),
        ((512, 8192), "an alignment of 512 B for memory and 8192 B for offsets"),
        ((3072, 512), "an alignment of 3072 B for memory"),
        ((0, 0), "takes no direct I/O"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reused", [False, True])
def test_io_is_direct_where_the_stated_alignment_divides_that_of_images(
    alignment: tuple[int, int] | None,
    objection: str,
    reused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where nothing is stated; the file system is asked once per open file, and the reason to
    go through the page cache is kept."""
    spare = tmp_path / "spare"
    spare.write_bytes(bytes(CHUNK))
    with ImageReader(str(spare), direct=True) as reader:
        if not is_direct(reader._fd):
            pytest.skip("no direct I/O here")
    asked: list[int] = []
    state(monkeypatch, alignment, asked)
    flags: list[bool] = []
    for name in ("pwrite", "preadv"):
        monkeypatch.setattr(os, name, noting(getattr(os, name), flags))
    image = Arena.anonymous(2 * CHUNK).view
    path, reuse = str(tmp_path / "shard"), str(spare) if reused else None
    file = ImageFile(path, allocate_bytes=len(image), direct=True, reuse=reuse)
    assert file.direct is (objection == "")
    assert objection in file.objection
    assert bool(file.objection) is bool(objection)
    file.write_at(CHUNK, image[CHUNK:])
    file.write_at(0, image[:CHUNK])
    file.finish(len(image))
    told, wrote = len(asked), len(flags)
    with ImageReader(path, direct=True) as reader:
        reader.read_at(0, image)
    assert set(flags) == {objection == ""}
    assert len(flags) > wrote
    assert told == (1 if objection == "" else 2)  # once more for the reason
    assert len(asked) == told + 1


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize("code", ["EOPNOTSUPP", "ENOSYS"])
@pytest.mark.parametrize("reused", [False, True])
def test_a_file_system_that_reserves_nothing_is_not_written_instead(
    reused: bool, code: str, tmp_path: Path
) -> None:
    """No byte of every block, one after another, and no error about a spare file."""
    spare = tmp_path / "spare"
    spare.write_bytes(bytes(CHUNK))
    log, path = tmp_path / "log", tmp_path / "shard"
    subprocess.run(
        [
            "strace", "-f", "-qq", "-o", str(log), "-e", "trace=fallocate,pwrite64",
            "-e", f"inject=fallocate:error={code}", sys.executable, "-c", RESERVE, str(path),
            str(spare) if reused else "",
        ],
        check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    said = log.read_text()
    assert f"-1 {code}" in said
    assert said.count("pwrite64(") == (2 if reused else 1)  # the chunk; the header of the spare
    assert path.read_bytes() == bytes(CHUNK)


RESERVE = """
import sys
from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.shard_file import ImageFile

path, spare = sys.argv[1:]
chunk = Arena.anonymous(2**16).view
file = ImageFile(path, allocate_bytes=len(chunk), direct=False, reuse=spare or None)
file.write_at(0, chunk)
file.finish(len(chunk))
"""


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def noting(real: Any, flags: list[bool]) -> Any:
    """A call that notes whether it was direct."""

    def call(fd: int, *rest: Any) -> Any:
        flags.append(is_direct(fd))
        return real(fd, *rest)

    return call


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


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    """`ulimit -f` holds for files and for shared memory; both errors say what to raise."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, before[1]))
    try:
        with pytest.raises(StorageError, match=r"`ulimit -f` allows .*`ulimit -f unlimited`"):
            ImageFile(str(tmp_path / "shard"), allocate_bytes=4 * CHUNK, direct=False)
        with pytest.raises(GuardError, match=r"slot: needs .*`ulimit -f unlimited`"):
            Arena.create_shared(4 * CHUNK, name="slot")
        new_files.raise_size_limit()
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == (before[1], before[1])
        Arena.create_shared(4 * CHUNK, name="slot").close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
