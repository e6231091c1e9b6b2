"""Peers that hang, garble, lie or count to 10^12: refused, soon, with a clear event.

Those of the second part know the run's secret: a broken machine is such a peer.
"""

import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from autockpt.executors.image import chunk_digest
from autockpt.executors.transfer import greeting
from autockpt.executors.transfer.events import (
    ConnectionRefused,
    ReplicaReceived,
    ReplicaSealed,
    TransferFailed,
)
from autockpt.executors.transfer.frames import (
    CHUNK,
    END,
    HOLD,
    TEXT,
    Accepted,
    Header,
    Join,
    Offer,
    Refused,
    Sealed,
    Span,
    Want,
)
from autockpt.executors.transfer.pool import MAX_STRANGERS
from autockpt.values.generation import Generation
from tests.executors.transfer import ends
from tests.executors.transfer.conftest import Make, Start
from tests.executors.transfer.ends import PATIENCE_S, RUN, End, Image, identity
from tests.executors.transfer.stranger import Stranger, Trap

SILENCE_S = 0.4
BIG = 10**12
CHUNKS = 4


@pytest.fixture
def victim(start: Start, monkeypatch: pytest.MonkeyPatch) -> End:
    """A node with little patience."""
    monkeypatch.setattr(greeting, "HANDSHAKE_S", SILENCE_S)
    return start(1, silence_s=SILENCE_S)


@pytest.fixture
def good(image: Make) -> Image:
    """An image of four chunks."""
    return image(CHUNKS * ends.CHUNK)


@pytest.fixture
def trap() -> Iterator[Trap]:
    """A listener that plays node 1."""
    made = Trap()
    yield made
    made.close()


