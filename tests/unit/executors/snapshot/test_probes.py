"""A few elements that are written past autograd while a snapshot is under way are found."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.executors.snapshot import tear_check
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.snapshot.tear_check import FIRST_SNAPSHOTS, LATER_SHARE, Probe
from autockpt.executors.state.live_state import LiveState
from tests.unit.executors.shots import held, saved, slot_for, snapshotter
from tests.unit.executors.snapshot.test_device import Bench
from tests.unit.executors.snapshot.test_device import bench as bench
from tests.unit.executors.states import bytes_of

ROWS, WIDTH = 4000, 64


class Memory(torch.nn.Module):
    """A bank of rows beside layers; a forward writes some of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))
        self.bank = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))


def by_data(bank: torch.Tensor, row: int) -> None:
    """No version counter sees it."""
    bank.data[row, 5] += 1


def by_numpy(bank: torch.Tensor, row: int) -> None:
    """Nor this."""
    bank.detach().numpy()[row] += 1


def found_after(shooter: Snapshotter, model: Memory, write: Callable[..., None]) -> int:
    """Number of the snapshot that was found out, 1 the first; 0: none of ten."""
    draw, slot = random.Random(3), slot_for(shooter)
    for number in range(1, FIRST_SNAPSHOTS + 1):
        before = bytes_of(model.bank)
        with held(shooter.engine):
            shooter.begin(slot, {"step": number}, lazy=True)
            write(model.bank, draw.randrange(ROWS))
        changed = shooter.fence()
        if changed:
            assert changed == ["model.bank"]
            assert saved(slot)["model.bank"] == before
            return number
    return 0


@pytest.mark.parametrize("write", [by_data, by_numpy])
def test_one_row_of_a_large_tensor_is_found_within_ten_snapshots(
    write: Callable[..., None],
) -> None:
    """Also one that is written before the copy gets there, which the slot cannot show."""
    model = Memory()
    state = LiveState.of(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with snapshotter(state) as shooter:
        assert found_after(shooter, model, write)


def test_probes_take_nothing_of_the_scripts_random_numbers(bench: Bench) -> None:
    """Rows are drawn by a generator of our own."""
    before = torch.get_rng_state(), random.getstate()
    bench.begin()
    bench.shooter.fence()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize("sizes", [[7] * 100, [1, 900, 3, 50], [10**9], [0, 0, 5], [2**30] * 3])
def test_every_piece_has_its_turn_in_the_first_snapshots_and_few_later(sizes: list[int]) -> None:
    """Later ones probe a hundredth on average, large pieces rarely."""
    probe = Probe()
    scale = 10**6
    sizes = [size * scale for size in sizes]
    first = [probe.next(sizes) for _ in range(FIRST_SNAPSHOTS)]
    assert {index for chosen in first for index in chosen} == set(range(len(sizes)))
    later = [probe.next(sizes) for _ in range(1000)]
    probed = sum(sizes[index] for chosen in later for index in chosen)
    assert 0.5 * LATER_SHARE < probed / (1000 * sum(sizes)) < 1.5 * LATER_SHARE + 1e-3
    assert {index for chosen in later[:150] for index in chosen} == set(range(len(sizes)))


def test_what_grows_has_its_turn_anew() -> None:
    """The optimizer's state comes with its first step."""
    probe = Probe()
    for _ in range(20):
        probe.next([10**6] * 10)
    grown = [probe.next([10**6] * 30) for _ in range(FIRST_SNAPSHOTS)]
    assert {index for chosen in grown for index in chosen} == set(range(30))


def test_no_pieces_are_no_probe() -> None:
    """A state of nothing but boundary tensors."""
    assert Probe().next([]) == []


@pytest.mark.parametrize("room", [True, False], ids=["whole", "rows"])
def test_a_row_on_a_device_without_a_clone_is_found(
    bench: Bench, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept whole beside it, or drawn where there is no room: ten times half of the rows."""
    weight = bench.model[0].weight
    bench.device.room, bench.shooter.device_clone = room, "off"
    monkeypatch.setattr(tear_check, "ROW_ELEMENTS", 50)
    monkeypatch.setattr(tear_check, "DRAWN_BYTES", 30 * 50 * 4)
    bench.shooter._draw = random.Random(1)
    found = []
    for number in range(FIRST_SNAPSHOTS):
        bench.begin(number % 2)
        for row in range(0, 60, 20):
            weight.data[row, 7] += 1
        assert bench.shooter.fence() == []
        found.append(bench.completed().changed)
    assert ["model.0.weight"] in found
    assert all(names in ([], ["model.0.weight"]) for names in found)


def test_an_undisturbed_device_is_good_with_probes(bench: Bench) -> None:
    """Steps behind the fence are none of a snapshot's business."""
    for number in range(4):
        bench.begin(number % 2)
        bench.train()
        assert bench.good(bench.completed())
        bench.device.training.drain()


def test_a_device_without_memory_for_probes_goes_without(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is taken all the same."""

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tear_check, "_view", full)
    bench.begin()
    bench.train()
    assert bench.good(bench.completed())
