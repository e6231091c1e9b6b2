"""Nodes on one machine: network namespaces at one switch, each line held to a rate.  Needs root.

Each node has its own interface `eth0`, address and loopback; memory, files and processes are the
machine's.  The switch is a namespace too: what runs there (a rendezvous store, say) lives on when
nodes are lost.
"""

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

SUBNET = "10.213.9"
OUTSIDE = 254
"""Last number of the switch's own address; nodes count from 1."""
INTERFACE = "eth0"
DEVICE_SUBNET = "10.213.10"
DEVICE_INTERFACE = "eth1"
"""Where devices have a network of their own, which nothing shapes."""
BURST = "1mb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A namespace, and how to run something in it."""

    host: str
    prefix: tuple[str, ...]
    """Put before a command to run it on this node."""
    namespace: str = ""

    def pids(self) -> list[int]:
        """All processes on this node."""
        said = _run("ip", "netns", "pids", self.namespace)
        return [int(word) for word in said.split()]

    def kill(self) -> None:
        """The machine is gone: SIGKILL for everything that runs on it."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes and what is outside of all of them."""

    nodes: tuple[Node, ...]
    outside: Node
    """The switch, with an address that all nodes reach."""

    def shape(self, node: int, bits_per_s: int) -> None:
        """Holds the line of a node to another rate, both ways."""
        name = self.nodes[node].namespace
        _shape(name, INTERFACE, bits_per_s)
        _shape(self.outside.namespace, _port(node), bits_per_s)

    def plug(self, node: int, state: str) -> None:
        """up or down, at the switch: nobody is told."""
        _run("ip", "-n", self.outside.namespace, "link", "set", _port(node), state)


@contextlib.contextmanager
def network(count: int, bits_per_s: int, *, devices: bool = False) -> Iterator[Network]:
    """`count` nodes, each sending and receiving at most `bits_per_s` (token bucket, headers count).

    `devices`: with a second network beside it, for emulated devices.  Whatever still runs on them
    in the end is killed.  Raises OSError or CalledProcessError where namespaces or tc are not to be
    had.
    """
    word = secrets.token_hex(3)
    switch = _node(f"ckpt{word}-switch", OUTSIDE)
    nodes = tuple(_node(f"ckpt{word}-{index}", index + 1) for index in range(count))
    try:
        _run("ip", "netns", "add", switch.namespace)
        _inside(switch, "link", "add", "switch", "type", "bridge")
        _inside(switch, "addr", "add", f"{switch.host}/24", "dev", "switch")
        for link in ("lo", "switch"):
            _inside(switch, "link", "set", link, "up")
        made = Network(nodes=nodes, outside=switch)
        for index, node in enumerate(nodes):
            _connect(node, switch, _port(index))
            made.shape(index, bits_per_s)
        if devices:
            _connect_devices(nodes, switch)
        yield made
    finally:
        for node in (*nodes, switch):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                node.kill()
                _run("ip", "netns", "del", node.namespace)


def _node(name: str, number: int) -> Node:
    prefix = ("ip", "netns", "exec", name)
    return Node(host=f"{SUBNET}.{number}", prefix=prefix, namespace=name)


def _connect(node: Node, switch: Node, port: str) -> None:
    _run("ip", "netns", "add", node.namespace)
    _run("ip", "link", "add", INTERFACE, "netns", node.namespace, "type", "veth",
         "peer", "name", port, "netns", switch.namespace)  # fmt: skip
    _inside(switch, "link", "set", port, "master", "switch", "up")
    _inside(node, "addr", "add", f"{node.host}/24", "dev", INTERFACE)
    for link in ("lo", INTERFACE):
        _inside(node, "link", "set", link, "up")


def _connect_devices(nodes: tuple[Node, ...], switch: Node) -> None:
    _inside(switch, "link", "add", "devices", "type", "bridge")
    _inside(switch, "link", "set", "devices", "up")
    for index, node in enumerate(nodes):
        port = f"device{index}"
        _run("ip", "link", "add", DEVICE_INTERFACE, "netns", node.namespace, "type", "veth",
             "peer", "name", port, "netns", switch.namespace)  # fmt: skip
        _inside(switch, "link", "set", port, "master", "devices", "up")
        address = f"{DEVICE_SUBNET}.{index + 1}/24"
        _inside(node, "addr", "add", address, "dev", DEVICE_INTERFACE)
        _inside(node, "link", "set", DEVICE_INTERFACE, "up")


def _port(index: int) -> str:
    return f"port{index}"


def _shape(namespace: str, device: str, bits_per_s: int) -> None:
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
         "rate", str(bits_per_s), "burst", BURST, "latency", "50ms")  # fmt: skip


def _inside(node: Node, *words: str) -> None:
    _run("ip", "-n", node.namespace, *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, timeout=20, text=True)
    return done.stdout
