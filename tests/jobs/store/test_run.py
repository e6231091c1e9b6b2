"""`autockpt run` with `disk.path: s3://...`: the store alone brings a run back, to the bit."""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autockpt.cli.app import run as cli
from autockpt.executors.storage.catalogue import committed_names
from autockpt.values.generation import Generation
from tests.conftest import end_keeper
from tests.jobs.kill.zygote import environment
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

__all__ = ["endpoint", "s3"]

SCRIPT = Path(__file__).with_name("train.py")
URL = "s3://bucket/jobs/{}"
PATIENCE_S = 60.0


class Machine:
    """One machine's working directory, in which a job is started."""

    def __init__(self, folder: Path, url: str, *, ranks: int = 1) -> None:
        folder.mkdir()
        self.folder, self.url = folder, url
        self._ranks = ranks
        self._job: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> Path:
        """The control directory, as the documented rule names it."""
        return self.folder / "runs" / self.url.replace("://", "-").replace("/", "-")

    @property
    def said(self) -> str:
        """Everything that the job has printed."""
        return (self.folder / "out").read_text()

    def start(self, *, steps: int, pace_s: float = 0.02, settings: tuple[str, ...] = ()) -> None:
        """Starts it; the policy is an option."""
        argv = [sys.executable, "-m", "autockpt", "run", "--nproc-per-node", str(self._ranks),
                "--no-profile"]  # fmt: skip
        for one in (f"disk.path={self.url}", "memory.interval=5 steps", "disk.interval=10 steps",
                    "retune=false", *settings):  # fmt: skip
            argv += ["--set", one]
        argv += ["--", str(SCRIPT), "--steps", str(steps), "--pace", str(pace_s)]
        with open(self.folder / "out", "ab") as out:
            self._job = subprocess.Popen(
                argv, cwd=self.folder, env=environment(), stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def finish(self) -> dict[int, str]:
        """The digests by rank."""
        assert self._job is not None
        assert self._job.wait(PATIENCE_S) == 0, self.said
        found = re.findall(r"digest of rank (\d+): (\w+)", self.said)
        return {int(rank): digest for rank, digest in found}

    def lose(self) -> None:
        """The machine is gone: every process, and everything on its disk."""
        assert self._job is not None
        self.end()
        shutil.rmtree(self.folder / "runs")

    def end(self) -> None:
        """Ends whatever still lives, the keeper first: nothing is saved behind it."""
        end_keeper(str(self.run))
        if self._job is not None and self._job.poll() is None:
            ranks = psutil.Process(self._job.pid).children(recursive=True)
            for process in (self._job, *ranks):
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    process.kill()
            self._job.wait(PATIENCE_S)
        end_keeper(str(self.run))


@contextlib.contextmanager
def machine(folder: Path, url: str, *, ranks: int = 1) -> Iterator[Machine]:
    """One, without a process left behind."""
    one = Machine(folder, url, ranks=ranks)
    try:
        yield one
    finally:
        one.end()


def wait_for(url: str, *, checkpoints: int) -> list[str]:
    """The committed checkpoints of a store, once there are so many."""
    deadline = time.monotonic() + PATIENCE_S
    while len(names := committed_names(url)) < checkpoints:
        assert time.monotonic() < deadline, names
        time.sleep(0.05)
    return names


def bare(folder: Path, *, steps: int) -> str:
    """The digest of a training without autockpt that nobody disturbs."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--bare", "--steps", str(steps), "--pace", "0"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    return done.stdout.split()[-1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_new_machine_resumes_from_the_store_alone(
    tmp_path: Path, s3: None, capsys: pytest.CaptureFixture[str]
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
        for place in (url, str(second.run)):
            for words in (("ls",), ("show",), ("verify",)):
                assert cli([*words, place]) == 0
                assert newest in capsys.readouterr().out
        assert cli(["watch", "--once", str(second.run)]) == 0
        assert cli(["report", str(second.run)]) == 0
        assert not (second.run / "checkpoints").exists()
