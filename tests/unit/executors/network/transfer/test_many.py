"""Many transfers at once, with owners that change their minds: each ends once, and as it says."""

import random
import threading
import time
from dataclasses import dataclass, field

from autockpt.executors.network.transfer.destination import SlotDestination
from autockpt.executors.network.transfer.events import Fetched, FetchEnd, TransferFailed
from autockpt.executors.network.transfer.transfer import Transfer
from tests.unit.executors.network.transfer.conftest import Make, Start
from tests.unit.executors.network.transfer.ends import CHUNK, PATIENCE_S, End, Image

ROUNDS = 60


@dataclass
class Begun:
    """A fetch, what is to come of it, and what did."""

    truth: bytes
    memory: bytearray
    told: list[FetchEnd] = field(default_factory=list)
    transfer: Transfer | None = None

    def start(self, lender: End, lost: End, image: Image, streams: int) -> Transfer:
        """Begins it."""
        self.transfer = lost.pool.fetch(
            lender.node, lender.address, image.subject, image.root,
            SlotDestination(memoryview(self.memory), image.subject), ended=self.told.append,
            deadline_s=PATIENCE_S, streams=streams,
        )  # fmt: skip
        return self.transfer


def disturb(draw: random.Random, begun: Begun, image: Image) -> None:
    """Lets it be, or ends it somewhere, at some time; after that the memory is the owner's."""
    assert begun.transfer is not None
    time.sleep(draw.random() * 0.004)
    match draw.randrange(4):
        case 0:
            begun.transfer.abort("changed our mind")
            before = bytes(begun.memory)
            time.sleep(0.002)
            assert begun.memory == before
        case 1:
            image.source.revoke("overwritten")
            image.view[:] = bytes(len(image.view))


def test_every_transfer_ends_once_and_what_is_fetched_is_right(start: Start, image: Make) -> None:
    """60 fetches with up to four streams, aborted at random at either end."""
    draw = random.Random(11)
    ends = [start(node, silence_s=5.0) for node in range(3)]
    fetches: list[Begun] = []
    before = threading.active_count()
    for _ in range(ROUNDS):
        lender, lost = draw.sample(ends, 2)
        made = image(draw.randrange(1, 40 * CHUNK), seed=draw.randrange(99))
        lender.refusal = "not now" if draw.random() < 0.1 else ""
        lender.lend(made)
        begun = Begun(truth=bytes(made.view), memory=bytearray(len(made.view)))
        begun.start(lender, lost, made, draw.randrange(1, 5))
        fetches.append(begun)
        disturb(draw, begun, made)
    for begun in fetches:
        assert begun.transfer is not None
        assert begun.transfer.done.wait(PATIENCE_S)
    for end in ends:
        end.close()
    _judge(ends, fetches)
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, "no thread is left behind"


def _judge(ends: list[End], fetches: list[Begun]) -> None:
    for begun in fetches:
        (end,) = begun.told
        if isinstance(end, Fetched):
            assert begun.memory == begun.truth
    counts = [
        sum(isinstance(b.told[0], kind) for b in fetches) for kind in (Fetched, TransferFailed)
    ]
    assert min(counts) > 5, counts
    told = [event for end in ends for event in end.events] + [b.told[0] for b in fetches]
    assert "internal" not in {e.fault for e in told if isinstance(e, TransferFailed)}
