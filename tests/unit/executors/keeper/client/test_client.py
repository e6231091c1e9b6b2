"""What a keeper lends for a restore stays with the order that it was lent for."""

import os
import socket
from pathlib import Path

import pytest

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client import client
from autockpt.executors.keeper.client.client import GATHER_S, KeeperClient
from autockpt.executors.keeper.client.saves import UNANSWERED
from autockpt.executors.keeper.replication.shard_fetch import (
    DEADLINE_S,
    LEAST_BYTES_PER_S,
    time_for,
)
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.values.generation import Generation
from tests.contracts.faults import open_descriptors


def link(folder: Path) -> KeeperClient:
    """The trainer's end, of a keeper that was never started."""
    incarnation = p.Incarnation(launch_id="launch", restart_round=0)
    attach = p.TrainerAttached(
        rank=0, incarnation=incarnation, world_size=2, nodes=(0, 0), slots=0
    )  # fmt: skip
    return KeeperClient(
        str(folder), 0, checkpoints=str(folder), attach=attach, launcher_pid=0,
    )  # fmt: skip


def order(attempt: int) -> p.RestoreShard:
    """To restore from storage, with a neighbour."""
    return p.RestoreShard(
        rank=0, term=1, attempt=attempt, generation=Generation(term=1, step=1), step=1,
        source=p.ShardSource(kind="disk"), readers=(0, 1),
    )  # fmt: skip


def lend(to: KeeperClient, attempt: int, mark: bytes) -> None:
    """Memory, and the order that it is for."""
    arena = Arena.create_shared(4096, name="autockpt-test-lent")
    arena.view[: len(mark)] = mark
    assert arena.fd is not None
    to._received(wire.ReadingMemory(rank=0, term=1, attempt=attempt), [os.dup(arena.fd)])
    to._received(order(attempt), [])
    arena.close()


def test_a_newer_order_keeps_its_memory_when_an_older_one_ends(tmp_path: Path) -> None:
    """Another rank's source was bad: the next order arrives while this rank still restores."""
    one = link(tmp_path)
    lend(one, 1, b"first")
    first = one.take_lent(order(1))
    lend(one, 2, b"second")
    assert first.reading is not None
    assert bytes(first.reading.view[:5]) == b"first"
    first.close()
    second = one.take_lent(order(2))
    assert second.reading is not None
    assert bytes(second.reading.view[:6]) == b"second"
    second.close()


def test_an_order_without_memory_gets_nothing_of_another_one(tmp_path: Path) -> None:
    """There was no room for it, or the source is a slot: this rank reads by itself."""
    one = link(tmp_path)
    lend(one, 1, b"first")
    one._received(order(2), [])
    assert one.take_lent(order(2)).reading is None
    assert one.take_lent(order(1)).reading is not None
    assert one.take_lent(order(1)).reading is None, "once"


def test_memory_that_no_order_followed_is_given_back(tmp_path: Path) -> None:
    """A keeper died between the two."""
    one = link(tmp_path)
    arena = Arena.create_shared(4096, name="autockpt-test-lent")
    assert arena.fd is not None
    fds = len(os.listdir("/proc/self/fd"))
    for attempt in range(3):
        message = wire.ReadingMemory(rank=0, term=1, attempt=attempt)
        one._received(message, [os.dup(arena.fd)])
    assert len(os.listdir("/proc/self/fd")) <= fds + 2  # the descriptor, and mmap's own


def test_what_is_written_counts_whoever_began_it(tmp_path: Path) -> None:
    """The limit of checkpoints in flight holds for those that other ranks had written, too."""
    one = link(tmp_path)
    first, second, third = (Generation(term=1, step=step) for step in (1, 2, 3))
    save = one.ask(first, disk=False)
    one._received(p.GrantSlot(rank=0, generation=first, slot=0), [])
    assert one.saves.begin(save, disk=True) == 0
    one._received(p.StartPersist(rank=0, generation=first, slot=0, attempt=1), [])
    for generation in (second, third):
        one._received(p.StartPersist(rank=0, generation=generation, slot=1, attempt=1), [])
    assert one.saves.writing == {first, second, third}
    one._received(p.AnnounceDropped(generation=third, reason="torn"), [])
    one._received(p.AnnounceDurable(generation=first), [])
    assert one.saves.writing == {second}
    one._received(p.StartPersist(rank=0, generation=first, slot=0, attempt=2), [])
    assert one.saves.writing == {second}, "it is durable"


def test_what_was_asked_for_ahead_is_not_written_yet(tmp_path: Path) -> None:
    """The keeper gets ready for it at once; the iteration until it begins is a quiet one."""
    one = link(tmp_path)
    first = Generation(term=1, step=1)
    save = one.ask(first, disk=False)
    one._received(p.GrantSlot(rank=0, generation=first, slot=0), [])
    one._received(p.StartPersist(rank=0, generation=first, slot=0, attempt=1), [])
    assert one.saves.writing == frozenset()
    assert one.saves.begin(save, disk=False) == 0
    assert one.saves.writing == {first}


