"""Images from node to node: whole, verified, in any number of streams, while they still fill."""

import threading
import time

import pytest

from autockpt.executors.gate import PacedGate
from autockpt.executors.transfer.events import (
    ChunkReceived,
    Fetched,
    ReplicaReceived,
    ReplicaSealed,
    Served,
    TransferFailed,
)
from autockpt.executors.transfer.frames import Span
from autockpt.executors.transfer.lease import Lease, Revoked
from autockpt.executors.transfer.session import split_spans
from autockpt.values.errors import ConfigError
from tests.executors.transfer.conftest import Make, Start
from tests.executors.transfer.ends import CHUNK, PATIENCE_S


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [1, CHUNK, 20 * CHUNK + 17])
def test_a_pushed_image_arrives_to_the_bit(
    start: Start, image: Make, streams: int, nbytes: int
) -> None:
    """Both ends are told with the same root, and every chunk once."""
    sender, receiver, made = start(0), start(1), image(nbytes).seal()
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S, streams=streams)
    there, here = receiver.told(ReplicaReceived), sender.told(ReplicaSealed)
    assert receiver.received == made.view
    assert there.index == made.index == receiver.sealed[0]
    assert here.root == made.index.root
    assert here.nbytes == there.nbytes == nbytes
    chunks = [event.number for event in receiver.events if isinstance(event, ChunkReceived)]
    assert sorted(chunks) == list(range(made.subject.chunks))
    assert len(sender.events) == len(receiver.facts()) == 1


def test_chunks_travel_before_the_snapshot_is_whole(start: Start, image: Make) -> None:
    """The first chunks are there while the last ones do not exist."""
    sender, receiver, made = start(0), start(1), image(4 * CHUNK)
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S, streams=2)
    for number in range(3):
        made.source.digested(number, made.digest(number))
    receiver.told(ChunkReceived)
    assert not receiver.sealed
    made.seal()
    receiver.told(ReplicaReceived)
    assert receiver.received == made.view


def test_a_slow_snapshot_is_no_silence(start: Start, image: Make) -> None:
    """Nothing to send for three times the patience of the other end."""
    sender, receiver = start(0, silence_s=0.3), start(1, silence_s=0.3)
    made = image(2 * CHUNK)
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S)
    time.sleep(0.9)
    made.seal()
    assert sender.told(ReplicaSealed).held_s > 0.5


@pytest.mark.parametrize("streams", [1, 3])
def test_a_sealed_image_is_fetched(start: Start, image: Make, streams: int) -> None:
    """The way back, for whoever lost the image."""
    lender, lost, made = start(0), start(1), image(9 * CHUNK + 5).seal()
    root = made.index.root
    lender.lent[root] = made
    lost.pool.fetch(
        0, lender.address, made.subject, root, lost.destination(made.subject),
        deadline_s=PATIENCE_S, streams=streams,
    )  # fmt: skip
    fetched = lost.told(Fetched)
    assert lost.received == made.view
    assert (fetched.index.root, fetched.nbytes) == (root, len(made.view))
    lender.told(Served)


def test_only_the_wanted_chunks_are_fetched(start: Start, image: Make) -> None:
    """A partial loss needs a part."""
    lender, lost, made = start(0), start(1), image(9 * CHUNK + 5).seal()
    lender.lent[made.index.root] = made
    lost.pool.fetch(
        0, lender.address, made.subject, made.index.root, lost.destination(made.subject),
        deadline_s=PATIENCE_S, chunks=(Span(start=1, stop=3), Span(start=9, stop=10)), streams=2,
    )  # fmt: skip
    assert lost.told(Fetched).nbytes == 2 * CHUNK + 5
    assert lost.received[CHUNK : 3 * CHUNK] == made.view[CHUNK : 3 * CHUNK]
    assert lost.received[9 * CHUNK :] == made.view[9 * CHUNK :]
    assert not any(lost.received[3 * CHUNK : 9 * CHUNK])


def test_an_offer_is_refused_in_the_words_of_the_owner(start: Start, image: Make) -> None:
    """Both ends know why."""
    sender, receiver, made = start(0), start(1), image(CHUNK).seal()
    receiver.refusal = "the slot is taken"
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S)
    for end in (sender, receiver):
        failed = end.told(TransferFailed)
        assert (failed.fault, failed.reason) == ("refused", "the slot is taken")


def test_an_image_that_nobody_has_is_not_fetched(start: Start, image: Make) -> None:
    """Nor one that was sealed with another root meanwhile."""
    lender, lost, made = start(0), start(1), image(CHUNK).seal()
    for lent, reason in (({}, "no such image"), ({"0" * 64: made}, "is sealed here")):
        lender.lent = lent
        lost.events.clear()
        lost.pool.fetch(
            0, lender.address, made.subject, "0" * 64, lost.destination(made.subject),
            deadline_s=PATIENCE_S,
        )  # fmt: skip
        failed = lost.told(TransferFailed)
        assert failed.fault == "refused"
        assert reason in failed.reason


def test_the_gate_paces_all_streams_together(start: Start, image: Make) -> None:
    """20 chunks at 100 chunks a second."""
    sender, receiver, made = start(0), start(1), image(20 * CHUNK).seal()
    sender.pool.push(
        1, receiver.address, made.source, deadline_s=PATIENCE_S, streams=3,
        gate=PacedGate(100 * CHUNK),
    )  # fmt: skip
    done = sender.told(ReplicaSealed)
    assert done.seconds > 0.15
    assert done.held_s > 0.05


