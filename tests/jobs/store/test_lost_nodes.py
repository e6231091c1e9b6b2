"""Three nodes that share no directory: network namespaces with disks of their own, and a store."""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from autockpt.executors.storage.catalogue import committed_names
from autockpt.executors.storage.places.choose import place_of
from autockpt.run_directory import RunDirectory
from autockpt.values.generation import Generation
from autockpt.values.telemetry import Restored
from benchmarks.cluster import PORT
from benchmarks.cluster import STORE as RENDEZVOUS
from benchmarks.namespaces import INTERFACE, Network, network
from tests.jobs.kill.zygote import environment
from tests.jobs.store.door import Door
from tests.jobs.store.test_run import SCRIPT, Machine, bare
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

__all__ = ["endpoint", "s3"]

NODES = 3
BITS_PER_S = 1_000_000_000
STEPS = 1500
PACE_S = 0.1
WIDTH = 4096
PATIENCE_S = 180.0


class Trio:
    """Three nodes with a rank each, the store at the switch, and a scheduler that replaces them."""

    def __init__(
        self, folder: Path, net: Network, url: str, settings: Sequence[str], words: Sequence[str]
    ) -> None:
        """`url`: of the checkpoints; `words`: of the script."""
        folder.mkdir()
        self.net, self.url, self.settings = net, url, tuple(settings)
        self.door = Door(net.outside)
        self.machines = [Machine(folder / f"disk{node}", url) for node in range(NODES)]
        self._lost_s = 0.0
        self._meetings = 0
        for node, one in enumerate(self.machines):
            at = net.nodes[node]
            runtime = folder / f"own{node}"
            one.prefix = at.prefix
            one.arguments = ("--width", str(WIDTH), *words)
            one.options = (
                "--nnodes", str(NODES), "--nproc-per-node", "1", "--node-rank", str(node),
                "--rdzv-id", "nodes", "--rdzv-endpoint", f"{net.outside.host}:{PORT}",
                "--local-addr", at.host,
            )  # fmt: skip
            one.variables = {
                "AWS_ENDPOINT_URL": self.door.url, "NO_PROXY": net.outside.host,
                "XDG_RUNTIME_DIR": str(runtime), "GLOO_SOCKET_IFNAME": INTERFACE,
                "AUTOCKPT_CONTROL_INTERFACE": INTERFACE,
            }  # fmt: skip
            runtime.mkdir()

    def start(self, *nodes: int, pace_s: float = PACE_S, steps: int = STEPS) -> None:
        """Launchers on these nodes."""
        for node in nodes:
            self.machines[node].start(steps=steps, pace_s=pace_s, settings=self.settings)

    def meet_anew(self, nodes: int) -> None:
        """Behind a job that has ended: the next one has so many nodes."""
        self.machines = self.machines[:nodes]
        self._meetings += 1
        for one in self.machines:
            words = list(one.options)
            words[words.index("--nnodes") + 1] = str(nodes)
            words[words.index("--rdzv-id") + 1] = f"nodes-{self._meetings}"
            one.options = tuple(words)

    def lose(self, *nodes: int, disks: bool) -> None:
        """With their memory, and their disks where these are lost, too."""
        self._lost_s = time.monotonic()
        for node in nodes:
            self.net.nodes[node].kill()
        for node in nodes:
            job = self.machines[node].job
            assert job is not None
            job.wait(PATIENCE_S)
            if disks:
                shutil.rmtree(self.machines[node].folder / "runs")

    def committed(self) -> int:
        """The newest step that the store has; 0: none."""
        names = committed_names(self.url)
        return Generation.from_name(names[-1]).step if names else 0

    def newest_is_verified(self) -> bool:
        """Whether the newest checkpoint of the store was read back and found whole."""
        names = committed_names(self.url)
        return bool(names) and "VERIFIED" in place_of(self.url).names(f"{self.url}/{names[-1]}")

    def restored(self) -> list[Restored]:
        """By rank, what it went on from after the last loss."""
        found: dict[int, Restored] = {}

        def all_there() -> bool:
            for one in self.machines:
                files = RunDirectory(one.run)
                events = files.events() if files.telemetry.is_dir() else []
                found.update(
                    (event.rank, event) for event in events
                    if isinstance(event, Restored) and event.at_s > self._lost_s
                )  # fmt: skip
            return len(found) == NODES

        self.wait(all_there, "a restore of all ranks")
        return [found[rank] for rank in range(NODES)]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Until something has happened while launchers run."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{what} did not happen; {self.said}"
            assert all(one.is_running for one in self.machines), f"ended before {what}; {self.said}"
            time.sleep(0.1)

    def finish(self) -> dict[int, str]:
        """The digests by rank."""
        return {rank: end for one in self.machines for rank, end in one.finish().items()}

    def end(self) -> None:
        """Nothing of it is left."""
        for node in self.net.nodes:
            node.kill()
        for one in self.machines:
            if one.job is not None:
                one.job.wait(PATIENCE_S)
        self.door.end()

    @property
    def said(self) -> str:
        """Everything that was printed."""
        return "\n".join(f"--- {one.folder.name}\n{one.said[-3000:]}" for one in self.machines)


