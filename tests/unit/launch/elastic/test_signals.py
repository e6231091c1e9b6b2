"""A signal ends the job, whatever the launcher is doing for itself at that moment."""

import contextlib
import os
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.launch.elastic.agent import agent_class
from autockpt.launch.elastic.signals import heeded, signals_wait


class SignalException(Exception):
    """As torchelastic's: an ordinary exception, which any `except Exception` takes."""

    def __init__(self, text: str, sigval: int) -> None:
        super().__init__(f"{text}: {int(sigval)}")


def raising(number: int, frame: object) -> None:
    """As torchelastic's handler."""
    raise SignalException("got", number)


@pytest.fixture(autouse=True)
def _handlers() -> Any:
    before = {number: signal.signal(number, raising) for number in heeded()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def swallowed(number: int) -> None:
    """Code of ours that goes on after an exception of its own."""
    try:
        signal.raise_signal(number)
    except Exception:
        pytest.fail("the signal was taken for an exception of this code")


@pytest.mark.parametrize("number", heeded())
def test_a_signal_arrives_at_the_end_of_our_own_work(number: int) -> None:
    """By the handler that stood before, which is back."""
    with pytest.raises(SignalException, match=f": {int(number)}"), signals_wait():
        swallowed(number)
    assert signal.getsignal(number) is raising
    with signals_wait():
        pass


def test_every_signal_arrives_and_an_exception_goes_on() -> None:
    """The second is the one that ends at once: it must not be lost."""
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))

    def ours() -> None:
        with signals_wait():
            swallowed(signal.SIGTERM)
            swallowed(signal.SIGINT)

    with pytest.raises(SignalException, match=": 15"):
        ours()
    assert came == [signal.SIGINT]
    with pytest.raises(KeyError, match="ours"), signals_wait():
        raise KeyError("ours")


def test_a_signal_while_ranks_start_is_raised_when_they_are_known() -> None:
    """Else they train on, and no launcher has them: it tells torchelastic's ranks alone."""

    class Base:
        _pcontext: Any = None

        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def _start_workers(self, group: Any) -> None:
            rank = subprocess.Popen(["sleep", "600"])
            named = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
            if hasattr(signal, named):  # as torchelastic does at each start
                signal.signal(getattr(signal, named), raising)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)  # a handler that raises does so here
                self._pcontext = rank
            finally:
                rank.kill()
                rank.wait()

    class Watch:
        standbys = SimpleNamespace(serving=contextlib.nullcontext, expect=lambda spec: None)
        survivors = SimpleNamespace(serving=contextlib.nullcontext, any=False)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: True

        def seated(self, rendezvous: Any) -> Any:
            return rendezvous

    api = SimpleNamespace(LocalElasticAgent=Base, SignalException=SignalException)
    with agent_class(api, Watch()):  # type: ignore[arg-type]
        agent = api.LocalElasticAgent(SimpleNamespace(rdzv_handler=None))
        group = SimpleNamespace(group_rank=0, workers=[SimpleNamespace(global_rank=0)])
        with pytest.raises(SignalException, match=": 15"):
            agent._start_workers(group)
    assert agent._pcontext is not None


@pytest.mark.parametrize("hook", ["starting", "look", "goes_on"])
def test_no_hook_of_the_agent_takes_a_signal_for_its_own_failure(hook: str) -> None:
    """torchelastic's agent calls them between its own work."""

    class Base:
        _remaining_restarts = 1
        _pcontext = SimpleNamespace(pids=dict)

        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def _start_workers(self, group: Any) -> None:
            pass

        def _monitor_workers(self, group: Any) -> Any:
            return SimpleNamespace(is_failed=lambda: True, failures={})

    class Watch:
        standbys = SimpleNamespace(serving=signals_wait, expect=lambda spec: None)
        survivors = SimpleNamespace(serving=signals_wait, any=False)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: swallowed(signal.SIGTERM) if name == hook else True

        def seated(self, rendezvous: Any) -> Any:
            return rendezvous

    api = SimpleNamespace(LocalElasticAgent=Base, SignalException=SignalException)

    def job() -> None:
        with agent_class(api, Watch()):  # type: ignore[arg-type]
            agent = api.LocalElasticAgent(SimpleNamespace(rdzv_handler=None))
            agent._start_workers(
                SimpleNamespace(group_rank=0, workers=[SimpleNamespace(global_rank=0)])
            )
            agent._monitor_workers(
                SimpleNamespace(group_rank=0, workers=[SimpleNamespace(global_rank=0)])
            )

    with pytest.raises(SignalException, match=": 15"):
        job()


@pytest.mark.parametrize("hands_time_on", [False, True], ids=["torch 2.11", "torch 2.13"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_ranks_have_our_time_to_end_under_each_torch(
    hands_time_on: bool, interrupted: bool
) -> None:
    """torch 2.11 shuts down without a time, later ones with 30 s."""
    closed: list[tuple[int, float]] = []

    class Base:
        def __init__(self, spec: Any) -> None:
            self._pcontext = SimpleNamespace(
                close=lambda death_sig=None, timeout=30: closed.append((death_sig, timeout)),
                pids=dict,
            )

    def shutdown_with_time(
        self: Any, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30
    ) -> None:
        self._pcontext.close(death_sig, timeout)

    def shutdown(self: Any, death_sig: signal.Signals = signal.SIGTERM) -> None:
        self._pcontext.close(death_sig)

    vars_of_base: Any = Base
    vars_of_base._shutdown = shutdown_with_time if hands_time_on else shutdown
    watch: Any = SimpleNamespace(
        standbys=SimpleNamespace(serving=contextlib.nullcontext, expect=lambda spec: None),
        survivors=SimpleNamespace(serving=contextlib.nullcontext, signal=lambda number: None),
        seated=lambda rendezvous: rendezvous, interrupted=lambda number: 7.5,
    )  # fmt: skip
    api = SimpleNamespace(LocalElasticAgent=Base, SignalException=SignalException)
    time = {"timeout": 30} if hands_time_on else {}
    with agent_class(api, watch):
        agent = api.LocalElasticAgent(SimpleNamespace(rdzv_handler=None))
        if interrupted:
            try:
                raise SignalException("SIGTERM", sigval=signal.SIGTERM)
            except SignalException:
                agent._shutdown(signal.SIGTERM, **time)
        else:
            agent._shutdown(**time)
    assert closed == [(signal.SIGTERM, 7.5 if interrupted else 30)]
