"""The device path without a device: streams that are threads, and copies that a test holds.

What stands in `executors/snapshot/device.py` itself (CUDA streams and events) runs on a GPU
only; how the snapshot uses it is shown here.
"""

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.device_marks import DeviceMarks
from autockpt.executors.snapshot.snapshotter import Snapshot, Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.throttle.idle_windows import IdleWindowThrottle
from autockpt.values.pipeline import order_digest
from tests.support.devices import FakeDevice
from tests.unit.executors.shots import (
    PATIENCE_S,
    assert_image,
    counters,
    saved,
    slot_for,
    state_bytes,
)
from tests.unit.executors.states import bytes_of


class Bench:
    """A model on a device, its optimizer's step counts on the host, and what was completed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(2)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Linear(60, 50))
        self.first, self.second = (
            torch.optim.Adam(layer.parameters(), lr=0.1) for layer in self.model
        )
        self.gradients()
        self.first.step()
        self.second.step()
        self.state = LiveState.of(
            model=self.model, optimizer={"first": self.first, "second": self.second}
        )
        self.device = FakeDevice(
            t for n, t in self.state.lazy_tensors().items() if not n.endswith(".step")
        )
        self.device.install(monkeypatch)
        self.shooter = Snapshotter(self.state, counters(), device=self.device)  # type: ignore[arg-type]
        self.slots = [slot_for(self.shooter) for _ in range(2)]
        self.ended: list[Snapshot] = []
        self._told = threading.Semaphore(0)

    def gradients(self) -> None:
        """New ones."""
        self.model(torch.randn(4, 50)).square().sum().backward()

    def begin(self, slot: int = 0, *, lazy: bool = True) -> tuple[Snapshot, dict[str, bytes]]:
        """A snapshot, and what its image must hold."""
        expected = state_bytes(self.state)
        snapshot = self.shooter.begin(
            self.slots[slot], {"step": 1}, lazy=lazy, slot=slot, completed=self._completed
        )
        return snapshot, expected

    def _completed(self, snapshot: Snapshot) -> None:
        self.ended.append(snapshot)
        self._told.release()

    def completed(self) -> Snapshot:
        """Waits for the end of a snapshot."""
        assert self._told.acquire(timeout=PATIENCE_S), "never completed"
        return self.ended[-1]

    def train(self) -> None:
        """Both steps, each behind its fence, given to the training stream."""
        for optimizer in (self.first, self.second):
            if self.shooter.current is not None:
                assert self.shooter.fence(optimizer) == []
            self.device.compute(optimizer.step)

    def good(self, snapshot: Snapshot) -> bool:
        return snapshot.error is None and snapshot.changed == []


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Both streams idle."""
    made = Bench(monkeypatch)
    yield made
    made.shooter.close()
    made.device.close()


# --- who waits for whom --------------------------------------------------------------------------


def test_the_training_thread_never_waits_for_a_device(bench: Bench) -> None:
    """Boundary, fences and steps return while no byte has been copied; the device keeps order."""
    opened = bench.device.side.hold()
    snapshot, expected = bench.begin()
    bench.train()
    assert bench.shooter.current is None
    assert state_bytes(bench.state) == expected  # the device itself waits with the steps
    assert bench.ended == []
    assert bench.shooter.counters.get() < snapshot.layout.image_bytes
    opened.set()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)
    bench.device.training.drain()
    assert state_bytes(bench.state) != expected


def test_a_devices_buffers_are_of_the_boundary_and_nobody_waits_for_them(bench: Bench) -> None:
    """To read a device is to wait for all it has been given: they are cloned there, and fetched."""
    counted = torch.full((7,), 3.0)
    bench.model.register_buffer("counted", counted)
    bench.device.take([counted])
    bench.slots = [slot_for(bench.shooter) for _ in range(2)]
    opened = bench.device.side.hold()
    busy = bench.device.training.hold()  # and so is the training stream
    snapshot, expected = bench.begin()
    assert bench.shooter.counters.get() < snapshot.layout.boundary_end
    bench.device.compute(lambda: counted.fill_(4.0))  # the next forward
    bench.train()
    busy.set()
    opened.set()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


