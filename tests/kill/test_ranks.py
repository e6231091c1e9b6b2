"""Ranks that share what they hold alike: killed, astray, and back to the bit, each with its own.

Two ranks of one node train with DDP, so that each stores a part of parameters and optimizer only.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.directory import read_commit
from tests.conftest import end_keeper, keeper_pids
from tests.fakes import trainings
from tests.kill.ordeal import read_events
from tests.kill.zygote import Zygote

RANKS = 2
PATIENCE_S = 90.0


class Pair:
    """Two ranks that are started together, again and again."""

    def __init__(self, zygote: Zygote, spec: trainings.JobSpec, folder: Path) -> None:
        self.zygote, self.spec, self.folder = zygote, spec, folder
        self.run_dir = ""
        self.starts = 0
        self.pids: list[int] = []
        for rank in range(RANKS):
            self.out(rank).mkdir(parents=True)

    def out(self, rank: int) -> Path:
        """What a rank says and leaves."""
        return self.folder / f"rank-{rank}"

    def start(self, *, attach: bool = True) -> None:
        """Both, as the launcher would after a failure."""
        self.pids = []
        for rank in range(RANKS):
            trainings.StepCell(self.out(rank) / "step").set(0)
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS), "AUTOCKPT_LAUNCH_ID": f"pair-{self.folder}",
                "TORCHELASTIC_RESTART_COUNT": str(self.starts),
                "TEST_STORE": str(self.folder / f"store-{self.starts}"),
            }  # fmt: skip
            self.pids.append(
                self.zygote.start(
                    trainings.spec_data(self.spec), self.run_dir, self.out(rank), attach=attach,
                    **environment,
                )
            )  # fmt: skip
        self.starts += 1

    def wait_step(self, step: int) -> None:
        """Both have begun it."""
        deadline = time.monotonic() + PATIENCE_S
        while min(trainings.StepCell(self.out(r) / "step").get() for r in range(RANKS)) < step:
            assert time.monotonic() < deadline, self.tale()
            assert all(self.zygote.status(pid) is None for pid in self.pids), self.tale()
            time.sleep(0.002)

    def wait_durable(self, step: int) -> None:
        """A checkpoint of this step or a later one."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(e["step"] >= step for e in self.events("PersistCommitted")):
            assert time.monotonic() < deadline, self.tale()
            time.sleep(0.005)

    def kill(self, *ranks: int, keeper: bool = False) -> None:
        """SIGKILL; the others end with their collective, or are ended as a launcher does it."""
        victims = [self.pids[rank] for rank in ranks]
        victims += keeper_pids(self.run_dir) if keeper else []
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        for rank, pid in enumerate(self.pids):
            if rank not in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                if self.zygote.status(pid, wait_s=10.0) is None:
                    os.kill(pid, signal.SIGKILL)
            assert self.zygote.status(pid, wait_s=PATIENCE_S) is not None

    def finish(self) -> list[str]:
        """Digest of every rank at its end."""
        for pid in self.pids:
            assert self.zygote.status(pid, wait_s=PATIENCE_S) == 0, self.tale()
        return [trainings.said(self.out(rank))[-1]["digest"] for rank in range(RANKS)]

    def events(self, kind: str, writer: str = "keeper-000") -> list[dict[str, Any]]:
        """Telemetry."""
        found = read_events(Path(self.run_dir) / "telemetry" / f"{writer}.jsonl")
        return [event for event in found if event["event"] == kind]

    def started_at(self) -> list[int]:
        """The step at which each rank of the newest start went on."""
        facts = [trainings.said(self.out(rank)) for rank in range(RANKS)]
        return [[f["step"] for f in said if f["event"] == "started"][-1] for said in facts]

    def parts_differ(self) -> bool:
        """Whether the ranks stored different parts in the newest commit."""
        commit = max(Path(self.run_dir).glob("checkpoints/gen-*/COMMIT"))
        return len({record["layout_digest"] for record in read_commit(str(commit)).records}) > 1

    def tale(self) -> str:
        """Everything a failure needs."""
        files = [self.out(rank) / "log" for rank in range(RANKS)]
        files += sorted(Path(self.run_dir or self.folder).glob("logs/*"))
        return "".join(f"\n--- {file}\n{file.read_text()[-2500:]}" for file in files)

    def end(self) -> None:
        """Nothing of it survives."""
        for pid in self.pids:
            if self.zygote.status(pid) is None:
                os.kill(pid, signal.SIGKILL)
                self.zygote.status(pid, wait_s=PATIENCE_S)
        if self.run_dir:
            end_keeper(self.run_dir)


