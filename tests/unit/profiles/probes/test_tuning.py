"""The measured side of `autockpt tune`: real writes by a keeper's pipeline, nothing left over."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage import shard_file
from autockpt.profiles.probes import clean
from autockpt.profiling import tuning
from autockpt.profiling.measure import sample_data as contents
from autockpt.profiling.measure import timed_write
from autockpt.profiling.measure.sample_data import Content, content
from autockpt.profiling.measure.timed_write import Write, measure, target_directory
from autockpt.tuner.search.outcome import outcome_of, replay
from autockpt.tuner.search.record import Trial, parse
from autockpt.tuner.search.space import MIB, Candidate
from autockpt.values.errors import GuardError, StorageError
from autockpt.values.profile import StateClass, StateInventory
from tests.support.profiles import example_state
from tests.unit.integrations.trained import saved, trained_job
from tests.unit.tuner.search.machines import model, record_of, search_for

DIRECT = Candidate(chunk_bytes=MIB, writers=2, direct_io=True, codec="none")
BUFFERED = Candidate(chunk_bytes=MIB, writers=1, direct_io=False, codec="none")
CODED = Candidate(chunk_bytes=MIB, writers=2, direct_io=True, codec="zstd")


@pytest.fixture(scope="module")
def image() -> Content:
    """Four mebibytes like a small state's."""
    return content(Path("no such directory"), example_state(4 * MIB), nbytes=4 * MIB)