def test_hundreds_of_small_tensors_are_one_copy(bench: Bench) -> None:
    """A fused optimizer keeps its step counts on the device."""
    bench.device.take(t for n, t in bench.state.lazy_tensors().items() if n.endswith(".step"))
    snapshot, expected = bench.begin()
    assert len(bench.device.copies) < len(bench.state.lazy_tensors())
    bench.train()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)
    assert snapshot.task.first == []


def test_each_fence_makes_the_training_wait_for_its_own_part(bench: Bench) -> None:
    """For the last copy of the part and not for the last of all."""
    opened = bench.device.side.hold()
    snapshot, _ = bench.begin()
    of_first = sum(
        end <= snapshot.recipe.parts["optimizer.first"].end for end, _ in snapshot.events
    )
    assert 0 < of_first < len(bench.device.copies)
    assert bench.device.ordered == []
    assert bench.shooter.fence(bench.first) == []
    (event,) = bench.device.ordered
    assert bench.device.copies.index(event) in (of_first - 1, of_first)
    assert bench.shooter.fence(bench.second) == []
    assert bench.device.ordered[1] is bench.device.copies[-1]
    opened.set()
    assert bench.good(bench.completed())


def test_the_copy_begins_after_what_the_training_was_given_before(bench: Bench) -> None:
    """The last step may still be under way when the boundary is reached."""
    opened = bench.device.training.hold()
    bench.device.compute(bench.first.step)
    bench.begin()
    assert bench.shooter.fence() == []
    opened.set()
    bench.completed()
    bench.device.training.drain()
    found = saved(bench.slots[0])
    assert found["model.0.weight"] == bytes_of(bench.model[0].weight)


def test_host_tensors_beside_a_devices_are_there_when_the_fence_returns(bench: Bench) -> None:
    """Adam counts its steps on the host and changes them at once, whatever the device does."""
    opened = bench.device.side.hold()
    _, expected = bench.begin()
    assert bench.shooter.fence(bench.first) == []
    for values in bench.first.state.values():
        values["step"].add_(100)
    assert bench.shooter.fence(bench.second) == []
    opened.set()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


def test_a_fence_does_not_wait_for_the_snapshot_before(bench: Bench) -> None:
    """With one at every iteration the last one may still be on its way."""
    opened = bench.device.side.hold()
    first = bench.begin(0)
    assert bench.shooter.fence() == []
    second = bench.begin(1)
    assert bench.shooter.fence() == []
    for values in bench.first.state.values():
        values["step"].add_(100)
    assert bench.ended == []
    opened.set()
    bench.completed()
    bench.completed()
    assert bench.ended == [first[0], second[0]]
    for arena, (snapshot, expected) in zip(bench.slots, (first, second), strict=True):
        assert bench.good(snapshot)
        assert_image(arena, expected)


@pytest.mark.parametrize("still", ["copied", "compared"])
def test_a_slot_that_a_device_is_not_done_with_is_not_begun_again(bench: Bench, still: str) -> None:
    """Bytes are on their way there, or the old snapshot's last word is: it comes first."""
    if still == "copied":
        opened = bench.device.side.hold()
        old, _ = bench.begin(0)
    else:
        old, _ = bench.begin(0)
        bench.shooter.engine.wait()
        opened = bench.device.training.hold()
    assert bench.shooter.fence() == []
    seen: list[Any] = []

    def again() -> None:
        def began(_: object) -> None:
            seen.append((list(bench.ended), bench.shooter.counters.get()))

        bench.shooter.begin(bench.slots[0], {"step": 2}, lazy=True, began=began)

    thread = threading.Thread(target=again)
    thread.start()
    thread.join(0.02)  # a wrong engine would be there long since; a right one does not care
    opened.set()
    thread.join(PATIENCE_S)
    assert seen == [([old], 0)]
    expected = state_bytes(bench.state)
    assert bench.shooter.fence() == []
    bench.shooter.engine.wait()
    assert_image(bench.slots[0], expected)


