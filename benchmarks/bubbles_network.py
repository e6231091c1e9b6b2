"""`make bench-bubbles-network`: replication over a shaped link, gated by idle windows and not.

Two ranks in network namespaces on one machine, joined by a link that `tc` holds to 400 Mbit/s each
way (needs root).  An iteration is layers of compute (a timed wait: an **emulated accelerator**) and
an all-reduce over gloo, which together use a known share of the link.  At every boundary rank 0
sends as many bytes of a checkpoint to rank 1, which drops them: at once, or in chunks that ask a
`WindowGate` fed by the hooks on collectives.  Blocks of iterations with it alternate with blocks
without, right before; the cost is the ratio of their times less one.
"""

import argparse
import array
import fcntl
import json
import os
import queue
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autockpt.executors.window_gate import WindowGate
from autockpt.profiles.probes.collectives import CollectiveHooks, CollectiveRecorder
from benchmarks.harness import Row, publish, row

MBIT = 400
LAYERS = 6
COMPUTE_S = 0.016
"""Of one layer."""
LAYER_BYTES = 2**20 // 2
"""Gradients that a layer's all-reduce exchanges: 10 ms of the link."""
REPLICA_BYTES = 5 * 2**19
"""Of a checkpoint, sent at every boundary: 52 ms of the link."""
SEND_BUFFER_BYTES = 64 * 2**10
"""Little of a chunk waits in the kernel: it would still leave when the window has closed."""
WAYS = ("ungated", "gated")
PORT, REPLICA_PORT = 29555, 29556
WARM = 6


class Sender:
    """A thread that sends replicas, asking a gate before each chunk when it has one."""

    def __init__(self, address: str, gate: WindowGate) -> None:
        plain, careful = (
            socket.create_connection((address, REPLICA_PORT), timeout=30) for _ in range(2)
        )
        careful.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sockets = {False: plain, True: careful}
        self._gate, self._asked = gate, queue.SimpleQueue[bool | None]()
        self._idle = threading.Event()
        self._idle.set()
        self.shares: list[float] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, *, gated: bool) -> None:
        """One replica, behind the training; an earlier one is waited for."""
        self._idle.wait()
        self._idle.clear()
        if gated:
            self._gate.begin(REPLICA_BYTES)
        self._asked.put(gated)

    def rest(self) -> None:
        """Waits until everything is sent."""
        self._gate.hurry()
        self._idle.wait()

    def _work(self) -> None:
        data = memoryview(bytearray(REPLICA_BYTES))
        while (gated := self._asked.get()) is not None:
            use = self._gate.use
            piece = use.chunk_bytes if gated else REPLICA_BYTES
            for start in range(0, REPLICA_BYTES, piece):
                part = data[start : start + piece]
                if gated:
                    self._gate.wait(len(part))
                self._sockets[gated].sendall(part)
                self._drain(self._sockets[gated])
            if gated:
                self.shares.append(use.share)
            self._idle.set()

    def _drain(self, connection: socket.socket) -> None:
        """Until the other side has acknowledged every byte: what is queued still uses the link."""
        left = array.array("i", [1])
        while left[0]:
            fcntl.ioctl(connection, termios.TIOCOUTQ, left)
            time.sleep(100e-6)


