"""The launcher's side, against ranks that the test plays."""

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.launch import environment
from autockpt.launch.elastic.agent import agent_class
from autockpt.launch.elastic.signals import signals_wait
from autockpt.launch.in_process import survivors as module
from autockpt.launch.in_process.channel import connect, listen
from autockpt.launch.in_process.survivors import Survivors
from autockpt.launch.standby.channel import Channel

OTHER, THIRD = 2**22 + 1, 2**22 + 2
"""No process has these numbers."""


class Ranks:
    """Rank 0 is this process, rank 1 another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variables = {environment.LAUNCH_ID: secrets.token_hex(8),
                     environment.LAUNCHER_PID: str(os.getpid())}  # fmt: skip
        self._variables = variables
        monkeypatch.setattr(os, "getppid", os.getpid)
        self.said: list[str] = []
        console: Any = SimpleNamespace(say=self.said.append)
        self.survivors = Survivors(console)
        self.survivors._listener = listen(variables)
        self.dead: set[int] = set()
        self.ranks: list[Channel] = []

    def connect(self, *, restarts: int = 0, begins: bool = True) -> Channel:
        """The function of this process; it begins now, or later."""
        channel = connect(self._variables)
        assert channel is not None
        channel._sock.settimeout(60)
        if begins:
            channel.send({"restartable": True, "restarts": restarts})
        self.ranks.append(channel)
        return channel

    def look(self, *pids: int) -> dict[int, Any]:
        """The handlers as the look leaves them."""
        handlers: dict[int, Any] = {
            n: SimpleNamespace(proc=SimpleNamespace(pid=pid)) for n, pid in enumerate(pids)
        }
        self.survivors.look(handlers, lambda pid: pid in self.dead)
        return handlers

    def close(self) -> None:
        self.survivors._parked.clear()  # else it would end this process
        self.survivors.close()
        for channel in self.ranks:
            channel.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Ended with the test."""
    made = Ranks(monkeypatch)
    yield made
    made.close()


