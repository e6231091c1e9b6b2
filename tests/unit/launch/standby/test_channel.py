"""Messages between a launcher and its ranks, over real sockets."""

import os
import socket
import threading
import time
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


def test_an_end_that_reads_nothing_is_given_up(ends: tuple[Channel, Channel]) -> None:
    """A process that is stopped takes what the kernel holds for it, and no more."""
    here, there = ends
    long = {"modules": ["name" * 20] * 30_000}
    here.post(long)
    began_s = time.monotonic()
    assert not here.flush()
    assert time.monotonic() - began_s < 1.0
    assert not here.send({"end": True}, wait_s=0.1)
    assert time.monotonic() - began_s < 2.0
    assert not here.send({"end": True}, wait_s=60.0), "a half message is not followed by another"
    found: list[dict[str, Any]] = []
    while (heard := there.receive()) is not None:
        found += heard[0]
    assert found == []


def test_what_is_posted_goes_in_order_as_it_is_read(ends: tuple[Channel, Channel]) -> None:
    """In as many pieces as it takes, and descriptors with their own message."""
    here, there = ends
    long = {"modules": ["name" * 20] * 30_000}
    here.post(long)
    here.post({"environment": {}}, (1,))
    found: list[dict[str, Any]] = []
    taken: list[int] = []
    while len(found) < 2:
        here.flush()
        heard = there.receive()
        assert heard is not None
        found += heard[0]
        taken += heard[1]
    assert found == [long, {"environment": {}}]
    assert len(taken) == 1
    os.close(taken[0])
    here.close()
    assert not here.send({"ready": True})
