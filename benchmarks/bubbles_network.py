"""`make bench-bubbles-network`: replication over a shaped link, gated by idle windows and not.

Two ranks in network namespaces on one machine, joined by a link that `tc` holds to 400 Mbit/s each
way (needs root), and beside each of them the part of a keeper that moves copies, in a process of
its own.  An iteration is layers of compute (a timed wait: an **emulated accelerator**) and an
all-reduce over gloo, which together use a known share of the link.  At every boundary node 1
fetches as many bytes of a checkpoint from node 0: as they come, or in the windows that rank 0
marks on the page it shares with its keeper (`keeper/replication/network_windows.py`, as in a
run). Blocks of iterations with it alternate with blocks without, right before; the cost is the
ratio of their times less one.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.keeper.client.traffic_marks import MarkWriter
from autockpt.executors.keeper.replication.network_windows import NodeWindows
from autockpt.executors.keeper.slots import BOARD_BYTES, RankMemory
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.handshake import Identity
from autockpt.executors.network.transfer.destination import SlotDestination
from autockpt.executors.network.transfer.events import FetchEnd, TransferFailed
from autockpt.executors.network.transfer.frames import Subject
from autockpt.executors.network.transfer.pool import TransferPool
from autockpt.executors.network.transfer.session import Loan
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.protocol.messages import Incarnation
from autockpt.executors.throttle.idle_windows import WindowUse
from autockpt.profiles.probes.windows.collectives import CollectiveHooks, CollectiveRecorder
from autockpt.values.generation import Generation
from benchmarks.harness import Row, parse, publish, row

MBIT = 400
LAYERS = 6
COMPUTE_S = 0.016
"""Of one layer."""
LAYER_BYTES = 2**20 // 2
"""Gradients that a layer's all-reduce exchanges: 10 ms of the link."""
REPLICA_BYTES = 5 * 2**19
"""Of a checkpoint, sent at every boundary: 52 ms of the link."""
WAYS = ("ungated", "gated")
PORT = 29555
HOSTS = ("10.77.0.1", "10.77.0.2")
WARM = 6
RUN, SECRET = "0123456789abcdef", bytes(32)
PATIENCE_S = 60.0


class Replica:
    """The sealed image that node 0 lends, the same wherever it is made."""

    def __init__(self) -> None:
        self.arena = Arena.create_shared(REPLICA_BYTES, name="bench-replica")
        self.image = self.arena.view[:REPLICA_BYTES]
        self.index = ImageIndex(
            run_id=RUN, generation=Generation(term=1, step=1), step=1, rank=0, world_size=2,
            layout_digest="", image_bytes=REPLICA_BYTES, chunk_bytes=8 * 2**20,
            digests=(chunk_digest(self.image),),
        )  # fmt: skip

    @property
    def source(self) -> ImageSource:
        """To lend it."""
        assert self.arena.fd is not None
        return ImageSource(self.arena.fd, self.image, self.index)


def identity(node: int) -> Identity:
    """A keeper of this benchmark."""
    incarnation = Incarnation(launch_id="bench", restart_round=0)
    return Identity(run_id=RUN, node=node, incarnation=incarnation)


def lender_main(board_fd: int, folder: Path) -> None:
    """Lends the replica by either way, each at its own port, until it is ended."""
    memory, source = RankMemory(rank=0, board=Arena.attach(board_fd)), Replica().source
    uses = (folder / "uses").open("w", buffering=1)

    def told(use: WindowUse, seconds: float) -> None:
        said = {"share": use.share, "reason": use.reason, "chunk_bytes": use.chunk_bytes}
        uses.write(json.dumps(said) + "\n")

    windows, ports = NodeWindows(lambda: 0.0, told), {}
    for way in WAYS:
        gated = way == "gated"
        pool = TransferPool(
            SECRET, identity(0),
            lambda peer, want, gated=gated: Loan(
                source=source, deadline_s=PATIENCE_S, windows=windows.of(memory) if gated else None
            ),
        )  # fmt: skip
        ports[way] = pool.listen(HOSTS[0])
    (folder / "ports.new").write_text(json.dumps(ports))
    (folder / "ports.new").rename(folder / "ports")
    threading.Event().wait()


