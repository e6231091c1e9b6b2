"""Two network namespaces with a cable of a given rate: two nodes on one machine.  Needs root."""

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

HOSTS = ("10.213.9.1", "10.213.9.2")
BURST = "1mb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One end of the cable."""

    host: str
    prefix: tuple[str, ...]
    """Put before a command to run it on this node."""


@contextlib.contextmanager
def cable(bits_per_s: int) -> Iterator[tuple[Node, Node]]:
    """Two nodes, each sending at most `bits_per_s` (token bucket, headers count).

    Raises OSError or CalledProcessError where namespaces or tc are not to be had.
    """
    word = secrets.token_hex(3)
    names = [f"bench{word}{end}" for end in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        zero, one = names
        _run("ip", "link", "add", zero, "netns", zero, "type", "veth",
             "peer", "name", one, "netns", one)  # fmt: skip
        for name, host in zip(names, HOSTS, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", name)
            _run("ip", "-n", name, "link", "set", name, "up")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, "root", "tbf",
                 "rate", str(bits_per_s), "burst", BURST, "latency", "50ms")  # fmt: skip
        nodes = [
            Node(host=host, prefix=("ip", "netns", "exec", name))
            for name, host in zip(names, HOSTS, strict=True)
        ]
        yield nodes[0], nodes[1]
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)
