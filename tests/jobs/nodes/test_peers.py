"""Connections between keepers: they find one another, come back, and let nobody else in."""

import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper.__main__ import MOST_DESCRIPTORS, raise_descriptor_limit
from autockpt.executors.network import control_plane as peers_module
from autockpt.executors.network import handshake
from autockpt.executors.network.control_plane import Peers
from autockpt.executors.network.discovery import KeeperAddress, open_secret, write_address
from autockpt.executors.network.handshake import (
    MAX_FRAME_BYTES,
    Channel,
    Identity,
    StandingChanged,
    frame,
)
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.admission import may_send
from autockpt.values.errors import ProtocolError
from autockpt.values.generation import Generation

RUN = "0123456789abcdef"
FIRST = p.Incarnation(launch_id="launch", restart_round=0)
SECOND = p.Incarnation(launch_id="launch", restart_round=1)
NODES = (0, 1, 2)
PATIENCE_S = 60.0
GRACE_S = 0.4


def lost(rank: int) -> p.TrainerLost:
    """A message with a number in it."""
    return p.TrainerLost(incarnation=FIRST, rank=rank)


def wait(done: Callable[[], Any], what: str) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Keeper:
    """A node's end of the control plane, and what it heard."""

    def __init__(self, checkpoints: Path, node: int, *, run_id: str = RUN) -> None:
        self.heard: list[tuple[int, Any]] = []
        self.lost: list[int] = []
        self.trouble: list[str] = []
        self.log: list[str] = []
        self.peers = Peers(
            str(checkpoints), run_id, node,
            received=lambda sender, message: self.heard.append((sender, message)),
            lost=self.lost.append, trouble=self.trouble.append, log=self.log.append,
            grace_s=GRACE_S,
        )  # fmt: skip

    def expect(self, incarnation: p.Incarnation = FIRST, host: str = "127.0.0.1") -> "Keeper":
        """Takes part."""
        self.peers.expect(incarnation, NODES, host)
        return self

    def refusals(self) -> list[str]:
        """Log lines about strangers."""
        return [line for line in self.log if "refused" in line]


Start = Callable[..., Keeper]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts keepers that share a directory."""
    made: list[Keeper] = []

    def begin(node: int, **settings: Any) -> Keeper:
        made.append(Keeper(tmp_path, node, **settings))
        return made[-1]

    yield begin
    for keeper in made:
        keeper.peers.close()
        for sock in (keeper.peers._wake_read, keeper.peers._wake_write):
            sock.close()  # of a keeper that never took part


# ------------------------------------------------------------------ among friends


def test_messages_arrive_in_order_and_in_both_directions(start: Start) -> None:
    """Also those that were sent before anybody knew anybody."""
    zero, one = start(0), start(1)
    for rank in range(50):
        one.peers.send(0, lost(rank))
        zero.peers.send(1, lost(100 + rank))
    zero.expect()
    one.expect()
    wait(lambda: len(zero.heard) == len(one.heard) == 50, "all messages")
    assert zero.heard == [(1, lost(rank)) for rank in range(50)]
    assert one.heard == [(0, lost(100 + rank)) for rank in range(50)]
    assert zero.peers.connected == (1,)
    assert not zero.refusals() + one.trouble + zero.trouble


def test_a_large_message_arrives(start: Start) -> None:
    """Sockets take it in pieces."""
    zero, one = start(0).expect(), start(1).expect()
    proposed = p.PlanProposed(version=1, payload={"text": "x" * (8 * 2**20)})
    plan = p.Relayed(incarnation=FIRST, term=1, event=proposed)
    one.peers.send(0, plan)
    wait(lambda: zero.heard, "the message")
    assert zero.heard == [(1, plan)]


def test_a_new_keeper_on_another_port_is_found_again(start: Start, tmp_path: Path) -> None:
    """The coordinator's keeper dies within the grace time: nobody is lost, messages flow again."""
    zero, one = start(0).expect(), start(1).expect()
    one.peers._grace_s = PATIENCE_S  # a busy machine takes its time to start a keeper
    wait(lambda: one.peers.connected == (0,), "connection")
    _die(zero)
    wait(lambda: one.peers.connected == (), "the end of the connection")
    one.peers.send(0, lost(7))
    again = start(0).expect()
    wait(lambda: (1, lost(7)) in again.heard, "the message")
    assert again.peers.port != 0
    assert not one.lost


