"""`autockpt run` with `disk.path: s3://...`: the store alone brings a run back, to the bit."""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import autockpt
from autockpt.cli.app import run as cli
from autockpt.executors.storage.catalogue import committed_names
from autockpt.executors.storage.places.choose import place_of
from autockpt.run_directory import control_path
from autockpt.values.generation import Generation
from tests.conftest import end_keeper
from tests.jobs.kill.zygote import environment
from tests.support import azurite, google
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

__all__ = ["endpoint", "s3"]

SCRIPT = Path(__file__).with_name("train.py")
URL = "s3://bucket/jobs/{}"
PATIENCE_S = 180.0


class Machine:
    """One machine's working directory, in which a job is started."""

    def __init__(self, folder: Path, url: str, *, ranks: int = 1) -> None:
        folder.mkdir()
        self.folder, self.url = folder, url
        self._ranks = ranks
        self.options: tuple[str, ...] = ()
        self.arguments: tuple[str, ...] = ()
        """Of the script."""
        self.launcher: tuple[str, ...] = ()
        """The module of another launcher with its options; empty: `autockpt run` launches."""
        self.prefix: tuple[str, ...] = ()
        """Put before the command."""
        self.variables: dict[str, str] = {}
        self.job: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> Path:
        """The control directory, as the documented rule names it."""
        return self.folder / control_path(self.url)

    @property
    def is_running(self) -> bool:
        """Its launcher lives."""
        return self.job is not None and self.job.poll() is None

    @property
    def said(self) -> str:
        """Everything that the job has printed."""
        return (self.folder / "out").read_text()

    def start(self, *, steps: int, pace_s: float = 0.02, settings: tuple[str, ...] = ()) -> None:
        """Starts it; the policy is an option."""
        argv = [*self.prefix, sys.executable, "-m", *self.launcher, "autockpt", "run"]
        if not self.launcher:
            argv += ["--nproc-per-node", str(self._ranks)]
        argv.append("--no-profile")
        for one in (f"disk.path={self.url}", "memory.interval=5 steps", "disk.interval=10 steps",
                    "retune=false", *settings):  # fmt: skip
            argv += ["--set", one]
        argv += [*self.options, "--", str(SCRIPT), "--steps", str(steps), *self.arguments]
        with open(self.folder / "out", "ab") as out:
            self.job = subprocess.Popen(
                argv, cwd=self.folder,
                env={**environment(), "TEST_PACE_S": str(pace_s), **self.variables},
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def finish(self) -> dict[int, str]:
        """The digests by rank."""
        assert self.job is not None
        assert self.job.wait(PATIENCE_S) == 0, self.said
        logs = [path.read_text() for path in (self.run / "logs").rglob("*") if path.is_file()]
        found = re.findall(r"digest of rank (\d+): (\w+)", "\n".join([self.said, *logs]))
        return {int(rank): digest for rank, digest in found}

    def lose(self) -> None:
        """The machine is gone: every process, and everything on its disk."""
        assert self.job is not None
        self.end()
        shutil.rmtree(self.folder / "runs")

    def end(self) -> None:
        """Ends whatever still lives, the keeper first: nothing is saved behind it."""
        end_keeper(str(self.run), nodes=2)
        if self.job is not None and self.job.poll() is None:
            ranks = psutil.Process(self.job.pid).children(recursive=True)
            self.job.kill()
            for process in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.job.wait(PATIENCE_S)
        end_keeper(str(self.run), nodes=2)


@contextlib.contextmanager
def machine(folder: Path, url: str, *, ranks: int = 1) -> Iterator[Machine]:
    """One, without a process left behind."""
    one = Machine(folder, url, ranks=ranks)
    try:
        yield one
    finally:
        one.end()


class Nodes:
    """Two nodes on one machine, each with a working directory of its own."""

    def __init__(self, folder: Path, url: str, *, torchrun: bool = False) -> None:
        folder.mkdir()
        self._torchrun = torchrun
        self.machines = [Machine(folder / f"node{number}", url) for number in range(2)]

    def start(self, *, steps: int, pace_s: float, settings: tuple[str, ...] = ()) -> None:
        """Starts a launcher on each."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for number, one in enumerate(self.machines):
            meeting = ("--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint",
                       f"127.0.0.1:{port}", "--rdzv-id", "nodes")  # fmt: skip
            if self._torchrun:
                one.launcher = ("torch.distributed.run", *meeting, "--rdzv-backend", "c10d",
                                "--nproc-per-node", "1", "-m", "--")  # fmt: skip
            else:
                one.options = meeting
            one.start(steps=steps, pace_s=pace_s, settings=settings)

    def run(self, *, steps: int, pace_s: float, settings: tuple[str, ...] = ()) -> dict[int, str]:
        """The digests by rank, when both have ended."""
        self.start(steps=steps, pace_s=pace_s, settings=settings)
        return self.machines[0].finish() | self.machines[1].finish()

    @property
    def said(self) -> str:
        """Everything that was printed."""
        return "".join(one.said for one in self.machines)

    def lose(self) -> None:
        """Both, with everything on their disks."""
        for one in self.machines:
            one.end()
        for one in self.machines:
            one.lose()


@contextlib.contextmanager
def nodes(folder: Path, url: str, *, torchrun: bool = False) -> Iterator[Nodes]:
    """Two, without a process left behind."""
    both = Nodes(folder, url, torchrun=torchrun)
    try:
        yield both
    finally:
        for one in both.machines:
            one.end()


def wait_for(url: str, *, checkpoints: int) -> list[str]:
    """The committed checkpoints of a store, once there are so many."""
    deadline = time.monotonic() + PATIENCE_S
    while len(names := committed_names(url)) < checkpoints:
        assert time.monotonic() < deadline, names
        time.sleep(0.05)
    return names


def bare(folder: Path, *, steps: int, seed: int = 0, width: int = 64) -> str:
    """The digest of a training without autockpt that nobody disturbs."""
    words = ["--bare", "--seed", str(seed), "--steps", str(steps), "--width", str(width)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    return done.stdout.split()[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_machine_resumes_from_the_store_alone(
    tmp_path: Path, s3: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is killed and the directory removed; the end is that of an undisturbed run."""
    url = URL.format("lost")
    with machine(tmp_path / "first", url) as first:
        first.start(steps=60, pace_s=0.1)
        wait_for(url, checkpoints=2)
        first.lose()
    kept = committed_names(url)[-1]
    step = Generation.from_name(kept).step
    with machine(tmp_path / "second", url) as second:
        second.start(steps=60, pace_s=0.0)
        assert second.finish() == {0: bare(tmp_path, steps=60)}
        assert f"resumed step {step} from disk" in second.said, second.said
        newest = committed_names(url)[-1]
        monkeypatch.chdir(second.folder)
        assert cli(["pin", url, "paper"]) == 0
        capsys.readouterr()
        assert cli(["ls", url]) == 0
        (line,) = [one for one in capsys.readouterr().out.splitlines() if newest in one]
        assert "pinned as paper" in line
        assert cli(["pin", url, "paper", "--remove"]) == 0
        for place in (url, str(second.run)):
            for words in (("ls",), ("show",), ("verify",)):
                assert cli([*words, place]) == 0
                assert newest in capsys.readouterr().out
            assert autockpt.load(place)
            assert cli(["watch", "--json", place]) == 0
            assert cli(["report", place]) == 0
            assert cli(["failures", place]) == 0
            planned = subprocess.run(
                [sys.executable, "-m", "autockpt", "restore", "--dry-run", place, str(SCRIPT)],
                env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
            assert "fits          yes" in planned.stdout, planned.stderr
        assert cli(["explain", url]) == cli(["explain", str(second.run)])
        assert cli(["diff", url, f"{url}/{newest}"]) == 0
        assert cli(["gc", "--dry-run", url]) == 0
        assert not (second.run / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("provider", ["az", "gs"])
def test_other_providers_have_a_run_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """Two ranks on the protocols of Azure and Google; all is lost but the store."""
    kind, start = (azurite, azurite.azurite) if provider == "az" else (google, google.google)
    url = f"{provider}://bucket/jobs/{provider}"
    expected = {rank: bare(tmp_path, steps=60, seed=rank) for rank in range(2)}
    with start() as server:
        for name, value in kind.account(server).items():
            monkeypatch.setenv(name, value)
        with machine(tmp_path / "first", url, ranks=2) as first:
            first.start(steps=60, pace_s=0.1)
            wait_for(url, checkpoints=2)
            first.lose()
        step = Generation.from_name(committed_names(url)[-1]).step
        with machine(tmp_path / "second", url, ranks=2) as second:
            second.start(steps=60, pace_s=0.0, settings=("keep.last=2",))
            assert second.finish() == expected
            assert f"resumed step {step} from disk" in second.said, second.said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_rank_puts_its_own_shard(tmp_path: Path, s3: None) -> None:
    """Two ranks, all killed and everything removed, twice: the third machine goes on to the bit.

    Retention deletes.
    """
    url = URL.format("ranks")
    expected = {rank: bare(tmp_path, steps=80, seed=rank) for rank in range(2)}
    assert len(set(expected.values())) == 2
    with machine(tmp_path / "first", url, ranks=2) as first:
        first.start(steps=80, pace_s=0.1)
        seen = wait_for(url, checkpoints=2)[-1]
        first.lose()
    with machine(tmp_path / "second", url, ranks=2) as second:
        second.start(steps=80, pace_s=0.1)
        wait_for(url, checkpoints=len(committed_names(url)) + 1)
        second.lose()
    newest = Generation.from_name(committed_names(url)[-1])
    assert newest.term > Generation.from_name(seen).term
    with machine(tmp_path / "third", url, ranks=2) as third:
        third.start(steps=80, pace_s=0.0, settings=("keep.last=2",))
        assert third.finish() == expected
        assert f"resumed step {newest.step} from disk" in third.said, third.said
    newest = committed_names(url)[-1]
    names = place_of(url).names(f"{url}/{newest}")
    assert sum(name.startswith("shard-") for name in names) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("torchrun", [False, True])
def test_two_nodes_share_nothing_but_the_store(tmp_path: Path, s3: None, torchrun: bool) -> None:
    """Each node has a run directory of its own; both are lost, and new nodes resume."""
    url = URL.format(f"nodes-{torchrun}")
    expected = {rank: bare(tmp_path, steps=60, seed=rank) for rank in range(2)}
    with nodes(tmp_path / "first", url, torchrun=torchrun) as first:
        first.start(steps=60, pace_s=0.1)
        wait_for(url, checkpoints=2)
        first.lose()
    with nodes(tmp_path / "second", url, torchrun=torchrun) as second:
        assert second.run(steps=60, pace_s=0.0) == expected
        assert "resumed step" in second.said, second.said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_that_share_put_into_the_store_once_what_both_hold(tmp_path: Path, s3: None) -> None:
    """DDP: the store has one state in two shards, from which new nodes resume."""
    url, width, settings = URL.format("shares"), 4096, ("staging.shares=job",)
    end = bare(tmp_path, steps=60, width=width)
    with nodes(tmp_path / "first", url) as first, nodes(tmp_path / "second", url) as second:
        for one in (*first.machines, *second.machines):
            one.arguments = ("--ddp", "--seed", "0", "--width", str(width))
        first.start(steps=60, pace_s=0.1, settings=settings)
        newest = f"{url}/{wait_for(url, checkpoints=2)[-1]}"
        stored = place_of(url).sizes(newest)
        sizes = [nbytes for name, nbytes in stored.items() if name.startswith("shard-")]
        state_bytes = 3 * 4 * (2 * 16 * width + width + 16)
        assert len(sizes) == 2
        assert sum(sizes) <= 1.05 * state_bytes, (sizes, state_bytes)
        first.lose()
        assert second.run(steps=60, pace_s=0.0, settings=settings) == {0: end, 1: end}
        assert "resumed step" in second.said, second.said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_job_is_refused(
    tmp_path: Path, s3: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no run directory says whose the checkpoints are; a dry run leaves nothing."""
    url = URL.format("owned")
    with machine(tmp_path / "first", url) as first:
        first.start(steps=12, pace_s=0.0)
        first.finish()
        first.lose()
    monkeypatch.chdir(first.folder)
    words = ["run", "--no-profile", "--dry-run", "--set", f"disk.path={url}", str(SCRIPT)]
    assert cli([*words, "--steps", "12", "--width", "32"]) == 78
    said = capsys.readouterr().err
    assert f"{url}: holds checkpoints of another job: " in said
    assert "32" in said
    assert cli([*words, "--steps", "20"]) == 0
    assert not (first.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_that_attaches_alone_is_refused_the_store_of_another_job(
    tmp_path: Path, s3: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each start is on a new machine; the same job is let in, under `autockpt run` as well."""
    url = URL.format("alone")

    def start(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).mkdir()
        try:
            return subprocess.run(
                [sys.executable, str(SCRIPT), "--url", url, "--steps", "6", *words],
                cwd=tmp_path / name, env={**environment(), **variables}, capture_output=True,
                text=True, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
        finally:
            end_keeper(str(tmp_path / name / "runs" / "train"))

    assert start("first").returncode == 0
    other = start("other", "--width", "32")
    assert other.returncode != 0
    assert f"{url}: holds checkpoints of another job: " in other.stderr
    assert "AUTOCKPT_SAME_JOB=1" in other.stderr
    assert start("same").returncode == 0
    words = ["run", "--no-profile", "--dry-run", "--set", f"disk.path={url}", str(SCRIPT)]
    assert cli([*words, "--url", url, "--steps", "6"]) == 0
    assert cli([*words, "--url", url, "--width", "32"]) == 78
    capsys.readouterr()


def test_a_store_that_does_not_answer_ends_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the code of storage and a cure; so does an address that is none."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("obstore", reason="needs the extra remote")
    for name, value in {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "x", "AWS_ACCESS_KEY_ID": "x",
                        "AWS_SECRET_ACCESS_KEY": "x", "NO_PROXY": "127.0.0.1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    words = ["run", "--no-profile", "--set", "disk.path=s3://bucket/x", str(SCRIPT)]
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert cli(words) == 74
    assert "check its address (S3: AWS_ENDPOINT_URL) and the network" in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    assert cli(words) == 78
    assert "AWS_ENDPOINT_URL: expected the address of a store" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
