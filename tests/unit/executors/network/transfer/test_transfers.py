"""Images from node to node: whole, verified, in any number of streams, until somebody minds."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autockpt.executors.image.container import chunk_digest
from autockpt.executors.network.transfer.destination import SlotDestination, Staging
from autockpt.executors.network.transfer.events import Fetched, Served, TransferFailed
from autockpt.executors.network.transfer.frames import Span
from autockpt.executors.network.transfer.session import split_spans
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.throttle.rate_limit import RateLimiter
from autockpt.values.errors import ConfigError, GuardError, ProtocolError, StorageError
from tests.unit.executors.network.transfer.conftest import Make, Start
from tests.unit.executors.network.transfer.ends import CHUNK, PATIENCE_S


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [1, CHUNK, 20 * CHUNK + 17])
def test_a_sealed_image_is_fetched_to_the_bit(
    start: Start, image: Make, streams: int, nbytes: int
) -> None:
    """Both ends are told with the same root; every chunk is placed once."""
    lender, lost, made = start(0), start(1), image(nbytes)
    placed: list[int] = []
    lost.placing = placed.append
    lender.lend(made)
    lost.fetch(lender, made, streams=streams)
    fetched = lost.told(Fetched)
    assert lost.received == made.view
    assert (fetched.node, fetched.index, fetched.nbytes) == (0, made.index, nbytes)
    assert sorted(placed) == list(range(made.subject.chunks))
    assert lender.told(Served).root == made.root
    assert len(lost.events) == 1


def test_only_the_wanted_chunks_are_fetched(start: Start, image: Make) -> None:
    """A partial loss needs a part."""
    lender, lost, made = start(0), start(1), image(9 * CHUNK + 5)
    lender.lend(made)
    lost.fetch(lender, made, chunks=(Span(start=1, stop=3), Span(start=9, stop=10)), streams=2)
    assert lost.told(Fetched).nbytes == 2 * CHUNK + 5
    assert lost.received[CHUNK : 3 * CHUNK] == made.view[CHUNK : 3 * CHUNK]
    assert lost.received[9 * CHUNK :] == made.view[9 * CHUNK :]
    assert not any(lost.received[3 * CHUNK : 9 * CHUNK])


def test_a_want_is_refused_in_the_words_of_the_owner(start: Start, image: Make) -> None:
    """Whoever fetches knows why."""
    lender, lost, made = start(0), start(1), image(CHUNK)
    for lent, refusal, reason in (
        ({}, "", "no such image"), ({made.root: made}, "the keeper is busy", "the keeper is busy"),
    ):  # fmt: skip
        lender.lent, lender.refusal = lent, refusal
        lost.events.clear()
        lost.fetch(lender, made)
        failed = lost.told(TransferFailed)
        assert (failed.fault, failed.reason, failed.direction) == ("refused", reason, "fetch")


def test_the_gate_paces_all_streams_together(start: Start, image: Make) -> None:
    """20 chunks at 100 chunks a second."""
    lender, lost, made = start(0), start(1), image(20 * CHUNK)
    lender.lend(made)
    lender.gate = RateLimiter(100 * CHUNK)
    lost.fetch(lender, made, streams=3)
    assert lost.told(Fetched).seconds > 0.15


class Pieces:
    """Windows that let so many bytes pass at a time, after a pause; records what was asked."""

    def __init__(self, piece: int, pause_s: float = 0.0) -> None:
        self.piece, self.pause_s = piece, pause_s
        self.begun: list[int] = []
        self.asked: list[int] = []

    @contextmanager
    def begin(self, nbytes: int) -> Iterator["Pieces"]:
        """A transfer."""
        self.begun.append(nbytes)
        yield self

    def take(self, left: int) -> int:
        """A piece."""
        time.sleep(self.pause_s)
        self.asked.append(left)
        return min(self.piece, left)


@pytest.mark.parametrize("streams", [1, 2])
def test_chunks_leave_in_pieces_in_windows(start: Start, image: Make, streams: int) -> None:
    """To the bit, every byte asked for once, by each stream for its part."""
    lender, lost, made = start(0), start(1), image(6 * CHUNK + 17)
    lender.windows = windows = Pieces(CHUNK // 4 + 1)
    lender.lend(made)
    lost.fetch(lender, made, streams=streams)
    assert lost.told(Fetched).nbytes == 6 * CHUNK + 17
    assert lost.received == made.view
    assert (len(windows.begun), sum(windows.begun)) == (streams, 6 * CHUNK + 17)
    assert len(windows.asked) == 6 * 4 + 1
    assert max(windows.asked) == CHUNK


def test_windows_hold_no_chunk_back_until_it_looks_like_silence(start: Start, image: Make) -> None:
    """Pieces that would take 6 s: after half of what the other end grants a chunk goes on whole."""
    lender, lost, made = start(0, silence_s=1.0), start(1, silence_s=1.0), image(CHUNK)
    lender.windows = windows = Pieces(CHUNK // 64, pause_s=0.1)
    lender.lend(made)
    lost.fetch(lender, made)
    assert 0.4 < lost.told(Fetched).seconds < 4.0
    assert lost.received == made.view
    assert 3 <= len(windows.asked) <= 6


def test_a_piece_that_is_not_acknowledged_ends_with_the_transfer(start: Start, image: Make) -> None:
    """The other end takes nothing; when the slot is needed nobody is inside it."""
    lender, lost, made = start(0), start(1), image(2**26)
    go_on = threading.Event()
    lost.placing = lambda number: go_on.wait(PATIENCE_S)
    lender.windows = Pieces(2**26)
    lender.lend(made)
    lost.fetch(lender, made)
    deadline = time.monotonic() + PATIENCE_S
    while not made.source._leases and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.2)
    began = time.monotonic()
    made.source.revoke("the slot is needed")
    assert time.monotonic() - began < 1.0
    assert lender.told(TransferFailed).fault == "aborted"
    go_on.set()


def test_a_gate_that_looks_like_silence_is_refused(start: Start, image: Make) -> None:
    """The other end would take the pause for a loss."""
    lender, lost, made = start(0, silence_s=1.0), start(1), image(CHUNK)
    lender.lend(made)
    lender.gate = RateLimiter(1, longest_wait_s=0.6)
    lost.fetch(lender, made)
    assert "at most half" in lost.told(TransferFailed).reason


@pytest.mark.parametrize("streams", [0, 17])
def test_streams_are_bounded(start: Start, image: Make, streams: int) -> None:
    """Each is a thread at both ends."""
    lender, lost, made = start(0), start(1), image(CHUNK)
    with pytest.raises(ConfigError, match="between 1 and 16"):
        lost.fetch(lender, made, streams=streams)


# ------------------------------------------------------------------ the owner changes its mind


@pytest.mark.parametrize("streams", [1, 3])
def test_after_revoke_the_slot_belongs_to_its_owner(
    start: Start, image: Make, streams: int
) -> None:
    """The other end takes nothing, so senders sit in their system call: revoke gets them out."""
    lender, lost, made = start(0), start(1), image(2**26)
    go_on = threading.Event()
    lost.placing = lambda number: go_on.wait(PATIENCE_S)
    lender.lend(made)
    lost.fetch(lender, made, streams=streams)
    deadline = time.monotonic() + PATIENCE_S
    while _readers(made.source) < streams and time.monotonic() < deadline:
        time.sleep(0.001)
    assert _readers(made.source) == streams
    leases = list(made.source._leases)
    began = time.monotonic()
    made.source.revoke("the slot is needed")
    assert time.monotonic() - began < 1.0
    assert not any(lease._inside for lease in leases)
    go_on.set()
    served = lender.told(TransferFailed)
    assert (served.fault, served.reason, served.direction) == (
        "aborted", "the slot is needed", "serve",
    )  # fmt: skip
    assert lost.told(TransferFailed).fault in ("refused", "broken")


def _readers(source: ImageSource) -> int:
    return sum(lease._inside for lease in list(source._leases))


def test_a_revoked_source_begins_no_transfer(start: Start, image: Make) -> None:
    """Both ends are told at once."""
    lender, lost, made = start(0), start(1), image(CHUNK)
    lender.lend(made)
    made.source.revoke("overwritten")
    lost.fetch(lender, made)
    assert lender.told(TransferFailed).fault == "aborted"
    failed = lost.told(TransferFailed)
    assert (failed.fault, failed.reason) == ("refused", "overwritten")


def test_after_abort_nothing_is_written_to_the_destination(start: Start, image: Make) -> None:
    """Whoever fetches needs its slot back while chunks pour in."""
    lender, lost, made = start(0), start(1), image(2**26)
    lender.lend(made)
    lender.gate = RateLimiter(2**26)
    coming = threading.Event()
    lost.placing = lambda number: coming.set()
    transfer = lost.fetch(lender, made, streams=2)
    assert coming.wait(PATIENCE_S)
    transfer.abort("needed here")
    before = bytes(lost.received)
    assert lost.told(TransferFailed).fault == "aborted"
    lender.told(TransferFailed)
    assert lost.received == before
    assert before != made.view


def test_closing_the_pool_ends_every_transfer(start: Start, image: Make) -> None:
    """And says so once for each; nothing begins any more."""
    lender, lost, made = start(0), start(1), image(2**24)
    lender.lend(made)
    lender.gate = RateLimiter(2**22)
    for _ in range(3):
        lost.fetch(lender, made)
    lost.pool.close("the end")
    assert [event.reason for event in lost.events] == ["the end"] * 3  # type: ignore[union-attr]
    with pytest.raises(StorageError, match="closed"):
        lost.fetch(lender, made)


def test_a_bit_that_flips_in_the_slot_is_found_by_whoever_fetches(
    start: Start, image: Make
) -> None:
    """The digest was taken when the chunk arrived in the slot; the lender hears of it."""
    lender, lost, made = start(0), start(1), image(3 * CHUNK)
    lender.lend(made)
    made.view[CHUNK + 5] ^= 4
    lost.fetch(lender, made)
    failed = lost.told(TransferFailed)
    assert failed.fault == "corrupt"
    assert "chunk 1" in failed.reason
    assert "chunk 1" in lender.told(TransferFailed).reason


def test_a_destination_that_raises_ends_the_fetch_only(start: Start, image: Make) -> None:
    """An owner's mistake is an event, and the pool goes on."""
    lender, lost, made = start(0), start(1), image(2 * CHUNK)
    lender.lend(made)

    def fall(number: int) -> None:
        raise ValueError(f"no place for {number}")

    lost.placing = fall
    lost.fetch(lender, made)
    failed = lost.told(TransferFailed)
    assert (failed.fault, failed.reason) == ("internal", "ValueError: no place for 0")
    lost.placing = lambda number: None
    lost.fetch(lender, made)
    lost.told(Fetched)