def test_a_node_is_lost_once_after_the_grace_time_and_may_come_back(start: Start) -> None:
    """Both ends report it; a node that was never there is not lost."""
    zero, one = start(0).expect(), start(1).expect()
    wait(lambda: zero.peers.connected == (1,), "connection")
    assert zero.peers.needed
    _die(one)
    wait(lambda: zero.lost == [1], "loss")
    wait(lambda: not zero.peers.needed, "a lost node needs nobody")
    zero.peers.send(1, lost(3))
    again = start(1).expect()
    wait(lambda: again.heard == [(0, lost(3))], "the message")
    assert zero.lost == [1]


def test_who_says_farewell_is_not_lost(start: Start) -> None:
    """And needs nobody any more; what it sent before has arrived."""
    zero, one = start(0).expect(), start(1).expect()
    wait(lambda: zero.peers.connected == (1,), "connection")
    for rank in range(100):
        one.peers.send(0, lost(rank))
    one.peers.close()
    wait(lambda: not zero.peers.connected, "end of the connection")
    assert len(zero.heard) == 100
    time.sleep(2 * GRACE_S)
    assert not zero.lost
    assert not zero.peers.needed


def test_a_settled_keeper_does_not_hold_the_others(start: Start) -> None:
    """Until somebody is busy again."""
    zero, one = start(0).expect(), start(1).expect()
    wait(lambda: zero.peers.needed, "connection")
    one.peers.stand("settled")
    wait(lambda: not zero.peers.needed, "settled")
    one.peers.stand("busy")
    wait(lambda: zero.peers.needed, "busy")


def test_an_address_of_another_incarnation_is_not_called(start: Start) -> None:
    """The keeper behind it may be one that was left behind on another machine."""
    zero, one = start(0).expect(FIRST), start(1).expect(SECOND)
    wait(lambda: any("has not said" in line for line in one.log), "a look at the address")
    assert not one.peers.connected
    zero.expect(SECOND)
    wait(lambda: one.peers.connected == (0,), "connection")


def test_a_keeper_of_a_replaced_incarnation_does_not_push_out_the_new_one(
    start: Start, tmp_path: Path
) -> None:
    """It knows the secret and its node's number, but it is not of this start."""
    zero, one = start(0).expect(SECOND), start(1).expect(SECOND)
    wait(lambda: zero.peers.connected == (1,), "connection")
    old = Caller(zero, open_secret(str(tmp_path)), Identity(run_id=RUN, node=1, incarnation=FIRST))
    old.introduce()
    assert old.is_closed()
    wait(lambda: any("was replaced" in line for line in zero.refusals()), "refusal")
    one.peers.send(0, lost(1))
    wait(lambda: zero.heard == [(1, lost(1))], "the message")


def test_the_queue_for_an_absent_node_is_bounded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are given up: the protocol repeats them."""
    monkeypatch.setattr(peers_module, "QUEUE_BYTES", 20 * len(frame(lost(1000))))
    zero, one = start(0), start(1)
    for rank in range(1000, 1100):
        one.peers.send(0, lost(rank))
    one.expect()
    zero.expect()
    wait(lambda: (1, lost(1099)) in zero.heard, "the newest message")
    assert [message.rank for _, message in zero.heard] == list(range(1080, 1100))


def _die(keeper: Keeper) -> None:
    """Ends without farewell, as by SIGKILL."""

    def stop() -> None:
        keeper.peers._closing_s = 0.0  # long ago: no time for a farewell

    thread = keeper.peers._thread
    assert thread is not None
    keeper.peers._post(stop)
    thread.join(timeout=PATIENCE_S)
    keeper.peers._thread = None


# ------------------------------------------------------------------ strangers


class Caller:
    """Connects to a keeper's port by hand."""

    def __init__(self, keeper: Keeper, secret: bytes, me: Identity, *, to_node: int = 0) -> None:
        wait(lambda: keeper.peers.port and keeper.peers._secret, "the listener")
        self.sock = socket.create_connection(("127.0.0.1", keeper.peers.port), timeout=PATIENCE_S)
        self.channel = Channel(secret, me, to_node=to_node)

    def introduce(self) -> None:
        """Answers the challenge."""
        self.channel.feed(self.sock.recv(65536))
        for data in self.channel.outbox:
            self.sock.sendall(data)
        self.channel.outbox.clear()

    def send(self, data: bytes) -> None:
        """Sends what it likes, as long as somebody listens."""
        try:
            self.sock.sendall(data)
        except OSError:
            return

    def is_closed(self) -> bool:
        """Reads until the keeper closes."""
        with self.sock:
            try:
                while self.sock.recv(65536):
                    pass
            except ConnectionError:
                return True
            except TimeoutError:
                return False
            return True


