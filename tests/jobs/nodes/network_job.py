"""A job of one rank a node, nodes being network namespaces, that is lost in parts and restarted.

What a launcher would do is done here: after a loss everybody's trainers are ended and all ranks
start once more, on the survivors and on new machines.  Rendezvous is a file on the file system that
all nodes share.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autockpt.values.goal import SharedAmong
from autockpt.values.redundancy import Redundancy
from benchmarks.namespaces import INTERFACE, Network
from tests.conftest import keeper_pids
from tests.jobs.kill.ordeal import read_events
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

PATIENCE_S = 60.0


class NetworkJob:
    """`count` nodes with a rank each; `limit` holds the training at a step until it is raised."""

    def __init__(
        self,
        zygote: Zygote,
        network: Network,
        folder: Path,
        redundancy: Redundancy,
        *,
        ranks: int,
        steps: int,
        trainer: str = "tests.jobs.nodes.trainer:run",
        numbered: bool = False,
        environment: Mapping[str, str] | None = None,
        width: int = 32,
        shares: SharedAmong = "node",
    ) -> None:
        """Nodes from `ranks` on are spare machines.  `numbered`: machines keep their numbers, as
        under `autockpt run`; else they are counted anew at every start."""
        self._environment = environment or {}
        self.zygote, self.network, self.folder = zygote, network, folder
        # Names of sockets are short, and pytest's folders are not.
        self._private = Path(tempfile.mkdtemp(prefix="nodes-"))
        self.count = ranks
        self._trainer, self._numbered = trainer, numbered
        self.spec = trainings.JobSpec(steps=steps, pace_s=0.005, seed=5, width=width)
        plan = replace(trainings.plan(memory=3, disk=20), redundancy=redundancy)
        plan = replace(plan, staging=replace(plan.staging, shares=shares))
        self.run_dir = trainings.prepare(folder / "run", plan)
        self.places = list(range(self.count))
        """Node of each rank."""
        self.pids: list[int] = []
        self.starts = 0
        self.lost_s = 0.0
        """When something was lost last, monotonic."""
        self.limit = trainings.StepCell(folder / "limit")
        for rank in range(max(self.count, len(network.nodes))):
            self.out(rank).mkdir()
        for node in range(len(network.nodes)):
            self.runtime(node).mkdir()

    def out(self, rank: int) -> Path:
        """What a rank says and leaves."""
        return self.folder / f"rank-{rank}"

    def runtime(self, node: int) -> Path:
        """What is a node's own: the sockets of its keeper."""
        return self._private / f"node-{node}"

    # ------------------------------------------------------------------ what a launcher does

    def start(self, limit: int) -> None:
        """All ranks, up to a step."""
        self.limit.set(limit)
        self.pids = [self._start(rank, node) for rank, node in enumerate(self.places)]
        self.starts += 1

    def _start(self, rank: int, node: int) -> int:
        arguments = {
            "spec": trainings.spec_data(self.spec), "run_dir": self.run_dir,
            "out": str(self.out(rank)), "namespace": self.network.nodes[node].namespace,
        }  # fmt: skip
        kept = {"AUTOCKPT_NODE": str(node)} if self._numbered else {}
        return self.zygote.call(
            self._trainer, arguments, self.out(rank),
            RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(self.count), LOCAL_WORLD_SIZE="1",
            AUTOCKPT_LAUNCH_ID=f"nodes-{self.folder}",
            TORCHELASTIC_RESTART_COUNT=str(self.starts),
            TEST_STORE=str(self.folder / f"store-{self.starts}"),
            GLOO_SOCKET_IFNAME=INTERFACE, AUTOCKPT_CONTROL_INTERFACE=INTERFACE,
            XDG_RUNTIME_DIR=str(self.runtime(node)), **self._environment, **kept,
        )  # fmt: skip

    def resize(self, places: Sequence[int]) -> None:
        """From the next start on a rank on each of these nodes."""
        self.places, self.count = list(places), len(places)

    def lose(self, nodes: Collection[int]) -> None:
        """These nodes are gone with their memory; the other trainers are ended, as launchers do."""
        self.lost_s = time.monotonic()
        for node in nodes:
            self.network.nodes[node].kill()
            shutil.rmtree(self.runtime(node))
            self.runtime(node).mkdir()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            assert self.zygote.status(pid, wait_s=PATIENCE_S) is not None, self.tale()

    # ------------------------------------------------------------------ what can be seen

    def events(self, kind: str, writers: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Telemetry of keepers, by node, oldest first."""
        found = []
        for node in range(len(self.network.nodes)) if writers is None else writers:
            path = Path(self.run_dir, "telemetry", f"keeper-{node:03d}.jsonl")
            found += [e for e in read_events(path) if e["event"] == kind]
        return sorted(found, key=lambda event: event["at_s"])

    def newest(self, kind: str) -> int:
        """The newest step of an event of any keeper."""
        return max((event["step"] for event in self.events(kind)), default=0)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Waits for something to happen while all ranks train."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{what} did not happen; {self.tale()}"
            assert all(self.zygote.status(pid) in (None, 0) for pid in self.pids), self.tale()
            time.sleep(0.01)

    def stand_at(self, step: int) -> None:
        """Waits until all ranks have said their state at a step."""

        def there() -> bool:
            said = [
                {fact["step"] for fact in self.said(rank, "state")} for rank in range(self.count)
            ]
            return all(step in steps for steps in said)

        self.wait(there, f"step {step}")

    def restored(self) -> list[dict[str, Any]]:
        """What every rank went on from after the last loss: one generation, or the test ends.

        Keepers and trainers have to say the same.
        """
        self.wait(lambda: len(self._restored()) == self.count, "a restore of all ranks")
        self.wait(lambda: len(self._began()) == self.count, "a start of all ranks")
        found = self._restored()
        assert len({e["generation"] for e in found.values()}) == 1, f"a mixture: {found}"
        assert {e["step"] for e in found.values()} == set(self._began()), f"elsewhere: {found}"
        return [found[rank] for rank in range(self.count)]

    def _began(self) -> list[int]:
        """The steps at which trainers of the newest start went on."""
        said = [fact for rank in range(self.count) for fact in self.said(rank, "started")]
        return [fact["step"] for fact in said if fact["start"] == self.starts - 1]

    def _restored(self) -> dict[int, dict[str, Any]]:
        return {e["rank"]: e for e in self.events("Restored") if e["at_s"] > self.lost_s}

    def said(self, rank: int, event: str) -> list[dict[str, Any]]:
        """What the trainers of a rank said of one kind."""
        return [fact for fact in trainings.said(self.out(rank)) if fact["event"] == event]

    def finish(self) -> list[str]:
        """Digest of every rank."""
        self.limit.set(self.spec.steps)
        for pid in self.pids:
            assert self.zygote.status(pid, wait_s=PATIENCE_S) == 0, self.tale()
        return [self.said(rank, "finished")[-1]["digest"] for rank in range(self.count)]

    def undisturbed(self) -> list[str]:
        """Digest of every rank of the same training without autockpt."""
        digests = []
        for rank in range(self.count):
            out = self.folder / f"bare-{rank}"
            out.mkdir()
            spec = trainings.spec_data(replace(self.spec, pace_s=0.0))
            pid = self.zygote.start(spec, "", out, attach=False, RANK=str(rank))
            self.zygote.finish(pid, out / "log", wait_s=PATIENCE_S)
            digests.append(trainings.said(out)[-1]["digest"])
        return digests

    def tale(self) -> str:
        """Everything a failure needs."""
        files = [self.out(rank) / "log" for rank in range(self.count)]
        files += sorted(Path(self.run_dir, "logs").glob("keeper-*.log"))
        return "".join(f"\n--- {x}\n{x.read_text()[-2500:]}" for x in files if x.exists())

    def end(self) -> None:
        """Nothing of it survives, nothing it left is in the way."""
        shutil.rmtree(self._private)
        for pid in self.pids:
            self.zygote.kill(pid)
        for node in self.network.nodes:
            node.kill()
        left = [pid for n in range(len(self.network.nodes)) for pid in keeper_pids(self.run_dir, n)]
        assert not left