def fetcher_main(asked: int, done: int, folder: Path) -> None:
    """Fetches the replica as often as the pipe says, and says when it is there."""
    while not (folder / "ports").exists():
        time.sleep(0.01)
    ports, replica, into = json.loads((folder / "ports").read_text()), Replica(), Replica()
    pool = TransferPool(SECRET, identity(1), lambda peer, want: "nothing is lent here")
    pool.listen(HOSTS[1])
    subject = Subject.of(replica.index, "image")

    def ended(event: FetchEnd) -> None:
        os.write(done, b"f" if isinstance(event, TransferFailed) else b".")

    while word := os.read(asked, 1):
        address = HOSTS[0], ports[next(way for way in WAYS if way[0] == word.decode())]
        pool.fetch(
            0, address, subject, replica.index.root, SlotDestination(into.image, subject),
            ended=ended, deadline_s=PATIENCE_S,
        )  # fmt: skip


class Replication:
    """Rank 0's word to the fetcher."""

    def __init__(self, asked: int, done: int) -> None:
        self._asked, self._done, self._busy = asked, done, False

    def begin(self, way: str) -> None:
        """One replica, behind the training; an earlier one is waited for."""
        self.rest()
        os.write(self._asked, way[0].encode())
        self._busy = True

    def rest(self) -> None:
        """Waits until everything is sent."""
        if self._busy and os.read(self._done, 1) != b".":
            raise SystemExit("a replica was not fetched")
        self._busy = False


def rank_main(rank: int, out: Path, given: dict[str, Any], fds: list[int]) -> None:
    """One rank; `fds`: of rank 0's board and pipes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    board = Arena.attach(fds[0]) if fds else Arena.anonymous(BOARD_BYTES)
    marks, recorder = MarkWriter(board.view), CollectiveRecorder()
    marks.spread(1)
    hooks = CollectiveHooks(recorder, marks)
    hooks.attach()
    replication = Replication(*fds[1:]) if fds else None
    gradients = torch.zeros(LAYER_BYTES // 4)

    def iterate(way: str) -> None:
        for _ in range(LAYERS):
            time.sleep(COMPUTE_S)
            dist.all_reduce(gradients)
        marks.step_began()
        marks.boundary()
        recorder.boundary()
        if replication is not None and way != "none":
            replication.begin(way)

    def block(way: str) -> float:
        iterate(way)
        began = time.perf_counter()
        for _ in range(given["iterations"]):
            iterate(way)
        took = (time.perf_counter() - began) / given["iterations"]
        if replication is not None:
            replication.rest()
        return took

    for way in ("none", *WAYS, "gated"):  # the windows are learned, then the rate of the link
        for _ in range(WARM):
            iterate(way)
    if replication is not None:
        replication.rest()
    recorder.samples.clear()
    order, blocks = random.Random(0), []
    for _ in range(given["rounds"]):
        for way in order.sample(WAYS, len(WAYS)):
            without = block("none")
            blocks.append((way, block(way), without))
    busy = [
        sum(end - begin for begin, end in sample.spans) / sample.iteration_s
        for sample in recorder.samples
    ]
    out.write_text(json.dumps({"blocks": blocks, "busy": statistics.median(busy)}))
    hooks.detach()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a normal end


@contextmanager
def link() -> Iterator[tuple[str, str]]:
    """Two namespaces and a shaped link between them."""
    names = [f"bub{os.getpid()}{side}" for side in "ab"]
    ends = [f"vb{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            ip("link", "set", end, "netns", name)
            inside = ("-n", name)
            ip(*inside, "link", "set", end, "name", "veth0")
            ip(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", "veth0")
            ip(*inside, "link", "set", "veth0", "up")
            ip(*inside, "link", "set", "lo", "up")
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf",
                 "rate", f"{MBIT}mbit", "burst", "128kb", "latency", "50ms"], check=True,
            )  # fmt: skip
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def no_link() -> str:
    """Why no link can be made here; empty where one can."""
    try:
        with link():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs root, ip and tc: {error}"


def ip(*arguments: str) -> None:
    """Runs ip(8)."""
    subprocess.run(["ip", *arguments], check=True)


def measure(given: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What rank 0 saw, and what became of each transfer in windows."""
    with tempfile.TemporaryDirectory(prefix="bench-bubbles-") as folder, link() as names:
        board = Arena.create_shared(BOARD_BYTES, name="bench-board")
        assert board.fd is not None
        (ask, asked), (finish, finished) = os.pipe()[::-1], os.pipe()[::-1]
        environment = {**os.environ, "MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(PORT),
                       "GLOO_SOCKET_IFNAME": "veth0"}  # fmt: skip

        def start(node: int, role: str, *fds: int) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                ["ip", "netns", "exec", names[node], sys.executable, "-W", "ignore", "-m",
                 "benchmarks.bubbles_network", "--role", role, "--node", str(node), "--folder",
                 folder, "--fds", *map(str, fds), "--rounds", str(given["rounds"]),
                 "--iterations", str(given["iterations"])],
                env=environment, pass_fds=fds,
            )  # fmt: skip

        keepers = [start(0, "lender", board.fd), start(1, "fetcher", asked, finish)]
        ranks = [start(0, "rank", board.fd, ask, finished), start(1, "rank")]
        try:
            for process in ranks:
                if process.wait(timeout=400):
                    raise SystemExit(f"a rank ended with {process.returncode}")
        finally:
            for process in (*ranks, *keepers):
                process.kill()
                process.wait()
            for fd in (ask, asked, finish, finished):
                os.close(fd)
        uses = Path(folder, "uses").read_text().splitlines()
        found: dict[str, Any] = json.loads(Path(folder, "0.json").read_text())
        return found, [json.loads(line) for line in uses][2 * WARM :]


