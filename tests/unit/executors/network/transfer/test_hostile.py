"""Peers that hang, garble, lie or count to 10^12: dropped, soon, with a clear event.

First whoever does not know the run's secret, then lenders and askers that do: a broken machine is
such a peer.
"""

import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from autockpt.executors.network.handshake import Channel
from autockpt.executors.network.transfer import greeting
from autockpt.executors.network.transfer.events import (
    ConnectionRefused,
    Fetched,
    Served,
    TransferFailed,
)
from autockpt.executors.network.transfer.frames import (
    CHUNK,
    TEXT,
    Header,
    Refused,
    Span,
    Verified,
    Want,
    pack_text,
)
from autockpt.executors.network.transfer.pool import MAX_STRANGERS
from autockpt.values.generation import Generation
from autockpt.values.record import to_data
from tests.unit.executors.network.transfer import ends
from tests.unit.executors.network.transfer.conftest import Make, Start
from tests.unit.executors.network.transfer.ends import PATIENCE_S, End, Image, identity
from tests.unit.executors.network.transfer.stranger import Stranger, Trap

SILENCE_S = 0.4
BIG = 10**12
CHUNKS = 4


@pytest.fixture
def victim(start: Start, monkeypatch: pytest.MonkeyPatch) -> End:
    """A node with little patience."""
    monkeypatch.setattr(greeting, "HANDSHAKE_S", SILENCE_S)
    return start(2, silence_s=SILENCE_S)


@pytest.fixture
def good(image: Make, victim: End) -> Image:
    """An image of four chunks, which the victim lends."""
    made = image(CHUNKS * ends.CHUNK)
    victim.lend(made)
    return made


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
    """Somebody honest is served, and serves."""
    friend = start(0)
    friend.lend(good)
    end.events.clear()
    for lender, lost in ((end, friend), (friend, end)):
        lost.fetch(lender, good, streams=2)
        lost.told(Fetched)
        assert lost.received == good.view


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
    others = set(threading.enumerate())  # of other tests, too
    crowd = [_silence(victim) for _ in range(MAX_STRANGERS + 20)]
    assert len(set(threading.enumerate()) - others) < MAX_STRANGERS + 20
    for one in crowd:
        assert one.is_closed()
        one.close()
    still_works(victim, start, good)


def _listener_garbles(trap: Trap) -> Stranger:
    one = trap.taken()
    one.say(b"HTTP/1.1 200 OK\r\n\r\n" * 100)
    return one


def _listener_says_nothing(trap: Trap) -> Stranger:
    return trap.taken()


def _listener_has_another_secret(trap: Trap) -> Stranger:
    """It cannot check the caller's proof, and makes one up."""
    one = trap.taken()
    channel = Channel(bytes(32), identity(1), to_node=None, purpose="transfer")
    one.say(channel.outbox.pop())
    one.read(*struct.unpack("!I", one.read(4)))
    welcome = json.dumps({"proof": "0" * 64}).encode()
    one.say(struct.pack("!I", len(welcome)) + welcome)
    return one


def _listener_reflects(trap: Trap) -> Stranger:
    """Gives the caller's own proof back."""
    one = trap.taken()
    channel = Channel(bytes(32), identity(1), to_node=None, purpose="transfer")
    one.say(channel.outbox.pop())
    said = json.loads(one.read(*struct.unpack("!I", one.read(4))))
    welcome = json.dumps({"proof": said["proof"]}).encode()
    one.say(struct.pack("!I", len(welcome)) + welcome)
    return one


