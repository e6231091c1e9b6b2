"""The trainer's socket: whole messages with their descriptors, or a ProtocolError and no leak."""

import array
import contextlib
import dataclasses
import json
import os
import random
import socket
import stat
import struct
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.wire import MAX_DESCRIPTORS, MAX_FRAME_BYTES, Connection
from autockpt.executors.protocol import messages as p
from autockpt.executors.storage import runtime_paths
from autockpt.values.errors import ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.record import to_data, to_json
from tests.contracts.faults import open_descriptors
from tests.contracts.records import VALIDATED, WHOLE, of_type

QUICK = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
STATUS = wire.StatusWanted(leave_when_drained=True)
COUNTS = st.lists(st.integers(0, 2**40), min_size=4, max_size=4)
RANGES = {"class_ranges": st.lists(COUNTS, max_size=3).map(json.dumps)}


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """Two ends of a socket; afterwards no descriptor is left."""
    before = open_descriptors()
    one, two = socket.socketpair()
    ends = Connection(one), Connection(two)
    yield ends
    for end in ends:
        end.close()
    assert open_descriptors() <= before


def frame(body: bytes) -> bytes:
    """With its length."""
    return struct.pack("!I", len(body)) + body


def attached(
    message: bytes, count: int
) -> tuple[list[bytes], list[tuple[int, int, Any]], list[int]]:
    """Arguments of `sendmsg` with `count` descriptors, and these."""
    fds = [os.memfd_create("x") for _ in range(count)]
    rights = array.array("i", fds)
    return [message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], fds


@pytest.mark.parametrize("kind", wire._KINDS.values(), ids=wire._KINDS)
def test_every_message_arrives_as_it_was_sent(kind: type) -> None:
    """All kinds, over a real socket."""

    @QUICK
    @given(message(kind))
    def check(value: Any) -> None:
        one, two = socket.socketpair()
        sender, receiver = Connection(one), Connection(two)
        try:
            sender.send(value)
            ((got, fds),) = receiver.receive()
            assert type(got) is kind
            assert to_json(got) == to_json(value)
            assert fds == []
        finally:
            sender.close()
            receiver.close()

    check()


def message(kind: type) -> "st.SearchStrategy[Any]":
    """Any message of a kind; opaque parts are small JSON."""
    hints = typing.get_type_hints(kind)
    own = RANGES if kind is wire.SnapshotBegan else VALIDATED.get(kind, {})
    fields = {f.name: own.get(f.name, _strategy(hints[f.name])) for f in dataclasses.fields(kind)}
    return st.builds(kind, **fields)


def _strategy(hint: Any) -> "st.SearchStrategy[Any]":
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return st.integers() | st.text(max_size=5)
    if hint in WHOLE:
        return WHOLE[hint]
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), _strategy(args[1]), max_size=2)
    if origin is tuple:
        return st.lists(_strategy(args[0]), max_size=2).map(tuple)
    if dataclasses.is_dataclass(hint) and hint is not Generation:
        return message(hint)  # type: ignore[arg-type]
    if origin is not None and type(None) in args:
        return st.none() | _strategy(args[0])
    return of_type(hint)


def test_messages_arrive_whole_however_they_are_cut(pair: tuple[Connection, Connection]) -> None:
    """Byte by byte, and many at once."""
    sender, receiver = pair
    body = {"type": "StatusWanted", "body": {"leave_when_drained": True}}
    data = frame(json.dumps(body).encode())
    got: list[Any] = []
    for i in range(len(data)):
        sender.sock.sendall(data[i : i + 1])
        got += receiver.receive()
    assert got == [(STATUS, [])]
    sender.sock.sendall(data * 50)
    got = []
    while len(got) < 50:
        got += receiver.receive()
    assert got == [(STATUS, [])] * 50


def test_descriptors_come_with_their_message(pair: tuple[Connection, Connection]) -> None:
    """As new numbers for the same memory, not inherited by children."""
    sender, receiver = pair
    fds = [os.memfd_create("slot") for _ in range(3)]
    sender.send(STATUS)
    sender.send(STATUS, tuple(fds))
    received: list[tuple[Any, list[int]]] = []
    while len(received) < 2:
        received += receiver.receive()
    (_, none), (_, got) = received
    assert none == []
    assert [os.fstat(fd).st_ino for fd in got] == [os.fstat(fd).st_ino for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in got)
    for fd in (*fds, *got):
        os.close(fd)