def peak_bytes() -> int:
    """Most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def still_works(end: End, start: Start, good: Image) -> None:
    """Somebody honest is served."""
    good.seal()
    friend = start(0)
    friend.pool.push(end.node, end.address, good.source, deadline_s=PATIENCE_S, streams=2)
    friend.told(ReplicaSealed)
    assert end.received == good.view


# ------------------------------------------------------------------ who does not know the secret


def _garbage(end: End) -> Stranger:
    one = Stranger(socket.create_connection(end.address))
    one.say(b"GET / HTTP/1.1\r\nHost: keeper\r\n\r\n" * 100)
    return one


def _endless_greeting(end: End) -> Stranger:
    one = Stranger(socket.create_connection(end.address))
    one.say(struct.pack("!I", 2**32 - 1) + bytes(10**6))
    return one


def _silence(end: End) -> Stranger:
    return Stranger(socket.create_connection(end.address))


def _slow_greeting(end: End) -> Stranger:
    one = Stranger(socket.create_connection(end.address))
    one.read(4)
    one.trickle(struct.pack("!I", 400) + b"{" * 400, 0.05)
    return one


def _other_secret(end: End) -> Stranger:
    return Stranger.calls(end, secret=bytes(32))


def _other_run(end: End) -> Stranger:
    return Stranger.calls(end, me=identity(0, run_id="f" * 16))


def _for_messages(end: End) -> Stranger:
    return Stranger.calls(end, purpose="control")


STRANGERS = (
    (_garbage, "greeting of"), (_endless_greeting, "greeting of"), (_silence, "no handshake"),
    (_slow_greeting, "no handshake"), (_other_secret, "secret"), (_other_run, "of run"),
    (_for_messages, "comes for control"),
)  # fmt: skip


@pytest.mark.parametrize(("attack", "reason"), STRANGERS, ids=lambda x: getattr(x, "__name__", ""))
def test_who_does_not_prove_itself_is_sent_away(
    victim: End, start: Start, good: Image, attack: Callable[[End], Stranger], reason: str
) -> None:
    """Within the time for a handshake, and the reason is told."""
    began = time.monotonic()
    stranger = attack(victim)
    assert stranger.is_closed()
    assert time.monotonic() - began < 10 * SILENCE_S
    assert reason in victim.told(ConnectionRefused).reason
    stranger.close()
    still_works(victim, start, good)


def test_a_crowd_of_strangers_is_bounded(victim: End, start: Start, good: Image) -> None:
    """More than 32 at once are closed unheard; when they are gone, friends come in."""
    crowd = [_silence(victim) for _ in range(MAX_STRANGERS + 20)]
    begun = threading.active_count()
    assert begun < MAX_STRANGERS + 20
    for one in crowd:
        assert one.is_closed()
        one.close()
    still_works(victim, start, good)


# ------------------------------------------------------------------ who knows it


def _accepted(end: End, good: Image, **offer: object) -> Stranger:
    one = Stranger.calls(end)
    assert one.offer(good, **offer) == Accepted()
    return one


def _no_frame(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(b"\0" * 4096)
    return one


def _unknown_kind(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(Header(kind=77).pack())
    return one


def _huge_chunk(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(Header(kind=CHUNK, number=0, length=BIG).pack() + bytes(10**6))
    return one


def _huge_text(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(Header(kind=TEXT, length=BIG).pack() + b"{" * 10**6)
    return one


def _long_chunk(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 0, length=ends.CHUNK + 1) + b"x")
    return one


def _short_chunk(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 1, length=ends.CHUNK - 1))
    return one


def _chunk_beyond(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(Header(kind=CHUNK, number=CHUNKS, length=ends.CHUNK).pack() + bytes(ends.CHUNK))
    return one


def _chunk_twice(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 2) + one.chunk(good, 2))
    return one


def _wrong_bytes(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 0, digest=bytes(16)))
    return one


def _gone_between_chunks(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 0))
    one.sock.shutdown(socket.SHUT_WR)
    return one


def _gone_in_a_chunk(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 0)[:-100])
    one.sock.shutdown(socket.SHUT_WR)
    return one


def _hangs_between_chunks(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 0))
    return one


def _hangs_in_a_chunk(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 0)[:-100])
    return one


def _trickles(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.trickle(one.chunk(good, 0), 0.02)
    return one


def _only_lives(end: End, good: Image) -> Stranger:
    end.deadline_s = 3 * SILENCE_S
    one = _accepted(end, good)
    while one.say(Header(kind=HOLD).pack()):
        time.sleep(SILENCE_S / 20)
    return one


def _index_too_early(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    one.say(one.chunk(good, 0))
    one.tell(good.index)
    return one


def _complete(one: Stranger, good: Image) -> None:
    for number in range(CHUNKS):
        one.say(one.chunk(good, number))


def _other_generation(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    _complete(one, good)
    one.tell(replace(good.index, generation=Generation(epoch=1, seq=8)))
    return one


def _other_digests(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    _complete(one, good)
    one.tell(replace(good.index, digests=("0" * 32,) * CHUNKS))
    return one


def _text_of_another_kind(end: End, good: Image) -> Stranger:
    one = _accepted(end, good)
    _complete(one, good)
    one.tell(Sealed(root=good.index.root))
    return one


def _stream_that_nobody_awaits(end: End, good: Image) -> Stranger:
    main = _accepted(end, good, streams=2)
    first, second = main.others = [Stranger.calls(end), Stranger.calls(end)]
    first.tell(Join(transfer="0011223344556677", stream=1))
    assert first.hear() == Accepted()
    second.tell(Join(transfer="0011223344556677", stream=1))
    second.hear()
    return main


def _index_on_a_further_stream(end: End, good: Image) -> Stranger:
    main = _accepted(end, good, streams=2)
    (side,) = main.others = [Stranger.calls(end)]
    side.tell(Join(transfer="0011223344556677", stream=1))
    assert side.hear() == Accepted()
    side.tell(good.index)
    return main


PEERS = (
    (_no_frame, "protocol", "not a frame"), (_unknown_kind, "protocol", "unknown kind"),
    (_huge_chunk, "protocol", f"{BIG} bytes"), (_huge_text, "protocol", f"{BIG} bytes"),
    (_long_chunk, "protocol", "expected"), (_short_chunk, "protocol", "expected"),
    (_chunk_beyond, "protocol", "not announced"), (_chunk_twice, "protocol", "came twice"),
    (_wrong_bytes, "corrupt", "expected digest"), (_gone_between_chunks, "broken", "after 0 of"),
    (_gone_in_a_chunk, "broken", "closed by the other end"),
    (_hangs_between_chunks, "silent", "nothing for"), (_hangs_in_a_chunk, "silent", "nothing for"),
    (_trickles, "silent", "nothing for"), (_only_lives, "silent", "time for the transfer is over"),
    (_index_too_early, "silent", "3 of 4 chunks"), (_other_generation, "protocol", "e1s8"),
    (_other_digests, "corrupt", "its index says"), (_text_of_another_kind, "protocol", "Sealed"),
    (_stream_that_nobody_awaits, "protocol", "not awaited"),
    (_index_on_a_further_stream, "protocol", "further stream"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("attack", "fault", "reason"), PEERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_peer_that_misbehaves_is_dropped(
    victim: End, start: Start, good: Image,
    attack: Callable[[End, Image], Stranger], fault: str, reason: str,
) -> None:  # fmt: skip
    """Soon, with what it did; nothing is sealed, and others are served."""
    stranger = attack(victim, good)
    failed = victim.told(TransferFailed)
    assert failed.fault == fault
    assert reason in failed.reason
    assert stranger.is_closed()
    assert not victim.sealed
    stranger.close()
    victim.deadline_s = PATIENCE_S
    still_works(victim, start, good)


def test_memory_does_not_follow_what_a_peer_says(victim: End, good: Image) -> None:
    """10^12 in every place that has a length, and nothing is allocated for it."""
    before = peak_bytes()
    for _ in range(5):
        for attack in (_huge_chunk, _huge_text):
            stranger = attack(victim, good)
            assert stranger.is_closed()
            stranger.close()
    for bytes_, chunk_bytes in ((BIG, ends.CHUNK), (BIG, 2**30), (BIG, BIG)):
        subject = {"image_bytes": bytes_, "chunk_bytes": chunk_bytes}
        one = Stranger.calls(victim)
        assert isinstance(_lie(one, good, subject), Refused)
        one.close()
    assert peak_bytes() - before < 64 * 2**20


def _lie(one: Stranger, good: Image, changed: dict[str, object]) -> object:
    """An offer that our own types would not let us make."""
    import json

    from autockpt.values.record import to_data

    offer = Offer(transfer="00", subject=good.subject, chunks=(Span(start=0, stop=1),), streams=1)
    data = to_data(offer)
    data["subject"] |= changed
    body = json.dumps({"type": "Offer", "body": data}).encode()
    one.say(Header(kind=TEXT, length=len(body)).pack() + body)
    return one.hear()


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        ({"streams": 10**6}, "streams"),
        ({"streams": 0}, "streams"),
        ({"chunks": ()}, "no chunk"),
        ({"chunks": (Span(start=0, stop=BIG),)}, "of 4"),
        ({"chunks": (Span(start=2, stop=3), Span(start=0, stop=1))}, "of 4"),
        ({"chunks": (Span(start=0, stop=3), Span(start=2, stop=4))}, "of 4"),
    ],
)
def test_an_offer_that_cannot_be_meant_is_refused(
    victim: End, good: Image, offer: dict[str, object], reason: str
) -> None:
    """Before the owner hears of it."""
    one = Stranger.calls(victim)
    answer = one.offer(good, **offer)
    assert isinstance(answer, Refused)
    assert reason in answer.reason
    assert reason in victim.told(ConnectionRefused).reason
    one.close()


def test_an_offer_of_another_run_is_refused(victim: End, good: Image) -> None:
    """Whoever it proved to be."""
    one = Stranger.calls(victim)
    answer = one.offer(good, subject=replace(good.subject, run_id="f" * 16))
    assert isinstance(answer, Refused)
    assert RUN in answer.reason
    one.close()


def test_chunks_in_any_order_are_fine(victim: End, good: Image) -> None:
    """Several streams bring them as they come."""
    one = _accepted(victim, good)
    for number in (3, 1, 0, 2):
        one.say(one.chunk(good, number))
    one.tell(good.index)
    assert one.hear() == Sealed(root=good.index.root)
    assert victim.told(ReplicaReceived).index == good.index
    assert victim.received == good.view
    one.close()


def test_one_that_hangs_does_not_hold_another(start: Start, good: Image) -> None:
    """An honest push ends while the other one still counts as alive."""
    victim = start(1, silence_s=5.0)
    hanging = _accepted(victim, good)
    hanging.say(hanging.chunk(good, 0)[:-1])
    began = time.monotonic()
    still_works(victim, start, good)
    assert time.monotonic() - began < 2.5
    hanging.close()


def test_a_want_of_chunks_that_are_not_there_is_refused(victim: End, good: Image) -> None:
    """Whoever asks for more than the image has gets nothing."""
    root = good.seal().index.root
    victim.lent[root] = good
    one = Stranger.calls(victim)
    one.tell(
        Want(transfer="00", generation=ends.GENERATION, rank=0, root=root,
             chunks=(Span(start=0, stop=BIG),))
    )  # fmt: skip
    answer = one.hear()
    assert isinstance(answer, Refused)
    assert "of 4" in answer.reason
    one.close()


# ------------------------------------------------------------------ whom we call


def _push(start: Start, good: Image, trap: Trap) -> End:
    sender = start(0, silence_s=SILENCE_S)
    sender.pool.push(1, trap.address, good.seal().source, deadline_s=PATIENCE_S)
    return sender


def test_a_receiver_that_does_not_answer_is_dropped(start: Start, good: Image, trap: Trap) -> None:
    """The offer is read, and that is all."""
    sender = _push(start, good, trap)
    one = trap.answer()
    assert sender.told(TransferFailed).fault == "silent"
    one.close()


def test_a_receiver_that_reads_nothing_is_dropped(start: Start, image: Make, trap: Trap) -> None:
    """The buffers of the connection are full, the slot is free again after the deadline."""
    large = image(2**25)
    sender = _push(start, large, trap)
    one = trap.answer()
    one.tell(Accepted())
    failed = sender.told(TransferFailed)
    assert failed.fault == "silent"
    assert "not taken" in failed.reason
    large.source.revoke("free")
    one.close()


def _answer(one: Stranger, good: Image, last: bytes) -> None:
    one.hear()
    one.tell(Accepted())
    one.read(sum(len(one.chunk(good, number)) for number in range(CHUNKS)))
    one.hear()
    one.say(last)


def test_an_acknowledgement_with_another_root_is_none(
    start: Start, good: Image, trap: Trap
) -> None:
    """What was sealed there is not what we have."""
    from autockpt.executors.transfer.frames import pack_text

    sender = _push(start, good, trap)
    one = trap.answer()
    _answer(one, good, pack_text(Sealed(root="0" * 64)))
    failed = sender.told(TransferFailed)
    assert failed.fault == "protocol"
    assert "sealed as 0000" in failed.reason
    one.close()


def test_an_acknowledgement_that_never_comes_is_a_failure(
    start: Start, good: Image, trap: Trap
) -> None:
    """Although everything was taken."""
    sender = _push(start, good, trap)
    one = trap.answer()
    _answer(one, good, b"")
    assert sender.told(TransferFailed).fault == "silent"
    one.close()


def test_reasons_of_others_are_cleaned(start: Start, good: Image, trap: Trap) -> None:
    """They go to a log and to a terminal."""
    sender = _push(start, good, trap)
    one = trap.answer()
    one.hear()
    one.tell(Refused(reason="no\x1b[2J\n" + "x" * 10_000))
    failed = sender.told(TransferFailed)
    assert failed.fault == "refused"
    assert failed.reason.startswith("no?[2J?xxx")
    assert len(failed.reason) <= 500
    one.close()


def test_a_lender_with_another_image_is_found_out(start: Start, good: Image, trap: Trap) -> None:
    """An index of its own for bytes of its own is not the root that was asked for."""
    lost = start(0, silence_s=SILENCE_S)
    root = good.seal().index.root
    lost.pool.fetch(1, trap.address, good.subject, root, lost.destination(good.subject),
                    deadline_s=PATIENCE_S)  # fmt: skip
    one = trap.answer()
    one.hear()
    one.tell(replace(good.index, digests=("0" * 32,) * CHUNKS))
    failed = lost.told(TransferFailed)
    assert failed.fault == "protocol"
    assert "asked for root" in failed.reason
    one.close()


def test_a_lender_with_other_bytes_is_found_out(start: Start, good: Image, trap: Trap) -> None:
    """The right index, and a chunk that is right by its own header only."""
    lost = start(0, silence_s=SILENCE_S)
    index = good.seal().index
    lost.pool.fetch(1, trap.address, good.subject, index.root, lost.destination(good.subject),
                    deadline_s=PATIENCE_S)  # fmt: skip
    one = trap.answer()
    one.hear()
    one.tell(index)
    rubbish = bytes(ends.CHUNK)
    digest = bytes.fromhex(chunk_digest(memoryview(rubbish)))
    one.say(Header(kind=CHUNK, number=0, length=ends.CHUNK, digest=digest).pack() + rubbish)
    assert lost.told(TransferFailed).fault == "corrupt"
    assert not lost.sealed
    one.close()


def test_a_lender_that_stops_early_has_not_served(start: Start, good: Image, trap: Trap) -> None:
    """The end is said, and chunks are missing."""
    lost = start(0, silence_s=SILENCE_S)
    index = good.seal().index
    lost.pool.fetch(1, trap.address, good.subject, index.root, lost.destination(good.subject),
                    deadline_s=PATIENCE_S)  # fmt: skip
    one = trap.answer()
    one.hear()
    one.tell(index)
    one.say(one.chunk(good, 0) + Header(kind=END).pack())
    failed = lost.told(TransferFailed)
    assert failed.reason == "3 of the chunks that were asked for did not come"
    one.close()
