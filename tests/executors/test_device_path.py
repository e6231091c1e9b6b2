"""The path through the devices, on gloo in one process: images arrive, failures end the path."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autockpt.executors.device_path import DeviceLinks, DevicePath
from autockpt.executors.gate import PacedGate
from autockpt.executors.image import ImageIndex
from autockpt.executors.transfer.destination import SlotDestination
from autockpt.executors.transfer.events import Fetched, Served, TransferFailed
from autockpt.executors.transfer.frames import Subject
from autockpt.executors.transfer.transfer import End
from autockpt.values.errors import GuardError
from tests.executors.parity.sets import index_of

CHUNK = 2**16
TIMEOUT_S = 5.0


class Rank:
    """One end, and what it was told."""

    def __init__(self, group: Any, rank: int, **settings: Any) -> None:
        self.events: list[End] = []
        settings = {"timeout_s": TIMEOUT_S, **settings}
        self.path = DevicePath(
            group, peer=1 - rank, node=1 - rank, ended=self.events.append, **settings
        )
        self.memory = bytearray()

    def receive(self, index: ImageIndex) -> Any:
        """Into memory of its own."""
        subject = Subject.of(index)
        self.memory = bytearray(subject.image_bytes)
        destination = SlotDestination(memoryview(self.memory), subject)
        return self.path.receive("image", subject, destination)

    @property
    def last(self) -> End:
        """The newest event."""
        return self.events[-1]


Pair = Callable[..., tuple[Rank, Rank]]


@pytest.fixture
def pair() -> Pair:
    """Makes two ranks with a gloo group between them."""

    def make(**settings: Any) -> tuple[Rank, Rank]:
        store, groups = dist.HashStore(), {}

        def join(rank: int) -> None:
            groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=TIMEOUT_S))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Rank(groups[0], 0, **settings), Rank(groups[1], 1, **settings)

    return make


def image_of(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes in the (emulated) device."""
    return torch.randint(
        256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def described(image: torch.Tensor) -> ImageIndex:
    """Its index."""
    return index_of(memoryview(image.numpy()), CHUNK)


@pytest.mark.parametrize("nbytes", [1, CHUNK, 7 * CHUNK + 5])
def test_an_image_arrives_in_the_peers_host_memory(pair: Pair, nbytes: int) -> None:
    """Both directions at once, twice in a row."""
    zero, one = pair()
    for turn in range(2):
        images = image_of(nbytes, turn), image_of(nbytes, turn + 9)
        exchanges = [
            zero.path.send("image", images[0], CHUNK, lambda i=images[0]: described(i)),
            one.path.send("image", images[1], CHUNK, lambda i=images[1]: described(i)),
            one.receive(described(images[0])),
            zero.receive(described(images[1])),
        ]
        for exchange in exchanges:
            assert exchange.done.wait(TIMEOUT_S)
        assert one.memory == images[0].numpy().tobytes()
        assert zero.memory == images[1].numpy().tobytes()
        assert described(images[1]) in [e.index for e in zero.events if isinstance(e, Fetched)]
    kinds = [type(event) for event in zero.events]
    assert kinds.count(Served) == kinds.count(Fetched) == 2


def test_emulated_links_are_as_slow_as_they_say(pair: Pair) -> None:
    """40 chunks at 200 a second, and the label says what they are."""
    links = DeviceLinks(to_peer=PacedGate(200 * CHUNK), emulated=True)
    zero, one = pair(links=links)
    image = image_of(40 * CHUNK)
    one.receive(described(image))
    zero.path.send("image", image, CHUNK, lambda: described(image)).done.wait(TIMEOUT_S)
    done = zero.last
    assert isinstance(done, Served)
    assert done.seconds > 0.15
    assert zero.path.links.emulated


def test_a_peer_that_does_not_come_costs_a_timeout_and_the_group(pair: Pair) -> None:
    """Once: whatever is asked later is refused at once, and never waits."""
    zero, _ = pair(timeout_s=0.3)
    image = image_of(3 * CHUNK)
    began = time.monotonic()
    exchange = zero.receive(described(image))
    assert time.monotonic() - began < 0.2, "the training goes on"
    assert exchange.done.wait(TIMEOUT_S)
    assert isinstance(zero.last, TransferFailed)
    assert zero.last.fault == "silent"
    began = time.monotonic()
    zero.path.send("image", image, CHUNK, lambda: described(image)).done.wait(TIMEOUT_S)
    assert time.monotonic() - began < 0.1
    assert isinstance(zero.last, TransferFailed)
    assert zero.last.fault == "refused"
    assert "given up after" in zero.last.reason


def test_an_exchange_under_way_is_not_joined_by_another(pair: Pair) -> None:
    """The newer one is refused; the older one and the group are untouched."""
    zero, one = pair()
    image = image_of(2 * CHUNK)
    first = zero.path.send("image", image, CHUNK, lambda: described(image))
    second = zero.path.send("next", image, CHUNK, lambda: described(image))
    assert second.done.is_set()
    assert isinstance(zero.last, TransferFailed)
    assert "still under way" in zero.last.reason
    one.receive(described(image))
    assert first.done.wait(TIMEOUT_S)
    assert isinstance(zero.last, Served)
    assert not zero.path.given_up


def test_other_bytes_than_described_are_not_sealed(pair: Pair) -> None:
    """A bit that flips on the way is in nobody's index; both ends know."""
    zero, one = pair()
    image = image_of(3 * CHUNK)
    index = described(image)
    image[CHUNK] += 1
    receiving = one.receive(index)
    sending = zero.path.send("image", image, CHUNK, lambda: index)
    assert sending.done.wait(TIMEOUT_S)
    assert receiving.done.wait(TIMEOUT_S)
    for end in (zero, one):
        assert isinstance(end.last, TransferFailed)
        assert end.last.fault == "corrupt"


def test_after_abort_the_image_is_not_read(pair: Pair) -> None:
    """Although the other end takes nothing; the message that is under way ends by its timeout."""
    zero, _ = pair(timeout_s=0.5)
    image = image_of(40 * CHUNK)
    exchange = zero.path.send("image", image, CHUNK, lambda: described(image))
    began = time.monotonic()
    exchange.abort("the optimizer steps")
    assert time.monotonic() - began < 0.2
    assert exchange.done.wait(TIMEOUT_S)
    assert isinstance(zero.last, TransferFailed)
    assert zero.path.given_up


def test_an_owner_that_raises_ends_the_exchange_only(pair: Pair) -> None:
    """No memory for a chunk: an event, and the process lives."""
    zero, one = pair(timeout_s=0.5)
    image = image_of(2 * CHUNK)
    index = described(image)

    def no_memory(number: int, nbytes: int) -> memoryview:
        raise GuardError("no memory")

    destination = SlotDestination(memoryview(bytearray(2 * CHUNK)), Subject.of(index))
    destination.place = no_memory  # type: ignore[method-assign]
    receiving = one.path.receive("image", Subject.of(index), destination)
    zero.path.send("image", image, CHUNK, lambda: index).done.wait(TIMEOUT_S)
    assert receiving.done.wait(TIMEOUT_S)
    assert isinstance(one.last, TransferFailed)
    assert one.last.reason == "no memory"
    assert isinstance(zero.last, TransferFailed)
