"""The adapter contract in Ray Train, with the real package: Ray starts the workers again."""

import contextlib
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from autockpt.run_directory import RunDirectory
from autockpt.values.telemetry import CheckpointDurable
from tests.conftest import end_keeper, keeper_pids
from tests.contracts.adapter_contract import (
    CASES,
    ROOT,
    AdapterContract,
    Framework,
    Outcome,
    bare,
    protected,
    require_equal,
)
from tests.contracts.adapter_process import BATCH, SAMPLES, Case

FRAMEWORK = Framework("ray", "tests/frameworks/ray_driver.py", "ray", launches=True)
WITHIN_S = 300.0
PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": "300", "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000", "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "60000", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip
"""A slow start is no failure here, and no process starts that is not needed."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


class Cluster:
    """Nodes on this machine; drivers find it by RAY_ADDRESS."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def order(self, line: str) -> None:
        """See ray_cluster.py."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert "done\n" in iter(self._process.stdout.readline, "")


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[Cluster]:
    """Of a node for each number."""
    script = str(ROOT / "tests" / "frameworks" / "ray_cluster.py")
    command = [FRAMEWORK.python, script, *map(str, cpus)]
    # A token of this cluster's own: Ray asks drivers for one, and else keeps one in the home.
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **PATIENCE}
    environment = {
        **os.environ, **given, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "AUTOCKPT_NO_PROFILE": "1",
    }  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=sys.stderr,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        address = next(line for line in lines if line.startswith("address ")).split()[1]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**given, "RAY_ADDRESS": address}.items():
                patch.setenv(name, value)
            yield Cluster(process)
        process.stdin.close()


@pytest.fixture(scope="module")
def one_node() -> Iterator[None]:
    """One cluster for all cases: a start of Ray takes longer than a training."""
    with cluster(2):
        yield


@pytest.mark.usefixtures("one_node")
class TestRay(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
    not_for: ClassVar[dict[str, str]] = {
        case.name: "each case is two jobs of Ray, which take long: one of each kind"
        for case in CASES
        if case.name not in ("forward:8", "backward:19,accumulation=4", "backward:5,ranks=2")
    }


def test_a_lost_node_is_replaced(tmp_path: Path) -> None:
    """A raylet dies with its worker and its keeper; on a third node all goes on to the bit."""
    case = Case(kill="node:5", ranks=2)
    with cluster(1, 1) as nodes:

        def fail() -> None:
            for pid in keeper_pids(str(_run(tmp_path)), 1):
                os.kill(pid, 9)
            nodes.order("kill")
            nodes.order("add 1")

        outcome = _disturbed(case, tmp_path, fail)
        assert max(outcome.began) > 0, outcome.said[-6000:]
        require_equal(outcome, bare(FRAMEWORK, case.undisturbed))


def test_fewer_workers_go_on(tmp_path: Path) -> None:
    """`num_workers=(1, 2)`: a node is lost, and one worker trains what is left of the epoch."""
    case = Case(kill="node:5", ranks=2, option="elastic")
    with cluster(1, 1) as nodes, pytest.MonkeyPatch.context() as patch:
        # Ray counts the lost node for a moment, and waits so long for two workers.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "90")
        outcome = _disturbed(case, tmp_path, lambda: nodes.order("kill"))
    assert max(outcome.began) > 0, outcome.said[-6000:]
    assert set(outcome.ends) == {"0", "1"} or set(outcome.ends) == {"0"}
    (last,) = [each for each in outcome.attempts["0"][1:] if each]
    trained = [one for number in last for one in outcome.samples["0", number][-1]]
    # Two workers had trained `began` batches each; the rest of the epoch is the one worker's.
    left = SAMPLES - 2 * BATCH * max(outcome.began) % SAMPLES
    first_epoch = trained[: left if left else SAMPLES]
    assert len(set(first_epoch)) == len(first_epoch)
    before = {
        one
        for (_, number), attempts in outcome.samples.items()
        if number <= max(outcome.began)
        for one in attempts[0]
    }
    assert not before & set(first_epoch)
    assert before | set(first_epoch) == set(range(SAMPLES))


def test_an_announced_preemption_makes_a_durable_checkpoint(tmp_path: Path) -> None:
    """Nothing else makes one at that step, and the training goes on to its end."""
    case = Case(kill="node:5", ranks=2, option="preempted")
    with cluster(1, 1) as nodes:
        outcome = _disturbed(case, tmp_path, lambda: nodes.order("drain"), is_lost=False)
    announced = re.search(
        r"Ray announces the preemption of 1 node\(s\): a durable checkpoint begins at step (\d+)",
        outcome.said,
    )
    assert announced, outcome.said[-6000:]
    events = RunDirectory.open(_run(tmp_path)).events()
    durable = {each.step for each in events if isinstance(each, CheckpointDurable)}
    assert int(announced[1]) in durable
    assert len(durable) < 8, "the plan itself makes few"
    assert set(outcome.ends) == {"0", "1"}


def _run(folder: Path) -> Path:
    return folder / "store" / "contract" / "autockpt"


def _disturbed(
    case: Case, folder: Path, disturb: Callable[[], None], *, is_lost: bool = True
) -> Outcome:
    """`disturb()` is called when the worker waits in micro-batch 5 for it."""

    def when_it_waits() -> None:
        deadline = time.monotonic() + WITHIN_S
        while not (folder / "killed").exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)
        workers = [int(path.name.split("-")[2]) for path in folder.glob("samples-*")]
        disturb()
        while is_lost and all(map(_lives, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)  # a worker outlives its raylet by a little: it is to train no more
        (folder / "disturbed").touch()

    thread = threading.Thread(target=when_it_waits)
    thread.start()
    try:
        return protected(FRAMEWORK, case, str(folder))
    finally:
        thread.join()
        end_keeper(str(_run(folder)), nodes=3)


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
