"""Nodes keep their numbers when others are lost or replaced."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from autockpt.launch.elastic.rendezvous import node_numbers
from autockpt.launch.elastic.rendezvous.node_numbers import Claim, Seated, hosts_rendezvous, numbers

NEW = Claim()


def held(number: int) -> Claim:
    """A launcher that had this number."""
    return Claim(held=number)


def test_a_first_start_takes_the_order_of_the_rendezvous() -> None:
    """Nobody claims anything."""
    assert numbers([NEW] * 4) == (0, 1, 2, 3)


def test_survivors_stay_and_a_replacement_takes_the_empty_seat() -> None:
    """Node 1 was lost; its replacement sorts last, so the rendezvous moved 2 and 3 down."""
    assert numbers([held(0), held(2), held(3), NEW]) == (0, 2, 3, 1)


def test_a_new_launcher_follows_its_dead_one_to_the_keeper() -> None:
    """Also past another newcomer; a number that somebody has is not taken from him."""
    assert numbers([NEW, Claim(kept=(0,)), held(2)]) == (1, 0, 2)
    assert numbers([Claim(kept=(2, 0)), NEW, held(2)]) == (0, 1, 2)


def test_a_job_that_goes_on_with_fewer_nodes_leaves_gaps() -> None:
    """The keepers of 2 and 3 hold what they hold under these numbers; who comes later fills in."""
    assert numbers([held(0), held(3), held(2)]) == (0, 3, 2)
    assert numbers([held(0), NEW, held(3), held(2)]) == (0, 1, 3, 2)


@given(
    st.lists(
        st.builds(
            Claim,
            held=st.none() | st.integers(0, 9),
            kept=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
        min_size=1, max_size=9,
    )
)  # fmt: skip
def test_every_number_has_one_node_and_who_had_one_keeps_it(claims: list[Claim]) -> None:
    """No number twice; the first who claims one has it; nobody is given a high one anew."""
    found = numbers(claims)
    assert len(set(found)) == len(claims)
    claimed = {n for c in claims for n in (c.held, *c.kept)}
    assert all(number in claimed or number < len(claims) for number in found)
    for launcher, claim in enumerate(claims):
        first = [c.held for c in claims].index(claim.held) == launcher
        if first and claim.held is not None:
            assert found[launcher] == claim.held


def test_the_process_at_which_nodes_meet_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that leaves with the store would end the job for all; the port may be torch's own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert hosts_rendezvous(f"somewhere:{port}")
        monkeypatch.setattr(node_numbers, "DEFAULT_PORT", str(port))
        assert hosts_rendezvous("somewhere")
        assert hosts_rendezvous("[::1]")
    monkeypatch.undo()
    assert int(node_numbers.DEFAULT_PORT) == c10d_rendezvous_backend.DEFAULT_PORT
    assert not hosts_rendezvous(f"somewhere:{port}")


class Handler:
    """A rendezvous of torchelastic, as far as its end goes."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def shutdown(self) -> bool:
        """For all nodes."""
        self.done.append("closed")
        return True

    def _stop_heartbeats(self) -> None:
        self.done.append("silent")


def test_a_node_that_leaves_does_not_close_the_rendezvous() -> None:
    """The others take it for lost and go on."""
    handler = Handler()
    seated = Seated(handler, None, ())
    seated.leaves = True
    assert not seated.shutdown()
    assert handler.done == ["silent"]
    seated.leaves = False
    assert seated.shutdown()
    assert handler.done == ["silent", "closed"]