def test_a_snapshot_that_blocks_waits_for_the_device(bench: Bench) -> None:
    """The schedule "blocking": everything is there when the boundary ends."""
    snapshot, expected = bench.begin(lazy=False)
    assert snapshot.task.copied > snapshot.layout.image_bytes
    assert bench.shooter.fence() == []
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


# --- clones --------------------------------------------------------------------------------------


def test_a_clone_needs_no_order_and_survives_any_change(bench: Bench) -> None:
    """Nobody waits for the link: the next step may come at once, fenced or not."""
    bench.device.room = True
    opened = bench.device.side.hold()
    _, expected = bench.begin()
    for weight in (bench.model[0].weight, bench.model[1].weight.data):  # seen by versions, unseen
        bench.device.compute(weight.detach().zero_)
    bench.device.training.drain()
    assert bench.shooter.fence(bench.first) == []
    bench.device.compute(bench.first.step)
    assert bench.shooter.fence(bench.second) == []
    bench.device.training.drain()
    assert bench.device.ordered == []
    opened.set()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


def test_host_tensors_are_proven_beside_a_clone_too(bench: Bench) -> None:
    """They are not cloned."""
    bench.device.room = True
    bench.begin()
    bench.first.state[bench.model[0].weight]["step"].data.add_(1)
    name = "optimizer.first.model.0.weight.step"
    assert bench.shooter.fence() == [name]
    assert bench.completed().changed == [name]


@pytest.mark.parametrize(
    ("wish", "room", "full", "cloned"),
    [("auto", True, False, True), ("auto", False, False, False), ("auto", True, True, False),
     ("on", False, False, True), ("on", True, True, False), ("off", True, False, False)],
)  # fmt: skip
def test_a_clone_is_made_where_it_is_wanted_and_fits(
    bench: Bench, wish: Any, room: bool, full: bool, cloned: bool
) -> None:
    """What does not fit after all is copied from where it is."""
    bench.shooter.device_clone = wish
    bench.device.room, bench.device.full = room, full
    snapshot, expected = bench.begin()
    bench.train()
    assert snapshot.cloned == cloned
    assert bool(bench.device.ordered) != cloned
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


# --- changes and errors --------------------------------------------------------------------------


def test_a_change_behind_the_fence_is_found_late_and_named(bench: Bench) -> None:
    """By canaries that are compared when the device has come so far, not by the training thread."""
    opened = bench.device.side.hold()
    bench.begin()
    bench.model[1].bias.data.add_(1)
    assert bench.shooter.fence() == []
    opened.set()
    assert bench.completed().changed == ["model.1.bias"]


def test_a_change_that_a_version_counter_sees_is_named_at_once(bench: Bench) -> None:
    """The fence returns it, and the end repeats it."""
    bench.begin()
    with torch.no_grad():
        bench.model[1].bias.add_(1)
    assert bench.shooter.fence() == ["model.1.bias"]
    assert bench.completed().changed == ["model.1.bias"]


def test_a_parameter_that_came_meanwhile_is_named(bench: Bench) -> None:
    """And is no error of ours."""
    bench.begin()
    late = torch.nn.Parameter(torch.ones(3))
    bench.device.take([late])
    bench.model.register_parameter("late", late)
    bench.first.add_param_group({"params": [late]})
    assert bench.shooter.fence() == ["model.late"]
    ended = bench.completed()
    assert (ended.error, ended.changed) == (None, ["model.late"])


def test_an_error_of_the_device_ends_in_completed_and_the_next_one_is_good(bench: Bench) -> None:
    """The training goes on meanwhile: fences return, nothing is raised there."""
    bench.device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    snapshot, _ = bench.begin()
    assert bench.shooter.fence() == []
    assert bench.completed() is snapshot
    assert snapshot.error is bench.device.error
    bench.device.error = None
    snapshot, expected = bench.begin()
    assert bench.shooter.fence() == []
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


