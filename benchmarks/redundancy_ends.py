"""The two ends of `make bench-redundancy`, each a process, perhaps each in a network namespace.

    lend HOST BYTES         prints {"pool": port, "plain": port}, ends when stdin does
    fetch HOST PEER POOL PLAIN BYTES STREAMS ROUNDS    prints one JSON object a sample

Both fault their memory before the first byte moves.  The plain contestant is one `os.sendfile` of
the same memfd into `recv_into` of the same memory: no digest, no frame, no acknowledgement.
"""

import json
import os
import queue
import random
import socket
import sys
import threading
import time

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.handshake import Identity
from autockpt.executors.network.transfer.destination import SlotDestination
from autockpt.executors.network.transfer.events import Fetched, FetchEnd
from autockpt.executors.network.transfer.frames import Subject, Want
from autockpt.executors.network.transfer.pool import TransferPool
from autockpt.executors.network.transfer.session import Loan
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.protocol.messages import Incarnation
from autockpt.values.generation import Generation

CHUNK_BYTES = 8 * 2**20
DEADLINE_S = 120.0
SECRET = bytes(32)


def main() -> None:
    """Plays one end."""
    role, *words = sys.argv[1:]
    if role == "lend":
        lend(words[0], int(words[1]))
    else:
        host, peer = words[:2]
        pool, plain, nbytes, streams, rounds = (int(word) for word in words[2:])
        fetch(host, (peer, pool), (peer, plain), nbytes, streams, rounds)


def me(node: int) -> Identity:
    """Who an end is."""
    return Identity(
        run_id="bench", node=node, incarnation=Incarnation(launch_id="bench", restart_round=0)
    )


def image(nbytes: int, name: str) -> tuple[Arena, ImageIndex]:
    """The same bytes at both ends: one lends them, the other one knows what to ask for."""
    arena = Arena.create_shared(nbytes, name=name)
    arena.view[:] = random.Random(0).randbytes(2**20) * (arena.nbytes // 2**20)
    starts = range(0, nbytes, CHUNK_BYTES)
    return arena, ImageIndex(
        run_id="bench", generation=Generation(term=1, step=1), step=1, rank=0, world_size=2,
        layout_digest="bench", image_bytes=nbytes, chunk_bytes=CHUNK_BYTES,
        digests=tuple(
            chunk_digest(arena.view[start : min(start + CHUNK_BYTES, nbytes)]) for start in starts
        ),
    )  # fmt: skip


def lend(host: str, nbytes: int) -> None:
    """Lends one slot, and gives the same bytes to whoever connects to the plain port."""
    arena, index = image(nbytes, "bench-source")
    assert arena.fd is not None
    source = ImageSource(arena.fd, arena.view[:nbytes], index)

    def lent(peer: Identity, want: Want) -> Loan:
        return Loan(source=source, deadline_s=DEADLINE_S)

    pool = TransferPool(SECRET, me(1), lent)
    port = pool.listen(host)
    plain = socket.create_server((host, 0))
    threading.Thread(target=_give_plain, args=(plain, arena.fd, nbytes), daemon=True).start()
    print(json.dumps({"pool": port, "plain": plain.getsockname()[1]}), flush=True)
    sys.stdin.read()
    pool.close()


def _give_plain(server: socket.socket, fd: int, nbytes: int) -> None:
    while True:
        sock, _ = server.accept()
        with sock:
            offset = 0
            while offset < nbytes:
                offset += os.sendfile(sock.fileno(), fd, offset, nbytes - offset)


def fetch(
    host: str,
    pool_address: tuple[str, int],
    plain_address: tuple[str, int],
    nbytes: int,
    streams: int,
    rounds: int,
) -> None:
    """Plain copies and fetches in 1, 2, 4, ... streams, in turn; the first round is dropped."""
    arena, index = image(nbytes, "bench-target")
    target, subject = arena.view[:nbytes], Subject.of(index)
    pool = TransferPool(SECRET, me(0), lambda peer, want: "nothing is lent here")
    pool.listen(host)
    told: queue.SimpleQueue[FetchEnd] = queue.SimpleQueue()
    counts = [1 << power for power in range(streams.bit_length())]
    for number in range(rounds + 1):
        samples = {"plain": _plain(target, plain_address)}
        for count in counts:
            began = time.perf_counter()
            pool.fetch(
                1, pool_address, subject, index.root, SlotDestination(target, subject),
                ended=told.put, deadline_s=DEADLINE_S, streams=count,
            )  # fmt: skip
            event = told.get(timeout=DEADLINE_S)
            if not isinstance(event, Fetched):
                raise SystemExit(f"fetch failed: {event}")
            samples[str(count)] = time.perf_counter() - began
        if number:
            print(json.dumps(samples), flush=True)
    pool.close()


def _plain(target: memoryview, address: tuple[str, int]) -> float:
    began = time.perf_counter()
    with socket.create_connection(address, timeout=DEADLINE_S) as sock:
        sock.setblocking(True)
        done = 0
        while done < len(target):
            count = sock.recv_into(target[done:])
            if not count:
                raise SystemExit("the plain sender is gone")
            done += count
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
