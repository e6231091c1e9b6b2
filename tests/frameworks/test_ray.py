"""The adapter contract in Ray Train, with the real package: Ray starts the workers again."""

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

import autockpt
from autockpt.run_directory import RunDirectory, control_path
from autockpt.values.telemetry import CheckpointDurable, GenerationReplicated, Restored
from benchmarks.namespaces import INTERFACE, Network, network
from tests.conftest import end_keeper, keeper_pids
from tests.contracts.adapter_contract import (
    BY_MICRO_BATCH,
    LATER,
    ROOT,
    AdapterContract,
    Framework,
    Outcome,
    bare,
    protected,
    require_equal,
)
from tests.contracts.adapter_process import BATCH, SAMPLES, Case
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

__all__ = ["endpoint", "s3"]

FRAMEWORK = Framework("ray", "tests/frameworks/ray_driver.py", "ray", launches=True)
WITHIN_S = 300.0
PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": "300", "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000", "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "60000", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}  # fmt: skip
"""A slow start is no failure, no process starts without need, and nothing is slower than it has to
be: Ray's workers give way to all others by default, and reports wait 2 s."""
SUBREAPER = {
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
    "RAY_process_group_cleanup_enabled": "false",
}
"""Within 10 s Ray kills all that a dead worker has started."""

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
def cluster(*cpus: int, **settings: str) -> Iterator[Cluster]:
    """Of a node for each number.  `settings`: of Ray, in the environment."""
    script = str(ROOT / "tests" / "frameworks" / "ray_cluster.py")
    command = [FRAMEWORK.python, script, *map(str, cpus)]
    # A token of this cluster's own: Ray asks drivers for one, and else keeps one in the home.
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **PATIENCE,
             **settings}  # fmt: skip
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


