"""A node is lost with its memory, and the job goes on from the memory of the others.

    make demo-nodes                         # or: python examples/demo_nodes.py --lose 2

Four network namespaces on this machine are four nodes, each with an interface, a line of 1 Gbit/s,
a launcher, a keeper and a trainer of `gpt/train.py`.  The rendezvous store runs at the switch, as it
would on a login node, and this script is the scheduler: it replaces the node that it kills.  The
training must end with the digest of the bare script that nobody touched.  Needs root, for the
namespaces; exit code 0: everything held.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo import MARK, ROOT, E, Failed, R, Story, digest_of, end_everything, shown

from autockpt.reports.restarts import LABELS, Restart, restarts
from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from autockpt.values.placement import place
from autockpt.values.redundancy import Redundancy
from autockpt.values.units import format_bytes, format_duration
from benchmarks.namespaces import INTERFACE, Network, Node, network

NODES = 4
BITS_PER_S = 1_000_000_000
PORT = 29400
JOB = ("examples/gpt/train.py", "--size", "1m", "--batch", "1", "--accumulation", "1",
       "--threads", "1", "--digest", "--text-bytes", "400000")  # fmt: skip
STEPS = 160
MEMORY_STEPS, DISK_STEPS = 5, 60
COPIES = Redundancy(scheme="replicas", copies=2)
KILL_AFTER = 30
"""Steps that are protected when the node is lost."""
STAGE_S = 90.0
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print("listening", flush=True)
sys.stdin.read()
"""


