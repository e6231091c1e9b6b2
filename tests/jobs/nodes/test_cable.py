"""Two network namespaces with a cable between them: what only a real network shows."""

import contextlib
import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.nodes_job import environment

HOSTS = ("10.213.7.1", "10.213.7.2")
PATIENCE_S = 30.0


class Cable:
    """Two namespaces and the pair of interfaces between them."""

    def __init__(self) -> None:
        word = secrets.token_hex(3)
        self.names = [f"ck{word}{node}" for node in range(2)]
        for name in self.names:
            _ip("netns", "add", name)
        zero, one = self.names
        _ip("link", "add", zero, "netns", zero, "type", "veth", "peer", "name", one, "netns", one)
        for name, host in zip(self.names, HOSTS, strict=True):
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")

    def plug(self, state: str) -> None:
        """up or down, at one end: nobody is told."""
        _ip("-n", self.names[1], "link", "set", self.names[1], state)

    def remove(self) -> None:
        """Removes both namespaces, and with them the interfaces."""
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Endpoint:
    """A process in one namespace that says facts, one JSON object a line."""

    def __init__(self, cable: Cable, node: int, *words: str) -> None:
        """`words`: module and arguments of the process."""
        command = ["ip", "netns", "exec", cable.names[node], sys.executable, "-m", *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
        )
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def hears(self, what: str) -> dict[str, Any]:
        """The next fact of this kind, from now on."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            fact = self.said.get(timeout=max(0.0, deadline - time.monotonic()))
            if what in fact:
                return fact

    def forget(self) -> None:
        """What was said until now does not count."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.said.get_nowait()

    def end(self) -> None:
        """Lets it go."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)
        self._reader.join(timeout=20)
        self.process.stdout.close()


@pytest.fixture
def cable() -> Iterator[Cable]:
    """A new pair of namespaces."""
    try:
        made = Cable()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.remove()


@pytest.mark.root
@pytest.mark.slow
def test_a_cut_cable_is_noticed_and_a_mended_one_is_used(cable: Cable, tmp_path: Path) -> None:
    """No packet says that it is cut: silence of 3 s, then 5 s of grace."""
    ends = [
        Endpoint(cable, node, "tests.jobs.nodes.endpoint", str(tmp_path), str(node), HOSTS[node])
        for node in range(2)
    ]
    try:
        for end in ends:
            end.hears("heard")
        cable.plug("down")
        cut_s = time.monotonic()
        assert ends[0].hears("lost") == {"lost": 1}
        assert ends[1].hears("lost") == {"lost": 0}
        took = time.monotonic() - cut_s
        assert 5.0 <= took < 15.0, f"noticed after {took:.1f} s"
        cable.plug("up")
        for end in ends:
            end.forget()
        mended_s = time.monotonic()
        for end in ends:
            end.hears("heard")
        assert time.monotonic() - mended_s < 10.0
        print(f"noticed after {took:.1f} s, mended after {time.monotonic() - mended_s:.1f} s")
    finally:
        for end in ends:
            end.end()


@pytest.mark.root
@pytest.mark.slow
def test_a_cable_cut_during_a_transfer_ends_it_at_both_ends(cable: Cable) -> None:
    """No packet says so: the silence does, 2 s here, and neither end keeps the memory longer."""
    lender = Endpoint(cable, 0, "tests.jobs.nodes.carrier", "lend", HOSTS[0])
    ends = [lender]
    try:
        port = lender.hears("port")["port"]
        words = ("fetch", HOSTS[1], HOSTS[0], str(port))
        ends.append(Endpoint(cable, 1, "tests.jobs.nodes.carrier", *words))
        assert ends[1].hears("chunk")
        cable.plug("down")
        cut_s = time.monotonic()
        for end in ends:
            told = end.hears("event")
            assert told["event"] == "TransferFailed"
            assert "nothing for 2 s" in told["reason"]
        assert time.monotonic() - cut_s < 6.0
    finally:
        for end in ends:
            end.end()
