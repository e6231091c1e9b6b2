"""Messages between a launcher and its ranks, over real sockets."""

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from autockpt.launch.standby.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Of one connection."""
    here, there = map(Channel, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_messages_are_whole_however_they_are_read(ends: tuple[Channel, Channel]) -> None:
    """A long one comes in several reads, short ones together; descriptors come with theirs."""
    here, there = ends
    long = {"modules": ["name" * 20] * 10_000}
    sending = threading.Thread(target=here.send, args=(long, (1,)), daemon=True)
    sending.start()
    found: list[dict[str, Any]] = []
    taken: list[int] = []
    while not found:
        heard = there.receive()
        assert heard is not None
        found += heard[0]
        taken += heard[1]
    sending.join(60)
    assert found == [long]
    assert len(taken) == 1
    os.close(taken[0])
    here.send({"ready": True})
    here.send({"refused": "its files have changed"})
    assert there.receive() == ([{"ready": True}, {"refused": "its files have changed"}], [])


def test_the_next_message_has_a_time_limit(ends: tuple[Channel, Channel]) -> None:
    """A parked process that does not answer is ended; so is one that has gone."""
    here, there = ends
    assert there.next_message(0.05) is None
    here.send({"taken": True})
    assert there.next_message(60.0) == {"taken": True}
    here.close()
    assert there.next_message(60.0) is None
