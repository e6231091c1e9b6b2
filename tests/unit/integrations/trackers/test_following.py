"""Trackers get what is new, in order, from a thread; one that fails never ends a training."""

import atexit
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autockpt.integrations import trackers
from autockpt.integrations.trackers import following as module
from autockpt.integrations.trackers.following import Following
from autockpt.integrations.trackers.values import charted
from autockpt.session.attaches import Attaches
from autockpt.values import telemetry as t
from tests.support import trainings


class Seen:
    """A tracker that keeps what it is told."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[Any] = []
        self.threads: set[int] = set()

    def begin(self, step: int, run_id: str) -> None:
        """As of `Sink`."""
        self.calls.append(("begin", step))

    def send(self, step: int, values: Mapping[str, float], wall_s: float) -> None:
        """As of `Sink`."""
        self.threads.add(threading.get_ident())
        if self.fails:
            raise OSError("no route to the tracker")
        self.calls.append((step, dict(values)))

    def end(self) -> None:
        """As of `Sink`."""
        self.calls.append("end")


def iterated(step: int, *, rank: int = 0) -> t.IterationsTimed:
    """A block of two iterations of a second each."""
    return t.IterationsTimed(
        at_s=float(step), rank=rank, step=step, count=2, total_s=2.0, checkpoint_s=0.5,
        quiet_s=1.0, busy_s=0.0,
    )  # fmt: skip


def write(file: Path, *events: t.Event, torn: str = "") -> None:
    """As a trainer or a keeper does."""
    with open(file, "a", encoding="utf-8") as opened:
        for event in events:
            opened.write(json.dumps(t.event_data(event)) + "\n")
        opened.write(torn)


def test_only_what_is_new_is_sent_in_the_order_of_time(tmp_path: Path) -> None:
    """Of two files; a line that is not whole yet comes with its end."""
    folder = tmp_path / "telemetry"
    folder.mkdir()
    trainer, keeper = folder / "rank-00000.jsonl", folder / "keeper-000.jsonl"
    write(trainer, iterated(2))
    seen = Seen()
    following = Following(str(tmp_path), (seen,), step=2)
    following.start()
    line = json.dumps(t.event_data(iterated(8))) + "\n"
    write(trainer, iterated(6), torn=line[:20])
    write(keeper, iterated(4, rank=-1))
    with open(trainer, "a", encoding="utf-8") as opened:
        opened.write(line[20:])
    following.stop()
    steps = [call[0] for call in seen.calls[1:-1]]
    assert (seen.calls[0], steps, seen.calls[-1]) == (("begin", 2), [4, 6, 8], "end")
    assert seen.calls[1][1] == {"iteration_s": 1.0, "checkpoint_stall_s": 0.25}
    assert threading.get_ident() not in seen.threads


class Appending(Seen):
    """It keeps each point that it ever got."""

    appends = True


def follow_to_the_end(run_dir: Path, *events: t.Event, step: int, former: bool = False) -> Any:
    """(what a tracker that replaces got, what one that appends got) in one start of a process.

    `former`: the events are of the process before, which was killed before it sent them.
    """
    file = run_dir / "telemetry" / "rank-00000.jsonl"
    seen, appending = Seen(), Appending()
    if former:
        write(file, *events)
    following = Following(str(run_dir), (seen, appending), step=step)
    following.start()
    if not former:
        write(file, *events)
    following.stop()
    return tuple(
        [(call[0], call[1]["iteration_s"]) for call in one.calls[1:-1]] for one in (seen, appending)
    )


def test_a_killed_process_leaves_no_gap_and_no_second_point(tmp_path: Path) -> None:
    """It had sent steps up to 4, and not 6 and 8; the training goes on from 6, then from 2."""
    (tmp_path / "telemetry").mkdir()
    first = follow_to_the_end(tmp_path, iterated(2), iterated(4), step=0)
    assert first == ([(2, 1.0), (4, 1.0)], [(2, 1.0), (4, 1.0)])
    second = follow_to_the_end(tmp_path, iterated(6), iterated(8), step=6, former=True)
    assert second == ([(6, 1.0)], [(6, 1.0)])
    again = [dataclasses.replace(iterated(step), total_s=6.0) for step in (4, 6, 8)]
    third = follow_to_the_end(tmp_path, *again, step=2)
    assert third == ([(4, 3.0), (6, 3.0), (8, 3.0)], [(8, 3.0)])


def test_two_resumes_at_one_step_are_two_points(tmp_path: Path) -> None:
    """They are no values of the step."""
    (tmp_path / "telemetry").mkdir()
    resumed = t.Restored(
        at_s=1.0, rank=-1, generation="g", step=7, source="memory", bytes=1, restore_s=0.5,
        lost_steps=2, lost_s=3.0, down_s=4.0,
    )  # fmt: skip
    appending = Appending()
    following = Following(str(tmp_path), (appending,), step=7)
    following.start()
    write(tmp_path / "telemetry" / "keeper-000.jsonl", resumed, resumed)
    following.stop()
    assert [call[0] for call in appending.calls[1:-1]] == [7, 7]


def test_a_training_that_begins_anew_has_a_run_of_its_own(tmp_path: Path) -> None:
    """Its steps are others, though their numbers come again."""
    (tmp_path / "telemetry").mkdir()
    job = SimpleNamespace(rank=0, run_directory=str(tmp_path), fresh=False)
    ckpt = SimpleNamespace(_job=job, restored=None)
    first = trackers.run_id(ckpt)
    follow_to_the_end(tmp_path, iterated(2), step=0)
    assert trackers.run_id(ckpt) == first
    job.fresh = True
    assert trackers.run_id(ckpt) == f"{first}-2"
    job.fresh = False  # a restart of it
    assert trackers.run_id(ckpt) == f"{first}-2"
    _, appended = follow_to_the_end(tmp_path, iterated(2), step=0)
    assert appended == [(2, 1.0)]


def test_a_tracker_that_fails_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, and the others go on."""
    (tmp_path / "telemetry").mkdir()
    bad, good = Seen(fails=True), Seen()
    following = Following(str(tmp_path), (bad, good), step=0)
    following.start()
    write(tmp_path / "telemetry" / "rank-00000.jsonl", iterated(2), iterated(4))
    following.stop()
    assert [call[0] for call in good.calls[1:-1]] == [2, 4]
    assert bad.calls == [("begin", 0)]
    assert capsys.readouterr().err.count("no route to the tracker") == 1


