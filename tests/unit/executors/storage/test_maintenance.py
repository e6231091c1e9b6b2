"""Looking deep, setting aside, cleaning up: nothing with a COMMIT is deleted, ever."""

import os
from pathlib import Path

import pytest

from autockpt.cli import app
from autockpt.executors.storage import maintenance
from autockpt.executors.storage.catalogue import verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.lease import Lease
from autockpt.executors.storage.places.unfinished_uploads import UnfinishedUpload
from autockpt.values.errors import CorruptCheckpointError
from autockpt.values.generation import Generation
from tests.campaigns.job import SHAPES, Job, Scene
from tests.contracts.remote_contract import image
from tests.unit.executors.checkpoints import commit_images

NEWEST = Generation(term=1, step=3)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three generations, foreign files among them."""
    job = Scene(tmp_path, SHAPES[1]).fresh()
    job.directory.release(1)
    return job


def make_foreign(directory: Path) -> dict[Path, bytes]:
    """Files of a person under folders and endings that we use too."""
    names = (
        "trash/mine/weights.bin", "trash/thesis.tex", "trash/run-01234567/log",
        "spare/thesis.txt", "spare/r00000-notes", "spare/taken-photos.zip",
        "download.tmp", "model.tmp/weights", "terms/list.tmp", "decisions/t-000001.abc.tmp",
        "RUN.old.tmp",
    )  # fmt: skip
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(name.encode())
    return {directory / name: name.encode() for name in names}


def test_a_start_and_an_end_of_a_keeper_leave_foreign_files(job: Job) -> None:
    """It empties trash and spare files of ours alone."""
    foreign = make_foreign(Path(job.path))
    ours = (
        Path(job.path, "trash", f"{NEWEST.name}-01234567", "shard"),
        Path(job.path, "spare", "r00000-0123456789ab"),
        Path(job.path, "spare", "taken-0123456789ab"),
    )
    for path in ours:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    job.directory.empty_trash()
    assert {path: path.read_bytes() for path in foreign} == foreign
    assert not any(path.exists() for path in ours)
    assert job.directory.spares.take(0) is None


def results(job: Job) -> list[object]:
    return [verify_generation(job.path, f"ckpt-t0001-step-0000000{step}") for step in (1, 2, 3)]


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newest(job: Job) -> Path:
    return Path(job.directory.generation_path(NEWEST))


def test_a_damaged_generation_is_set_aside_with_its_reason(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `verify --quarantine`; a restart finds the one before it, and every file is kept."""
    flip(newest(job) / "shard-00000-a1.safetensors")
    files = {path.name: path.read_bytes() for path in newest(job).iterdir()}
    assert app.run(["verify", job.path, "--quarantine"]) == CorruptCheckpointError.exit_code
    assert f"{NEWEST.name}: set aside as quarantine/{NEWEST.name}-" in capsys.readouterr().out
    (aside,) = (p for p in Path(job.path, "quarantine").iterdir() if p.is_dir())
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == files
    assert "rank 0" in aside.with_name(aside.name + ".why").read_text()
    assert job.restore() == Generation(term=1, step=2)
    assert app.run(["verify", job.path, "--with-records"]) == 0


def test_what_reads_back_whole_is_no_longer_called_corrupt(job: Job) -> None:
    """A storage that was ill for a while must not condemn it for ever."""
    job.directory.mark(NEWEST, "CORRUPT")
    assert job.restore() == Generation(term=1, step=2)
    assert any("reads back whole" in one for one in maintenance.repair(job.path, results(job)))
    assert job.restore() == NEWEST


def test_a_damaged_run_file_is_rebuilt_from_the_commits(job: Job) -> None:
    """They all name the run."""
    Path(job.path, "RUN").write_bytes(b"\0" * 90)
    assert "RUN" in maintenance.damaged_records(job.path)[0].path
    assert "RUN: rebuilt from the COMMITs" in maintenance.repair(job.path, results(job))
    assert CheckpointDirectory(job.path).open() == job.run_id


def test_a_run_file_that_nobody_can_vouch_for_stays_away(job: Job) -> None:
    """Two runs in one directory: not guessed."""
    other = Scene(Path(job.path).parent, SHAPES[0]).fresh()
    os.rename(other.directory.generation_path(NEWEST), f"{job.path}/ckpt-t0009-step-00000001")
    Path(job.path, "RUN").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="name 2 runs; it cannot be rebuilt"):
        maintenance.repair(job.path, [])


