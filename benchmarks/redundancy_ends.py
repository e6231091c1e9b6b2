"""The two ends of `make bench-redundancy`, each a process, perhaps each in a network namespace.

    receive HOST BYTES                 prints {"pool": port, "plain": port}, ends when stdin does
    send HOST PEER POOL PLAIN BYTES STREAMS ROUNDS    prints one JSON object a sample

Both fault their memory before the first byte moves.  The plain contestant is one `os.sendfile` of
the same memfd into one `recv_into` of the same memory: no digest, no frame, no acknowledgement but
a byte at the end.
"""

import json
import os
import queue
import random
import socket
import sys
import threading
import time
from typing import Any

from autockpt.executors.image import ImageIndex, chunk_digest
from autockpt.executors.keeper.handshake import Identity
from autockpt.executors.memory import Arena
from autockpt.executors.protocol.messages import Incarnation
from autockpt.executors.transfer.destination import SlotDestination
from autockpt.executors.transfer.events import ReplicaSealed
from autockpt.executors.transfer.frames import Subject
from autockpt.executors.transfer.pool import Owner, TransferPool
from autockpt.executors.transfer.session import Acceptance
from autockpt.executors.transfer.source import ImageSource
from autockpt.values.generation import Generation

CHUNK_BYTES = 8 * 2**20
DEADLINE_S = 120.0
SECRET = bytes(32)


def main() -> None:
    """Plays one end."""
    role, *words = sys.argv[1:]
    if role == "receive":
        receive(words[0], int(words[1]))
    else:
        host, peer = words[:2]
        pool, plain, nbytes, streams, rounds = (int(word) for word in words[2:])
        send(host, (peer, pool), (peer, plain), nbytes, streams, rounds)


def pool_of(node: int, host: str, accept: Any, event: Any) -> tuple[TransferPool, int]:
    """A pool that listens, and its port."""
    me = Identity(
        run_id="bench", node=node, incarnation=Incarnation(launch_id="bench", restart_round=0)
    )
    owner = Owner(accept=accept, lend=lambda *_: "nothing is lent here", event=event)
    pool = TransferPool(SECRET, me, owner)
    return pool, pool.listen(host)


def receive(host: str, nbytes: int) -> None:
    """Takes images into one slot, and plain bytes into the same."""
    arena = Arena.create_shared(nbytes, name="bench-target")

    def accept(peer: Any, transfer: Any, offer: Any) -> Acceptance:
        return Acceptance(
            destination=SlotDestination(arena.view, offer.subject), deadline_s=DEADLINE_S
        )

    pool, port = pool_of(1, host, accept, lambda event: None)
    plain = socket.create_server((host, 0))
    threading.Thread(target=_take_plain, args=(plain, arena.view[:nbytes]), daemon=True).start()
    print(json.dumps({"pool": port, "plain": plain.getsockname()[1]}), flush=True)
    sys.stdin.read()
    pool.close()


def _take_plain(server: socket.socket, target: memoryview) -> None:
    while True:
        sock, _ = server.accept()
        with sock:
            done = 0
            while done < len(target) and (count := sock.recv_into(target[done:])):
                done += count
            sock.sendall(b"k")


def send(
    host: str,
    pool_address: tuple[str, int],
    plain_address: tuple[str, int],
    nbytes: int,
    streams: int,
    rounds: int,
) -> None:
    """Plain copies and pushes of 1, 2, 4, ... streams, in turn; the first round is dropped."""
    arena = Arena.create_shared(nbytes, name="bench-source")
    arena.view[:] = random.Random(0).randbytes(2**20) * (arena.nbytes // 2**20)
    assert arena.fd is not None
    index = _index(arena.view[:nbytes])
    source = ImageSource.sealed(arena.fd, arena.view[:nbytes], Subject.of(index), index)
    told: queue.Queue[Any] = queue.Queue()
    pool, _ = pool_of(0, host, lambda *_: "nothing is taken here", told.put)
    counts = [1 << power for power in range(streams.bit_length())]
    for number in range(rounds + 1):
        samples = {"plain": _plain(arena.fd, nbytes, plain_address)}
        for count in counts:
            began = time.perf_counter()
            pool.push(1, pool_address, source, deadline_s=DEADLINE_S, streams=count)
            event = told.get(timeout=DEADLINE_S)
            if not isinstance(event, ReplicaSealed):
                raise SystemExit(f"push failed: {event}")
            samples[str(count)] = time.perf_counter() - began
        if number:
            print(json.dumps(samples), flush=True)
    source.revoke("done")
    pool.close()


def _plain(fd: int, nbytes: int, address: tuple[str, int]) -> float:
    began = time.perf_counter()
    with socket.create_connection(address, timeout=DEADLINE_S) as sock:
        sock.setblocking(True)
        offset = 0
        while offset < nbytes:
            offset += os.sendfile(sock.fileno(), fd, offset, nbytes - offset)
        if sock.recv(1) != b"k":
            raise SystemExit("the plain receiver is gone")
    return time.perf_counter() - began


def _index(image: memoryview) -> ImageIndex:
    starts = range(0, len(image), CHUNK_BYTES)
    return ImageIndex(
        run_id="bench", generation=Generation(epoch=1, seq=1), step=1, rank=0, world_size=2,
        layout_digest="bench", image_bytes=len(image), chunk_bytes=CHUNK_BYTES,
        digests=tuple(chunk_digest(image[start : start + CHUNK_BYTES]) for start in starts),
    )  # fmt: skip


if __name__ == "__main__":
    main()
