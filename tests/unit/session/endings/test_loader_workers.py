"""torch's parts that workers of loaders go through, and what they are behind a session."""

import functools
import sys
import types
from collections.abc import Callable

import pytest
from torch.utils.data._utils import signal_handling, worker

from autockpt.session.endings.loader_workers import LoaderWorkers

LOOP = worker._worker_loop


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_loop", LOOP)
    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", failing)


def failing() -> None:
    """As torch's, of a worker that a signal has ended."""
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")


def test_a_workers_death_is_no_error_once_this_process_is_told_to_end() -> None:
    """Before and behind that it is."""
    told = False
    workers = LoaderWorkers(lambda: told)
    workers.start()
    with pytest.raises(RuntimeError, match="killed by signal"):
        signal_handling._error_if_any_worker_fails()
    told = True
    signal_handling._error_if_any_worker_fails()
    workers.close()
    assert signal_handling._error_if_any_worker_fails is failing
    with pytest.raises(RuntimeError, match="killed by signal"):
        workers._check()  # a framework has put it back


@pytest.mark.parametrize("first", [0, 1])
def test_sessions_of_one_process_end_in_any_order(first: int) -> None:
    """No end brings another session's check back, and a worker's loop is wrapped once."""
    told: list[Callable[[], bool]] = [lambda: False, lambda: True]
    both = [LoaderWorkers(one) for one in told]
    for one in both:
        one.start()
    assert isinstance(worker._worker_loop, functools.partial)
    assert not isinstance(worker._worker_loop.args[0], functools.partial)
    signal_handling._error_if_any_worker_fails()
    both[first].close()
    both[1 - first].close()
    with pytest.raises(RuntimeError, match="killed by signal"):
        signal_handling._error_if_any_worker_fails()


def test_a_torch_with_other_names_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost but this."""
    for name in ("worker", "signal_handling"):
        module = f"torch.utils.data._utils.{name}"
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    workers = LoaderWorkers(bool)
    workers.start()
    workers.close()
