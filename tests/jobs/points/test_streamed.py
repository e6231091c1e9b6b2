"""Real runs without room for one image: it streams to storage through a window of memory."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from autockpt.executors.snapshot import streaming
from autockpt.executors.snapshot.copy_plan import CopyPlan
from autockpt.session import Session, slots
from autockpt.values.goal import Goal, Limits
from autockpt.values.telemetry import Degraded, MemoryCommitted, SnapshotDiscarded
from tests.conftest import end_keeper
from tests.jobs.points.tight_host.sitecustomize import held_bytes
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live, granted

SPEC = trainings.JobSpec(steps=12, width=512)
PLAN = trainings.plan(memory=2, disk=4)
PAGE_BYTES = 4096
WINDOWS = {"beside": 8 * 2**16, "blocking": 2 * 2**16}
"""Bytes that the policy allows, by how the training goes on."""


def allowed(nbytes: int) -> Goal:
    """Of host memory, on the node."""
    return Goal(limits=Limits(host_memory_bytes=nbytes))


def window(session: Session) -> int:
    """Waits for it."""
    link = session._client
    assert link.wait_until(lambda: bool(link.slots or link.slots_refused), PATIENCE_S)
    return link.window_bytes


@contextmanager
def most_held(session: Session) -> Iterator[list[int]]:
    """The most bytes of the window that have memory, meanwhile."""
    fd = session._client.slots[0].fd
    assert fd is not None
    held, over = [0], threading.Event()

    def look(fd: int) -> None:
        while not over.is_set():
            held[0] = max(held[0], os.fstat(fd).st_blocks * 512)

    thread = threading.Thread(target=look, args=(os.dup(fd),))
    thread.start()
    try:
        yield held
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("way", list(WINDOWS))
def test_what_streamed_to_storage_comes_back(live: Live, way: str) -> None:
    """In a window that is a tenth of the image, every planned one; and it says so."""
    whole = trainings.bare(trainings.build(SPEC))
    job, ckpt = live.attach(SPEC, PLAN, allowed(WINDOWS[way]))
    watched, held = ExitStack(), [0]
    for step, batch in ckpt.batches(SPEC.steps):
        if step == 10:
            break
        if step == 2:
            assert window(ckpt) == WINDOWS[way]
            assert ckpt._client.blocking is (way == "blocking")
            held = watched.enter_context(most_held(ckpt))
        trainings.train_step(job, step, batch)
        granted(ckpt)
    watched.close()
    assert ckpt._client.image_bytes > 10 * WINDOWS[way]
    live.leave()
    assert {4, 8} <= set(live.durable_steps())
    assert 0 < held[0] <= WINDOWS[way] + PAGE_BYTES
    (told,) = {event.reason for event in live.events(Degraded)}
    assert "checkpoints go to storage through" in told
    assert "none stays in memory" in told
    job, ckpt = live.attach(SPEC, PLAN, allowed(WINDOWS[way]))
    assert ckpt.step_count == 8
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
    assert trainings.digest(job) == whole
    live.leave()
    assert {12} <= set(live.durable_steps())


def test_a_change_of_one_element_behind_the_fence_is_found(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no slot to compare with: digests of what was copied are.

    What changed is copied at the boundary from then on, and is larger than the window.
    """
    job, ckpt = live.attach(SPEC, PLAN, allowed(WINDOWS["beside"]))
    weight = job.model.get_parameter("middle.weight")
    assert weight.nbytes > WINDOWS["beside"]
    compare = streaming.Passage.differing
    changes = iter([1.0])

    def change(self: streaming.Passage, recipe: CopyPlan, part: str) -> list[str]:
        weight.detach().numpy()[100, 100] += next(changes, 0.0)
        return compare(self, recipe, part)

    monkeypatch.setattr(streaming.Passage, "differing", change)
    for step, batch in ckpt.batches(SPEC.steps):
        if step == 2:
            assert window(ckpt)
        granted(ckpt)
        trainings.train_step(job, step, batch)
    live.leave()
    (discarded,) = live.events(SnapshotDiscarded)
    assert "middle.weight" in discarded.reason
    durable = set(live.durable_steps())
    assert discarded.step not in durable
    assert {8, 12} <= durable