def test_a_failure_waits_for_a_rank_that_may_be_about_to_die(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of that rank has ended, and its process has not."""
    monkeypatch.setattr(module, "ALONE_S", -1.0)
    rank = ranks.connect()
    rank.send({"failed": "a collective"})
    ranks.look(os.getpid(), OTHER)
    rank._sock.setblocking(False)
    assert rank.receive() == ([], [])
    monkeypatch.setattr(module, "DYING_S", -1.0)
    ranks.look(os.getpid(), OTHER)
    assert rank.receive() == ([{"alone": True}], [])


def test_a_process_that_is_no_rank_is_not_heard(ranks: Ranks) -> None:
    """Any process of the machine can connect."""
    stranger = ranks.connect()
    ranks.look(OTHER)
    assert stranger.receive() is None
    assert not ranks.survivors.any


def test_the_end_of_one_connection_ends_no_later_one(ranks: Ranks) -> None:
    """Both are of the same process."""
    first = ranks.connect()
    ranks.look(os.getpid(), OTHER)
    first.close()
    ranks.connect()
    ranks.look(os.getpid(), OTHER)
    assert ranks.survivors.any


def test_all_ranks_survive_a_death_on_another_node(ranks: Ranks) -> None:
    """They have the numbers of the whole job in what is said."""
    rank = ranks.connect()
    ranks.look(os.getpid())

    def leave() -> None:
        assert rank.receive() == ([{"unwind": True}], [])
        rank.send({"parked": True})

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    handlers: dict[int, Any] = {0: SimpleNamespace(proc=SimpleNamespace(pid=os.getpid()))}
    ranks.survivors.first_rank = 6
    ranks.survivors.leave(handlers)
    thread.join(60)
    assert ranks.survivors.parked == (6,)
    assert handlers[0].poll() == 0


def test_reasons_are_said_when_the_job_goes_on(ranks: Ranks) -> None:
    """A job that ends has no new processes."""
    rank = ranks.connect()
    ranks.look(os.getpid(), OTHER)

    def leave() -> None:
        rank.receive()
        rank.send({"refused": "a thread"})

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    ranks.dead.add(OTHER)
    ranks.look(os.getpid(), OTHER)
    thread.join(60)
    assert ranks.said == []
    ranks.survivors.say_reasons()
    assert ranks.said == ["rank 0 goes on in a new process: a thread"]


def test_a_function_that_begins_while_others_leave_theirs_is_asked_too(ranks: Ranks) -> None:
    """Its rank was still starting when another one died."""
    rank = ranks.connect(begins=False)
    ranks.look(os.getpid(), OTHER)
    here, there = map(Channel, socket.socketpair())
    there._sock.settimeout(60)
    ranks.ranks.append(there)
    ranks.survivors._functions[THIRD] = module._Function(here, THIRD, is_restartable=True)

    def leave() -> None:
        there.receive()
        rank.send({"restartable": True, "restarts": 0})
        rank.receive()
        rank.send({"parked": True})
        there.send({"parked": True})

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    ranks.dead.add(OTHER)
    ranks.look(os.getpid(), OTHER, THIRD)
    thread.join(60)
    assert ranks.survivors.parked == (0, 2)


def test_a_rank_that_stands_in_a_collective_is_ended_at_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears no signal; torchelastic sees a process that has ended well, and starts another."""
    ended: list[int] = []
    monkeypatch.setattr(module, "_kill", lambda process: ended.append(process.pid))
    rank = ranks.connect()
    ranks.look(os.getpid(), OTHER)

    def stand() -> None:
        rank.receive()
        rank.send({"stands": "train (job.py:7), within all_reduce"})

    thread = threading.Thread(target=stand, daemon=True)
    thread.start()
    ranks.dead.add(OTHER)
    handlers = ranks.look(os.getpid(), OTHER)
    thread.join(60)
    assert ended == [os.getpid()]
    assert handlers[0].poll() == 0
    assert ranks.survivors.parked == ()
    ranks.survivors.say_reasons()
    assert ranks.said[0].endswith("train (job.py:7), within all_reduce")


def test_a_rank_that_will_have_a_new_process_leaves_its_groups_too(ranks: Ranks) -> None:
    """Another one may wait for it in a collective.  Nobody waits for its answer."""
    rank = ranks.connect(restarts=10)
    ranks.look(os.getpid(), OTHER)
    ranks.dead.add(OTHER)
    ranks.look(os.getpid(), OTHER)
    assert rank.receive() == ([{"unwind": True}], [])


def test_after_a_failed_call_in_the_same_process_no_rank_goes_on(ranks: Ranks) -> None:
    """The dead rank has told of it before it ended."""
    rank = ranks.connect(restarts=1)
    ranks.look(os.getpid(), OTHER)
    rank.send({"unfit": "ValueError: registered twice"})
    ranks.dead.add(OTHER)
    ranks.look(os.getpid(), OTHER)
    ranks.survivors.say_reasons()
    assert "failed (ValueError: registered twice)" in ranks.said[0]


def test_ranks_that_stand_in_the_kernel_are_still_looked_for() -> None:
    """torchelastic itself does so at each tick (torch 2.13)."""

    class Base:
        _pcontext = SimpleNamespace(pids=dict)
        _uninterruptible_state_timeout = 5.0

        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def _check_uninterruptible_state_timeout(self, group: Any, timeout: float) -> str:
            return f"unhealthy after {timeout} s"

    class Watch:
        standbys = SimpleNamespace(serving=signals_wait, expect=lambda spec: None)
        survivors = SimpleNamespace(serving=signals_wait, any=True, look=lambda *_: None)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    api = SimpleNamespace(LocalElasticAgent=Base, SignalException=KeyError)
    watch: Any = Watch()
    with agent_class(api, watch):
        agent = api.LocalElasticAgent(SimpleNamespace(rdzv_handler=None))
        assert agent._monitor_workers(SimpleNamespace()) == "unhealthy after 5.0 s"