def undisturbed(zygote: Zygote, spec: trainings.JobSpec, folder: Path) -> list[str]:
    """Digests of the same two ranks without autockpt."""
    pair = Pair(zygote, spec, folder)
    pair.start(attach=False)
    try:
        return pair.finish()
    finally:
        pair.end()


@pytest.mark.timeout(240)
def test_what_two_ranks_share_comes_back_from_memory_and_from_disk(
    zygote: Zygote, tmp_path: Path
) -> None:
    """One rank is killed: each takes the other's part from its slot.  All die with the keeper: they
    read the files together.  In the end nothing differs from a run that nobody disturbed."""
    spec = trainings.JobSpec(steps=60, pace_s=0.01, seed=11, ddp=True, optimizer="fused")
    expected = undisturbed(zygote, spec, tmp_path / "bare")
    pair = Pair(zygote, spec, tmp_path / "pair")
    pair.run_dir = trainings.prepare(tmp_path / "pair" / "run", trainings.plan(memory=2, disk=6))
    try:
        pair.start()
        pair.wait_step(14)
        pair.kill(1)
        promised = max(event["step"] for event in pair.events("MemoryCommitted"))
        pair.start()
        pair.wait_step(30)
        assert min(pair.started_at()) >= promised
        pair.wait_durable(24)
        pair.kill(0, 1, keeper=True)
        durable = max(event["step"] for event in pair.events("PersistCommitted"))
        pair.start()
        digests = pair.finish()
        assert min(pair.started_at()) >= durable
        sources = [event["source"] for event in pair.events("Restored")]
        assert sources == ["memory"] * RANKS + ["disk"] * RANKS
        assert pair.parts_differ(), "each stores a part of its own"
        for rank in range(RANKS):
            lost = pair.events("Degraded", f"rank-{rank:05d}")
            assert not [e for e in lost if "shared state" in str(e)], pair.tale()
        assert digests == expected, pair.tale()
    finally:
        pair.end()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_goes_astray_keeps_its_own_values(zygote: Zygote, tmp_path: Path) -> None:
    """A parameter of one rank is changed behind DDP's back: the save that would mix both is
    dropped, training goes on, and from then on each rank's own state is saved and comes back."""
    spec = trainings.JobSpec(steps=60, pace_s=0.01, seed=12, ddp=True, stray_at=15)
    expected = undisturbed(zygote, spec, tmp_path / "bare")
    pair = Pair(zygote, spec, tmp_path / "pair")
    pair.run_dir = trainings.prepare(tmp_path / "pair" / "run", trainings.plan(memory=2, disk=6))
    try:
        pair.start()
        pair.wait_step(40)
        pair.wait_durable(24)
        for rank in range(RANKS):
            told = pair.events("Degraded", f"rank-{rank:05d}")
            assert any("replicas differ" in str(event) for event in told), pair.tale()
        pair.kill(0, 1, keeper=True)
        pair.start()
        digests = pair.finish()
        assert not pair.parts_differ()
        assert min(pair.started_at()) >= 24 > spec.stray_at  # type: ignore[operator]
        assert digests == expected, pair.tale()
    finally:
        pair.end()