class Machines:
    """Nodes of Ray, each in a network namespace; what is killed in one leaves nothing."""

    def __init__(self, network: Network, folder: str) -> None:
        self.network, self._folder = network, folder
        self._count = 0
        head = network.nodes[0]
        self.framework = dataclasses.replace(FRAMEWORK, prefix=head.prefix)
        """Whose driver runs on the head."""
        self.address = f"{head.host}:6379"

    def start(self, cpus: int) -> None:
        """The next one, by `ray start`; the first is the head."""
        node = self.network.nodes[self._count]
        here = Path(self._folder) / str(self._count)
        here.mkdir()
        place = (
            ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._folder}/ray"]
            if self._count == 0
            else [f"--address={self.address}"]
        )
        self._count += 1
        ray = Path(FRAMEWORK.python).with_name("ray")
        subprocess.run(
            [*node.prefix, str(ray), "start", *place, f"--node-ip-address={node.host}",
             f"--num-cpus={cpus}", "--object-store-memory=100000000", "--disable-usage-stats"],
            check=True, stdout=sys.stderr, timeout=WITHIN_S, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                 "AUTOCKPT_NO_PROFILE": "1", "XDG_RUNTIME_DIR": str(here),
                 "GLOO_SOCKET_IFNAME": INTERFACE},
        )  # fmt: skip


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """So many can be started; all that still runs on them is killed in the end."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        network(count, 1_000_000_000) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        nodes = Machines(made, folder)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # A node that is gone is to be noticed soon.
        soon = {"RAY_health_check_timeout_ms": "10000", "RAY_health_check_period_ms": "1000"}
        for name, value in {**PATIENCE, **soon, **token, "RAY_ADDRESS": nodes.address}.items():
            patch.setenv(name, value)
        yield nodes


@pytest.fixture(scope="module")
def one_node() -> Iterator[None]:
    """One cluster for all cases: a start of Ray takes longer than a training.

    It kills what a worker leaves behind, a process in a session of its own too.
    """
    with cluster(2, **SUBREAPER):
        yield


@pytest.mark.usefixtures("one_node")
class TestRay(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
    not_for: ClassVar[dict[str, str]] = BY_MICRO_BATCH
    more = (*LATER, Case(kill="forward:17", evaluate_every=5, option="epochs"))

    def test_the_keeper_outlives_workers_and_ends_with_the_training(self, tmp_path: Path) -> None:
        """In an actor, though Ray kills whatever a worker leaves; the next one finds it."""
        outcome = protected(FRAMEWORK, Case(kill="forward:8"), str(tmp_path))
        keepers = set(
            re.findall(r"process (\d+), in Ray's detached actor (keeper-\S+)", outcome.said)
        )
        assert len(keepers) == 1, outcome.said
        restored = _restored(tmp_path)
        assert [(each.source, each.step) for each in restored] == [("memory", 7)]
        _wait_for_no_actor()

    def test_a_driver_that_is_started_again_goes_on_from_memory(self, tmp_path: Path) -> None:
        """Its workers have died with it, and the keeper is in no process of the driver's."""
        case = Case(kill="node:8")
        drivers: list[int] = []

        def end_driver() -> None:
            (driver,) = [
                each.pid for each in psutil.Process().children() if str(tmp_path) in each.cmdline()
            ]
            drivers.append(driver)
            os.kill(driver, signal.SIGKILL)

        with pytest.raises(AssertionError, match="ended with -9"):
            _disturbed(case, tmp_path, end_driver, keep=True)
        outcome = protected(FRAMEWORK, case, str(tmp_path))
        assert [(each.source, each.step) for each in _restored(tmp_path)] == [("memory", 7)]
        require_equal(outcome, bare(FRAMEWORK, case.undisturbed))

    def test_a_keeper_starts_beside_ray_where_no_actor_does(self, tmp_path: Path) -> None:
        """An actor that comes too late has nothing to do, and ends."""
        run = tmp_path / "run"
        said = _asked(
            "from autockpt.executors.keeper import launch; "
            "from autockpt.integrations.ray import keeper_actor; keeper_actor.START_S = 0.001; "
            "launch.start_keepers_by(keeper_actor.start_in_actor); "
            f"launch.ensure_keeper('{run}', 0, checkpoints='{run}/checkpoints'); "
        )
        assert "starts as a process beside Ray" in said
        _wait_for_no_actor()  # its keeper finds the other one, and ends
        (pid,) = keeper_pids(str(run))
        assert "KeeperActor" not in psutil.Process(psutil.Process(pid).ppid()).name()
        end_keeper(str(run))

    def test_an_actor_that_is_killed_is_replaced(self, tmp_path: Path) -> None:
        """By the worker, which goes on meanwhile; the new keeper has what the old one had."""
        case = Case(kill="node:8")
        kill = "[ray.kill(ray.get_actor(**each)) for each in ray.util.list_named_actors(True) "
        kill += "if each['name'].startswith('keeper-')]"
        outcome = _disturbed(case, tmp_path, lambda: _asked(kill) and None, is_lost=False)
        assert len(_keepers(outcome)) == 2, outcome.said
        assert outcome.began == [0]
        require_equal(outcome, bare(FRAMEWORK, case.undisturbed))


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


@pytest.mark.root
@pytest.mark.parametrize("place", ["beside the other", "on a new machine"])
def test_a_lost_machine_comes_back_from_the_memory_of_another(place: str, tmp_path: Path) -> None:
    """Two nodes by `ray start`, a network namespace each: nothing of one is left, nor on disk."""
    case = Case(kill="node:5", ranks=2, option="peers")
    alone = 2 if place == "beside the other" else 1
    promised = []
    with machines(3) as nodes:
        nodes.start(alone)
        nodes.start(alone)

        def fail() -> None:
            promised.append(_wait_for(_run(tmp_path), GenerationReplicated, 3))
            nodes.network.nodes[1].kill()
            if place == "on a new machine":
                nodes.start(1)

        outcome = _disturbed(case, tmp_path, fail, framework=nodes.framework)
        require_equal(outcome, bare(nodes.framework, Case(ranks=2)))
        restored = _restored(tmp_path)
        assert {each.rank for each in restored} == {0, 1}
        assert {each.source for each in restored} <= {"memory", "peer"}
        assert min(each.step for each in restored) >= promised[0] > 0
        assert "in Ray's detached actor keeper-000-contract-" in outcome.said


