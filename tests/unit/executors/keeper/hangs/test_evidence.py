"""From stacks and states: which rank, and where."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autockpt.executors.keeper.hangs import stack_dumps
from autockpt.executors.keeper.hangs.evidence import RankState, culprit, sentence
from autockpt.executors.keeper.hangs.pace import Stillness

WAITS = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f2 (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 841 in _engine_run_backward
  File "/x/site-packages/torch/autograd/__init__.py", line 354 in backward
  File "/home/me/train.py", line 40 in step
  File "/home/me/train.py", line 60 in <module>
"""
READS = """Thread 0x00007f2 (most recent call first):
  File "/home/me/data.py", line 7 in fetch
  File "/home/me/train.py", line 38 in <module>
"""


def rank(number: int, stacks: str, process: str = "S (sleeping)", step: int = 9) -> RankState:
    """One of them."""
    return RankState(
        rank=number, pid=number + 100, step=step, marks=20, doing="trains", still_s=10.0,
        process=process, stacks=stacks,
    )  # fmt: skip


def still(*, is_late: bool = False) -> Stillness:
    """Since second 10, where 8 s were allowed."""
    return Stillness(since_s=10.0, allowed_s=8.0, learned=True, is_late=is_late)


def by_rank(*ranks: RankState) -> dict[int, RankState]:
    """As `culprit` wants them."""
    return {one.rank: one for one in ranks}


def test_the_rank_that_does_not_wait_for_others_is_named() -> None:
    """Its own line of the script is the place."""
    found = by_rank(rank(0, WAITS), rank(1, READS), rank(2, WAITS))
    assert culprit(found, alone=False) == 1
    text = sentence(found, 1, 20.0, still(), "runs/x/incidents/y")
    assert text == (
        "rank 1 is stuck at step 9: in fetch (/home/me/data.py:7); no progress for 10 s (a gap of "
        "8 s was allowed); 2 other ranks wait for it; evidence in runs/x/incidents/y"
    )
    assert found[0].place == "in step (/home/me/train.py:40), within _engine_run_backward"


def test_a_rank_that_computes_is_called_late() -> None:
    """It may go on by itself."""
    computes = dataclasses.replace(rank(1, READS), activity="computes")
    text = sentence(by_rank(rank(0, WAITS), computes), 1, 20.0, still(is_late=True), "x")
    assert text == (
        "rank 1 is late at step 9: in fetch (/home/me/data.py:7); it computes; no progress for "
        "10 s (a gap of 8 s was allowed); the other rank waits for it; evidence in x"
    )


def test_a_stopped_rank_is_named_before_all() -> None:
    """It cannot say where it stands."""
    found = by_rank(rank(0, WAITS), rank(1, READS), rank(2, "", "T (stopped)"))
    assert culprit(found, alone=True) == 2
    assert found[2].place == "stopped by a signal"


@pytest.mark.parametrize(("alone", "named"), [(True, None), (False, None)])
def test_nobody_is_named_where_all_wait(alone: bool, named: int | None) -> None:
    """The cause is on another node, or they wait in collectives that do not match."""
    assert culprit(by_rank(rank(0, WAITS), rank(1, WAITS)), alone=alone) is named


def test_where_all_wait_in_different_places_these_are_named() -> None:
    """Collectives that do not match; equal places are named once."""
    other = WAITS.replace("line 40 in step", "line 50 in check")
    ranks = by_rank(rank(0, WAITS), rank(1, WAITS), rank(2, other))
    assert sentence(ranks, None, 20.0, still(), "x").split(": ", 1)[1] == (
        "every rank waits; rank 0 in step (/home/me/train.py:40), within _engine_run_backward; "
        "rank 2 in check (/home/me/train.py:50), within _engine_run_backward; evidence in x"
    )


def test_where_all_wait_the_rank_that_is_behind_is_named() -> None:
    """One that never reached the step of the others."""
    assert culprit(by_rank(rank(0, WAITS), rank(1, WAITS, step=8)), alone=True) == 1


def test_a_node_whose_ranks_all_do_something_else_is_not_blamed() -> None:
    """Without the others' stacks nothing is known."""
    assert culprit(by_rank(rank(0, READS), rank(1, READS)), alone=False) is None


def test_a_process_in_a_system_call_gives_its_stacks(tmp_path: Path) -> None:
    """The handler is C's: Python need not run."""
    (tmp_path / "logs").mkdir()
    code = (
        "import os, time\nfrom autockpt.executors.keeper.hangs import stack_dumps\n"
        f"stack_dumps.answer_with_stacks({str(tmp_path)!r}, 3)\nprint('up', flush=True)\n"
        "def blocked():\n    os.read(0, 1)\nblocked()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        asked = {3: process.pid, 4: os.getpid()}
        found, deadline = {3: ""}, time.monotonic() + 60.0
        while "blocked" not in found[3] and time.monotonic() < deadline:
            found = stack_dumps.ask(str(tmp_path), asked)
        assert "blocked" in found[3]
        assert found[4] == "", "one without a handler is not sent a signal that would end it"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=60)
