"""A node is lost with its memory, and the job goes on from the memory of the others.

    make demo-nodes                         # or: python examples/demo_nodes.py --lose 2

Five network namespaces on this machine are four nodes and a spare.  Each has an interface, a line
of 1 Gbit/s and a launcher; the four have a keeper and a trainer of `gpt/train.py`.  The rendezvous
store runs at the switch, as it would on a login node.  The spare takes the place of the node that
this script kills.  The training must end with the digest of an undisturbed run of the bare script.
Needs root, for the namespaces; exit code 0: everything held.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from demo import MARK, ROOT, Failed, Story, digest_of, end_everything, shown

from autockpt.reports.analysis.restarts import LABELS, Restart, restarts
from autockpt.values import telemetry as t
from autockpt.values.placement import place
from autockpt.values.redundancy import Redundancy
from autockpt.values.units import format_bytes, format_duration
from benchmarks.cluster import Cluster, ClusterError, cluster

NODES = 4
SPARE = NODES
BITS_PER_S = 1_000_000_000
JOB = ("examples/gpt/train.py", "--size", "1m", "--batch", "1", "--accumulation", "1",
       "--threads", "1", "--digest", "--text-bytes", "400000")  # fmt: skip
STEPS = 400
MEMORY_STEPS, DISK_STEPS = 5, 60
SETTINGS = (f"memory.interval={MEMORY_STEPS} steps", f"disk.interval={DISK_STEPS} steps",
            "redundancy.scheme=replicas", "redundancy.copies=2", "restart.standby=on")  # fmt: skip
COPIES = Redundancy(scheme="replicas", copies=2)
KILL_AFTER = 30
"""Steps that are protected when the node is lost."""
STAGE_S = 90.0


# ---------------------------------------------------------------------------- the chapters


def train(story: Story, job: Cluster) -> None:
    """Start everything; until there is something to lose."""
    story.chapter(
        "Train on four nodes",
        f"Every {MEMORY_STEPS} steps each rank's state goes into its node's memory, and from there "
        "into that of another node. The disk gets one checkpoint in twelve of these.",
    )
    commands = [job.launch(node) for node in range(NODES)]
    story.command(["autockpt", *commands[0][2:]])
    story.say(
        f"... and the same on {NODES - 1} more nodes. A fifth one begins it later, as a spare."
    )
    job.wait_for("a first checkpoint", lambda: job.events(t.GenerationReplicated) or None, STAGE_S)
    job.launch(SPARE)
    job.wait_for(
        "a protected checkpoint",
        lambda: [e for e in job.events(t.GenerationReplicated) if e.step >= KILL_AFTER] or None,
        STAGE_S,
    )
    job.wait_for("parked processes", lambda: len(parked(job)) == NODES + 1 or None, STAGE_S)
    for node in range(NODES):
        holders = place(COPIES, NODES).cell_of(node).holders(node)
        story.fact(f"rank {node}", f"trains on node {node}; its checkpoint is in the memory of "
                   f"nodes {' and '.join(map(str, holders))}")  # fmt: skip
    protected = job.events(t.GenerationReplicated)
    copied = [e for e in job.events(t.ReplicaFetched) if e.purpose == "protect"]
    latencies = sorted(e.latency_s for e in protected)
    rates = sorted(8 * e.bytes / e.copy_s / 1e6 for e in copied if e.copy_s > 0)
    story.fact(
        "protected",
        f"up to step {protected[-1].step}; a checkpoint of {format_bytes(copied[-1].bytes)} a rank "
        f"survives the loss of a node {format_duration(latencies[len(latencies) // 2])} after its "
        f"snapshot began (median), copied at {rates[len(rates) // 2]:.0f} Mbit/s",
    )
    story.fact("parked", "a process on each node, the spare too, that has imported what a rank has")


def parked(job: Cluster) -> list[int]:
    """Processes on all nodes that wait for a restart."""
    every = [pid for node in job.net.nodes for pid in node.pids()]
    return [pid for pid in every if _command(pid) == b"autockpt: standby for a restart"]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return b""


def lose(story: Story, job: Cluster, node: int) -> tuple[float, int]:
    """SIGKILL for everything on a node; (when, promised step)."""
    (partner,) = [n for n in place(COPIES, NODES).cell_of(node).members if n != node]
    story.chapter("Lose a node", f"Launcher, trainer and keeper of node {node} are killed at once.")
    killed_s = job.lose(node)
    promised = max(e.step for e in job.events(t.GenerationReplicated))
    durable = max((e.step for e in job.events(t.CheckpointDurable)), default=0)
    story.blow(f"SIGKILL to all processes of node {node}; what its memory held is gone")
    story.fact("lost", f"rank {node}'s state, its checkpoints in memory, and the copies of rank "
               f"{partner} that it kept")  # fmt: skip
    story.fact(
        "still there",
        f"rank {node}'s checkpoint of step {promised} on node {partner}, and those of all others "
        f"where they train; on disk: {f'step {durable}' if durable else 'nothing yet'}",
    )
    story.fact("replaced", "by the spare node, which has waited; no scheduler is asked")
    return killed_s, promised


def recover(story: Story, job: Cluster, node: int, killed_s: float, promised: int) -> None:
    """Everybody is back: from where, at what step, and where the time went."""

    def back() -> dict[int, t.FirstIterationEnded] | None:
        found = {e.rank: e for e in job.events(t.FirstIterationEnded, since_s=killed_s)}
        return found if len(found) == NODES else None

    first = job.wait_for("an iteration of all ranks", back, STAGE_S)
    restored = {e.rank: e for e in job.events(t.Restored, since_s=killed_s)}
    sources = {rank: event.source for rank, event in restored.items()}
    wanted = {rank: "peer" if rank == node else "memory" for rank in range(NODES)}
    steps = {event.step for event in restored.values()}
    if sources != wanted or len(steps) != 1 or min(steps) < promised:
        raise Failed(f"restored {sources} at steps {steps}, expected {wanted} at {promised} or "
                     f"later; see {shown(job.files.path)}")  # fmt: skip
    story.chapter("Back", f"All ranks go on at step {min(steps)}.")
    fetched = [e for e in job.events(t.ReplicaFetched, since_s=killed_s)
               if e.purpose == "restore"]  # fmt: skip
    for copy in fetched:
        story.fact("fetched", f"rank {copy.shard_rank}'s {format_bytes(copy.bytes)} from node "
                   f"{copy.from_node} in {format_duration(copy.copy_s)}")  # fmt: skip
    noticed = min(e.at_s for e in job.events(t.FailureObserved, since_s=killed_s))
    story.fact("noticed", f"{format_duration(noticed - killed_s)} after the kill")
    witness = max((r for r in first if r != node), key=lambda rank: first[rank].at_s)
    (way,) = restarts(since(job, killed_s), witness, killed_s)
    tell_parts(story, way, f"from there to the first new iteration of rank {witness}")


def since(job: Cluster, killed_s: float) -> list[t.Event]:
    """All events after the kill, oldest first."""
    return [e for e in job.files.events() if e.at_s >= killed_s]


def tell_parts(story: Story, way: Restart, title: str) -> None:
    """A restart, part by part."""
    story.fact("recovered in", f"{format_duration(way.total_s)} {title}, of which")
    for name, label in LABELS.items():
        seconds = way.parts.get(name)
        if seconds is not None:
            story.fact("", f"{format_duration(seconds):>8}  {label}")


def finish(story: Story, job: Cluster) -> None:
    """To the end, and the comparison."""
    story.chapter("To the end, and compare", "The bare script under plain torchrun, undisturbed:")
    digest = digest_of(job.finish(STAGE_S), job.folder / "node-*.log")
    argv = ["-m", "torch.distributed.run", "--nproc-per-node", str(NODES), *JOB, "--steps",
            str(STEPS), "--no-checkpoint"]  # fmt: skip
    story.command(["torchrun", *argv[2:]])
    ended = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=STAGE_S,
        check=False, env={**os.environ, MARK: str(job.folder), "PYTHONPATH": str(ROOT),
                          "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    (job.folder / "bare.log").write_text(ended.stdout + ended.stderr)
    bare = digest_of(ended.stdout.splitlines(), job.folder / "bare.log")
    story.fact("a node lost", digest)
    story.fact("undisturbed", bare)
    if digest != bare:
        raise Failed(f"the digests differ; see {shown(job.folder)}")
    story.good("equal, to the bit")
    story.fact("report", shown(job.files.report))


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
    script = (*JOB, "--steps", str(STEPS), "--log-every", str(STEPS // 4))
    try:
        with cluster(NODES, BITS_PER_S, folder, settings=SETTINGS, script=script, spare=1,
                     environment={MARK: str(folder)}) as job:  # fmt: skip
            train(story, job)
            killed_s, promised = lose(story, job, arguments.lose)
            recover(story, job, arguments.lose, killed_s, promised)
            finish(story, job)
    except (OSError, subprocess.CalledProcessError) as error:
        story.say(f"There are no network namespaces to be had here: {error}")
        story.say("They need root and the tools ip and tc. Run it as root (sudo make demo-nodes), "
                  "in a container with --privileged, or on a virtual machine. Without them, `make "
                  "demo` shows recoveries within one node.")  # fmt: skip
        return 2
    except (Failed, ClusterError) as error:
        story.say("")
        story.blow(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        story.say("interrupted; everything that was started is ended")
        return 130
    finally:
        end_everything(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