def test_a_damaged_event_ends_no_charts(tmp_path: Path) -> None:
    """A block of no iterations has no mean; what comes behind it is sent."""
    (tmp_path / "telemetry").mkdir()
    seen = Seen()
    following = Following(str(tmp_path), (seen,), step=0)
    following.start()
    damaged = dataclasses.replace(iterated(2), count=0)
    write(tmp_path / "telemetry" / "rank-00000.jsonl", damaged, iterated(4))
    following.stop()
    assert [call[0] for call in seen.calls[1:-1]] == [4]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (iterated(4, rank=1), None),
        (t.Degraded(at_s=1.0, rank=0, what="snapshot", reason="x"), None),
        (
            t.Restored(
                at_s=1.0, rank=-1, generation="g", step=7, source="memory", bytes=1, restore_s=0.5,
                lost_steps=2, lost_s=3.0, down_s=4.0,
            ),
            (7, {"lost_steps": 2.0, "lost_s": 3.0, "down_s": 4.0, "restore_s": 0.5}),
        ),
    ],
)  # fmt: skip
def test_charts_show_numbers_of_rank_0_and_keepers(event: t.Event, expected: Any) -> None:
    """Other ranks would put several points at one step."""
    assert charted(event) == expected


def test_a_session_is_followed_from_attach_to_its_end(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """The events of a real training; without the line nothing is sent."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=2, disk=2))
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
    seen = Seen()
    following = trackers.follow(ckpt, seen)
    assert following is not None
    for _ in ckpt.steps(6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    following.stop()
    names = {name for call in seen.calls[1:-1] for name in call[1]}
    assert "iteration_s" in names
    assert {"begin", "end"} <= {seen.calls[0][0], seen.calls[-1]}


def test_the_last_values_come_before_the_trackers_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker that says farewell in a hook of its own, as W&B does, has had them by then."""
    hooks: list[Any] = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", lambda one: one in hooks and hooks.remove(one))
    farewells = Seen()
    begun = threading.Event()

    class Parting(Seen):
        def begin(self, step: int, run_id: str) -> None:
            atexit.register(farewells.end)

        def end(self) -> None:
            begun.set()

    (tmp_path / "telemetry").mkdir()
    following = Following(str(tmp_path), (Parting(),), step=0)
    following.start()
    following._ended.set()
    assert begun.wait(60)
    following._thread.join(60)
    assert hooks == [farewells.end, following.stop]


SHORT = """
import atexit, concurrent.futures, sys, threading, time
from autockpt.integrations.trackers.following import Following

class Slow:
    def begin(self, step, run_id):
        deadline = time.monotonic() + 60
        while not threading._SHUTTING_DOWN and time.monotonic() < deadline:
            time.sleep(0.01)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(print, "begun").result()
        atexit.register(print, "farewell")

    def send(self, step, values, wall_s):
        print("sent", step)

    def end(self):
        print("end")

Following(sys.argv[1], (Slow(),), step=0).start()
with open(sys.argv[1] + "/telemetry/rank-00000.jsonl", "a") as file:
    file.write(sys.argv[2])
"""
"""It has ended before its tracker has begun; the tracker needs threads for that, as W&B does."""


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread behind the last line"
)
def test_a_training_shorter_than_the_start_of_its_tracker_is_in_the_charts(tmp_path: Path) -> None:
    """The tracker begins, then gets the values, and says farewell behind them."""
    (tmp_path / "telemetry").mkdir()
    line = json.dumps(t.event_data(iterated(2))) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", SHORT, str(tmp_path), line],
        text=True, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["begun", "sent 2", "end", "farewell", ""], done.stderr
    assert not done.stderr


def test_a_tracker_that_hangs_delays_the_end_by_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its start; both hooks together wait once, and it is said."""
    released = threading.Event()

    class Hanging(Seen):
        def begin(self, step: int, run_id: str) -> None:
            released.wait(120)

    monkeypatch.setattr("autockpt.integrations.trackers.following.LAST_S", 0.2)
    monkeypatch.setattr(atexit, "register", lambda one: None)
    following = Following(str(tmp_path), (Hanging(),), step=0)
    following.start()
    try:
        following._await_begin()
        following.stop()
        assert not following._left_s()
        assert capsys.readouterr().err.count("did not take the last values within 0.2 s") == 1
    finally:
        released.set()
        following._thread.join(60)


def test_it_ends_with_the_sessions_of_a_process_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is left would force a new process."""
    attaches, seen = Attaches(), Seen()
    monkeypatch.setattr(module, "of_this_process", attaches)
    job = SimpleNamespace(rank=0, run_directory=str(tmp_path), fresh=False)
    made = trackers.follow(SimpleNamespace(_job=job, restored=None), seen)
    assert made is not None
    attaches.fail(ConnectionError("another rank has died"))
    assert not made._thread.is_alive()
    assert seen.calls == [("begin", 0), "end"]
