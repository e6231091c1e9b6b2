"""`autockpt run` with an object store: a lost disk, a store that fails, two directories."""

import json
import shutil
from pathlib import Path

import pytest

from autockpt.cli.checkpoints import remote
from autockpt.console import Console
from autockpt.executors.storage.places import object_store as objects_module
from autockpt.executors.storage.remote import Objects, RemoteCopies
from autockpt.executors.throttle.rate_limit import RateLimiter
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError, ConfigError, CorruptCheckpointError, GuardError
from autockpt.values.goal import RemoteWish
from tests.contracts.remote_contract import Trained, g
from tests.unit.cli.scripts import ECHO, ROOT, autockpt, write

SCRIPT = str(ROOT / "examples" / "gpt" / "train.py")
JOB = ("--size", "tiny", "--log-every", "1000", "--horizon", "100", "--digest")


def run(folder: Path, name: str, url: str, steps: int) -> tuple[int, str]:
    """(exit code, what it said)."""
    done = autockpt(
        "run", "--no-profile", "--run-dir", name, "--set", f"remote.url={url}", "--set",
        "disk.interval=10 steps", SCRIPT, *JOB, "--steps", str(steps), cwd=folder,
    )  # fmt: skip
    return done.returncode, done.stderr + done.stdout


def digest(told: str) -> str:
    """Of the state at the end, as the script says it."""
    return next(line for line in told.splitlines() if "digest" in line)


@pytest.mark.slow
def test_a_run_whose_disk_is_lost_goes_on_from_its_copies(tmp_path: Path) -> None:
    """In a new directory it resumes where the lost one ended, to the same end; the old directory,
    found again, takes what the new one has copied."""
    store = tmp_path / "store"
    code, told = run(tmp_path, "first", store.as_uri(), 20)
    assert code == 0, told
    assert "newest checkpoint in the object store: ckpt-t0001-step-00000020" in told
    status = RunDirectory(tmp_path / "first").read_status()
    assert status is not None
    name = status.last_remote  # the last save is made again where a busy machine dropped it
    assert name in ("ckpt-t0001-step-00000020", "ckpt-t0001-step-00000020.1")
    assert status.degraded == ()
    shutil.move(tmp_path / "first", tmp_path / "lost")
    code, told = run(tmp_path, "second", store.as_uri(), 40)
    assert code == 0, told
    assert f"{name} (step 20) is back from" in told
    assert "resumed step 20 from disk" in told
    undisturbed = autockpt(
        "run", "--no-profile", "--run-dir", "whole", SCRIPT, *JOB, "--steps", "40", cwd=tmp_path
    )
    assert digest(told) == digest(undisturbed.stdout)
    code, told = run(tmp_path, "lost", store.as_uri(), 60)
    assert code == 0, told
    assert "resumed step 40 from disk" in told


def test_a_store_that_fails_ends_no_training_and_is_said(tmp_path: Path) -> None:
    """A file stands where its directory should be."""
    store = tmp_path / "store"
    (store / "terms").parent.mkdir()
    (store / "terms").write_text("in the way")
    code, told = run(tmp_path, "r", store.as_uri(), 20)
    assert code == 0, told
    assert "object store degraded" in told
    assert "the copier ended with exit code 74" in told


def test_a_store_that_cannot_be_asked_begins_nothing_anew_by_itself(tmp_path: Path) -> None:
    """Something may have been committed; `--fresh` says that it is not wanted."""
    store = tmp_path / "store"
    store.write_text("no directory")
    code, told = run(tmp_path, "r", store.as_uri(), 20)
    assert code in (74, 78), told
    assert not (tmp_path / "r" / "checkpoints").exists()


def test_copies_are_listed_and_brought_back_by_hand(tmp_path: Path) -> None:
    """`ls` of the store, `pull` into a run that goes on."""
    store = tmp_path / "store"
    code, told = run(tmp_path, "r", store.as_uri(), 20)
    assert code == 0, told
    listed = json.loads(autockpt("ls", store.as_uri(), "--json", cwd=tmp_path).stdout)
    assert [one["step"] for one in listed["generations"] if one["offered"]][-1] == 20
    done = autockpt("pull", store.as_uri(), "again", cwd=tmp_path)
    assert (done.returncode, "verified" in done.stdout) == (0, True), done.stderr
    resumed = autockpt(
        "run", "--no-profile", "--run-dir", "again", SCRIPT, *JOB, "--steps", "22", cwd=tmp_path
    )
    assert "resumed step 20 from disk" in resumed.stderr
    nothing = autockpt("pull", (tmp_path / "empty").as_uri(), "other", cwd=tmp_path)
    assert (nothing.returncode, "holds no good checkpoint" in nothing.stderr) == (66, True)