LISTENERS = (
    (_listener_garbles, "protocol", "greeting of"), (_listener_says_nothing, "silent", "handshake"),
    (_listener_has_another_secret, "protocol", "secret"),
    (_listener_reflects, "protocol", "secret"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("attack", "fault", "reason"), LISTENERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_nothing_is_wanted_of_a_listener_that_proves_nothing(
    victim: End, start: Start, good: Image, trap: Trap,
    attack: Callable[[Trap], Stranger], fault: str, reason: str,
) -> None:  # fmt: skip
    """Somebody else listens where a keeper was."""
    victim.fetch(trap, good)
    stranger = attack(trap)
    failed = victim.told(TransferFailed)
    assert failed.fault == fault
    assert reason in failed.reason
    assert stranger.is_closed()
    stranger.close()
    still_works(victim, start, good)


# ------------------------------------------------------------------ lenders who know it


def _lends(one: Stranger, good: Image) -> None:
    """Answers as an honest lender does, up to the chunks."""
    assert one.hear().root == good.root
    one.tell(good.index)


def _no_frame(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(b"\0" * 4096)


def _unknown_kind(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(Header(kind=77).pack())


def _huge_chunk(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(Header(kind=CHUNK, number=0, length=BIG).pack() + bytes(10**6))


def _huge_text(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(Header(kind=TEXT, length=BIG).pack() + b"{" * 10**6)


def _huge_index(one: Stranger, good: Image) -> None:
    one.hear()
    one.say(Header(kind=TEXT, length=BIG).pack() + b"{" * 10**6)


def _long_chunk(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 0, length=ends.CHUNK + 1) + b"x")


def _short_chunk(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 1, length=ends.CHUNK - 1))


def _chunk_beyond(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(Header(kind=CHUNK, number=CHUNKS, length=ends.CHUNK).pack() + bytes(ends.CHUNK))


def _chunk_twice(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 2) + one.chunk(good, 2))


def _chunk_in_the_place_of_another(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(Header(kind=CHUNK, number=1, length=ends.CHUNK).pack() + good.view[: ends.CHUNK])


def _wrong_bytes(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(Header(kind=CHUNK, number=0, length=ends.CHUNK).pack() + bytes(ends.CHUNK))


def _gone_between_chunks(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 0))
    one.sock.shutdown(socket.SHUT_WR)


def _gone_in_a_chunk(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 0)[:-100])
    one.sock.shutdown(socket.SHUT_WR)


def _never_answers(one: Stranger, good: Image) -> None:
    one.hear()


def _hangs_between_chunks(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 0))


def _hangs_in_a_chunk(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 0)[:-100])


def _trickles(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.trickle(one.chunk(good, 0), 0.02)


def _dawdles(one: Stranger, good: Image) -> None:
    """Every chunk comes before its own deadline, and the fetch has one, too."""
    _lends(one, good)
    for number in range(CHUNKS):
        one.say(one.chunk(good, number))
        time.sleep(0.8 * SILENCE_S)


def _index_twice(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.tell(good.index)


def _verified_for_an_index(one: Stranger, good: Image) -> None:
    one.hear()
    one.tell(Verified(root=good.root))


def _chunk_for_an_index(one: Stranger, good: Image) -> None:
    one.hear()
    one.say(one.chunk(good, 0))


def _other_generation(one: Stranger, good: Image) -> None:
    one.hear()
    one.tell(replace(good.index, generation=Generation(term=1, step=8)))


def _other_rank(one: Stranger, good: Image) -> None:
    one.hear()
    one.tell(replace(good.index, rank=3))


def _other_digests(one: Stranger, good: Image) -> None:
    one.hear()
    one.tell(replace(good.index, digests=("0" * 32,) * CHUNKS))


def _other_length(one: Stranger, good: Image) -> None:
    one.hear()
    longer = (*good.index.digests, "0" * 32)
    one.tell(replace(good.index, image_bytes=good.index.image_bytes + 1, digests=longer))


def _endless_length(one: Stranger, good: Image) -> None:
    """An index that our own types would not let us make."""
    one.hear()
    data = to_data(good.index) | {"image_bytes": BIG, "chunk_bytes": BIG}
    body = json.dumps({"type": "ImageIndex", "body": data}).encode()
    one.say(Header(kind=TEXT, length=len(body)).pack() + body)


def _gives_up(one: Stranger, good: Image) -> None:
    _lends(one, good)
    one.say(one.chunk(good, 0))
    one.tell(Refused(reason="the slot is used again"))


LENDERS = (
    (_no_frame, "protocol", "not a frame"), (_unknown_kind, "protocol", "unknown kind"),
    (_huge_chunk, "protocol", f"{BIG} bytes"), (_huge_text, "protocol", f"{BIG} bytes"),
    (_huge_index, "protocol", f"{BIG} bytes"),
    (_long_chunk, "protocol", "expected"), (_short_chunk, "protocol", "expected"),
    (_chunk_beyond, "protocol", "not asked for"), (_chunk_twice, "protocol", "came twice"),
    (_chunk_in_the_place_of_another, "corrupt", "chunk 1"),
    (_wrong_bytes, "corrupt", "expected digest"), (_gone_between_chunks, "broken", "after 0 of"),
    (_gone_in_a_chunk, "broken", "closed by the other end"),
    (_never_answers, "silent", "nothing for"),
    (_hangs_between_chunks, "silent", "nothing for"), (_hangs_in_a_chunk, "silent", "nothing for"),
    (_trickles, "silent", "nothing for"), (_dawdles, "silent", "time for the transfer is over"),
    (_index_twice, "protocol", "ImageIndex among chunks"),
    (_verified_for_an_index, "protocol", "Verified where ImageIndex"),
    (_chunk_for_an_index, "protocol", "where a text"),
    (_other_generation, "protocol", "asked for root"), (_other_rank, "protocol", "asked for root"),
    (_other_digests, "protocol", "asked for root"), (_other_length, "protocol", "asked for root"),
    (_endless_length, "protocol", "malformed"), (_gives_up, "refused", "the slot is used again"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("attack", "fault", "reason"), LENDERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_lender_that_misbehaves_is_dropped(
    victim: End, start: Start, good: Image, trap: Trap,
    attack: Callable[[Stranger, Image], None], fault: str, reason: str,
) -> None:  # fmt: skip
    """Soon, with what it did, and others are served."""
    victim.fetch(trap, good, deadline_s=2 * SILENCE_S if attack is _dawdles else PATIENCE_S)
    stranger = trap.answer()
    attack(stranger, good)
    failed = victim.told(TransferFailed)
    assert (failed.fault, failed.direction, failed.node) == (fault, "fetch", 1)
    assert reason in failed.reason
    assert stranger.is_closed()
    assert victim.events == [failed]
    stranger.close()
    still_works(victim, start, good)


def test_a_chunk_of_another_stream_is_not_taken(victim: End, good: Image, trap: Trap) -> None:
    """Each stream brings what it was asked for: no chunk is received into one place twice."""
    victim.fetch(trap, good, streams=2)
    one, other = trap.answer(), trap.answer()
    (span,) = one.hear().chunks
    one.tell(good.index)
    one.say(one.chunk(good, 3 if span.start == 0 else 0))
    failed = victim.told(TransferFailed)
    assert failed.fault == "protocol"
    assert "not asked for" in failed.reason
    for stranger in (one, other):
        assert stranger.is_closed()
        stranger.close()


def test_reasons_of_others_are_cleaned(victim: End, good: Image, trap: Trap) -> None:
    """They go to a log and to a terminal."""
    dirty = Refused(reason="no\x1b[2J\n" + "x" * 1000)
    victim.fetch(trap, good)
    lender = trap.answer()
    lender.hear()
    lender.tell(dirty)
    asker = Stranger.calls(victim)
    asker.want(good)
    asker.tell(dirty)
    _told_twice(victim)
    for event in victim.events:
        assert isinstance(event, TransferFailed)
        assert event.fault == "refused"
        assert event.reason.startswith("no?[2J?xxx")
        assert len(event.reason) <= 500
    lender.close()
    asker.close()


def _told_twice(end: End) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(end.events) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(end.events) == 2


# ------------------------------------------------------------------ askers who know it


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"chunks": ()}, "no chunk"),
        ({"chunks": (Span(start=0, stop=BIG),)}, "of 4"),
        ({"chunks": (Span(start=-1, stop=2),)}, "of 4"),
        ({"chunks": (Span(start=2, stop=3), Span(start=0, stop=1))}, "of 4"),
        ({"chunks": (Span(start=0, stop=3), Span(start=2, stop=4))}, "of 4"),
        ({"root": "0" * 64}, "no such image"),
        ({"generation": Generation(term=1, step=8)}, "is sealed here"),
        ({"rank": 3}, "is sealed here"),
        ({"what": "parity"}, "is sealed here"),
    ],
)
def test_a_want_that_cannot_be_meant_is_refused(
    victim: End, start: Start, good: Image, changed: dict[str, Any], reason: str
) -> None:
    """Before a byte of the image is sent."""
    one = Stranger.calls(victim)
    one.want(good, **changed)
    answer = one.hear()
    assert isinstance(answer, Refused)
    assert reason in answer.reason
    assert one.is_closed()
    one.close()
    still_works(victim, start, good)


def _says(data: bytes) -> Callable[[End, Image], Stranger]:
    def attack(end: End, good: Image) -> Stranger:
        one = Stranger.calls(end)
        one.say(data)
        return one

    return attack


FIRST_WORDS = {
    "garbage": (b"\0" * 4096, "not a frame"),
    "silence": (b"", "nothing for"),
    "half a header": (Header(kind=TEXT, length=9).pack()[:7], "nothing for"),
    "a huge text": (Header(kind=TEXT, length=BIG).pack() + b"{" * 10**6, f"{BIG} bytes"),
    "a huge chunk": (Header(kind=CHUNK, length=BIG).pack() + bytes(10**6), "where a text"),
    "an answer": (pack_text(Verified(root="0" * 64)), "Verified where Want"),
    "no json": (Header(kind=TEXT, length=4).pack() + b"{{{{", "malformed"),
}


@pytest.mark.parametrize(("said", "reason"), FIRST_WORDS.values(), ids=FIRST_WORDS.keys())
def test_an_asker_that_wants_nothing_is_sent_away(
    victim: End, start: Start, good: Image, said: bytes, reason: str
) -> None:
    """The first words are a want, or there is no transfer."""
    one = _says(said)(victim, good)
    assert reason in victim.told(ConnectionRefused).reason
    assert one.is_closed()
    one.close()
    still_works(victim, start, good)


def _receives(end: End, good: Image) -> Stranger:
    """Takes all that was wanted."""
    one = Stranger.calls(end)
    one.want(good)
    assert one.hear() == good.index
    one.read(sum(len(one.chunk(good, number)) for number in range(CHUNKS)))
    return one


def _never_acknowledges(end: End, good: Image) -> Stranger:
    return _receives(end, good)


def _acknowledges_another_root(end: End, good: Image) -> Stranger:
    one = _receives(end, good)
    one.tell(Verified(root="0" * 64))
    return one


def _acknowledges_at_length(end: End, good: Image) -> Stranger:
    one = _receives(end, good)
    one.say(Header(kind=TEXT, length=BIG).pack() + b"{" * 10**6)
    return one


def _wants_more(end: End, good: Image) -> Stranger:
    one = _receives(end, good)
    one.want(good)
    return one


def _garbles_meanwhile(end: End, good: Image) -> Stranger:
    one = Stranger.calls(end)
    one.want(good)
    one.say(b"\0" * 4096)
    return one


def _is_gone(end: End, good: Image) -> Stranger:
    one = Stranger.calls(end)
    one.want(good)
    one.hear()
    one.sock.shutdown(socket.SHUT_RDWR)
    return one


ASKERS = (
    (_never_acknowledges, ("silent",), "nothing for"),
    (_acknowledges_another_root, ("protocol",), "verified as 0000"),
    (_acknowledges_at_length, ("protocol",), f"{BIG} bytes"),
    (_wants_more, ("protocol",), "Want where Verified"),
    (_garbles_meanwhile, ("protocol",), "not a frame"),
    (_is_gone, ("broken",), ""),
)


@pytest.mark.parametrize(
    ("attack", "faults", "reason"), ASKERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_an_asker_that_misbehaves_is_dropped(
    victim: End, start: Start, good: Image,
    attack: Callable[[End, Image], Stranger], faults: tuple[str, ...], reason: str,
) -> None:  # fmt: skip
    """Soon, with what it did; it does not count as served, and others are."""
    stranger = attack(victim, good)
    failed = victim.told(TransferFailed)
    assert (failed.direction, failed.node) == ("serve", 0)
    assert failed.fault in faults
    assert reason in failed.reason
    assert stranger.is_closed()
    assert not [event for event in victim.events if isinstance(event, Served)]
    stranger.close()
    still_works(victim, start, good)


def test_an_asker_that_reads_nothing_is_dropped(victim: End, image: Make) -> None:
    """The buffers of the connection are full; after the deadline the slot is free again."""
    large = image(2**25)
    victim.lend(large)
    one = Stranger.calls(victim)
    one.want(large)
    failed = victim.told(TransferFailed)
    assert failed.fault == "silent"
    assert "not taken" in failed.reason
    began = time.monotonic()
    large.source.revoke("free")
    assert time.monotonic() - began < SILENCE_S
    one.close()


def test_an_asker_that_reads_slowly_has_a_deadline(victim: End, image: Make) -> None:
    """However lively it is."""
    large = image(2**25)
    victim.lend(large)
    victim.deadline_s = 3 * SILENCE_S
    one = Stranger.calls(victim)
    one.want(large)
    began = time.monotonic()
    while time.monotonic() - began < 4 * SILENCE_S and one.read(2**18):
        time.sleep(SILENCE_S / 8)
    failed = victim.told(TransferFailed)
    assert failed.fault == "silent"
    assert "time for the transfer is over" in failed.reason
    one.close()


def test_one_that_hangs_does_not_hold_another(start: Start, good: Image, trap: Trap) -> None:
    """Honest fetches end while a lender and an asker still count as alive."""
    victim = start(3, silence_s=5.0)
    victim.lend(good)
    victim.fetch(trap, good)
    lender, asker = trap.answer(), Stranger.calls(victim)
    _lends(lender, good)
    lender.say(lender.chunk(good, 0)[:-1])
    asker.want(good)
    began = time.monotonic()
    still_works(victim, start, good)
    assert time.monotonic() - began < 2.5
    lender.close()
    asker.close()


# ------------------------------------------------------------------ both


def test_memory_does_not_follow_what_a_peer_says(victim: End, good: Image, trap: Trap) -> None:
    """10^12 in every place that has a length, and nothing is allocated for it."""
    before = peak_bytes()
    for attack in (_huge_chunk, _huge_text, _huge_index, _endless_length):
        for _ in range(3):
            victim.fetch(trap, good)
            stranger = trap.answer()
            attack(stranger, good)
            assert stranger.is_closed()
            stranger.close()
    for words in ("a huge text", "a huge chunk"):
        stranger = _says(FIRST_WORDS[words][0])(victim, good)
        assert stranger.is_closed()
        stranger.close()
    one = Stranger.calls(victim)
    one.want(good, chunks=(Span(start=0, stop=BIG),))
    assert isinstance(one.hear(), Refused)
    one.close()
    assert peak_bytes() - before < 64 * 2**20


def test_chunks_in_any_order_are_fine(victim: End, good: Image, trap: Trap) -> None:
    """A lender may have its reasons."""
    victim.fetch(trap, good)
    one = trap.answer()
    want = one.hear()
    assert isinstance(want, Want)
    one.tell(good.index)
    for number in (3, 1, 0, 2):
        one.say(one.chunk(good, number))
    assert one.hear() == Verified(root=good.root)
    assert victim.told(Fetched).index == good.index
    assert victim.received == good.view
    one.close()