def receive_all(receiver: Connection) -> None:
    """Until something is wrong."""
    while True:
        receiver.receive()


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"\xff\xff",
    "a list": b"[]",
    "a number": b"3",
    "no type": b'{"body":{}}',
    "no body": b'{"type":"StatusWanted"}',
    "unknown type": b'{"type":"Exec","body":{}}',
    "private type": b'{"type":"Connection","body":{}}',
    "type is a list": b'{"type":["StatusWanted"],"body":{}}',
    "unknown field": b'{"type":"StatusWanted","body":{"x":1}}',
    "wrong type": b'{"type":"StatusWanted","body":{"leave_when_drained":1}}',
    "missing field": b'{"type":"SlotsRefused","body":{"rank":1}}',
    "key twice": b'{"type":"StatusWanted","type":"StatusWanted","body":{}}',
    "NaN": b'{"type":"StatusWanted","body":NaN}',
    "deep": b'{"type":"StatusWanted","body":' + b"[" * 50_000,
    "deep payload": b'{"type":"PlanProposed","body":{"version":1,"payload":{"a":'
    + b"[" * 300 + b"]" * 300 + b"}}}",
    "no generation": b'{"type":"SnapshotCopied","body":{"rank":0,"generation":'
    b'{"term":0,"step":0}}}',
    "long number": b'{"type":"SlotsRefused","body":{"rank":' + b"9" * 5000 + b',"reason":""}}',
    "beyond floats": b'{"type":"TrainerResumed","body":{"rank":0,"term":2,"generation":null,'
    b'"step":0,"source":"","bytes":0,"restore_s":1' + b"0" * 400 + b"}}",
}  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_is_a_protocol_error(
    pair: tuple[Connection, Connection], body: bytes
) -> None:
    """And nothing else, so that the keeper drops the peer and lives."""
    sender, receiver = pair
    sender.sock.sendall(frame(body))
    with pytest.raises(ProtocolError, match="malformed message"):
        receive_all(receiver)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", "[[1,2,3]]", "[[1,2,3,-1]]", "[[1,2,3,true]]", "[[1,2,3,0.5]]", "[" * 9000],
)
def test_ranges_of_a_codec_are_four_counts_each(text: str) -> None:
    """Or the message is refused."""
    began = wire.SnapshotBegan(
        rank=0, generation=Generation(term=1, step=2), step=1, slot=0, image_bytes=1,
        boundary_end=1, layout_digest="", writers=1, chunk_bytes=1, direct_io=True, streaming=True,
        codec="planes",
        class_ranges="[[0,4096,2,0],[4096,8192,2,1]]",
    )  # fmt: skip
    assert began.ranges == ((0, 4096, 2, 0), (4096, 8192, 2, 1))
    bad = dataclasses.replace(began, class_ranges=text)
    body = json.dumps({"type": "SnapshotBegan", "body": to_data(bad)}).encode()
    with pytest.raises(ProtocolError, match="malformed message"):
        wire.decode(body)


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_an_oversized_frame_is_refused_by_its_first_bytes(
    pair: tuple[Connection, Connection], length: int
) -> None:
    """Nobody collects gigabytes first."""
    sender, receiver = pair
    sender.sock.sendall(struct.pack("!I", length))
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        receiver.receive()


def test_a_peer_that_leaves_is_seen(pair: tuple[Connection, Connection]) -> None:
    """Also in the middle of a frame."""
    sender, receiver = pair
    sender.sock.sendall(frame(b"x" * 100)[:50])
    assert receiver.receive() == []
    sender.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="peer closed"):
        receiver.receive()


@pytest.mark.parametrize("count", [-1, 1.5, "2", None, MAX_DESCRIPTORS + 1, 2])
def test_a_wrong_number_of_descriptors_is_a_protocol_error(
    pair: tuple[Connection, Connection], count: Any
) -> None:
    """Absurd, or more than came."""
    sender, receiver = pair
    body = {"type": "StatusWanted", "body": {}, "descriptors": count}
    parts, ancillary, fds = attached(frame(json.dumps(body).encode()), 1)
    sender.sock.sendmsg(parts, ancillary)
    os.close(fds[0])
    with pytest.raises(ProtocolError, match="descriptors"):
        receiver.receive()


def test_descriptors_of_a_malformed_message_are_closed(
    pair: tuple[Connection, Connection],
) -> None:
    """Also those of a good message that came in the same read."""
    sender, receiver = pair
    good = frame(b'{"type":"StatusWanted","body":{},"descriptors":5}')
    before = open_descriptors()
    for data in (frame(b"bad"), good + frame(b"bad")):
        parts, ancillary, fds = attached(data, 5)
        sender.sock.sendmsg(parts, ancillary)
        for fd in fds:
            os.close(fd)
        with pytest.raises(ProtocolError, match="malformed"):
            receiver.receive()
        assert open_descriptors() <= before