def test_a_disk_that_fails_costs_its_own_checkpoint(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is not held up, nothing is left half, and the next one is durable."""
    monkeypatch.setenv("FAILING_STORE", str(tmp_path / "broken"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "failing_store"))
    job, ckpt = live.attach(SPEC, PLAN, allowed(WINDOWS["beside"]))
    for step, batch in ckpt.batches(SPEC.steps):
        if step == 2:
            assert window(ckpt)
            (tmp_path / "broken").touch()
        if step == 7:
            (tmp_path / "broken").unlink()
        granted(ckpt)
        trainings.train_step(job, step, batch)
    live.leave()
    durable = set(live.durable_steps())
    assert {8, 12} <= durable
    assert 4 not in durable
    assert live.events(MemoryCommitted) == [], "no memory holds any of them"


def test_a_disk_that_hangs_is_not_waited_for_for_ever(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is given up, storage is left alone for a while, and then it is tried again."""
    monkeypatch.setattr(streaming, "PATIENCE_S", 0.2)
    monkeypatch.setattr(slots, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("HELD_STORE", str(tmp_path / "held"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "held_store"))
    job, ckpt = live.attach(SPEC, PLAN, allowed(WINDOWS["beside"]))
    for step, batch in ckpt.batches(SPEC.steps):
        if step == 2:
            assert window(ckpt)
            (tmp_path / "held").touch()
        if step == 7:
            (tmp_path / "held").unlink()
        granted(ckpt)
        trainings.train_step(job, step, batch)
    live.leave()
    durable = set(live.durable_steps())
    assert {8, 12} <= durable
    assert 4 not in durable
    said = {event.what: event.reason for event in live.events(Degraded)}
    assert "storage took nothing for" in said["storage"]


@pytest.mark.slow
def test_a_keeper_that_dies_takes_its_window_along(live: Live) -> None:
    """The training goes on, and the next keeper makes a window of its own."""
    whole = trainings.bare(trainings.build(SPEC))
    job, ckpt = live.attach(SPEC, PLAN, allowed(WINDOWS["beside"]))
    link = ckpt._client
    for step, batch in ckpt.batches(SPEC.steps):
        if step == 6:
            end_keeper(live.run_dir)
            former = link.slots_changed
            assert link.wait_until(lambda f=former: link.slots_changed > f, PATIENCE_S)
            assert link.window_bytes
        if step > 1:
            assert window(ckpt)
        granted(ckpt)
        trainings.train_step(job, step, batch)
    assert trainings.digest(job) == whole
    live.leave()
    assert {4, 8, 12} <= set(live.durable_steps())


@pytest.mark.slow
def test_slots_take_the_place_of_a_window_when_there_is_room(
    live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shortage that passes."""
    room = tmp_path / "room"
    others = held_bytes(os.getpid())
    room.write_text(str(others + WINDOWS["beside"]))
    monkeypatch.setenv("TIGHT_HOST", str(room))
    monkeypatch.setenv("TIGHT_HOST_TRAINER", str(os.getpid()))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "tight_host"))
    monkeypatch.setattr(slots, "FIRST_PAUSE_S", 0.0)
    job, ckpt = live.attach(SPEC, PLAN)
    link = ckpt._client
    seen = set()
    for step, batch in ckpt.batches(SPEC.steps):
        if step > 1:
            assert link.wait_until(lambda: bool(link.slots), PATIENCE_S)
            seen.add(link.window_bytes)
        if step == 6:
            room.write_text(str(2**40))
        trainings.train_step(job, step, batch)
        ckpt._client.wait_until(lambda: not link.saves.writing, PATIENCE_S)
    assert WINDOWS["beside"] in seen
    assert not link.window_bytes
    assert len(link.slots) == PLAN.slots
    live.leave()
    assert 12 in live.durable_steps()


def test_pieces_of_a_tensor_are_its_bytes_in_order() -> None:
    """Of any shape; those of its place in the image are cut alike."""
    for shape in ((), (1,), (7,), (3, 5), (1, 1, 9), (2, 3, 4), (5, 1), (0, 3)):
        tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for most in (1, 2, 3, 100):
            parts = list(streaming._pieces(tensor, most))
            assert all(part.numel() <= max(1, most) for part in parts)
            assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
    crossed = torch.arange(12.0).reshape(3, 4).t()
    parts = [part.reshape(-1) for part in streaming._pieces(crossed, 2)]
    assert torch.equal(torch.cat(parts), crossed.reshape(-1))