def rank_main(rank: int, out: Path, given: dict[str, Any]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if rank == 1:
        threading.Thread(target=sink, daemon=True).start()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    gate, recorder = (
        WindowGate(bytes_per_s=MBIT * 1e6 / 8, longest_wait_s=5.0),
        CollectiveRecorder(),
    )
    hooks = CollectiveHooks(recorder, gate)
    hooks.attach()
    sender = Sender("10.77.0.2", gate) if rank == 0 else None
    gradients = torch.zeros(LAYER_BYTES // 4)

    def iterate(way: str) -> None:
        for _ in range(LAYERS):
            time.sleep(COMPUTE_S)
            dist.all_reduce(gradients)
        gate.step_began()
        gate.boundary()
        recorder.boundary()
        if sender is not None and way != "none":
            sender.send(gated=way == "gated")

    def block(way: str) -> float:
        iterate(way)
        began = time.perf_counter()
        for _ in range(given["iterations"]):
            iterate(way)
        took = (time.perf_counter() - began) / given["iterations"]
        if sender is not None:
            sender.rest()
        return took

    for _ in range(WARM):
        iterate("none")
    recorder.samples.clear()
    order, blocks = random.Random(0), []
    for _ in range(given["rounds"]):
        for way in order.sample(WAYS, len(WAYS)):
            without = block("none")
            blocks.append((way, block(way), without))
    busy = [
        sum(end - begin for begin, end in sample.spans) / sample.lap_s
        for sample in recorder.samples
    ]
    found = {"blocks": blocks, "busy": statistics.median(busy),
             "shares": sender.shares if sender else [], "chunk_bytes": gate.use.chunk_bytes,
             "reason": gate.use.reason}  # fmt: skip
    out.write_text(json.dumps(found))
    hooks.detach()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a normal end


def sink() -> None:
    """Takes replicas and drops them."""
    with socket.create_server(("10.77.0.2", REPLICA_PORT)) as server:
        connections = [server.accept()[0] for _ in range(2)]
        while True:
            for connection in select.select(connections, [], [])[0]:
                connection.recv(2**20)


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


def ip(*arguments: str) -> None:
    """Runs ip(8)."""
    subprocess.run(["ip", *arguments], check=True)


def measure(given: dict[str, Any]) -> list[dict[str, Any]]:
    """What both ranks saw."""
    with tempfile.TemporaryDirectory(prefix="bench-bubbles-") as folder, link() as names:
        outs = [Path(folder, f"{rank}.json") for rank in range(2)]
        environment = {**os.environ, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT),
                       "GLOO_SOCKET_IFNAME": "veth0"}  # fmt: skip
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-W", "ignore", "-m",
                 "benchmarks.bubbles_network", "--rank", str(rank), "--out", str(out),
                 "--rounds", str(given["rounds"]), "--iterations", str(given["iterations"])],
                env=environment,
            )
            for rank, (name, out) in enumerate(zip(names, outs, strict=True))
        ]  # fmt: skip
        try:
            for process in ranks:
                if process.wait(timeout=400):
                    raise SystemExit(f"a rank ended with {process.returncode}")
        finally:
            for process in ranks:
                process.kill()
        return [json.loads(out.read_text()) for out in outs]


def rows_of(ranks: list[dict[str, Any]]) -> list[Row]:
    """Cost by way, what the link does without, and where the bytes moved."""
    name = "all-reduce and replication"
    costs = {
        way: [with_ / without - 1 for kind, with_, without in ranks[0]["blocks"] if kind == way]
        for way in WAYS
    }
    medians = {way: statistics.median(values) for way, values in costs.items()}
    times = medians["ungated"] / max(1e-4, medians["gated"])
    return [
        row(name, "cost, ungated", costs["ungated"], "fraction"),
        row(name, "cost, gated", costs["gated"], "fraction", at_most=0.01),
        row(name, "ungated over gated", [times], "x", at_least=5,
            note="a gated cost below 0.0001 counts as 0.0001"),
        row(name, "bytes in windows", ranks[0]["shares"], "fraction", at_least=0.9,
            statistic=statistics.fmean, note=ranks[0]["reason"]),
        row(name, "link used by training", [ranks[0]["busy"]], "fraction"),
    ]  # fmt: skip


def main() -> None:
    """Measures and publishes; with --rank, is one of the ranks."""
    parser = argparse.ArgumentParser(prog="bench-bubbles-network")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=20, help="of a block")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    given = {"rounds": args.rounds, "iterations": args.iterations}
    if args.rank >= 0:
        rank_main(args.rank, args.out, given)
    shape = {"mbit": MBIT, "layers": LAYERS, "compute_s": COMPUTE_S,
             "all_reduce_bytes": LAYER_BYTES, "replica_bytes": REPLICA_BYTES}  # fmt: skip
    note = "compute is a timed wait, the link a veth pair under tbf: no device, no NIC"
    publish("bubbles_network", rows_of(measure(given)), settings={**given, **shape},
            notes={"all-reduce and replication": note})  # fmt: skip


if __name__ == "__main__":
    main()