def page_table_bytes(link: KeeperClient) -> int:
    """Of the mapping of its slot what this process has in its page table, from the kernel."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(number, 16) for number in first.split("-"))
            inside = low <= link.slots[0].address < high
        elif inside and line.startswith("Rss:"):
            found = 1024 * int(line.split()[1])
    return found


def test_a_restore_does_not_wait_for_the_page_tables_of_slots(tmp_path: Path) -> None:
    """Slots of the run before are mapped at once and filled in when it is over; later ones are
    for saves, which must not fault."""
    one, size = link(tmp_path), 2**23
    given = wire.SlotsGiven(rank=0, image_bytes=size - 4096, slots=1, chunk_bytes=4096)
    arena = Arena.create_shared(size, name="autockpt-test-slot")
    assert arena.fd is not None
    one._received(given, [os.dup(arena.fd)])
    assert page_table_bytes(one) == 0
    generation = Generation(term=1, step=1)
    one._received(p.Resume(rank=0, term=2, generation=generation, step=1), [])
    assert page_table_bytes(one) == size
    another = Arena.create_shared(size, name="autockpt-test-slot")
    assert another.fd is not None
    one._received(given, [os.dup(another.fd)])
    assert page_table_bytes(one) == size
    assert one.slots_changed == 2


def test_a_later_keeper_hears_the_lineage_of_the_running_term(tmp_path: Path) -> None:
    """The hello to it names the lineage that came with the order to train."""
    lineage = (p.TermParent(term=2, parent=Generation(term=1, step=1)),)
    resume = p.Resume(
        rank=0, term=2, generation=Generation(term=1, step=1), step=1, lineage=lineage
    )  # fmt: skip
    for order in (resume, p.StartFresh(rank=0, term=2, lineage=lineage)):
        one = link(tmp_path)
        one._received(order, [])
        one.running_as(2, 0, None, attempt=0)
        hello, _ = one._hello()
        assert (hello.attach.term, hello.attach.lineage) == (2, lineage)


def test_a_slot_that_comes_beside_others_leaves_them_mapped(tmp_path: Path) -> None:
    """Copies into them go on; the same slots once more are no change."""
    one, size = link(tmp_path), 2**16
    arenas = [Arena.create_shared(size, name="autockpt-test-slot") for _ in range(3)]

    def give(count: int) -> None:
        given = wire.SlotsGiven(rank=0, image_bytes=size - 4096, slots=count, chunk_bytes=4096)
        one._received(given, [os.dup(arena.fd) for arena in arenas[:count] if arena.fd is not None])

    give(1)
    (first,) = one.slots
    give(1)
    assert one.slots_changed == 1
    give(3)
    assert one.slots[0] is first
    assert first.fd is not None
    assert len(one.slots) == 3
    assert one.slots_changed == 2
    arenas[2].view[0] = 7
    assert one.slots[2].view[0] == 7


def test_chunks_are_waited_for_while_the_attempt_lasts() -> None:
    """The keeper ends the wait, by its time for a shard of that size or with the attempt."""
    large = int(2 * DEADLINE_S * LEAST_BYTES_PER_S)
    assert min(Deadlines().restore_s, time_for(large)) <= GATHER_S
    assert time_for(large) > DEADLINE_S


def test_a_keeper_that_answers_nothing_is_silent_until_it_answers(tmp_path: Path) -> None:
    """Requests are counted while somebody is connected; an answer is one to all before it."""
    one = link(tmp_path)
    for step in range(UNANSWERED):
        one.ask(Generation(term=1, step=step), disk=False)
    assert not one.saves.is_silent, "nobody was there to hear them"
    here, there = socket.socketpair()
    one._connection = wire.Connection(here)
    for step in range(UNANSWERED):
        assert not one.saves.is_silent
        one.ask(Generation(term=1, step=step), disk=False)
    assert one.saves.is_silent
    one._received(p.SkipSave(rank=0, generation=Generation(term=1, step=3), reason="busy"), [])
    assert not one.saves.is_silent
    for step in range(UNANSWERED, UNANSWERED + 4):
        one.ask(Generation(term=1, step=step), disk=False)
    assert one.saves.is_silent
    one._closing = True  # no other keeper is started
    one._lost(one._connection, "it died")
    assert not one.saves.is_silent
    there.close()


def test_a_keeper_that_closes_every_connection_is_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start may have a keeper that takes it: the launcher is not told to give up."""
    one = link(tmp_path)
    monkeypatch.setattr(one, "_reconnect", lambda reason: False)
    here, there = socket.socketpair()
    one._lost(wire.Connection(here), "peer closed the connection")
    refused = one.restore_orders.get_nowait()
    assert isinstance(refused, p.RestoreRefused)
    assert refused.retryable
    assert "closes every connection (peer closed the connection)" in refused.reason
    there.close()


def test_a_forked_child_lets_go_of_slots_and_records(tmp_path: Path) -> None:
    """They are the parent's: memory that a child still holds is not given back."""
    one, before = link(tmp_path), open_descriptors()
    one.slots = [Arena.create_shared(4096, name="slot")]
    one.give_records([Arena.create_sparse(4096, name=f"record-{turn}") for turn in range(2)])
    one.disown()
    assert open_descriptors() == before
    assert (one.slots, one.records) == ([], [])


def test_the_slots_that_went_are_no_memory_that_the_training_needs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request lets the old slots go first, and later requests find none to let go."""
    one, size = link(tmp_path), 4 * 2**20
    monkeypatch.setattr(client, "swing_bytes", lambda: 2 * size + 1000)  # the peak less now
    one.slots = [Arena.create_shared(size, name="autockpt-test-slot") for _ in range(2)]
    swings = []
    for _ in range(2):
        one.want_slots(image_bytes=size, chunk_bytes=4096, slots=2, limit_bytes=None)
        assert one._wanted is not None
        swings.append(one._wanted.swing_bytes)
    assert swings == [1000, 1000]
