"""Ranks of one job that are started together, killed, and started again."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from autockpt.executors.storage.directory.records import read_commit
from tests.conftest import end_keeper, keeper_pids
from tests.jobs.kill.ordeal import read_events
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

PATIENCE_S = 90.0


class Group:
    """Ranks of one job on one node that are started together, again and again."""

    def __init__(
        self, zygote: Zygote, spec: trainings.JobSpec, folder: Path, *, ranks: int = 2
    ) -> None:
        self.ranks = ranks
        self.zygote, self.spec, self.folder = zygote, spec, folder
        self.run_dir = ""
        self.starts = 0
        self.pids: list[int] = []
        for rank in range(self.ranks):
            self.out(rank).mkdir(parents=True)

    def out(self, rank: int) -> Path:
        """What a rank says and leaves."""
        return self.folder / f"rank-{rank}"

    def start(self, *, attach: bool = True) -> None:
        """All, as the launcher would after a failure."""
        self.pids = []
        for rank in range(self.ranks):
            trainings.StepCell(self.out(rank) / "step").set(0)
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks), "AUTOCKPT_LAUNCH_ID": f"pair-{self.folder}",
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
        """All have begun it."""
        deadline = time.monotonic() + PATIENCE_S
        while min(trainings.StepCell(self.out(r) / "step").get() for r in range(self.ranks)) < step:
            assert time.monotonic() < deadline, self.tale()
            assert all(self.zygote.status(pid) is None for pid in self.pids), self.tale()
            time.sleep(0.002)

    def wait_durable(self, step: int) -> None:
        """A checkpoint of this step or a later one."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(e["step"] >= step for e in self.events("CheckpointDurable")):
            assert time.monotonic() < deadline, self.tale()
            time.sleep(0.005)

    def kill(self, *ranks: int, keeper: bool = False) -> None:
        """SIGKILL; the others end with their collective, or are ended as a launcher does it."""
        victims = [self.pids[rank] for rank in ranks]
        victims += keeper_pids(self.run_dir) if keeper else []
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):  # its neighbours' end took it along
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
        return [trainings.said(self.out(rank))[-1]["digest"] for rank in range(self.ranks)]

    def events(self, kind: str, writer: str = "keeper-000") -> list[dict[str, Any]]:
        """Telemetry."""
        found = read_events(Path(self.run_dir) / "telemetry" / f"{writer}.jsonl")
        return [event for event in found if event["event"] == kind]

    def started_at(self) -> list[int]:
        """The step at which each rank of the newest start went on."""
        facts = [trainings.said(self.out(rank)) for rank in range(self.ranks)]
        return [[f["step"] for f in said if f["event"] == "started"][-1] for said in facts]

    def parts_differ(self) -> bool:
        """Whether the ranks stored different parts in the newest commit."""
        commit = max(Path(self.run_dir).glob("checkpoints/ckpt-*/COMMIT"))
        return len({record["layout_digest"] for record in read_commit(str(commit)).records}) > 1

    def tale(self) -> str:
        """Everything a failure needs."""
        files = [self.out(rank) / "log" for rank in range(self.ranks)]
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


def undisturbed(
    zygote: Zygote, spec: trainings.JobSpec, folder: Path, *, ranks: int = 2
) -> list[str]:
    """Digests of the same ranks without autockpt."""
    group = Group(zygote, spec, folder, ranks=ranks)
    group.start(attach=False)
    try:
        return group.finish()
    finally:
        group.end()
