"""Members of a job keep their places, and a spare takes the place of one that is lost."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousParameters,
    dynamic_rendezvous,
)

from autockpt.launch import environment
from autockpt.launch.elastic.rendezvous import membership, store_connection
from autockpt.launch.elastic.rendezvous.membership import NotNeeded
from autockpt.launch.elastic.rendezvous.node_numbers import Seated
from autockpt.launch.elastic.torchrun_handler import make_factory

PATIENCE_S = 25.0
LOST = "127.0.0.3"


class Job:
    """Launchers that meet at one store; each is a thread that waits in the rendezvous."""

    def __init__(self, *, silence_s: int) -> None:
        """`silence_s`: a launcher without a sign of life for so long is lost."""
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._server.port
        self._silence_s = silence_s
        self._threads = ThreadPoolExecutor(8)
        self.launchers: list[Seated] = []
        self.lost_nodes: set[int] = set()
        self.said: list[str] = []

    def launcher(self, address: str, *, nodes: str = "2:2", port: int | None = None) -> Seated:
        """One more; `port`: at which it asks for the store."""
        least, most = map(int, nodes.split(":"))
        parameters = RendezvousParameters(
            "autockpt", f"127.0.0.1:{port or self.port}", "job", least, most, local_addr=address,
            is_host=False, keep_alive_max_attempt=self._silence_s, last_call_timeout=1,
        )  # fmt: skip
        bare: Any = make_factory()(parameters)
        made = Seated(
            bare._handler, address, (), lost_nodes=lambda: self.lost_nodes, say=self.said.append
        )
        self.launchers.append(made)
        return made

    def goes(self, launcher: Seated) -> "Future[Any]":
        """It goes to the rendezvous."""
        return self._threads.submit(launcher.next_rendezvous)

    def meet(self, *launchers: Seated) -> list[int | None]:
        """All of them; their numbers."""
        for met in [self.goes(one) for one in launchers]:
            met.result(PATIENCE_S)
        return [one.number for one in launchers]

    def two(self) -> tuple[Seated, Seated]:
        """Members of a job of two nodes, which have met."""
        here, there = self.launcher("127.0.0.2"), self.launcher(LOST)
        assert self.meet(here, there) == [0, 1]
        return here, there

    def end(self) -> None:
        """Nothing is left running."""
        for one in self.launchers:
            one._handler._stop_heartbeats()
        for one in self.launchers:
            one._handler.set_closed()
        self._threads.shutdown()


@pytest.fixture
def new_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Makes jobs."""
    monkeypatch.setenv(environment.NODE, "")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(membership, "SAID_AFTER", 2)
    wait = dynamic_rendezvous._delay
    monkeypatch.setattr(
        dynamic_rendezvous, "_delay",
        lambda seconds: wait(seconds if isinstance(seconds, tuple) else 0.02),
    )  # fmt: skip
    made: list[Job] = []

    def make(*, silence_s: int = 60) -> Job:
        made.append(Job(silence_s=silence_s))
        return made[-1]

    yield make
    for job in made:
        job.end()