@pytest.mark.parametrize("trained", [True, False])
def test_under_a_launcher_of_ones_own_a_store_that_fails_ends_only_a_first_start(
    tmp_path: Path, trained: bool
) -> None:
    """What stands in the directory is enough to begin from."""
    if trained:
        run = Trained(tmp_path / "r" / "checkpoints")
        run.save(20)
        run.directory.release(run.term)
    script = write(tmp_path, "t.py", ECHO)
    begun = autockpt(
        "run", "--no-profile", "--run-dir", "r", "--set", "remote.url=s3://bucket/r", str(script),
        cwd=tmp_path, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
        GROUP_RANK="0", TORCHELASTIC_RUN_ID="one", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        AWS_ACCESS_KEY_ID="nobody", AWS_SECRET_ACCESS_KEY="nothing", AWS_REGION="nowhere",
        AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_ALLOW_HTTP="true",
    )  # fmt: skip
    assert begun.returncode == (0 if trained else 74), begun.stderr
    assert ("argv" in begun.stdout) == trained
    told = "going on from" if trained else "--fresh begins anew without it"
    assert told in begun.stderr
    assert "cannot read" in begun.stderr


@pytest.mark.parametrize(
    ("url", "told"),
    [("bucket/run", "s3://bucket/run-7"), ("s3://key:word@bucket/r", "stand in the environment")],
)
def test_a_url_that_cannot_be_meant_is_refused_by_the_policy(
    tmp_path: Path, url: str, told: str
) -> None:
    """Before anything is written."""
    code, said = run(tmp_path, "r", url, 20)
    assert code == 78
    assert told in said
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        ("byte", CorruptCheckpointError, "rank 0"),
        ("CORRUPT", GuardError, "marked CORRUPT"),
        ("SUSPECT", GuardError, "suspect"),
        ("QUARANTINE", GuardError, "a person set it aside"),
    ],
)
def test_a_named_checkpoint_that_is_not_good_is_not_copied(
    tmp_path: Path, damage: str, error: type[AutockptError], told: str
) -> None:
    """With one that is kept, it would take the place of the last good copy."""
    run, url = Trained(tmp_path / "run"), (tmp_path / "store").as_uri()
    wish = RemoteWish(url=url, keep_last=1)

    def push(step: int) -> None:
        source = str(run.folder(run.save(step)))
        if step == 2 and damage == "byte":
            shard = run.folder(g(2)) / "shard-00000-a1.safetensors"
            rotten = bytearray(shard.read_bytes())
            rotten[-1] ^= 1
            shard.write_bytes(rotten)
        elif step == 2:
            (run.folder(g(2)) / damage).touch()
        remote.push(Console(json=False), remote.Request(source=source, wish=wish, follow=False))

    push(1)
    with pytest.raises(error, match=f"is not copied: .*{told}"):
        push(2)
    copies = RemoteCopies(Objects(url))
    assert [commit.generation for commit in copies.commits()] == [g(1)]
    push(3)
    assert [commit.generation for commit in copies.commits()] == [g(3)]


def test_a_low_rate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that take 16 s each at that rate; by a clock that only the waits move."""
    monkeypatch.setattr(objects_module, "PART_BYTES", 2**14)
    run, now_s = Trained(tmp_path / "run"), [0.0]
    run.save(1)
    sent = sum(len(data) for name, data in run.files(g(1)).items() if name != "COMMIT")
    wish = RemoteWish(url=(tmp_path / "store").as_uri(), keep_last=1, rate_bytes_per_s=2.0**10)
    copier = remote._Copier(
        Console(json=False), remote.Request(source=str(run.path), wish=wish, follow=False)
    )
    gate = copier._gate
    assert isinstance(gate, RateLimiter)

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    gate._now_s, gate._sleep, gate._paid_at_s = lambda: now_s[0], sleep, 0.0
    copier.look(last=True)
    assert sent > 4 * 2**14
    assert (sent - 2**14) / now_s[0] <= 2.0**10


def test_a_copy_is_shown_and_verified_where_it_is(tmp_path: Path) -> None:
    """By its URL; a flipped bit is found there, and nothing is written."""
    run = Trained(tmp_path / "run")
    run.save(1)
    generation = run.save(2)
    url = (tmp_path / "store").as_uri()
    for each in (g(1), generation):
        RemoteCopies(Objects(url)).push(run.directory, each)
    done = autockpt("verify", url, "--all", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [each["ok"] for each in json.loads(done.stdout)["results"]] == [True, True]
    for named in ((url, g(1).name), (f"{url}/{g(1).name}",)):
        done = autockpt("verify", *named, "--json", cwd=tmp_path)
        assert json.loads(done.stdout)["results"][0]["name"] == g(1).name
    shard = tmp_path / "store" / generation.name / "shard-00000-a1.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = autockpt("verify", url, cwd=tmp_path)
    assert done.returncode == CorruptCheckpointError.exit_code
    assert f"DAMAGED  {generation.name}" in done.stdout
    assert not (shard.parent / "CORRUPT").exists()
    for option, wrong in (("--quarantine", url), ("--all", f"{url}/none")):
        done = autockpt("verify", wrong, option, cwd=tmp_path)
        assert done.returncode == ConfigError.exit_code
        assert "needs a directory" in done.stderr or "holds no checkpoints" in done.stderr
