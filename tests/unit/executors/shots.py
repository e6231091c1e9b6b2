"""Snapshots that a test drives: copies that wait until they are let go, images held to the state.

Nothing of the engine is replaced: a copy is held by a job whose "event" is the test's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autockpt.executors.image.container import header_bytes, read_header
from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.snapshot.copy_engine import CopyEngine, CopyJob, CopyTask, ProgressCounter
from autockpt.executors.snapshot.snapshotter import Snapshot, Snapshotter
from autockpt.executors.state.live_state import LiveState, local_part
from tests.unit.executors.states import bytes_of

PATIENCE_S = 30.0
SLACK_BYTES = 2**18


class Barrier:
    """An event that a copy waits for until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        """As an event of a device: called on the copy thread."""
        self.reached.set()
        assert self.opened.wait(PATIENCE_S), "nobody let the copy go"

    def job(self, end: int) -> CopyJob:
        """A step of a copy that stands still here."""
        return CopyJob(end, 0, 0, 0, event=self)


def counters(slots: int = 8) -> memoryview:
    """The cells of a board that a keeper would read."""
    return memoryview(bytearray(8 * slots))


@contextmanager
def held(engine: CopyEngine) -> Iterator[Barrier]:
    """Nothing that is begun inside is copied, until the barrier is opened or the block ends."""
    barrier = Barrier()
    engine.start(CopyTask(jobs=[barrier.job(1)], publish=ProgressCounter(counters(1))))
    assert barrier.reached.wait(PATIENCE_S)
    try:
        yield barrier
    finally:
        barrier.opened.set()


@contextmanager
def snapshotter(state: LiveState, slots: int = 8) -> Iterator[Snapshotter]:
    """A Snapshotter whose copy thread ends with the block."""
    shooter = Snapshotter(state, counters(slots))
    try:
        yield shooter
    finally:
        shooter.close()


def slot_for(shooter: Snapshotter) -> Arena:
    """Private memory for an image of the state as it is, and a bit more."""
    return Arena.anonymous(page_align(shooter.plan({"step": 0}).image_bytes) + SLACK_BYTES)


def copied_but_unproven(
    shooter: Snapshotter, arena: Arena, step: int = 1
) -> tuple[Snapshot, Barrier]:
    """A snapshot whose last byte is in the slot while the copy still counts as under way."""
    last = Barrier()
    with held(shooter.engine) as first:
        snapshot = shooter.begin(arena, {"step": step}, lazy=True)
        snapshot.task.jobs = [*snapshot.task.jobs, last.job(snapshot.layout.image_bytes)]
        first.opened.set()
    assert last.reached.wait(PATIENCE_S)
    return snapshot, last


def shoot(shooter: Snapshotter, arena: Arena, step: int = 1, *, lazy: bool = True) -> Snapshot:
    """One snapshot to its end; it must be good."""
    snapshot = shooter.begin(arena, {"step": step}, lazy=lazy)
    assert shooter.fence() == []
    assert snapshot.error is None
    return snapshot


def saved(arena: Arena) -> dict[str, bytes]:
    """Bytes by name as the image's own header finds them, aliases resolved."""
    length = header_bytes(arena.view, arena.nbytes)
    header = read_header(bytes(arena.view[:length]), arena.nbytes)
    found = {n: bytes(arena.view[p.start : p.stop]) for n, p in header.tensors.items()}
    return found | {alias: found[name] for alias, name in header.aliases.items()}


def state_bytes(state: LiveState) -> dict[str, bytes]:
    """What an image of now must hold under each name; random states are the only thing left out."""
    rng = {"python": (3, torch.zeros(1), None)}
    _, boundary = state.extra({}, rng=rng)
    tensors = {**boundary, **state.lazy_tensors()}
    return {n: bytes_of(local_part(t)) for n, t in tensors.items() if not n.startswith("rng.")}


def assert_image(arena: Arena, expected: dict[str, bytes]) -> None:
    """Exactly the expected names with exactly the expected bytes."""
    found = {n: b for n, b in saved(arena).items() if not n.startswith(("rng.", "__"))}
    assert found.keys() == expected.keys()
    wrong = [name for name, data in expected.items() if found[name] != data]
    assert wrong == []