def test_a_listener_that_fails_costs_its_snapshot_only(bench: Bench) -> None:
    """The copy thread calls it: without that thread no later fence would ever return."""

    def explode(_: Snapshot) -> None:
        raise OSError("the socket is gone")

    bench.shooter.begin(bench.slots[0], {"step": 1}, lazy=True, completed=explode)
    assert bench.shooter.fence() == []
    _, expected = bench.begin()
    assert bench.shooter.fence() == []
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


def test_tensors_of_two_devices_are_copied_at_once(bench: Bench) -> None:
    """One side stream orders one device: the other one's copies would be nobody's to wait for."""
    bench.device.take(bench.model[1].parameters(), number=1)
    snapshot, expected = bench.begin()
    assert bench.device.copies == []
    for parameter in bench.model.parameters():
        parameter.data.zero_()
    assert bench.shooter.fence() == []
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)
    assert snapshot.events == []


def test_only_empty_tensors_on_a_device_are_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is issued, and nobody asks which device it would be."""
    model: Any = torch.nn.Module()
    model.none, model.host = (torch.nn.Parameter(torch.ones(count)) for count in (0, 9))
    device = FakeDevice([model.none])
    device.install(monkeypatch)
    state = LiveState.of(model=model)
    shooter = Snapshotter(state, counters())
    slot: Arena = slot_for(shooter)
    shooter.begin(slot, {"step": 1}, lazy=True)
    assert shooter.fence() == []
    assert_image(slot, state_bytes(state))
    shooter.close()
    device.close()


def test_an_error_after_the_device_was_given_its_copies_does_not_free_the_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They still arrive there: whoever waits for the engine, as a session does, waits for them."""
    opened = bench.device.side.hold()

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(bench.device, "read", fail)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            bench.begin()
    assert bench.shooter.engine.busy
    opened.set()
    bench.shooter.engine.wait()
    assert all(event.is_done for event in bench.device.copies)
    _, expected = bench.begin()
    assert bench.shooter.fence() == []
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


# --- copies that are held back -------------------------------------------------------------------

BESIDE, IDLE = "0F0", "0F1"
"""A chunk of compute, and the next one."""


def gated(bench: Bench, *, chunk_bytes: int = 2**20) -> IdleWindowThrottle:
    """The bench under a gate that knows a window of a minute behind the chunk under way."""
    gate = IdleWindowThrottle(bytes_per_s=1e9, longest_wait_s=PATIENCE_S, chunks=(chunk_bytes,))
    gate.hand_in({0: 0.0, 1: 60.0}, order_digest([BESIDE, IDLE]))
    gate.boundary()
    gate.began(BESIDE)
    bench.shooter.gate = gate
    return gate


def test_nothing_is_given_to_a_device_beside_the_compute(bench: Bench) -> None:
    """The gate is shut: no copy is issued until the window opens, then all of them are."""
    gate = gated(bench)
    snapshot, expected = bench.begin()
    time.sleep(0.02)  # a wrong engine would have issued them at the boundary
    assert bench.device.copies == []
    gate.ended(BESIDE)
    bench.shooter.engine.wait_for(lambda: snapshot.task.copied == math.inf, hurry=False)
    assert_image(bench.slots[0], expected)
    use = snapshot.task.use
    assert use is not None
    assert use.passed == {"window": use.nbytes, "overlap": 0, "fence": 0}
    bench.train()
    assert bench.good(bench.completed())


def test_what_is_left_at_the_fence_is_issued_there_and_nobody_waits(bench: Bench) -> None:
    """The fence orders the device's own training behind copies that it has just been given."""
    gated(bench)
    opened = bench.device.side.hold()
    snapshot, expected = bench.begin()
    assert bench.device.copies == []
    bench.train()  # returns although not a byte has moved
    assert bench.shooter.current is None
    assert bench.device.ordered[-1] is bench.device.copies[-1]
    assert bench.ended == []
    opened.set()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)
    use = snapshot.task.use
    assert use is not None
    assert use.passed == {"window": 0, "overlap": 0, "fence": use.nbytes}