def test_a_gate_that_looks_like_silence_is_refused(start: Start, image: Make) -> None:
    """The other end would take the pause for a loss."""
    sender, made = start(0, silence_s=1.0), image(CHUNK).seal()
    with pytest.raises(ConfigError, match="at most half"):
        sender.pool.push(
            1, sender.address, made.source, deadline_s=1, gate=PacedGate(1, longest_wait_s=0.6)
        )


# ------------------------------------------------------------------ the owner changes its mind


@pytest.mark.parametrize("streams", [1, 3])
def test_after_revoke_the_slot_belongs_to_its_owner(
    start: Start, image: Make, streams: int
) -> None:
    """The receiver takes nothing, so senders sit in their system call: revoke gets them out."""
    sender, made = start(0), image(2**26).seal()
    receiver = start(1)
    gate = threading.Event()
    taken = receiver.accepting

    def hesitate(offer, transfer):  # type: ignore[no-untyped-def]
        answer = taken(offer, transfer)
        place = answer.destination.place
        answer.destination.place = lambda *chunk: (gate.wait(PATIENCE_S), place(*chunk))[1]
        return answer

    receiver.accepting = hesitate
    transfer = sender.pool.push(
        1, receiver.address, made.source, deadline_s=PATIENCE_S, streams=streams
    )
    deadline = time.monotonic() + PATIENCE_S
    while transfer.lease._inside < streams and time.monotonic() < deadline:
        time.sleep(0.001)
    assert transfer.lease._inside == streams
    began = time.monotonic()
    made.source.revoke("the slot is needed")
    assert time.monotonic() - began < 1.0
    assert transfer.lease._inside == 0
    gate.set()
    failed = sender.told(TransferFailed)
    assert (failed.fault, failed.reason) == ("aborted", "the slot is needed")
    assert receiver.told(TransferFailed).direction == "receive"
    assert not receiver.sealed


def test_a_revoked_source_begins_no_transfer(start: Start, image: Make) -> None:
    """It is said at once, by an event like every other end."""
    sender, made = start(0), image(CHUNK).seal()
    made.source.revoke("overwritten")
    sender.pool.push(1, sender.address, made.source, deadline_s=1)
    assert sender.told(TransferFailed).fault == "aborted"
    with pytest.raises(Revoked, match="overwritten"):
        made.source.wait_chunk(0, 0, Lease())


def test_after_abort_nothing_is_written_to_the_destination(start: Start, image: Make) -> None:
    """The receiving owner needs its slot back while chunks pour in."""
    sender, receiver, made = start(0), start(1), image(2**26).seal()
    incoming = []
    taken = receiver.accepting

    def remember(offer, transfer):  # type: ignore[no-untyped-def]
        incoming.append(transfer)
        return taken(offer, transfer)

    receiver.accepting = remember
    sender.pool.push(
        1, receiver.address, made.source, deadline_s=PATIENCE_S, streams=2, gate=PacedGate(2**26)
    )
    receiver.told(ChunkReceived)
    incoming[0].abort("needed here")
    before = bytes(receiver.received)
    assert receiver.told(TransferFailed).fault == "aborted"
    sender.told(TransferFailed)
    assert receiver.received == before
    assert before != made.view


def test_closing_the_pool_ends_every_transfer(start: Start, image: Make) -> None:
    """And says so once for each."""
    sender, receiver, made = start(0), start(1), image(CHUNK)
    for _ in range(3):
        sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S)
    sender.pool.close("the end")
    assert [event.reason for event in sender.facts()] == ["the end"] * 3  # type: ignore[union-attr]


def test_a_bit_that_flips_in_the_slot_is_found_by_the_receiver(start: Start, image: Make) -> None:
    """The digest was taken when the chunk arrived, and travels with it."""
    sender, receiver, made = start(0), start(1), image(3 * CHUNK).seal()
    made.view[CHUNK + 5] ^= 4
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S)
    failed = receiver.told(TransferFailed)
    assert failed.fault == "corrupt"
    assert "chunk 1" in failed.reason
    assert "chunk 1" in sender.told(TransferFailed).reason
    assert not receiver.sealed


def test_nobody_listening_is_a_failure_like_others(start: Start, image: Make) -> None:
    """At once, with the address."""
    sender, made = start(0), image(CHUNK).seal()
    gone = start(1)
    gone.close()
    sender.pool.push(1, gone.address, made.source, deadline_s=PATIENCE_S)
    failed = sender.told(TransferFailed)
    assert failed.fault == "broken"
    assert str(gone.port) in failed.reason


def test_another_address_takes_the_place_of_the_former(start: Start, image: Make) -> None:
    """A new incarnation may listen elsewhere; the old port is closed."""
    sender, receiver, made = start(0), start(1), image(CHUNK).seal()
    old = receiver.address
    receiver.port = receiver.pool.listen("127.0.0.1")
    sender.pool.push(1, old, made.source, deadline_s=PATIENCE_S)
    assert sender.told(TransferFailed).fault == "broken"
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S)
    sender.told(ReplicaSealed)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "localhost", ""])
def test_only_one_address_of_ours_is_listened_on(start: Start, host: str) -> None:
    """Never all interfaces, no names, none that is not here."""
    with pytest.raises(ConfigError, match="cannot listen"):
        start(0).pool.listen(host)


def test_chunks_are_split_evenly_and_each_once() -> None:
    """Also with more streams than chunks, and with gaps."""
    spans = (Span(start=0, stop=3), Span(start=5, stop=6), Span(start=9, stop=12))
    parts = split_spans(spans, 3)
    numbers = [n for part in parts for span in part for n in range(span.start, span.stop)]
    assert numbers == [0, 1, 2, 5, 9, 10, 11]
    assert {sum(s.stop - s.start for s in part) for part in parts} <= {2, 3}
    assert len(split_spans(spans, 50)) == 7