@pytest.fixture
def net() -> Iterator[Network]:
    """Of three nodes, with a rendezvous store at the switch that outlives them."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(network(NODES, BITS_PER_S))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        at = made.outside
        meeting = stack.enter_context(
            subprocess.Popen(
                [*at.prefix, sys.executable, "-c", RENDEZVOUS, at.host, str(PORT)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        assert meeting.stdout is not None
        assert meeting.stdout.readline() == b"listening\n"
        yield made


@pytest.fixture
def trio(tmp_path: Path, net: Network, s3: None) -> Iterator[Callable[..., Trio]]:
    """Makes the job; nothing of it is left."""
    with contextlib.ExitStack() as stack:

        def make(url: str, *settings: str, words: Sequence[str] = ()) -> Trio:
            made = Trio(tmp_path / "nodes", net, url, settings, words)
            stack.callback(made.end)
            return made

        yield make


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("disks", [True, False], ids=["with-its-disk", "without-its-disk"])
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "store-alone"])
def test_each_node_is_lost_in_turn_and_then_all(
    tmp_path: Path, trio: Callable[..., Trio], disks: bool, copies: bool
) -> None:
    """A peer's memory or the store brings it back; at the end the store alone, which is read once.

    Each rank draws numbers of its own, so that a shard of another one shows.
    """
    expected = {rank: bare(tmp_path, steps=STEPS, seed=rank, width=WIDTH) for rank in range(NODES)}
    assert len(set(expected.values())) == NODES
    url = f"s3://bucket/lost/{disks}-{copies}"
    scheme = ("redundancy.scheme=replicas",) if copies else ("redundancy.scheme=none",)
    job = trio(url, *scheme)
    job.start(*range(NODES))
    began = 0
    for lost in range(NODES):
        job.wait(lambda began=began: job.committed() > began + 10, "a checkpoint in the store")
        kept = job.committed()
        job.lose(lost, disks=disks)
        job.start(lost)
        restored = job.restored()
        assert len({event.step for event in restored}) == 1, restored
        began = restored[0].step
        assert began >= kept, (restored, job.said)
        sources = [event.source for event in restored]
        assert sources[lost] == ("peer" if copies else "disk"), (restored, job.said)
    job.wait(lambda: job.committed() > began + 10, "a checkpoint in the store")
    read, unique = cold_restore(job, disks=disks)
    assert unique <= read <= 1.05 * unique, (read, unique)
    assert job.finish() == expected, job.said


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_all_nodes_share_is_read_once(tmp_path: Path, trio: Callable[..., Trio]) -> None:
    """DDP, stored once for the job: every node needs all bytes, and the store sends each once."""
    words = ("--ddp", "--seed", "0", "--width", str(WIDTH))
    alone = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NODES),
         str(SCRIPT), "--bare", "--steps", str(STEPS), *words],
        env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    found = set(re.findall(r"digest of rank \d: ([0-9a-f]{64})", alone.stdout))
    assert len(found) == 1, alone.stdout
    (expected,) = found
    job = trio("s3://bucket/lost/shares", "staging.shares=job", words=words)
    job.start(*range(NODES))
    job.wait(lambda: job.committed() >= 20, "two checkpoints in the store")
    read, unique = cold_restore(job, disks=True)
    print(f"a cold restore of {NODES} nodes: {read} bytes of shards read, {unique} are unique")
    assert unique <= read <= 1.05 * unique, (read, unique)
    settings, job.settings = job.settings, (*job.settings, "disk.read_once=false")
    read, unique = cold_restore(job, disks=True)
    print(f"where each reads what it needs: {read} bytes of shards read, {unique} are unique")
    assert NODES * unique <= 1.05 * read, (read, unique)
    job.settings = settings
    # Node 1 is lost while the others wait for what it reads.
    newest = lose_all(job, disks=True)
    before = job.door.shards_read_bytes(newest)
    job.door.held_host = job.net.nodes[1].host
    job.start(*range(NODES), pace_s=0.0)
    job.wait(job.door.held.is_set, "node 1 reads from the store")
    job.lose(1, disks=True)
    job.door.held_host = ""
    job.start(1, pace_s=0.0)
    assert {event.generation for event in job.restored()} == {str(Generation.from_name(newest))}
    read = job.door.shards_read_bytes(newest) - before
    # Of its shard: an answer that it did not hear, one for the nodes that waited, one when it was
    # back.  The other shards were read once: keepers still had them.
    assert read <= 1.05 * (NODES - 1 + 3) / NODES * unique, (read, unique)
    assert job.finish() == dict.fromkeys(range(NODES), expected), job.said


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shares", ["node", "job"])
def test_what_all_need_is_read_once_by_fewer_nodes(trio: Callable[..., Trio], shares: str) -> None:
    """DDP resumes on three nodes and on two of them.

    `node`: each shard has all state, and they differ in one chunk; `job`: it is in all shards.
    """
    words = ("--ddp", "--seed", "0", "--width", str(16 * WIDTH))  # a header is short beside it
    url = f"s3://bucket/lost/fewer-{shares}"
    rare = "disk.interval=200 steps"  # the newest checkpoint is read back before the next one
    job = trio(url, f"staging.shares={shares}", "disk.chunk=256 KiB", rare, words=words)
    job.start(*range(NODES))
    job.wait(lambda: job.committed() > 0, "a checkpoint in the store")
    newest = lose_all(job, disks=True)
    step = Generation.from_name(newest).step
    sizes = place_of(url).sizes(f"{url}/{newest}")
    shards = [nbytes for name, nbytes in sorted(sizes.items()) if name.startswith("shard-")]
    unique = shards[0] if shares == "node" else sum(shards)

    settings, digests = job.settings, set[str]()

    def read_by(nodes: int, *, once: bool) -> float:
        """Bytes read over unique ones."""
        job.settings = (*settings, f"disk.read_once={str(once).lower()}")
        job.meet_anew(nodes)
        before = job.door.shards_read_bytes(newest)
        job.start(*range(nodes), pace_s=0.0, steps=step)
        found = job.finish()
        assert set(found) == set(range(nodes)), job.said
        digests.update(found.values())
        for one in job.machines:
            shutil.rmtree(one.folder / "runs")
        return (job.door.shards_read_bytes(newest) - before) / unique

    for nodes in (NODES, NODES - 1):
        once, each = (read_by(nodes, once=way) for way in (True, False))
        print(f"shares of the {shares}, {nodes} nodes: {once:.3f}; {each:.3f} where each reads")
        assert 1.0 <= once <= 1.05, (nodes, once, each)
        assert each >= 0.95 * nodes, (nodes, once, each)
    assert len(digests) == 1, digests


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_disks_alone_are_refused(tmp_path: Path, trio: Callable[..., Trio]) -> None:
    """One path, a disk each: every launcher ends with the code of storage, and says what to do."""
    path = tmp_path / "run"
    path.mkdir()
    job = trio(str(path / "checkpoints"))
    for one in job.machines:
        bind = 'mount --bind "$0" "$1" && shift && exec "$@"'
        one.prefix = (*one.prefix, "sh", "-c", bind, str(one.folder), str(path))
        one.options = (*one.options, "--run-dir", str(path))
    began = time.monotonic()
    job.start(*range(NODES))
    for one in job.machines:
        assert one.job is not None
        assert one.job.wait(PATIENCE_S) == 74, job.said
        assert "not shared by all nodes" in one.said
        assert "Give the run a directory on storage that all nodes see" in one.said
    took = time.monotonic() - began
    assert took < 90.0, f"{took:.0f} s"
    assert not list(path.iterdir()), "it was hidden under the disks"


def cold_restore(job: Trio, *, disks: bool) -> tuple[int, int]:
    """Loses all nodes and starts them again: (bytes read of the newest shards, their bytes)."""
    newest = lose_all(job, disks=disks)
    sizes = place_of(job.url).sizes(f"{job.url}/{newest}")
    unique = sum(nbytes for name, nbytes in sizes.items() if name.startswith("shard-"))
    before = job.door.shards_read_bytes(newest)
    job.start(*range(NODES), pace_s=0.0)
    restored = job.restored()
    assert {event.source for event in restored} == {"disk"}
    assert {event.generation for event in restored} == {str(Generation.from_name(newest))}
    return job.door.shards_read_bytes(newest) - before, unique


def lose_all(job: Trio, *, disks: bool) -> str:
    """Loses all nodes; the name of the newest checkpoint.

    It was read back before: a start would do that beside its restore.
    """
    while True:
        job.wait(job.newest_is_verified, "a checkpoint is read back")
        job.lose(*range(NODES), disks=disks)
        if job.newest_is_verified():
            return committed_names(job.url)[-1]
        job.start(*range(NODES))
        job.restored()
