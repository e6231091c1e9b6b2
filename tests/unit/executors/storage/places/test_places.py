"""A file system and an object store keep the same contract."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autockpt.executors.image.container import read_index
from autockpt.executors.keeper.saving.delta_bases import Base
from autockpt.executors.network.discovery import read_record
from autockpt.executors.restore.shard_sources import PatientSource, shards_on_disk
from autockpt.executors.storage.catalogue import list_generations, verify_generation
from autockpt.executors.storage.directory import claims
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places import choose, store
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.place import MAX_RECORD_BYTES, always
from autockpt.executors.storage.places.store import StorePlace, read_patiently
from autockpt.profiling.measure import store_probe
from autockpt.values.errors import ConfigError, GuardError, NoCheckpointError, StorageError
from autockpt.values.generation import Generation
from tests.contracts.place_contract import PlaceContract
from tests.contracts.remote_contract import image
from tests.support import azurite, google
from tests.unit.executors.checkpoints import commit_images
from tests.unit.executors.storage.remote.test_remote import azure, endpoint, googles, s3

__all__ = ["azure", "endpoint", "googles", "s3"]

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


@pytest.mark.slow
class TestAzure(PlaceContract):
    """Over HTTP, with the protocol of Azure's."""

    @pytest.fixture
    def path(self, azure: str, monkeypatch: pytest.MonkeyPatch) -> str:
        """A prefix each."""
        for name, value in azurite.account(azure).items():
            monkeypatch.setenv(name, value)
        return f"az://{azurite.CONTAINER}/places/{next(_places)}"


@pytest.mark.slow
class TestGoogle(PlaceContract):
    """Over HTTP, with the protocol of Google's."""

    @pytest.fixture
    def path(self, googles: str, monkeypatch: pytest.MonkeyPatch) -> str:
        """A prefix each."""
        for name, value in google.account(googles).items():
            monkeypatch.setenv(name, value)
        return f"gs://{google.BUCKET}/places/{next(_places)}"


@pytest.mark.parametrize("codec", ["none", "planes", "zstd"])
def test_shards_go_through_the_keepers_pipeline_into_a_store(tmp_path: Path, codec: str) -> None:
    """With several writers, encoded or as they are, and as a difference; every byte reads back."""
    directory = CheckpointDirectory(f"file://{tmp_path}/store/run")
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    first = commit_images(
        directory, run_id, Generation(term=1, step=1), [image(1), image(2)], codec=codec
    )
    base = None
    if codec == "planes":
        text = place_of(first).read(f"{first}/idx-00000-a1.json")
        base = Base(image(1), read_index(text, where="index"), bases=0)
    commit_images(directory, run_id, Generation(term=1, step=2), [image(3)], codec=codec, base=base)
    for generation in directory.catalogue(run_id):
        result = verify_generation(directory.path, generation.generation.name)
        assert result.ok, result.problems
    assert [r.state for r in list_generations(directory.path)] == ["committed", "committed"]
    shard = tmp_path / "store" / "run" / "ckpt-t0001-step-00000001" / "shard-00001-a1.safetensors"
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    assert verify_generation(directory.path, shard.parent.name).damaged


