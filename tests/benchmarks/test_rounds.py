"""What a contestant is asked in a round: a save stands in the place of a boundary."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest.client import Client, Training
from benchmarks.peers import rounds
from benchmarks.peers.contract import Peer
from benchmarks.peers.registry import BY_NAME

TRAINING = Training(size="tiny", tokens=16, threads=1)


class Fake(Peer):
    """Notes what it is asked, and what its job does."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.job: Any = self
        self.state = 0

    def iterate(self) -> None:
        self.state += 1
        self.said.append("iterate")

    def digests(self) -> dict[str, str]:
        return {"state": str(self.state)}

    def wipe(self) -> None:
        self.state = 0

    def save(self) -> None:
        self.saved = self.state
        self.said.append("save")

    def boundary(self) -> None:
        self.said.append("boundary")

    def load(self) -> None:
        self.state = self.saved

    def wait(self) -> float:
        return time.monotonic()

    def files(self) -> list[Path]:
        return []

    def tidy(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        (0, "iterate boundary iterate boundary iterate boundary"),
        (1, "iterate save iterate boundary iterate boundary"),
        (2, "iterate save iterate save iterate boundary"),
    ],
)
def test_a_save_is_right_behind_an_iteration(saves: int, said: str) -> None:
    """A boundary between them would leave the save without an optimizer's step in front of it."""
    fake = Fake()
    rounds.segment(fake, 2, saves=saves)
    assert fake.said == said.split()


def test_a_check_compares_the_state_that_was_saved() -> None:
    """The digests are those of the step at which the save begins."""
    fake = Fake()
    found = rounds.check(fake, 2)
    assert found["torn"] == []
    assert fake.said == ["iterate", "save", *["iterate", "boundary"] * 2]


@pytest.mark.slow
def test_our_save_begins_at_its_boundary(tmp_path: Path) -> None:
    """Its checkpoint is durable, and of the state whose digests the parent is told."""
    client = Client(BY_NAME["autockpt"], sys.executable, tmp_path / "client", TRAINING)
    keepers: list[int] = []
    try:
        client.await_ready(120.0)
        keepers = client.ask({"do": "facts"}, 60.0)["helpers"]
        digests = client.ask({"do": "hold"}, 120.0)["digests"]
        saved = client.ask({"do": "facts"}, 60.0)["saved"]
        assert saved["disk"] == 1
        client.kill()
        run = tmp_path / "client" / "work" / "run"
        assert restored(run) == digests
    finally:
        client.end(graceful=False)
        for pid in keepers:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def restored(run: Path) -> dict[str, str]:
    """Digests of the state with which a new process comes back."""
    shard = max(run.glob("checkpoints/ckpt-*/shard-*"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.contest.resume_probe", str(run), str(shard),
         TRAINING.size, str(TRAINING.tokens), "1"],
        capture_output=True, text=True, timeout=120, cwd=run, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(rounds.__file__).parents[2])},
    )  # fmt: skip
    assert done.stdout, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return dict(answer["digests"])