class Cluster:
    """Launchers on nodes, and what they write."""

    def __init__(self, net: Network, folder: Path, private: Path, stack: ExitStack) -> None:
        self.net, self.folder, self._private, self._stack = net, folder, private, stack
        self.files = RunDirectory(folder / "run")
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._logs = 0

    def host_rendezvous(self) -> None:
        """The store outlives every node."""
        store = self.spawn(
            self.net.outside, (sys.executable, "-c", STORE, self.net.outside.host, str(PORT)),
            self._private, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert store.stdout is not None
        self._stack.callback(store.stdout.close)
        if store.stdout.readline() != b"listening\n":
            raise Failed(f"the rendezvous store did not start on {self.net.outside.host}:{PORT}")

    def launch(self, node: int) -> list[str]:
        """`autockpt run` on one node; the command."""
        at = self.net.nodes[node]
        argv = [
            "-m", "autockpt", "run", "--no-profile", "--nnodes", str(NODES),
            "--rdzv-id", "demo", "--rdzv-endpoint", f"{self.net.outside.host}:{PORT}",
            "--local-addr", at.host, "--run-dir", str(self.files.path),
            "--set", f"memory.interval={MEMORY_STEPS} steps",
            "--set", f"disk.interval={DISK_STEPS} steps",
            "--set", "redundancy.scheme=replicas", "--set", f"redundancy.copies={COPIES.copies}",
            *JOB, "--steps", str(STEPS), "--log-every", str(STEPS // 4),
        ]  # fmt: skip
        runtime = self._private / f"node-{node}"
        shutil.rmtree(runtime, ignore_errors=True)  # a new machine has nothing in its /run
        runtime.mkdir()
        self._logs += 1
        with open(self.log(node), "ab") as log:
            self.launchers[node] = self.spawn(
                at, (sys.executable, *argv), runtime, stdout=log, stderr=log
            )
        return argv

    def spawn(
        self, node: Node, argv: Sequence[str], runtime: Path, **streams: Any
    ) -> "subprocess.Popen[bytes]":
        """A process on a node."""
        environment = {
            **os.environ, MARK: str(self.folder), "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(runtime), "GLOO_SOCKET_IFNAME": INTERFACE,
            "AUTOCKPT_CONTROL_INTERFACE": INTERFACE, "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
        return subprocess.Popen(
            [*node.prefix, *argv], cwd=ROOT, env=environment, start_new_session=True, **streams
        )

    def log(self, node: int) -> Path:
        """What the launcher and rank of a node said."""
        return self.folder / f"node-{node}.log"

    def events(self, kind: type[E], *, since_s: float = 0.0) -> list[E]:
        """Events of one kind, oldest first."""
        events = self.files.events() if self.files.telemetry.is_dir() else []
        return [e for e in events if isinstance(e, kind) and e.at_s >= since_s]

    def wait_for(self, what: str, look: Callable[[], R | None]) -> R:
        """What `look` returns, as soon as it returns something."""
        deadline = time.monotonic() + STAGE_S
        while time.monotonic() < deadline:
            found = look()
            if found is not None:
                return found
            codes = [launcher.poll() for launcher in self.launchers.values()]
            if any(code is not None for code in codes):
                raise Failed(f"a launcher ended before {what}; see {shown(self.folder)}/node-*.log")
            time.sleep(0.1)
        raise Failed(f"{what} was not seen within {STAGE_S:.0f} s; see {shown(self.folder)}")

    def digest(self) -> str:
        """What rank 0 printed in the end."""
        for node, launcher in self.launchers.items():
            if launcher.wait(timeout=STAGE_S) != 0:
                raise Failed(f"node {node} ended with {launcher.returncode}; see {self.log(node)}")
        lines = [x for n in range(NODES) for x in self.log(n).read_text().splitlines()]
        return digest_of(lines, self.folder / "node-*.log")


# ---------------------------------------------------------------------------- the chapters


def train(story: Story, cluster: Cluster) -> None:
    """Start everything; until there is something to lose."""
    story.chapter(
        "Train on four nodes",
        f"Every {MEMORY_STEPS} steps each rank's state goes into its node's memory, and from there "
        "into that of another node. The disk gets one checkpoint in twelve of these.",
    )
    cluster.host_rendezvous()
    commands = [cluster.launch(node) for node in range(NODES)]
    story.command(["autockpt", *commands[0][2:]])
    story.say(f"... and the same on {NODES - 1} more nodes.")
    (cell, *_) = place(COPIES, NODES).cells
    cluster.wait_for(
        "a protected checkpoint",
        lambda: [e for e in cluster.events(t.GenerationProtected) if e.step >= KILL_AFTER] or None,
    )
    for node in range(NODES):
        holders = place(COPIES, NODES).cell_of(node).holders(node)
        story.fact(f"rank {node}", f"trains on node {node}; its checkpoint is in the memory of "
                   f"nodes {' and '.join(map(str, holders))}")  # fmt: skip
    protected = cluster.events(t.GenerationProtected)
    copied = [e for e in cluster.events(t.ShardCopied) if e.purpose == "protect"]
    latencies = sorted(e.latency_s for e in protected)
    rates = sorted(8 * e.bytes / e.copy_s / 1e6 for e in copied if e.copy_s > 0)
    story.fact(
        "protected",
        f"up to step {protected[-1].step}; a checkpoint of {format_bytes(copied[-1].bytes)} a rank "
        f"survives the loss of a node {format_duration(latencies[len(latencies) // 2])} after its "
        f"snapshot began (median), copied at {rates[len(rates) // 2]:.0f} Mbit/s",
    )


def lose(story: Story, cluster: Cluster, node: int) -> tuple[float, int]:
    """SIGKILL for everything on a node, and a new machine in its place; (when, promised step)."""
    (partner,) = [n for n in place(COPIES, NODES).cell_of(node).members if n != node]
    story.chapter("Lose a node", f"Launcher, trainer and keeper of node {node} are killed at once.")
    killed_s = time.monotonic()
    cluster.net.nodes[node].kill()
    cluster.launchers.pop(node).wait()
    promised = max(e.step for e in cluster.events(t.GenerationProtected))
    durable = max((e.step for e in cluster.events(t.PersistCommitted)), default=0)
    story.blow(f"SIGKILL to all processes of node {node}; what its memory held is gone")
    story.fact("lost", f"rank {node}'s state, its checkpoints in memory, and the copies of rank "
               f"{partner} that it kept")  # fmt: skip
    story.fact("still there", f"rank {node}'s checkpoint of step {promised} on node {partner}, and "
               f"those of all others where they train; on disk: step {durable or 'none'}")  # fmt: skip
    cluster.launch(node)
    story.fact("replaced", "a new machine is started in its place, as a scheduler would")
    return killed_s, promised


def recover(story: Story, cluster: Cluster, node: int, killed_s: float, promised: int) -> None:
    """Everybody is back: from where, at what step, and where the time went."""

    def back() -> dict[int, t.FirstIterated] | None:
        found = {e.rank: e for e in cluster.events(t.FirstIterated, since_s=killed_s)}
        return found if len(found) == NODES else None

    first = cluster.wait_for("an iteration of all ranks", back)
    restored = {e.rank: e for e in cluster.events(t.Restored, since_s=killed_s)}
    sources = {rank: event.source for rank, event in restored.items()}
    wanted = {rank: "peer" if rank == node else "memory" for rank in range(NODES)}
    steps = {event.step for event in restored.values()}
    if sources != wanted or len(steps) != 1 or min(steps) < promised:
        raise Failed(f"restored {sources} at steps {steps}, expected {wanted} at {promised} or "
                     f"later; see {shown(cluster.files.path)}")  # fmt: skip
    story.chapter("Back", f"All ranks go on at step {min(steps)}.")
    fetched = [e for e in cluster.events(t.ShardCopied, since_s=killed_s)
               if e.purpose == "restore"]  # fmt: skip
    for copy in fetched:
        story.fact("fetched", f"rank {copy.shard_rank}'s {format_bytes(copy.bytes)} from node "
                   f"{copy.from_node} in {format_duration(copy.copy_s)}")  # fmt: skip
    noticed = min(e.at_s for e in cluster.events(t.FailureObserved, since_s=killed_s))
    story.fact("noticed", f"{format_duration(noticed - killed_s)} after the kill")
    witness = max((r for r in first if r != node), key=lambda rank: first[rank].at_s)
    (way,) = restarts(since(cluster, killed_s), witness, killed_s)
    tell_parts(story, way, f"from there to the first new iteration of rank {witness}")


def since(cluster: Cluster, killed_s: float) -> list[t.Event]:
    """All events after the kill, oldest first."""
    return [e for e in cluster.files.events() if e.at_s >= killed_s]


def tell_parts(story: Story, way: Restart, title: str) -> None:
    """A restart, part by part."""
    story.fact("recovered in", f"{format_duration(way.total_s)} {title}, of which")
    for name, label in LABELS.items():
        seconds = way.parts.get(name)
        if seconds is not None:
            story.fact("", f"{format_duration(seconds):>8}  {label}")


def finish(story: Story, cluster: Cluster) -> None:
    """To the end, and the comparison."""
    story.chapter("To the end, and compare", "The bare script under plain torchrun, undisturbed:")
    digest = cluster.digest()
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", str(NODES), *JOB, "--steps",
            str(STEPS), "--no-checkpoint"]  # fmt: skip
    story.command(["torchrun", *argv[2:]])
    ended = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=STAGE_S,
        check=False, env={**os.environ, MARK: str(cluster.folder), "PYTHONPATH": str(ROOT),
                          "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    (cluster.folder / "bare.log").write_text(ended.stdout + ended.stderr)
    bare = digest_of(ended.stdout.splitlines(), cluster.folder / "bare.log")
    story.fact("a node lost", digest)
    story.fact("undisturbed", bare)
    if digest != bare:
        raise Failed(f"the digests differ; see {shown(cluster.folder)}")
    story.good("equal, to the bit")
    story.fact("report", shown(cluster.files.report))


def main() -> int:
    """Tell the story; 0 only if everything held."""
    parser = argparse.ArgumentParser(description="Lose a node of four and go on.")
    parser.add_argument("--lose", type=int, default=2, choices=range(NODES), help="which node")
    arguments = parser.parse_args()
    folder = ROOT / "runs" / f"demo-nodes-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    story = Story()
    story.say("autockpt demo: a job on four nodes loses one, with everything that was on it.")
    story.fact("written to", shown(folder))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        stack.callback(end_everything, folder)
        # Paths of sockets are short, and what is a node's own is gone with it.
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-")))
        try:
            net = stack.enter_context(network(NODES, BITS_PER_S))
        except (OSError, subprocess.CalledProcessError) as error:
            story.say(f"There are no network namespaces to be had here: {error}")
            story.say("They take root and the tools ip and tc: run it as root (sudo make "
                      "demo-nodes), in a container with --privileged, or on a virtual machine. "
                      "Without them, `make demo` shows recoveries within one node.")  # fmt: skip
            return 2
        try:
            cluster = Cluster(net, folder, private, stack)
            train(story, cluster)
            killed_s, promised = lose(story, cluster, arguments.lose)
            recover(story, cluster, arguments.lose, killed_s, promised)
            finish(story, cluster)
        except Failed as error:
            story.say("")
            story.blow(f"FAILED: {error}")
            return 1
        except KeyboardInterrupt:
            story.say("interrupted; everything that was started is ended")
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