def test_damaged_claims_are_told_and_keep_their_number(job: Job) -> None:
    """A number that was given out twice would make two owners of one term."""
    flip(Path(job.path, "terms", "t-000001"))
    Path(job.path, "terms", "t-000001").write_bytes(b"?")
    assert len(maintenance.damaged_records(job.path)) == 1
    assert maintenance.repair(job.path, []) == []
    after = CheckpointDirectory(job.path)
    assert after.claim(after.open(), "another", 0, force=True) == 2


def test_a_damaged_decision_is_set_aside(job: Job) -> None:
    """A flipped bit would name another parent: its digest tells."""
    flip(Path(job.path, "decisions", "t-000001"))
    assert job.directory.parents() == ()
    (done,) = maintenance.repair(job.path, [])
    assert done.startswith("decisions/t-000001: set aside as quarantine/decisions-t-000001-")


def test_deep_looks_at_the_records_too(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints alone are whole; a claim and a decision are not, and each is named."""
    Path(job.path, "terms", "t-000001").write_bytes(b"?")
    flip(Path(job.path, "decisions", "t-000001"))
    assert app.run(["verify", job.path, "--all"]) == 0
    assert "DAMAGED" not in capsys.readouterr().out
    assert app.run(["verify", job.path, "--with-records"]) == CorruptCheckpointError.exit_code
    told = capsys.readouterr()
    named = [line for line in told.out.splitlines() if line.startswith("DAMAGED")]
    assert ["terms" in named[0], "decisions" in named[1]] == [True, True], named
    assert "0 of 3 checkpoints and 2 records damaged" in told.err


def test_gc_removes_leftovers_and_nothing_else(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unfinished, temporary, trash and spare; not what somebody else put there."""
    unfinished = Path(job.directory.create_generation(Generation(term=1, step=9)))
    (unfinished / "shard-00000-a1.safetensors").write_bytes(b"torn")
    mixed = Path(job.directory.create_generation(Generation(term=1, step=8)))
    (mixed / "idx-00000-a1.json").write_bytes(b"torn")
    (mixed / "mine").write_bytes(b"mine")
    (Path(job.path) / "terms" / "t-000002.0123456789ab.tmp").write_bytes(b"")
    (Path(job.path) / "trash").mkdir(exist_ok=True)
    (Path(job.path) / "trash" / f"{Generation(term=1, step=4).name}-01234567").mkdir()
    foreign = make_foreign(Path(job.path))
    before = [path.read_bytes() for path in sorted(newest(job).iterdir())]
    assert app.run(["gc", job.path, "--dry-run"]) == 0
    assert (unfinished / "shard-00000-a1.safetensors").exists()
    assert app.run(["gc", job.path]) == 0
    out = capsys.readouterr().out
    for kind in ("unfinished", "temporary", "trash", "spare"):
        assert kind in out
    assert not unfinished.exists()
    assert [path.name for path in mixed.iterdir()] == ["mine"]
    assert [path.read_bytes() for path in sorted(newest(job).iterdir())] == before
    assert maintenance.leftovers(job.path) == []
    assert (Path(job.path) / "notes.txt").exists()
    assert {path: path.read_bytes() for path in foreign} == foreign
    assert job.restore() == NEWEST


def test_gc_cleans_an_object_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of dead starts go; a start that begins just now keeps its own, and so does a pin."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # else keepers of this machine's past, too
    directory = CheckpointDirectory(f"file://{tmp_path}/store/run")
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    directory.release(1)
    whole = commit_images(directory, run_id, NEWEST, [image(1)])
    folder = tmp_path / "store" / "run"
    for generation, files in {
        Generation(term=1, step=9): ["shard-00000-a1.safetensors", "mine"],
        Generation(term=1, step=8): ["shard-00000-a1.safetensors", "PINNED"],
        Generation(term=2, step=1): ["shard-00000-a1.safetensors"],
    }.items():
        (folder / generation.name).mkdir()
        for name in files:
            (folder / generation.name / name).write_bytes(b"torn")
    (folder / "probe.0123456789ab.tmp").write_bytes(b"first")
    assert app.run(["gc", directory.path, "--dry-run"]) == 0
    assert app.run(["gc", directory.path]) == 0
    said = capsys.readouterr().out.splitlines()
    dead = Generation(term=1, step=9).name
    assert said[:2] == said[2:] == [
        f"temporary         5 B  {directory.path}/probe.0123456789ab.tmp",
        f"unfinished        4 B  {directory.path}/{dead}/shard-00000-a1.safetensors",
    ]  # fmt: skip
    assert [path.name for path in (folder / dead).iterdir()] == ["mine"]
    left = maintenance.leftovers(directory.path)
    assert [Path(one.path).parent.name for one in left] == [Generation(term=2, step=1).name]
    assert verify_generation(directory.path, Path(whole).name).ok
    assert app.run(["pin", directory.path, "best"]) == 0
    assert directory.pins()["best"] == NEWEST
    assert app.run(["verify", directory.path, "--with-records"]) == 0
    flip(folder / "terms" / "t-000001")
    assert app.run(["verify", directory.path, "--with-records"]) == 65
    assert f"{directory.path}/terms/t-000001" in capsys.readouterr().out


def test_gc_leaves_the_copy_alone_that_may_be_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with `remote.url` leaves no heartbeat there: only what is older than a COMMIT goes."""
    monkeypatch.setattr(Lease, "require_unheld", lambda self: None)
    directory = CheckpointDirectory(f"file://{tmp_path}/store/run")
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    commit_images(directory, run_id, Generation(term=1, step=5), [image(1)])
    folder = tmp_path / "store" / "run"
    shards = []
    for step in (4, 9):
        shards.append(folder / Generation(term=1, step=step).name / "shard-00000-a1.safetensors")
        shards[-1].parent.mkdir()
        shards[-1].write_bytes(b"torn")
    uploads = [
        UnfinishedUpload(
            bucket="b", key=f"run/{shard.parent.name}/{shard.name}", upload_id="1", term=1
        )
        for shard in shards
    ]
    ended: list[UnfinishedUpload] = []
    monkeypatch.setattr(maintenance, "unfinished_uploads", lambda url: uploads)
    monkeypatch.setattr(maintenance, "end_upload", lambda upload: not ended.append(upload))
    assert app.run(["gc", directory.path]) == 0
    assert [shard.exists() for shard in shards] == [False, True]
    assert ended == uploads[:1]


def test_a_directory_that_a_live_run_holds_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither cleaned nor repaired: exit code 73, and the holder is named."""
    job = Scene(tmp_path, SHAPES[0]).fresh()
    holder = os.getppid()
    job.directory.claim(job.run_id, "launch", 1, force=True)
    path = Path(job.path, "terms", "t-000002")
    start = upkeep_pid_start(holder)
    text = path.read_text().replace(f'"pid":{os.getpid()}', f'"pid":{holder}')
    path.write_text(
        text.replace(f'"pid_start":{upkeep_pid_start(os.getpid())}', f'"pid_start":{start}')
    )
    for command in (["gc", job.path], ["verify", job.path, "--quarantine"]):
        assert app.run(command) == 73
        assert f"keeper pid {holder}" in capsys.readouterr().err
    assert Path(job.path, "spare").exists()


def upkeep_pid_start(pid: int) -> int | None:
    from autockpt.executors.storage.directory.claims import pid_start

    return pid_start(pid)


def test_only_folders_of_keepers_whose_lock_is_free_are_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held lock, or a young folder, is a keeper's."""
    import fcntl

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    parent = tmp_path / f"autockpt-{os.getuid()}"
    parent.mkdir(0o700)
    for name in ("dead", "live", "young"):
        (parent / name).mkdir()
        (parent / name / "keeper.lock").write_text("1\n")
    for name in ("dead", "live"):
        os.utime(parent / name, (1, 1))
    with (parent / "live" / "keeper.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = maintenance.dead_keepers()
        assert [Path(one.path).name for one in found] == ["dead"]
        maintenance.remove(found[0])
        maintenance.remove(maintenance.Leftover(path=str(parent / "live"), kind="keeper", bytes=0))
    assert sorted(os.listdir(parent)) == ["live", "young"]
    os.utime(parent / "live", (1, 1))
    parent.chmod(0o777)  # as a stranger's: what stands there is none of our keepers
    assert maintenance.dead_keepers() == []