@pytest.mark.usefixtures("s3")
def test_a_store_is_the_disk_where_ray_stores_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker, keeper and run directory are lost: the checkpoints beside Ray's are enough."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    case = Case(kill="node:8", option="store")
    url = f"s3://bucket{tmp_path}/contract/autockpt"
    run = tmp_path / "home" / control_path(url)
    durable = []
    with cluster(2):

        def lose() -> None:
            durable.append(_wait_for(run, CheckpointDurable, 1))
            (worker,) = [int(path.name.split("-")[2]) for path in tmp_path.glob("samples-*")]
            for pid in (worker, *keeper_pids(str(run))):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(run)

        outcome = _disturbed(case, tmp_path, lose, keep=True)
        require_equal(outcome, bare(FRAMEWORK, Case()))
        restored = [each for each in RunDirectory.open(run).events() if isinstance(each, Restored)]
        assert [each.source for each in restored] == ["disk"], outcome.said
        assert restored[0].step >= durable[0]
        located = re.search(rf"located ({url}/\S+)", outcome.said)
        assert located, outcome.said
        assert autockpt.load(located[1])["model"]


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


def _wait_for(run: Path, kind: type[GenerationReplicated | CheckpointDurable], step: int) -> int:
    """The newest step with such an event, which is that step or a later one."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        events = RunDirectory.open(run).events()
        newest = max((each.step for each in events if isinstance(each, kind)), default=0)
        if newest >= step:
            return newest
        time.sleep(0.2)
    raise AssertionError(f"no {kind.__name__} of step {step}")


def _restored(folder: Path) -> list[Restored]:
    """The restores of all ranks."""
    events = RunDirectory.open(_run(folder)).events()
    return [each for each in events if isinstance(each, Restored)]


def _keepers(outcome: Outcome) -> set[tuple[str, str]]:
    """(process, name of its actor) of each keeper that was told of."""
    return set(re.findall(r"process (\d+), in Ray's detached actor (keeper-[\w-]+)", outcome.said))


def _asked(code: str) -> str:
    """What a driver prints."""
    done = subprocess.run(
        [FRAMEWORK.python, "-c", f"import ray; ray.init(log_to_driver=False); {code}"],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=WITHIN_S, cwd=ROOT,
    )  # fmt: skip
    return done.stdout


def _wait_for_no_actor() -> None:
    """Until no keeper has one in the cluster."""
    deadline = time.monotonic() + 60
    while "keeper-" in (left := _asked("print(ray.util.list_named_actors(all_namespaces=True))")):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def _disturbed(
    case: Case, folder: Path, disturb: Callable[[], None], *, is_lost: bool = True,
    framework: Framework = FRAMEWORK, keep: bool = False,
) -> Outcome:  # fmt: skip
    """`disturb()` is called when the worker waits for it; `keep`: the keeper stays in the end."""

    def when_it_waits() -> None:
        deadline = time.monotonic() + WITHIN_S
        while not (folder / "killed").exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)
        workers = [int(path.name.split("-")[2]) for path in folder.glob("samples-*")]
        try:
            disturb()
        except BaseException as error:
            failed.append(error)
        while not failed and is_lost and all(map(_lives, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)  # a worker outlives its raylet by a little: it is to train no more
        (folder / "disturbed").touch()

    failed = list[BaseException]()
    thread = threading.Thread(target=when_it_waits)
    thread.start()
    try:
        outcome = protected(framework, case, str(folder))
        assert not failed, failed
        return outcome
    finally:
        thread.join()
        if not keep:
            end_keeper(str(_run(folder)), nodes=3)


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
