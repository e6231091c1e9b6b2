"""autockpt through its public face: `attach`, then `save` and `step`."""

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Peer

NEVER = 10**9
SLOTS_WAIT_S = 120.0


class OnDemand(Peer):
    """Checkpoints only when asked for, to memory and disk."""

    memory_steps = NEVER
    disk_steps = NEVER

    def setup(self) -> None:
        import autockpt
        from autockpt.values.goal import Goal, Pins, Retention

        pins = Pins(
            memory_interval_steps=self.memory_steps,
            disk_interval_steps=self.disk_steps,
            retune=False,
        )
        os.environ["AUTOCKPT_NO_PROFILE"] = "1"
        session: Any = autockpt.attach(
            model=self.job.model,
            optimizer=self.job.optimizer,
            run_dir=str(self.run_directory),
            goal=Goal(pins=pins, retention=Retention(keep_last=1)),
        )
        self.session = session
        self._await_slots()
        self._keeper: int | None = self.session.keeper_pid

    @property
    def run_directory(self) -> Path:
        """Of this contestant's run."""
        return self.folder / "run"

    def _await_slots(self) -> None:
        """They are allocated once, after the first step."""
        deadline = time.monotonic() + SLOTS_WAIT_S
        while not self.session.ready:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no slots within {SLOTS_WAIT_S:.0f} s")
            self.job.iterate()
            self.session.step()

    def save(self) -> None:
        """Raises RuntimeError where none began: its figures would be of nothing."""
        newest = self.session._client.saves.newest_on_disk
        self.session.save()
        self.session.step()
        if self.session._client.saves.newest_on_disk == newest:
            raise RuntimeError("no checkpoint began at this boundary: is no slot free?")

    def boundary(self) -> None:
        self.session.step()

    def stalled_s(self) -> float:
        return float(self.session.fence_stall_s)

    def wait(self) -> float:
        durable = float(self.session.wait_durable(120.0))
        if not durable:
            raise RuntimeError("no durable checkpoint within 120 s")
        return durable

    def finished(self) -> bool:
        """The newest committed generation was read back."""
        commits = sorted((self.run_directory / "checkpoints").glob("ckpt-*/COMMIT"))
        return not commits or (commits[-1].parent / "VERIFIED").exists()

    def helpers(self) -> list[int]:
        return [self._keeper] if self._keeper else []

    def saved(self) -> dict[str, int]:
        """From the telemetry of trainer and keeper, which is what the report counts as well."""
        kinds = {
            "MemoryCommitted": "memory",
            "CheckpointDurable": "disk",
            "PersistFailed": "dropped on the way to disk",
            "SaveSkipped": "skipped",
        }
        counts = dict.fromkeys(kinds.values(), 0)
        for path in (self.run_directory / "telemetry").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                name = kinds.get(json.loads(line).get("event", ""))
                if name:
                    counts[name] += 1
        return counts

    def close(self) -> None:
        self.session.close(final_checkpoint=False)


class EveryIteration(OnDemand):
    """The plan itself asks for a checkpoint to memory and disk at every boundary."""

    memory_steps = 1
    disk_steps = 1

    def setup(self) -> None:
        super().setup()
        self.wait()

    def save(self) -> None:
        self.session.step()

    def boundary(self) -> None:
        """The boundary is where `save` is: segments without it have none, and so no checkpoint."""

    def wait(self) -> float:
        """The last one may have been dropped for a newer one; `saved` counts those that were."""
        return float(self.session.wait_durable(120.0)) or time.monotonic()


class EveryIterationInMemory(EveryIteration):
    """The same, disk never."""

    disk_steps = NEVER

    def wait(self) -> float:
        """Sealed in memory: the fence is all there is to wait for."""
        self.session.wait_for_staging()
        return time.monotonic()