class Relay:
    """Hands connections on to a port, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.listen()

    def listen(self) -> None:
        """Also again, at the same port."""
        if self._listener.fileno() < 0:
            self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._pairs += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    @staticmethod
    def _hand_on(source: socket.socket, target: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def cut(self) -> None:
        """All connections end."""
        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def close(self) -> None:
        """Nothing listens any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def until(done: Callable[[], object]) -> None:
    """Polls with a deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_spare_takes_no_place_while_the_members_start_again(new_job: Callable[..., Job]) -> None:
    """torchelastic gives a place to the launcher that comes first, whose node holds nothing."""
    job = new_job()
    here, there = job.two()
    spare = job.goes(job.launcher("127.0.0.1"))
    until(lambda: job.said)
    assert "a spare" in job.said[0]
    for _ in range(2):
        first = job.goes(here)
        time.sleep(3 * membership.LOOK_S)  # the spare looks while a place is free
        assert job.meet(there) == [1]
        first.result(PATIENCE_S)
        assert not spare.done()


def test_the_place_of_a_silent_member_goes_to_one_spare(new_job: Callable[..., Job]) -> None:
    """Of two; the survivor keeps its number."""
    job = new_job(silence_s=4)
    here, lost = job.two()
    spares = [job.launcher("127.0.0.1"), job.launcher("127.0.0.4")]
    coming = [job.goes(one) for one in spares]
    until(lambda: len(job.said) == 2)
    lost._handler._stop_heartbeats()
    until(lambda: here._handler.num_nodes_waiting())
    assert job.meet(here) == [0]
    until(lambda: any(one.done() for one in coming))
    assert sorted(one.number is None for one in spares) == [False, True]
    assert {one.number for one in spares} == {1, None}


def test_survivors_do_not_wait_for_a_node_that_keepers_have_lost(
    new_job: Callable[..., Job],
) -> None:
    """The minute for a silent launcher has only begun, and the spare is told."""
    job = new_job(silence_s=60)
    here, lost = job.two()
    spare = job.launcher("127.0.0.1")
    coming = job.goes(spare)
    until(lambda: job.said)
    lost._handler._stop_heartbeats()
    job.lost_nodes.add(1)
    began_s = time.monotonic()
    assert job.meet(here) == [0]
    coming.result(PATIENCE_S)
    assert spare.number == 1
    assert time.monotonic() < began_s + 30


def test_a_living_member_without_a_keeper_sees_that_the_others_wait(
    new_job: Callable[..., Job],
) -> None:
    """Its launcher gives signs of life, so its place in the last start is not taken away."""
    job = new_job()
    here, there = job.two()
    job.lost_nodes.add(1)
    waiting = job.goes(here)
    time.sleep(2 * membership.SILENT_S)
    assert there._handler.num_nodes_waiting() == 1
    assert job.meet(there) == [1]
    waiting.result(PATIENCE_S)
    assert here.number == 0


def test_a_member_that_comes_again_keeps_its_place_though_its_keeper_is_gone(
    new_job: Callable[..., Job],
) -> None:
    """It has left the rendezvous of the last start by itself, so it is alive."""
    job = new_job()
    here, there = job.two()
    job.lost_nodes.add(1)
    other = job.goes(there)
    time.sleep(3 * membership.LOOK_S)
    assert job.meet(here) == [0]
    other.result(PATIENCE_S)
    assert there.number == 1


def test_a_free_place_of_an_elastic_job_is_taken_at_once(new_job: Callable[..., Job]) -> None:
    """By the first launcher that comes; another one is a spare."""
    job = new_job()
    here = job.launcher("127.0.0.2", nodes="1:2")
    assert job.meet(here) == [0]
    coming = job.goes(second := job.launcher("127.0.0.1", nodes="1:2"))
    until(lambda: here._handler.num_nodes_waiting())
    assert job.meet(here) == [0]
    coming.result(PATIENCE_S)
    assert second.number == 1
    third = job.goes(job.launcher(LOST, nodes="1:2"))
    until(lambda: job.said)
    assert not third.done()


def test_a_spare_ends_with_the_job_and_does_not_end_it(new_job: Callable[..., Job]) -> None:
    """Neither as an error of its own."""
    job = new_job()
    here, _ = job.two()
    spare = job.launcher("127.0.0.1")
    coming = job.goes(spare)
    until(lambda: job.said)
    assert not spare.shutdown()
    assert not here._handler.is_closed()
    here.shutdown()
    with pytest.raises(NotNeeded, match="0"):
        coming.result(PATIENCE_S)
    assert "was not needed" in job.said[-1]


def test_a_launcher_of_a_job_that_is_over_is_told_so(new_job: Callable[..., Job]) -> None:
    """It is no spare that ends well: it has begun behind the end."""
    job = new_job()
    here, _ = job.two()
    here.shutdown()
    with pytest.raises(RendezvousClosedError, match=r"^$"):
        job.goes(job.launcher("127.0.0.1")).result(PATIENCE_S)
    assert not job.said


def test_the_fifth_of_a_first_start_is_a_spare(new_job: Callable[..., Job]) -> None:
    """It has waited with the others, who were sooner."""
    job = new_job()
    three = [job.launcher(f"127.0.0.{n}") for n in (1, 2, 3)]
    coming = [job.goes(one) for one in three]
    until(lambda: sum(one.done() for one in coming) == 2 and job.said)
    assert sorted(one.number is None for one in three) == [False, False, True]


def test_a_spare_whose_connection_breaks_connects_again(new_job: Callable[..., Job]) -> None:
    """Also where nothing listens for a moment; then it takes the place of a lost node."""
    job = new_job(silence_s=4)
    here, lost = job.two()
    relay = Relay(job.port)
    spare = job.launcher("127.0.0.1", port=relay.port)
    coming = job.goes(spare)
    until(lambda: job.said)
    relay.cut()
    until(lambda: membership.STORE_BACK in job.said)
    relay.close()
    until(lambda: job.said.count(membership.STORE_LOST) == 2)
    time.sleep(3 * store_connection.FIRST_WAIT_S)
    relay.listen()
    until(lambda: job.said.count(membership.STORE_BACK) == 2)
    assert not coming.done()
    lost._handler._stop_heartbeats()
    until(lambda: here._handler.num_nodes_waiting())
    assert job.meet(here) == [0]
    coming.result(PATIENCE_S)
    assert spare.number == 1
    spare._handler._stop_heartbeats()
    job.launchers.remove(spare)
    relay.close()


def test_a_spare_leaves_where_nothing_listens_any_more(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher that kept the store has ended."""
    monkeypatch.setattr(store_connection, "REFUSED_S", 0.5)
    job = new_job()
    job.two()
    relay = Relay(job.port)
    coming = job.goes(job.launcher("127.0.0.1", port=relay.port))
    until(lambda: job.said)
    relay.close()
    with pytest.raises(NotNeeded, match="0"):
        coming.result(PATIENCE_S)
    assert job.said[-1] == membership.STORE_GONE
    job.launchers.pop()