def test_one_piece_is_in_flight_at_a_time(bench: Bench) -> None:
    """In an open window the next piece is given when the one before has arrived."""
    gate = gated(bench, chunk_bytes=4096)
    opened = bench.device.side.hold()
    snapshot, expected = bench.begin()
    gate.ended(BESIDE)
    while not bench.device.copies:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(bench.device.copies) == 1
    opened.set()
    bench.shooter.engine.wait_for(lambda: snapshot.task.copied == math.inf, hurry=False)
    assert max(copy.nbytes for copy in bench.device.copies) <= 4096
    assert len(bench.device.copies) > len(snapshot.events)
    bench.train()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


def test_a_clone_is_fetched_in_windows_after_the_fence_too(bench: Bench) -> None:
    """Nobody needs it gone: the steps pass, and its pieces wait for the window all the same."""
    bench.device.room = True
    gate = gated(bench)
    snapshot, expected = bench.begin()
    bench.train()
    bench.device.training.drain()
    assert bench.device.copies == []
    assert bench.device.ordered == []
    gate.ended(BESIDE)
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)
    assert snapshot.task.use is not None
    assert snapshot.task.use.share == 1.0


def test_a_snapshot_behind_one_that_is_held_back_hurries_it(bench: Bench) -> None:
    """Its slot is needed soon, and two held back would be twice as late; the report says why."""
    bench.device.room = True
    gated(bench)
    first = bench.begin(0)
    assert bench.shooter.fence() == []
    second = bench.begin(1)
    assert bench.shooter.fence() == []
    bench.completed()
    bench.completed()
    for arena, (snapshot, expected) in zip(bench.slots, (first, second), strict=True):
        assert bench.good(snapshot)
        assert_image(arena, expected)
    assert second[0].task.use is not None
    assert "still being copied" in second[0].task.use.reason


def test_windows_that_take_nothing_leave_a_device_its_copies_at_the_boundary(bench: Bench) -> None:
    """As without a gate: all are issued at once, and the reason is kept."""
    bench.shooter.gate = IdleWindowThrottle(longest_wait_s=PATIENCE_S)
    snapshot, expected = bench.begin()
    assert bench.device.copies
    assert snapshot.task.use is not None
    assert snapshot.task.use.passed["overlap"] == snapshot.task.use.nbytes
    assert "no windows known yet" in snapshot.task.use.reason
    bench.train()
    assert bench.good(bench.completed())
    assert_image(bench.slots[0], expected)


def test_a_gate_hears_of_a_chunk_when_the_device_gets_there(bench: Bench) -> None:
    """The training thread is far ahead of it; it waits for nothing."""
    gate = gated(bench)
    marks = DeviceMarks(gate, bench.device)
    snapshot, expected = bench.begin()
    opened = bench.device.training.hold()
    marks.ended(BESIDE)
    time.sleep(0.02)
    assert bench.device.copies == []
    opened.set()
    bench.shooter.engine.wait_for(lambda: snapshot.task.copied == math.inf, hurry=False)
    assert_image(bench.slots[0], expected)
    for tell in (marks.step_began, marks.boundary, lambda: marks.began(BESIDE)):
        tell()
    marks.close()
    marks._thread.join(PATIENCE_S)
    assert gate._forecast.now.marks == [BESIDE]
    assert gate._forecast.window == 1


def test_a_device_that_fails_opens_the_gate(bench: Bench) -> None:
    """Nobody would ever say that a window opened."""
    gate = gated(bench)
    marks = DeviceMarks(gate, bench.device)
    snapshot, _ = bench.begin()
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    bench.device.error = broken
    marks.ended(BESIDE)
    assert bench.shooter.engine.wait_for(lambda: snapshot.task.copied == math.inf) < PATIENCE_S
    marks._thread.join(PATIENCE_S)
    assert marks.error is broken
    assert snapshot.task.error is broken
