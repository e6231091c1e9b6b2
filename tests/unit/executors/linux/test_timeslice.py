"""Threads that work beside the training give way to it, and nothing else about them changes."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper.launch import ensure_keeper, keeper_status
from autockpt.executors.linux import timeslice
from autockpt.executors.linux.timeslice import LONGEST_S, ask_for_long_slices, slice_s
from autockpt.executors.snapshot.copy_engine import CopyEngine, CopyTask, ProgressCounter
from autockpt.profiling.measure.movers import giving_way


def on_a_thread(work: Callable[[], Any]) -> Any:
    """What it returned."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


needs_long_slices = pytest.mark.skipif(
    not on_a_thread(ask_for_long_slices), reason="Linux before 6.12, or the call is forbidden"
)


@needs_long_slices
def test_slices_are_long_for_the_thread_that_asks_and_those_it_starts() -> None:
    """Priority and policy stay, and the thread that trains keeps its own slices."""
    before = slice_s()

    def asks() -> tuple[float, float, int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        assert ask_for_long_slices()
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return slice_s(), on_a_thread(slice_s), nice, os.sched_getscheduler(0)

    assert on_a_thread(asks) == (LONGEST_S, LONGEST_S, 3, os.SCHED_OTHER)
    assert slice_s() == before < LONGEST_S


@needs_long_slices
def test_the_copy_thread_gives_way() -> None:
    """It is the one that holds a core for tens of milliseconds within the trainer."""
    engine = CopyEngine()
    try:
        engine.start(CopyTask(jobs=[], publish=ProgressCounter(memoryview(bytearray(8)))))
        engine.wait()
        assert engine._thread.native_id is not None
        assert slice_s(engine._thread.native_id) == LONGEST_S
    finally:
        engine.close()


@needs_long_slices
def test_all_threads_of_a_keeper_give_way(tmp_path: Path) -> None:
    """Digests and writes are theirs."""
    run_dir = str(tmp_path / "run")
    ensure_keeper(run_dir, 0, checkpoints=str(tmp_path / "checkpoints"))
    status = keeper_status(run_dir, 0)
    assert status is not None
    try:
        slices_s = [slice_s(int(thread)) for thread in os.listdir(f"/proc/{status.pid}/task")]
        assert len(slices_s) > 1
        assert set(slices_s) == {LONGEST_S}
    finally:
        os.kill(status.pid, signal.SIGKILL)


@needs_long_slices
def test_what_a_profile_runs_beside_the_training_gives_way_as_a_run_does() -> None:
    """Else it would measure another cost than the one that will be paid."""
    before = slice_s()
    assert on_a_thread(giving_way(slice_s)) == LONGEST_S
    assert slice_s() == before < LONGEST_S


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a policy of real time")
def test_a_scheduling_policy_of_ones_own_is_left_alone() -> None:
    """Who runs a training under `chrt` has said what he wants."""

    def asks() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return ask_for_long_slices(), os.sched_getscheduler(0)

    assert on_a_thread(asks) == (False, os.SCHED_RR)


def test_where_the_kernel_cannot_be_asked_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose call numbers nobody has looked up, and a container that forbids them."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert (ask_for_long_slices(), slice_s()) == (False, 0.0)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(timeslice, "_NUMBERS", {"x86_64": (9999, 9999)})
    assert (ask_for_long_slices(), slice_s()) == (False, 0.0)