def rows_of(seen: dict[str, Any], uses: list[dict[str, Any]]) -> list[Row]:
    """Cost by way, what the link does without, and where the bytes moved."""
    name = "all-reduce and replication"
    costs = {
        way: [with_ / without - 1 for kind, with_, without in seen["blocks"] if kind == way]
        for way in WAYS
    }
    medians = {way: statistics.median(values) for way, values in costs.items()}
    times = medians["ungated"] / max(1e-4, medians["gated"])
    reasons = sorted({use["reason"] for use in uses} - {""})
    return [
        row(name, "cost, ungated", costs["ungated"], "fraction"),
        row(name, "cost, gated", costs["gated"], "fraction", at_most=0.01),
        row(name, "ungated over gated", [times], "x", at_least=5,
            note="a gated cost below 0.0001 counts as 0.0001"),
        row(name, "bytes in windows", [use["share"] for use in uses], "fraction", at_least=0.9,
            statistic=statistics.fmean, note="; ".join(reasons)),
        row(name, "link used by training", [seen["busy"]], "fraction"),
    ]  # fmt: skip


def main() -> None:
    """Measures and publishes; with --role, is one of the processes."""
    parser = argparse.ArgumentParser(prog="bench-bubbles-network")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=20, help="of a block")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fds", type=int, nargs="*", help=argparse.SUPPRESS)
    args = parse(parser, rounds=1, iterations=3)
    given = {"rounds": args.rounds, "iterations": args.iterations}
    match args.role:
        case "rank":
            rank_main(args.node, args.folder / f"{args.node}.json", given, args.fds)
        case "lender":
            lender_main(*args.fds, args.folder)
        case "fetcher":
            fetcher_main(*args.fds, args.folder)
        case _:
            shape = {"mbit": MBIT, "layers": LAYERS, "compute_s": COMPUTE_S,
                     "all_reduce_bytes": LAYER_BYTES, "replica_bytes": REPLICA_BYTES}  # fmt: skip
            if args.smoke and (absent := no_link()):
                print(f"skipped: {absent}")
                return
            note = "compute is a timed wait, the link a veth pair under tbf: no device, no NIC"
            publish("bubbles_network", rows_of(*measure(given)), settings={**given, **shape},
                    notes={"all-reduce and replication": note}, smoke=args.smoke)  # fmt: skip


if __name__ == "__main__":
    main()