def test_descriptors_without_a_message_are_bounded(
    pair: tuple[Connection, Connection],
) -> None:
    """A peer that only sends descriptors does not use up ours."""
    sender, receiver = pair
    for _ in range(4):
        parts, ancillary, fds = attached(b"\0", MAX_DESCRIPTORS // 2)
        sender.sock.sendmsg(parts, ancillary)
        for fd in fds:
            os.close(fd)
    with pytest.raises(ProtocolError, match="descriptors with one message"):
        receive_all(receiver)
    receiver.close()
    assert receiver.sock.fileno() == -1


def test_descriptors_nobody_took_are_closed_with_the_connection(
    pair: tuple[Connection, Connection],
) -> None:
    """The message that they belong to never came."""
    sender, receiver = pair
    parts, ancillary, fds = attached(frame(b"x" * 100)[:20], 3)
    sender.sock.sendmsg(parts, ancillary)
    for fd in fds:
        os.close(fd)
    assert receiver.receive() == []


def test_what_a_script_closed_before_is_no_error(pair: tuple[Connection, Connection]) -> None:
    """`os.closerange` of a script takes our sockets too."""
    for connection in pair:
        os.close(connection.sock.fileno())
        connection.close()


def test_random_bytes_never_break_a_receiver(pair: tuple[Connection, Connection]) -> None:
    """2,000 frames of noise and damaged messages."""
    chance = random.Random(5)
    good = b'{"type":"SlotsGiven","body":{"rank":0,"image_bytes":1,"slots":3}}'
    for _ in range(2000):
        data = bytearray(good if chance.random() < 0.7 else chance.randbytes(60))
        data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(ProtocolError):
            wire.decode(bytes(data))


def test_the_log_shows_a_message_in_one_bounded_line() -> None:
    """Whatever is in it."""
    text = wire.describe(wire.SlotsRefused(rank=3, reason="x" * 1000))
    assert text.startswith("SlotsRefused(rank=3, reason=xxx")
    assert len(text) < 400


# --- where the socket is -------------------------------------------------------------------------


def test_the_keepers_directory_is_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode 0700, one per run and node, short enough for a socket's path."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first = runtime_paths.keeper_directory(str(tmp_path / "a" / ("x" * 200)), 0)
    assert runtime_paths.keeper_directory(str(tmp_path / "a" / ("x" * 200)), 0) == first
    assert runtime_paths.keeper_directory(str(tmp_path / "b"), 0) != first
    assert runtime_paths.keeper_directory(str(tmp_path / "a" / ("x" * 200)), 1) != first
    for path in (first, os.path.dirname(first)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert len(first) - len(str(tmp_path)) < 60


def _open_to_others(path: Path) -> None:
    path.mkdir(mode=0o755)


def _a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(0o700)
    path.symlink_to(elsewhere)


def _a_file(path: Path) -> None:
    path.touch(0o600)


@pytest.mark.parametrize("taken", [_open_to_others, _a_link, _a_file])
def test_a_name_that_is_taken_does_not_stop_a_run(
    taken: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may make it in /tmp: the run directory is used, also when the name is free again."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    name = tmp_path / f"autockpt-{os.getuid()}"
    taken(name)
    run = tmp_path / "run"
    first = runtime_paths.keeper_directory(str(run), 3)
    assert Path(first).parent == run
    assert stat.S_IMODE(os.stat(first).st_mode) == 0o700
    assert runtime_paths.keeper_directories(str(run)) == {3: first}
    name.rename(tmp_path / "gone")
    assert runtime_paths.keeper_directory(str(run), 3) == first
    assert not name.exists()


def test_a_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode looks right; where nothing is ours the error says what to do."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "autockpt-12345").mkdir(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ProtocolError, match=r"is not ours with mode 700.*set XDG_RUNTIME_DIR"):
        runtime_paths.keeper_directory(str(tmp_path / "run"), 0)


def test_a_run_finds_its_keepers_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other runs are not among them."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = {node: runtime_paths.keeper_directory(str(tmp_path / "run"), node) for node in (0, 2)}
    runtime_paths.keeper_directory(str(tmp_path / "other"), 1)
    assert runtime_paths.keeper_directories(str(tmp_path / "run")) == found


def test_without_a_place_for_temporary_files_the_run_directory_has_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root is read-only."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runtime_paths, "_TEMPORARY", (str(tmp_path / "none"),))
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    monkeypatch.setattr(tempfile, "tempdir", None)
    run = tmp_path / "run"
    assert Path(runtime_paths.keeper_directory(str(run), 0)).parent == run


def test_relative_temporary_directories_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper works in /, and a script may work elsewhere than its launcher."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "TEMP"):
        monkeypatch.setenv(name, "here")
    monkeypatch.setenv("TMP", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert os.path.dirname(runtime_paths.keepers_directory()) == str(tmp_path)
    monkeypatch.delenv("TMP")
    assert os.path.isabs(runtime_paths.keepers_directory())
    assert "here" not in runtime_paths.keepers_directory()


def test_generations_travel_as_they_are() -> None:
    """The identity of everything."""
    event = p.SaveRequested(rank=0, generation=Generation(term=3, step=4), step=9)
    body = {"type": "SaveRequested", "body": json.loads(to_json(event))}
    assert wire.decode(json.dumps(body).encode()) == event
