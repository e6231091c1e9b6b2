"""Many transfers at once, with owners that change their minds: each ends once, and as it says."""

import random
import threading
import time
from collections import Counter

from autockpt.executors.transfer.destination import SlotDestination
from autockpt.executors.transfer.events import (
    Fetched,
    ReplicaReceived,
    ReplicaSealed,
    Served,
    TransferFailed,
)
from autockpt.executors.transfer.frames import Offer
from autockpt.executors.transfer.session import Acceptance
from autockpt.executors.transfer.transfer import Transfer
from tests.executors.transfer.conftest import Make, Start
from tests.executors.transfer.ends import CHUNK, PATIENCE_S, End, Image, subject

ROUNDS = 60
LAST = (Fetched, ReplicaReceived, ReplicaSealed, Served, TransferFailed)


class Keeper:
    """Takes every push into memory of its own, remembered by transfer."""

    def __init__(self, end: End, draw: random.Random) -> None:
        self.end, self._draw = end, draw
        self.memory: dict[str, bytearray] = {}
        self.incoming: list[Transfer] = []
        end.accepting = self._take

    def _take(self, offer: Offer, transfer: Transfer) -> Acceptance | str:
        if self._draw.random() < 0.1:
            return "not now"
        self.memory[transfer.name] = bytearray(offer.subject.image_bytes)
        self.incoming.append(transfer)
        destination = SlotDestination(memoryview(self.memory[transfer.name]), offer.subject)
        return Acceptance(destination=destination, deadline_s=PATIENCE_S)


def disturb(draw: random.Random, transfer: Transfer, keeper: Keeper, made: Image) -> None:
    """Lets it be, or ends it somewhere, at some time; after that the memory is the owner's."""
    time.sleep(draw.random() * 0.004)
    match draw.randrange(5):
        case 0:
            transfer.abort("changed our mind")
        case 1 if keeper.incoming:
            one = draw.choice(keeper.incoming)
            one.abort("changed our mind here")
            before = bytes(keeper.memory[one.name])
            time.sleep(0.002)
            assert keeper.memory[one.name] == before
        case 2:
            made.source.revoke("overwritten")
            made.view[:] = bytes(len(made.view))


def test_every_transfer_ends_once_and_what_is_sealed_is_right(start: Start, image: Make) -> None:
    """60 pushes and fetches with up to four streams, aborted at random at either end."""
    draw = random.Random(11)
    ends = [start(node, silence_s=5.0) for node in range(3)]
    keepers = [Keeper(end, draw) for end in ends]
    begun: list[tuple[int, Transfer, bytes]] = []
    before = threading.active_count()
    for _ in range(ROUNDS):
        source, target = draw.sample(range(3), 2)
        made = image(draw.randrange(1, 40 * CHUNK), seed=draw.randrange(99)).seal()
        truth, root = bytes(made.view), made.index.root
        if draw.random() < 0.3:
            ends[source].lent[root] = made
            transfer = ends[target].pool.fetch(
                source, ends[source].address, made.subject, root,
                SlotDestination(memoryview(bytearray(len(truth))), made.subject),
                deadline_s=PATIENCE_S, streams=draw.randrange(1, 5),
            )  # fmt: skip
            begun.append((target, transfer, truth))
        else:
            transfer = ends[source].pool.push(
                target, ends[target].address, made.source, deadline_s=PATIENCE_S,
                streams=draw.randrange(1, 5),
            )  # fmt: skip
            begun.append((source, transfer, truth))
        disturb(draw, transfer, keepers[target], made)
    for _, transfer, _ in begun:
        assert transfer.done.wait(PATIENCE_S)
    for end in ends:
        end.close()
    _judge(ends, keepers, begun)
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, "no thread is left behind"


def _judge(
    ends: list[End], keepers: list[Keeper], begun: list[tuple[int, Transfer, bytes]]
) -> None:
    truths = {transfer.name: truth for _, transfer, truth in begun}
    for node, transfer, _ in begun:
        last = [e for e in ends[node].events if isinstance(e, LAST) and e.transfer == transfer.name]
        assert len(last) == 1, last
    kinds = Counter(type(event).__name__ for end in ends for event in end.events)
    assert kinds["ReplicaSealed"] > 5
    assert kinds["Fetched"] > 2
    assert kinds["TransferFailed"] > 5
    faults = {e.fault for end in ends for e in end.events if isinstance(e, TransferFailed)}
    assert "internal" not in faults
    for keeper in keepers:
        received = [e for e in keeper.end.events if isinstance(e, ReplicaReceived)]
        for event in received:
            assert event.index.run_id == subject(1).run_id
            assert keeper.memory[event.transfer] == truths[event.transfer]
