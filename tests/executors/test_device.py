"""The device path without a device: streams that are threads, and copies that a test holds.

What stands in `executors/device.py` itself (CUDA streams and events) runs on a GPU only; how the
snapshot uses it is shown here.
"""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autockpt.executors.memory import Arena
from autockpt.executors.snapshot import Snapshot, Snapshotter
from autockpt.executors.state import LiveState
from tests.executors.shots import PATIENCE_S, assert_image, counters, saved, slot_for, state_bytes
from tests.executors.states import bytes_of
from tests.fakes.devices import FakeDevice


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
