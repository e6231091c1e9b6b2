"""Time for S bytes over each link of one node, over a range of sizes.

Sizes are taken in shuffled rounds, so that a slow second of the machine hits all of them.  The
caller faults the memory first: fresh pages are five times slower than the link.
"""

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from autockpt.profiles.samples import TransferSample
from autockpt.values.errors import StorageError

Move = Callable[[int], None]
"""Moves that many bytes and returns when they have arrived."""

SOCKET_TIMEOUT_S = 20.0
_ACKNOWLEDGED = b"k"


def link_sizes(largest: int) -> list[int]:
    """Five sizes up to `largest`, a factor of four apart, each of whole pages."""
    largest = max(4096, largest // 4096 * 4096)
    sizes = [largest // 4**i // 4096 * 4096 for i in range(5)]
    return sorted({size for size in sizes if size > 0})


def time_link(
    move: Move, sizes: Sequence[int], *, rounds: int = 5, budget_s: float = 2.0, seed: int = 0
) -> list[TransferSample]:
    """`rounds` samples of each size after one warm-up, fewer once `budget_s` is used up."""
    order = random.Random(seed)
    move(min(sizes))
    began = time.perf_counter()
    samples: list[TransferSample] = []
    for number in range(rounds):
        for size in order.sample(list(sizes), len(sizes)):
            started = time.perf_counter()
            move(size)
            now = time.perf_counter()
            samples.append(TransferSample(bytes=size, seconds=max(now - started, 1e-9)))
            if number and now - began > budget_s:
                return samples
    return samples


class PeerLink:
    """Host to peer: a TCP connection to a thread that receives into faulted memory.

    Both ends are on this node.  So it is an upper bound of the network and includes the costs of
    both sides on this node's cores.  Raises StorageError when no connection comes about.
    """

    def __init__(self, source: memoryview, target: memoryview, *, address: str = "127.0.0.1"):
        self._source, self._target = source, target
        try:
            with socket.create_server((address, 0)) as server:
                server.settimeout(SOCKET_TIMEOUT_S)
                self._client = socket.create_connection(
                    server.getsockname()[:2], timeout=SOCKET_TIMEOUT_S
                )
                self._server, _ = server.accept()
        except OSError as error:
            raise StorageError(
                f"peer link over {address}: {error}; pick another interface or check the firewall"
            ) from error
        for end in (self._client, self._server):
            end.settimeout(SOCKET_TIMEOUT_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def move(self, nbytes: int) -> None:
        """Sends `nbytes` and waits for the word that they were received."""
        self._client.sendall(nbytes.to_bytes(8, "little"))
        self._client.sendall(self._source[:nbytes])
        if self._client.recv(1) != _ACKNOWLEDGED:
            raise StorageError("peer link: the receiving end closed the connection")

    def close(self) -> None:
        """Closes both ends and waits for the receiving thread."""
        self._client.close()
        self._thread.join(timeout=SOCKET_TIMEOUT_S)
        self._server.close()

    def _receive(self) -> None:
        header = memoryview(bytearray(8))
        try:
            while self._fill(header):
                if not self._fill(self._target[: int.from_bytes(header, "little")]):
                    return
                self._server.sendall(_ACKNOWLEDGED)
        except OSError:
            return  # the sender sees the closed connection

    def _fill(self, into: memoryview) -> bool:
        done = 0
        while done < len(into):
            count = self._server.recv_into(into[done:])
            if count == 0:
                return False
            done += count
        return True


def interface_address(interface: str | None) -> str:
    """IPv4 address of an interface, of the loopback when None or unknown."""
    for entry in psutil.net_if_addrs().get(interface or "", []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    return "127.0.0.1"


def device_moves(device: Any, largest: int) -> dict[str, Move]:
    """Moves from a CUDA device by link name; sources and pinned targets are allocated here."""
    import torch

    source = torch.ones(largest, dtype=torch.uint8, device=device)
    clone = torch.empty_like(source)
    pinned = torch.empty(largest, dtype=torch.uint8, device="cpu", pin_memory=True)
    pageable = torch.zeros(largest, dtype=torch.uint8, device="cpu")

    def to(target: torch.Tensor) -> Move:
        def move(nbytes: int) -> None:
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
            torch.cuda.synchronize(device)

        return move

    return {
        "device_to_host_pinned": to(pinned),
        "device_to_host_pageable": to(pageable),
        "device_clone": to(clone),
    }