@pytest.mark.parametrize("way", [DIRECT, BUFFERED, CODED], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_write_is_timed_and_leaves_nothing(
    tmp_path: Path, image: Content, way: Candidate, ranks: int
) -> None:
    """Every rank's bytes are stored, fewer with a codec; the directory is empty afterwards."""
    written = measure(str(tmp_path), image.images(ranks, 2 * MIB), way)
    assert written.seconds > 0
    assert written.cpu_s >= 0
    if way.codec == "none":
        assert written.stored_bytes == ranks * 2 * MIB
    else:
        assert 0 < written.stored_bytes < ranks * 2 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_says_why_and_leaves_nothing(
    tmp_path: Path, image: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of two meets a full disk."""
    real, calls = shard_file.fallocate, []

    def full(fd: int, offset: int, length: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(shard_file, "fallocate", full)
    with pytest.raises(StorageError, match=r"2 writers x 1 MiB direct none: .*No space left"):
        measure(str(tmp_path), image.images(2, 2 * MIB), DIRECT)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_hangs_ends_the_write_and_not_the_patience(
    tmp_path: Path, image: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fsync that never returns is an error after the longest time, with no name left behind."""
    released = threading.Event()
    monkeypatch.setattr(timed_write, "LONGEST_WRITE_S", 1.5)
    monkeypatch.setattr(os, "fsync", lambda fd: released.wait(20) and None)
    try:
        with pytest.raises(StorageError, match=r"was not durable after 1\.5 s; the storage hangs"):
            measure(str(tmp_path), image.images(1, 2 * MIB), DIRECT)
        assert list(tmp_path.iterdir()) == []
    finally:
        released.set()


def test_a_missing_directory_is_made_and_taken_away(tmp_path: Path) -> None:
    """As a run would make it; what a killed search left is swept, what others put there stays."""
    deep = tmp_path / "a" / "b"
    with target_directory(deep) as directory:
        assert Path(directory).is_dir()
    assert not (tmp_path / "a").exists()
    (tmp_path / "kept").touch()
    left = tmp_path / f"{clean.PREFIX}{2**22 + 1}-{clean._host()}-0"
    left.touch()
    with target_directory(tmp_path):
        assert not left.exists()
    assert (tmp_path / "kept").exists()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """The message names the key that says where."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match=r"cannot be made.*disk\.path"),
        target_directory(tmp_path / "file" / "x"),
    ):
        pass


KILLED = """
import sys
from pathlib import Path
from autockpt.profiling.measure.sample_data import content
from autockpt.profiling.measure.timed_write import measure
from autockpt.tuner.search.space import MIB, Candidate
from tests.support.profiles import example_state
image = content("none", example_state(8 * MIB), nbytes=8 * MIB).images(1, 8 * MIB)
print("writing", flush=True)
while True:
    measure(sys.argv[1], image, Candidate(chunk_bytes=MIB, writers=2, direct_io=True, codec="zstd"))
"""


@pytest.mark.slow
def test_a_killed_search_leaves_at_most_a_name_that_the_next_sweeps(tmp_path: Path) -> None:
    """Files lose their names while they are written; SIGKILL between cannot hide one for good."""
    for delay_s in (0.05, 0.11, 0.23):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
            stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[4],
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        child.stdout.close()
        assert len(list(tmp_path.iterdir())) <= 1
    with target_directory(tmp_path):
        assert list(tmp_path.iterdir()) == []


# --- what is written


def test_bytes_of_a_checkpoint_are_taken_where_there_is_one(tmp_path: Path) -> None:
    """The newest readable one; a damaged newer one is passed over."""
    saved(tmp_path, trained_job())
    found = content(str(tmp_path), example_state(), nbytes=8 * 4096)
    assert "checkpoint ckpt-t" in found.source
    assert bytes(found.arena.view[:64]).strip(b"\0")
    for commit in tmp_path.glob("ckpt-*/shard-*"):
        commit.write_bytes(b"torn")
    assert "synthetic" in content(str(tmp_path), example_state(), nbytes=8 * 4096).source


def test_synthetic_bytes_shrink_as_little_as_weights() -> None:
    """Zeros would make every codec look good; half precision is made of halves."""
    from autockpt.executors.image.codecs import codec

    half = StateInventory(
        total_bytes=4 * MIB, layout_digest="", lazy_bytes=4 * MIB, boundary_bytes=0,
        classes=(StateClass(name="parameters", tensors=1, bytes=4 * MIB,
                            dtypes={"bfloat16": 4 * MIB}),),
    )  # fmt: skip
    for state in (example_state(4 * MIB), half):
        view = content("none", state, nbytes=4 * MIB).arena.view
        ratio = len(view) / len(codec("zstd").encode(view))
        assert 1.02 < ratio < 1.6
        assert not any(bytes(view[i : i + 64]) == bytes(64) for i in range(0, len(view), MIB))


def test_ranks_share_bytes_where_there_are_not_enough(image: Content) -> None:
    """Images are whole and aligned, however many."""
    images = image.images(5, MIB)
    assert [len(one) for one in images] == [MIB] * 5
    assert bytes(images[4][:32]) == bytes(images[0][:32])


def test_too_little_memory_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation beyond a cgroup's limit would be a kill and no error."""

    def refuse(nbytes: int, *, what: str) -> None:
        raise GuardError(f"{what}: needs {nbytes}")

    monkeypatch.setattr(contents, "require_headroom", refuse)
    with pytest.raises(GuardError, match="tune: a sample of the state: needs"):
        content("none", example_state(), nbytes=MIB)


def test_codecs_are_measured_only_where_the_profile_has_none() -> None:
    """All classes get what the mixture of their bytes gave."""
    profile = model().space.profile
    filled = Content(arena=Arena.anonymous(4 * MIB), source="zeros")
    assert tuning.with_codecs(profile, filled) is profile
    bare = model(profile=tuning.replace(profile, codecs=())).space.profile
    found = tuning.with_codecs(bare, filled)
    assert {m.tensor_class for m in found.codecs} == {"parameters", "moments", "other"}
    assert all(m.ratio > 100 for m in found.codecs)


# --- how long it takes


class Clock:
    """Seconds that writes take on a machine with `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now_s, self.bytes_per_s, self.writes = 0.0, bytes_per_s, 0

    def measure(self, candidate: Candidate, nbytes: int) -> Write:
        self.writes += 1
        seconds = nbytes / self.bytes_per_s
        self.now_s += seconds
        return Write(seconds=seconds, cpu_s=0.0, stored_bytes=nbytes)


@pytest.mark.parametrize("bytes_per_s", [1e6, 2e7, 1e9, 1e11])
@pytest.mark.parametrize("limit_s", [5.0, 60.0])
def test_a_search_keeps_its_time_on_any_storage(bytes_per_s: float, limit_s: float) -> None:
    """Samples shrink first, then the search ends early: two writes and a round late at most."""
    clock = Clock(bytes_per_s)
    found = model()
    default = found.space.default
    size = tuning.fit_sample(clock.measure, default, 128 * MIB, budget=25, limit_s=limit_s)
    began_s, out, told = clock.now_s, io.StringIO(), list[Trial]()
    search = search_for(found)
    header = record_of(search).header
    header = tuning.replace(header, sample_bytes=size)
    tuning.carry_out(
        search, header, clock.measure, out,
        limit_s=limit_s, told=told.append, now_s=lambda: clock.now_s,
    )  # fmt: skip
    late_s = max(0.0, clock.now_s - began_s - limit_s)
    assert late_s <= 5 * size / bytes_per_s
    assert told == search.trials
    record = parse(out.getvalue().splitlines(keepends=True), where="trials.jsonl")
    assert record.trials == tuple(search.trials)


def test_a_sample_is_no_larger_than_the_state_and_the_space(tmp_path: Path) -> None:
    """A quarter of what is free at most, and 128 MiB."""
    assert tuning.largest_sample(str(tmp_path), 5 * MIB, 1) == 5 * MIB
    assert tuning.largest_sample(str(tmp_path), 10**12, 1) == 128 * MIB
    assert tuning.largest_sample(str(tmp_path), 10**12, 10**4) < 128 * MIB


def test_a_directory_that_takes_no_write_ends_the_search_at_once() -> None:
    """Before anything is asked."""

    def dead(candidate: Candidate, nbytes: int) -> Write:
        raise OSError(5, "Input/output error")

    with pytest.raises(StorageError, match=r"the first write failed: .*Input/output error"):
        tuning.fit_sample(dead, DIRECT, MIB, budget=25, limit_s=60.0)


def test_a_live_search_and_its_file_agree(tmp_path: Path, image: Content) -> None:
    """Real writes of 2 MiB; the replay of the file says what the search said."""
    found = model()
    search, out = search_for(found, budget=10), io.StringIO()
    tuning.carry_out(
        search, record_of(search).header,
        lambda way, nbytes: measure(str(tmp_path), image.images(1, 2 * MIB), way), out,
        limit_s=60.0, told=lambda trial: None,
    )  # fmt: skip
    record = parse(out.getvalue().splitlines(keepends=True), where="trials.jsonl")
    assert replay(record, where="trials.jsonl") == outcome_of(search)