class Flaky(StorePlace):
    """A store whose COMMITs cannot be read `left` times."""

    left = 0

    def read(self, path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
        """503."""
        if path.endswith("COMMIT") and self.left:
            self.left -= 1
            raise OSError(5, "503 Service Unavailable")
        return super().read(path, limit=limit)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    """In the place of each store; no pause is long."""
    place = Flaky()
    monkeypatch.setattr(choose, "_STORE", place)
    monkeypatch.setattr(store, "PAUSES_S", (0.01,) * 4)
    return place


def test_a_store_that_cannot_be_read_for_a_moment_hides_no_checkpoint(
    tmp_path: Path, flaky: Flaky
) -> None:
    """It is asked again; then the start ends, and does not take an older one."""
    directory = CheckpointDirectory(f"file://{tmp_path}/store/run")
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    folder = commit_images(directory, run_id, Generation(term=1, step=1), [image(1)])
    flaky.left = 4
    assert [entry.step for entry in directory.catalogue(run_id)] == [1]
    flaky.left = 4
    sources = shards_on_disk(folder, 0, 1, patient=True)
    assert isinstance(sources.open(0), PatientSource)
    flaky.left = 1000
    with pytest.raises(StorageError, match="503"):
        directory.catalogue(run_id)
    with pytest.raises(OSError, match="503"):
        shards_on_disk(folder, 0, 1, patient=True)


def test_a_lost_run_record_is_found_again_in_the_commits(tmp_path: Path) -> None:
    """A rule of the bucket has deleted RUN and the claims: no second run, and no term twice."""
    url, kept = f"file://{tmp_path}/store/run", tmp_path / "store" / "run"
    directory = CheckpointDirectory(url)
    run_id = directory.open()
    for term in (1, 2):
        directory.claim(run_id, "launch", term, force=False)
        commit_images(directory, run_id, Generation(term=term, step=term), [image(term)])
    (kept / "RUN").unlink()
    assert directory.claim(run_id, "launch", 3, force=False) == 3
    assert (kept / "RUN").exists(), "a claim looks for it"
    for lost in ((kept / "RUN"), *(kept / "terms").iterdir()):
        lost.unlink()
    again = CheckpointDirectory(url)
    assert again.open() == run_id
    assert again.claim(run_id, "next", 0, force=False) == 3
    (kept / "RUN").unlink()
    commit = kept / "ckpt-t0002-step-00000002" / "COMMIT"
    commit.write_bytes(commit.read_bytes().replace(run_id.encode(), b"0" * 32))
    assert CheckpointDirectory(url).open() == run_id, "a damaged one says nothing"
    (kept / "RUN").unlink()
    (kept / "ckpt-t0001-step-00000001" / "COMMIT").unlink()
    with pytest.raises(NoCheckpointError, match=r"no RUN.*disk\.path"):
        CheckpointDirectory(url).open()


class Heedless(StorePlace):
    """A store that takes each put, whatever its condition."""

    def publish(
        self, path: str, text: bytes, *, replace: bool, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """It replaces."""
        return super().publish(path, text, replace=True)


def test_a_store_without_conditional_puts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts could hold one term there; nothing of the probe stays."""
    monkeypatch.setattr(choose, "_STORE", Heedless())
    url = f"file://{tmp_path}/store/run"
    with pytest.raises(ConfigError, match="If-None-Match"):
        CheckpointDirectory(url).open()
    assert place_of(url).names(url) == []


class Deaf(StorePlace):
    """A store whose answers of a commit, or whose heartbeats, are lost."""

    lost, beats = "", 0

    def publish(
        self, path: str, text: bytes, *, replace: bool, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """Takes the COMMIT, or not, and the answer is an error."""
        if not (self.lost and path.endswith("COMMIT")):
            return super().publish(path, text, replace=replace, is_wanted=is_wanted)
        if self.lost == "answer":
            super().publish(path, text, replace=replace)
        raise OSError(5, "connection reset")

    def read(self, path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
        """503."""
        if path.endswith("heartbeat") and self.lost:
            self.beats += 1
            raise OSError(5, "503 Service Unavailable")
        return super().read(path, limit=limit)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Deaf:
    """In the place of each store; no pause is long."""
    place = Deaf()
    monkeypatch.setattr(choose, "_STORE", place)
    monkeypatch.setattr(store, "PAUSES_S", (0.01,) * 4)
    return place


def test_a_commit_whose_answer_is_lost_is_one_and_never_trash(tmp_path: Path, deaf: Deaf) -> None:
    """It is read back; one that is not there may still come, so its shards stay."""
    directory = CheckpointDirectory(f"file://{tmp_path}/store/run")
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    deaf.lost = "answer"
    commit_images(directory, run_id, Generation(term=1, step=1), [image(1)])
    deaf.lost = "request"
    unclear = Generation(term=1, step=2)
    with pytest.raises(StorageError, match="connection reset"):
        commit_images(directory, run_id, unclear, [image(2)])
    with pytest.raises(GuardError, match="may still appear"):
        directory.trash(unclear)
    assert [entry.step for entry in directory.catalogue(run_id)] == [1]


def test_a_heartbeat_that_cannot_be_read_says_nothing(
    tmp_path: Path, deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder is neither dead nor alive."""
    directory = CheckpointDirectory(f"file://{tmp_path}/store/run")
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    directory.heartbeat(1)
    monkeypatch.setattr(claims, "boot_id", lambda: "another machine")
    monkeypatch.setattr(Deaf, "patience_s", 0.2)
    monkeypatch.setattr(Deaf, "heartbeat_s", 0.1)
    deaf.lost = "answer"
    with pytest.raises(StorageError, match="503"):
        directory.claim(run_id, "other", 0, force=False)
    assert deaf.beats > 1
    deaf.lost = ""
    assert directory.claim(run_id, "other", 0, force=False) == 2


def test_a_record_that_cannot_be_read_is_not_missing(tmp_path: Path, flaky: Flaky) -> None:
    """A round that is taken for the first would be given out again."""
    url = f"file://{tmp_path}/store/run"
    assert read_record(url, "COMMIT") is None
    flaky.left = 1
    with pytest.raises(StorageError, match="503"):
        read_record(url, "COMMIT")


def test_a_store_that_answers_nothing_for_long_is_asked_no_more(
    tmp_path: Path, flaky: Flaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request may take minutes then, and the protocol waits only so long for a rank."""
    monkeypatch.setattr(store, "PATIENCE_S", 0.0)
    path = f"file://{tmp_path}/store/COMMIT"
    flaky.write(path, b"here")
    flaky.left = 1
    with pytest.raises(OSError, match="503"):
        read_patiently(path, lambda: flaky.read(path))
    assert read_patiently(path, lambda: flaky.read(path)) == b"here"


def test_the_probe_of_a_store_measures_it_and_leaves_nothing(tmp_path: Path) -> None:
    """Latency and rates; objects of a profile that was killed go, those of others stay."""
    url = f"file://{tmp_path}/store/run"
    CheckpointDirectory(url).open()
    with subprocess.Popen(["true"]) as gone:
        pass
    dead = f"{url}/{store_probe.PREFIX}{gone.pid}-{store_probe.host_name()}-0"
    other = f"{url}/{store_probe.PREFIX}1-00000000-0"
    for path in (dead, other):
        place_of(url).write(path, b"x")
    image = memoryview(bytes(20 * 2**20))
    found = store_probe.measure(url, image, write_s=0.0, read_s=0.0)
    kinds = {(s.operation, s.direct) for s in found.samples}
    assert kinds == {("write", False), ("read", False)}
    assert all(s.bytes >= store_probe.PILOT_BYTES and s.seconds > 0 for s in found.samples)
    assert len(found.empty_write_s) == 3
    assert sorted(place_of(url).names(url)) == sorted(["RUN", os.path.basename(other)])


def test_a_directory_on_disk_loads_nothing_of_stores() -> None:
    """Each process of a job would pay for it, at each start."""
    code = "import sys, autockpt.executors.storage.directory.directory; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"ssl", "http.client", "urllib.request", "obstore"} & {*done.stdout.split()}
