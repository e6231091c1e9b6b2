"""Copies through emulated devices, between network namespaces whose hosts have slow lines."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from autockpt.executors.network.device_path import SETTING
from autockpt.policies.decide import decide
from autockpt.policies.redundancy.peer_costs import peer_costs
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal, RedundancyWish
from autockpt.values.profile import Profile
from autockpt.values.redundancy import Redundancy
from autockpt.values.telemetry import ReplicaFetched
from benchmarks.cluster import Cluster
from benchmarks.namespaces import DEVICE_INTERFACE
from tests.jobs.nodes.conftest import MakeJob, launched

BY_DEVICE = Redundancy(scheme="replicas", copies=2, placement="mixed", path="device")
STEPS = 120
EMULATED = {SETTING: f"{DEVICE_INTERFACE}=200 MB/s"}


@pytest.mark.root
@pytest.mark.timeout(180)
def test_a_lost_node_comes_back_from_a_copy_that_went_through_the_devices(
    new_job: MakeJob,
) -> None:
    """Copies are made through the devices, and restored from host memory to the bit."""
    job = new_job(2, BY_DEVICE, steps=STEPS, devices=True, environment=EMULATED)
    job.start(STEPS // 2)
    job.wait(lambda: job.newest("GenerationReplicated") > 12, "protection")
    job.wait(lambda: job.newest("CheckpointDurable") > 0, "a durable one")
    job.lose((1,))
    promised = job.newest("GenerationReplicated")
    job.start(STEPS)
    restored = job.restored()
    # What is durable as well is read from storage by the rank that was lost.
    sources = [event["source"] for event in restored]
    assert sources in (["memory", "peer"], ["memory", "disk"]), job.tale()
    assert restored[0]["step"] >= promised, job.tale()
    assert job.finish() == job.undisturbed(), job.tale()
    events = job.events("ReplicaFetched")
    paths = [e["path"] for e in events if e["purpose"] == "protect"]
    # When trainers are killed or leave, the last copies come from host memory.
    assert paths.count("emulated device") > 0.8 * len(paths), (paths, job.tale())
    assert {e["path"] for e in events if e["purpose"] == "restore"} <= {"host"}, job.tale()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Lines between hosts, and emulated links between devices."""

    host_bits_per_s: int
    device: str
    wins: str


SCRIPT = ("tests/jobs/nodes/paced.py",)
SETTINGS = ("redundancy.scheme=replicas", "redundancy.copies=2", "redundancy.rate=100 GB/s",
            "disk.chunk=1 MiB", "memory.interval=40 steps", "disk.interval=4000 steps")  # fmt: skip


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "speeds",
    [
        Speeds(host_bits_per_s=80_000_000, device="30 MB/s", wins="device"),
        Speeds(host_bits_per_s=240_000_000, device="10 MB/s", wins="host"),
    ],
    ids=lambda speeds: speeds.wins,
)
def test_the_faster_path_is_chosen_and_as_fast_as_predicted(tmp_path: Path, speeds: Speeds) -> None:
    """Profiled on the job itself; with the speeds swapped the other one is; within 20 %."""
    profile = profiled(tmp_path / "profile", speeds)
    link = profile.link("device_to_peer")
    assert link is not None, profile.warnings
    assert link.between_nodes
    assert "emulated" in link.note
    assert {"peer_host", "peer_device"} <= {m.work for m in profile.interference}
    wish = RedundancyWish(scheme="replicas", copies=2, rate_bytes_per_s=1e11)
    chosen = decide(profile, Goal(redundancy=wish)).plan.redundancy
    assert chosen.path == speeds.wins
    costs = peer_costs(profile, chosen)
    assert costs is not None
    copies = copied(tmp_path / "run", speeds, chosen.path)
    assert {copy.path for copy in copies} == {
        "emulated device" if speeds.wins == "device" else "host"
    }
    took_s = statistics.median(copy.copy_s for copy in copies)
    print(f"{speeds.wins}: predicted {costs.send_s:.3f} s, took {took_s:.3f} s (emulated devices)")
    assert took_s == pytest.approx(costs.send_s, rel=0.2)


def profiled(folder: Path, speeds: Speeds) -> Profile:
    """What `autockpt profile` finds."""
    with two_nodes(folder, speeds, "profile", ("--steps", "400"), settings=()) as job:
        job.finish(within_s=240.0)
        profile = RunDirectory(job.files.path).read_profile()
    assert profile is not None
    return profile


def copied(folder: Path, speeds: Speeds, path: str) -> list[ReplicaFetched]:
    """Copies that a run made, the first of each node dropped: it makes memory and the path."""
    settings = (*SETTINGS, f"redundancy.path={path}")
    with two_nodes(folder, speeds, "run", ("--steps", "100000"), settings=settings) as job:
        found = job.wait_for(
            "copies",
            lambda: found if len(found := job.events(ReplicaFetched)) >= 10 else None,
            120.0,
        )
    return found[4:]


@contextmanager
def two_nodes(
    folder: Path, speeds: Speeds, mode: str, script: tuple[str, ...], *, settings: tuple[str, ...]
) -> Iterator[Cluster]:
    """A job that is launched, on nodes whose devices have a network of their own."""
    folder.mkdir()
    with launched(
        2, speeds.host_bits_per_s, folder, settings=settings, script=(*SCRIPT, *script),
        environment={SETTING: f"{DEVICE_INTERFACE}={speeds.device}"}, mode=mode, devices=True,
    ) as job:  # fmt: skip
        yield job