def someone(*, node: int = 1, run_id: str = RUN) -> Identity:
    """Who a stranger says to be."""
    return Identity(run_id=run_id, node=node, incarnation=FIRST)


def _garbage(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.send(b"GET / HTTP/1.1\r\nHost: keeper\r\n\r\n" * 100)
    return caller


def _not_json(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.send(struct.pack("!I", 5) + b"\xff[[[[")
    return caller


def _deep(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.send(struct.pack("!I", 4000) + b"[" * 4000)
    return caller


def _huge_length(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.send(struct.pack("!Q", 10**12))
    caller.send(struct.pack("!I", 2**32 - 1) + bytes(10_000_000))
    return caller


def _long_greeting(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.send(struct.pack("!I", 4097) + bytes(4097))
    return caller


def _wrong_secret(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, bytes(32), someone())
    caller.introduce()
    return caller


def _other_run(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone(run_id="another"))
    caller.introduce()
    return caller


def _says_to_be_the_coordinator(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone(node=0))
    caller.introduce()
    return caller


def _no_node_of_this_job(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone(node=7))
    caller.introduce()
    return caller


def _means_another_node(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone(), to_node=2)
    caller.introduce()
    return caller


def _echoes(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.send(caller.sock.recv(65536))
    return caller


def _replays(keeper: Keeper, secret: bytes) -> Caller:
    heard = Caller(keeper, secret, someone())
    heard.channel.feed(heard.sock.recv(65536))
    heard.sock.close()  # its proof was overheard, and answers another challenge than ours
    caller = Caller(keeper, secret, someone())
    caller.send(heard.channel.outbox[0])
    return caller


def _garbage_after_the_handshake(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.introduce()
    caller.send(struct.pack("!I", MAX_FRAME_BYTES + 1))
    return caller


def _unknown_message(keeper: Keeper, secret: bytes) -> Caller:
    caller = Caller(keeper, secret, someone())
    caller.introduce()
    text = b'{"type": "Path", "body": {}}'
    caller.send(struct.pack("!I", len(text)) + text)
    return caller


ATTACKS = (
    _garbage, _not_json, _deep, _huge_length, _long_greeting, _wrong_secret, _other_run,
    _says_to_be_the_coordinator, _no_node_of_this_job, _means_another_node, _echoes, _replays,
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.strip("_"))
def test_a_stranger_is_refused_with_one_line(
    attack: Callable[[Keeper, bytes], Caller], start: Start, tmp_path: Path
) -> None:
    """And a friend who comes afterwards is heard."""
    zero = start(0).expect()
    wait(lambda: os.path.exists(tmp_path / "control" / "secret"), "the secret")
    caller = attack(zero, open_secret(str(tmp_path)))
    assert caller.is_closed()
    wait(zero.refusals, "a log line")
    assert len(zero.refusals()) == 1, zero.log
    assert len(zero.refusals()[0]) < 400
    assert not zero.heard
    one = start(1).expect()
    one.peers.send(0, lost(1))
    wait(lambda: zero.heard == [(1, lost(1))], "the message")


@pytest.mark.parametrize("attack", [_garbage_after_the_handshake, _unknown_message])
def test_nonsense_of_a_friend_ends_the_connection_only(
    attack: Callable[[Keeper, bytes], Caller], start: Start, tmp_path: Path
) -> None:
    """Whoever it is, the next one of this node is heard."""
    zero = start(0).expect()
    wait(lambda: os.path.exists(tmp_path / "control" / "secret"), "the secret")
    assert attack(zero, open_secret(str(tmp_path))).is_closed()
    assert not zero.heard
    one = start(1).expect()
    one.peers.send(0, lost(1))
    wait(lambda: zero.heard == [(1, lost(1))], "the message")


def test_silent_strangers_are_closed_in_time_and_keep_nobody_out(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take all places, for the time of a handshake."""
    monkeypatch.setattr(peers_module, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(peers_module, "MAX_STRANGERS", 8)
    zero = start(0).expect()
    wait(lambda: os.path.exists(tmp_path / "control" / "secret"), "the secret")
    secret = open_secret(str(tmp_path))
    silent = [Caller(zero, secret, someone()) for _ in range(8 + 5)]
    one = start(1).expect()
    one.peers.send(0, lost(1))
    assert all(caller.is_closed() for caller in silent)
    wait(lambda: zero.heard == [(1, lost(1))], "the message")
    assert 1 <= len(zero.refusals()) <= 5


def test_where_no_descriptor_is_left_it_is_said_once_and_nobody_spins(
    start: Start, tmp_path: Path
) -> None:
    """Callers wait until there is one again."""
    zero = start(0)
    accepts: list[int] = []
    accept = zero.peers._accept

    def counted(events: int) -> None:
        accepts.append(events)
        accept(events)

    zero.peers._accept = counted  # type: ignore[method-assign, assignment]
    zero.expect()
    wait(lambda: os.path.exists(tmp_path / "control" / "node-000.json"), "the address")
    callers = [socket.socket() for _ in range(20)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # everything below is taken
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        for caller in callers:
            caller.connect(("127.0.0.1", zero.peers.port))
        wait(lambda: zero.trouble, "a word about it")
        threading.Event().wait(0.5)
        assert len(accepts) < 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for caller in callers:
            caller.close()
    (text,) = zero.trouble
    assert "node 0 cannot take connections of more keepers: Too many open files" in text
    assert f"{free} open files are allowed" in text
    assert "raise the hard limit to at least 131" in text
    start(1).expect().peers.send(0, lost(1))
    wait(lambda: zero.heard == [(1, lost(1))], "the message")


def test_a_keeper_takes_all_the_descriptors_that_it_may_have() -> None:
    """The usual soft limit of 1024 is less than a large job has nodes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
        raise_descriptor_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == limits[1]
        assert soft >= min(limits[0], MOST_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_large_job_costs_a_keeper_nothing_but_its_own_connections(start: Start) -> None:
    """Only the keeper that coordinates is called by all."""
    keeper = start(4095)
    keeper.peers.expect(FIRST, tuple(range(4096)), "127.0.0.1")
    wait(lambda: any("no connection to node 0" in line for line in keeper.log), "a first try")
    assert list(keeper.peers._peers) == [0]
    assert keeper.peers._callees == {0}


def test_callers_come_by_hundreds_at_once(start: Start, tmp_path: Path) -> None:
    """Nobody is turned away, so nobody has to call again."""
    zero = start(0).expect()
    wait(lambda: os.path.exists(tmp_path / "control" / "node-000.json"), "the address")
    callers = [socket.socket() for _ in range(300)]
    try:
        for caller in callers:
            caller.settimeout(60)
            caller.connect(("127.0.0.1", zero.peers.port))
        assert all(caller.recv(1) for caller in callers)  # the challenge
    finally:
        for caller in callers:
            caller.close()


def test_an_impostor_at_the_address_gets_nothing(start: Start, tmp_path: Path) -> None:
    """Who is called must prove itself, too."""
    open_secret(str(tmp_path))
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = KeeperAddress(
            run_id=RUN, node=0, host="127.0.0.1", port=server.getsockname()[1], nonce="x",
            incarnation=FIRST,
        )  # fmt: skip
        write_address(str(tmp_path), address)

        def impostor() -> None:
            sock, _ = server.accept()
            me = Identity(run_id=RUN, node=0, incarnation=FIRST)
            channel = Channel(bytes(32), me, to_node=None)
            sock.sendall(channel.outbox[0])
            heard.append(sock.recv(65536))
            text = b'{"proof": "%s"}' % (b"0" * 64)
            sock.sendall(struct.pack("!I", len(text)) + text)
            heard.append(sock.recv(65536))
            sock.close()

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        one = start(1).expect()
        one.peers.send(0, lost(1))
        thread.join(timeout=PATIENCE_S)
        wait(lambda: any("does not know the secret" in line for line in one.log), "refusal")
    assert not one.peers.connected
    assert b"TrainerLost" not in b"".join(heard)


def test_a_frame_in_single_bytes_is_read() -> None:
    """The network cuts where it likes."""
    called = Channel(bytes(32), someone(node=0), to_node=None)
    caller = Channel(bytes(32), someone(node=1), to_node=0)
    messages: list[Any] = []
    for _ in range(2):
        for source, target in ((called, caller), (caller, called)):
            for data in source.outbox:
                for i in range(len(data)):
                    messages += target.feed(data[i : i + 1])
            source.outbox.clear()
    assert called.peer is not None
    assert caller.peer is not None
    assert (called.peer.node, caller.peer.node) == (1, 0)
    for byte in frame(lost(4)) + frame(StandingChanged(standing="settled")):
        messages += called.feed(bytes([byte]))
    assert messages == [lost(4), StandingChanged(standing="settled")]


def test_another_version_is_refused() -> None:
    """Before anything is said."""
    caller = Channel(bytes(32), someone(node=1), to_node=0)
    text = b'{"version": 9, "nonce": "aa"}'
    with pytest.raises(ProtocolError, match="speaks version 9"):
        caller.feed(struct.pack("!I", len(text)) + text)


def test_a_connection_for_transfers_is_none_for_messages() -> None:
    """The purpose is part of what is proven, so neither can be passed off as the other."""
    called = Channel(bytes(32), someone(node=0), to_node=None)
    caller = Channel(bytes(32), someone(node=1), to_node=0, purpose="transfer")
    caller.feed(called.outbox[0])
    with pytest.raises(ProtocolError, match="comes for transfer"):
        called.feed(caller.outbox[0])
    said = caller.outbox[0].replace(b'"purpose":"transfer"', b'"purpose":"control"')
    with pytest.raises(ProtocolError, match="secret"):
        called.feed(struct.pack("!I", len(said) - 4) + said[4:])


# ------------------------------------------------------------------ who may say what


def test_a_keeper_speaks_only_for_its_ranks() -> None:
    """And only the coordinator's keeper gives orders."""
    ranks = (0, 0, 1, 1)
    generation = Generation(term=1, step=1)

    def began(rank: int) -> p.RankBegan:
        return p.RankBegan(rank=rank, generation=generation, step=1, disk=False)

    assert may_send(1, began(2), ranks, ranks)
    assert not may_send(1, began(0), ranks, ranks)
    assert not may_send(1, began(4), ranks, ranks)
    assert not may_send(1, began(-1), ranks, ranks)
    order = p.DurableCommitted(generation=generation)
    assert may_send(0, order, ranks, ranks)
    assert not may_send(1, order, ranks, ranks)
    attach = p.TrainerAttached(rank=2, incarnation=FIRST, world_size=4, nodes=ranks, slots=2)
    assert may_send(1, p.RankAttached(attach=attach), (), ())
    assert not may_send(0, p.RankAttached(attach=attach), (), ())


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both ends: one that ends at the first difference tells how far a guess is right."""
    compared: list[tuple[bytes, bytes]] = []

    def record(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return False

    monkeypatch.setattr(handshake.hmac, "compare_digest", record)
    called = Channel(bytes(32), someone(node=0), to_node=None)
    caller = Channel(bytes(32), someone(node=1), to_node=0)
    caller.feed(called.outbox[0])
    with pytest.raises(ProtocolError, match="does not know the secret"):
        called.feed(caller.outbox[0])
    monkeypatch.undo()
    again = Channel(bytes(32), someone(node=0), to_node=None)
    caller = Channel(bytes(32), someone(node=1), to_node=0)
    caller.feed(again.outbox[0])
    again.feed(caller.outbox[0])
    monkeypatch.setattr(handshake.hmac, "compare_digest", record)
    with pytest.raises(ProtocolError, match="does not know the secret"):
        caller.feed(again.outbox[1])
    assert len(compared) == 2
    assert all(one == other and len(one) == 64 for one, other in compared)


@pytest.mark.parametrize("proof", ["", "0" * 64, "\u00e9" * 64, "0" * 2000])
def test_a_wrong_proof_is_refused_whatever_it_looks_like(proof: str) -> None:
    """Shorter, longer, or letters that a comparison of text does not take."""
    called = Channel(bytes(32), someone(node=0), to_node=None)
    caller = Channel(bytes(32), someone(node=1), to_node=0)
    caller.feed(called.outbox[0])
    said = json.loads(caller.outbox[0][4:])
    text = json.dumps({**said, "proof": proof}).encode()
    with pytest.raises(ProtocolError, match="does not know the secret"):
        called.feed(struct.pack("!I", len(text)) + text)
    assert called.peer is None