def test_nobody_listening_is_a_failure_like_others(start: Start, image: Make) -> None:
    """At once, with the address."""
    lost, made, gone = start(1), image(CHUNK), start(0)
    gone.close()
    lost.fetch(gone, made)
    failed = lost.told(TransferFailed)
    assert failed.fault == "broken"
    assert str(gone.port) in failed.reason


def test_another_address_takes_the_place_of_the_former(start: Start, image: Make) -> None:
    """A new incarnation may listen elsewhere; the old port is closed."""
    lender, lost, made = start(0), start(1), image(CHUNK)
    lender.lend(made)
    old, new = lender.port, lender.pool.listen("127.0.0.1")
    assert old != new
    lost.fetch(lender, made)
    assert lost.told(TransferFailed).fault == "broken"
    lender.port = new
    lost.fetch(lender, made)
    lost.told(Fetched)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "localhost", ""])
def test_only_one_address_of_ours_is_listened_on(start: Start, host: str) -> None:
    """Never all interfaces, no names, none that is not here."""
    with pytest.raises(ConfigError, match="cannot listen"):
        start(0).pool.listen(host)


# ------------------------------------------------------------------ parts


def test_chunks_are_split_evenly_and_each_once() -> None:
    """Also with more streams than chunks, and with gaps."""
    spans = (Span(start=0, stop=3), Span(start=5, stop=6), Span(start=9, stop=12))
    parts = split_spans(spans, 3)
    numbers = [n for part in parts for span in part for n in range(span.start, span.stop)]
    assert numbers == [0, 1, 2, 5, 9, 10, 11]
    assert {sum(s.stop - s.start for s in part) for part in parts} <= {2, 3}
    assert len(split_spans(spans, 50)) == 7


def test_staging_is_bounded() -> None:
    """More chunks at a time than there is memory for are refused; what is given back is used."""
    staging = Staging(memoryview(bytearray(2 * CHUNK + 5)), CHUNK)
    one, _ = staging.take(CHUNK), staging.take(7)
    with pytest.raises(GuardError, match="2 are under way"):
        staging.take(1)
    staging.give_back(one)
    assert len(staging.take(CHUNK)) == CHUNK


def test_memory_and_image_fit(image: Make) -> None:
    """What is lent is as long as its index says, and what is fetched fits where it goes."""
    made = image(CHUNK)
    assert made.index.digests == (chunk_digest(made.view),)
    with pytest.raises(ProtocolError, match="bytes for an image"):
        ImageSource(0, made.view[1:], made.index)
    with pytest.raises(GuardError, match="refuse it"):
        SlotDestination(memoryview(bytearray(CHUNK - 1)), made.subject)
