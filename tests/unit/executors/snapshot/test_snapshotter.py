"""What stands in the slot is the state of the boundary, to the bit, whatever the state became.

The live state is the oracle: after every snapshot the image is compared with it, name by name.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot import copy_engine, tensor_specs
from autockpt.executors.snapshot import snapshotter as snapshot
from autockpt.executors.snapshot.copy_engine import PIECE_BYTES
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import ConfigError
from tests.unit.executors.shots import (
    SLACK_BYTES,
    assert_image,
    held,
    saved,
    shoot,
    slot_for,
    snapshotter,
    state_bytes,
)
from tests.unit.executors.states import DTYPES, Holder, Module, bytes_of, random_tensor, step

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
ROOM_BYTES = 2**20


def assert_exact(state: LiveState, *, lazy: bool = True) -> None:
    """One image of a state, held to it."""
    with snapshotter(state) as shooter:
        arena = slot_for(shooter)
        shoot(shooter, arena, lazy=lazy)
        assert_image(arena, state_bytes(state))


# --- forms of tensors ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_every_form(dtype: str) -> None:
    """Scalars, empty ones, small and large ones, transposed and strided, lazily and at once."""
    large = random_tensor(dtype, (70, 130), 1)
    forms = {
        "scalar": random_tensor(dtype, (), 2), "empty": random_tensor(dtype, (0,), 3),
        "hollow": random_tensor(dtype, (2, 0, 3), 4), "small": random_tensor(dtype, (5,), 5),
        "large": large, "turned": random_tensor(dtype, (70, 130), 6).t(),
        "every_other": random_tensor(dtype, (40, 130), 7)[::2], "inner": large[3:60, 5:80],
        "tiny_turned": random_tensor(dtype, (3, 2), 8).t(),
    }  # fmt: skip
    if dtype == "float4_e2m1fn_x2":  # torch itself cannot bring strided ones into another order
        forms = {name: tensor for name, tensor in forms.items() if tensor.is_contiguous()}
    boundary = Holder({name: tensor.clone() for name, tensor in forms.items()})
    state = LiveState.of(model=Module(forms.items()), other=boundary)
    assert_exact(state)
    assert_exact(state, lazy=False)


@pytest.mark.parametrize("nbytes", [PIECE_BYTES - 4, PIECE_BYTES, 2 * PIECE_BYTES + 1028])
def test_tensors_of_many_pieces_arrive_whole(nbytes: int) -> None:
    """Larger than a memcpy, larger than a chunk of the keeper; the rest is not forgotten."""
    tensor = random_tensor("uint8", (nbytes,), 1)
    assert_exact(LiveState.of(model=Module([("a", tensor), ("b", torch.ones(3))])))


def test_views_of_one_memory_are_saved_as_what_each_of_them_is() -> None:
    """The same bytes once, overlapping ones twice, other strides apart."""
    base = torch.arange(10_000.0)
    square = base[:2500].view(50, 50)
    model: Any = Module([
        ("whole", base), ("front", base[:6000]), ("back", base[4000:]), ("same", base[:6000]),
        ("square", square), ("turned", square.t()), ("bits", base.view(torch.int32)),
    ])  # fmt: skip
    model.tied = model.front
    assert_exact(LiveState.of(model=model, other=Holder({"front": base[:6000], "one": base[7:8]})))


def test_many_small_tensors_are_copied_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of optimizer steps of 4 bytes; each call costs more than its bytes."""
    calls: list[int] = []
    copy = copy_engine.copy_tensors

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(copy_engine, "copy_tensors", counted)
    names = [(f"p{i}", random_tensor(DTYPES[i % 12], (i % 5,), i)) for i in range(700)]
    assert_exact(LiveState.of(model=Module(names)))
    assert calls == [700 - 700 // 5]


# --- a state that changes between snapshots ------------------------------------------------------


class Life:
    """A small training and what may happen to it between two snapshots."""

    def __init__(self) -> None:
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.others = Holder({"text": "x", "best": self.model[0].weight})
        self.state = LiveState.of(model=self.model, optimizer=self.optimizer, others=self.others)
        self.added = 0

    @property
    def square(self) -> torch.nn.Parameter:
        """The 40 x 40 weight."""
        weight: torch.nn.Parameter = self.model[0].weight
        return weight

    def grow(self) -> None:
        """A parameter that the optimizer trains from the next step on."""
        self.added += 1
        late = torch.nn.Parameter(torch.randn(self.added * 600))
        late.grad = torch.ones_like(late)
        self.model.register_parameter(f"late{self.added}", late)
        self.optimizer.add_param_group({"params": [late]})

    def reshape(self, data: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Other data for the parameter, usually at the same address; its moments stay."""
        self.model.odd = torch.nn.Parameter(data(self.square.data), requires_grad=False)

    def turn(self) -> None:
        """The same address, shape and dtype with other strides."""
        self.square.data = self.square.data.t()


CHANGES: dict[str, Callable[[Life], object]] = {
    "nothing": lambda life: None,
    "a step": lambda life: step(life.model, life.optimizer),
    "a new parameter": Life.grow,
    "a frozen parameter": lambda life: life.model.register_parameter(
        f"frozen{life.added}", torch.nn.Parameter(torch.randn(9), requires_grad=False)
    ),
    "a module replaced": lambda life: life.model.__setitem__(2, torch.nn.Linear(40, 3)),
    "a buffer replaced": lambda life: setattr(life.model[1], "running_mean", torch.randn(40)),
    "a buffer added": lambda life: life.model.register_buffer("more", torch.randn(41)),
    "other strides at the address": Life.turn,
    "another shape at the address": lambda life: life.reshape(lambda d: d.view(20, 80)),
    "fewer elements at the address": lambda life: life.reshape(lambda d: d[:7]),
    "another dtype at the address": lambda life: life.reshape(lambda d: d.view(torch.int16)),
    "another address": lambda life: life.reshape(lambda d: d.clone()),
    "data replaced": lambda life: setattr(life.model[0].bias, "data", torch.randn(40)),
    "optimizer loaded": lambda life: life.optimizer.load_state_dict(life.optimizer.state_dict()),
    "optimizer cleared": lambda life: life.optimizer.state.clear(),
    "an average that is the weight": lambda life: life.others.state.update(best=life.square),
    "an average that is the weight, turned": lambda life: life.others.state.update(
        best=life.square.data.t()
    ),
    "an average that is another weight": lambda life: life.others.state.update(
        best=life.model[2].weight
    ),
    "an average of its own": lambda life: life.others.state.update(best=life.square + 1),
    "two names for one tensor": lambda life: life.others.state.update(again=torch.randn(4)),
    "a longer text": lambda life: life.others.state.update(
        text=(life.others.state["text"] * 50)[:100_000]
    ),
    "a tensor kept at the boundary": lambda life: life.state.not_lazy.add("model.0.weight"),
    "a moment kept at the boundary": lambda life: life.state.not_lazy.add(
        "optimizer.model.0.weight.exp_avg"
    ),
}


@QUICK
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=8))
def test_after_any_history_the_image_is_the_state(names: list[str]) -> None:
    """One Snapshotter and two slots all the time, as in a run."""
    life = Life()
    with snapshotter(life.state) as shooter:
        slots = [Arena.anonymous(ROOM_BYTES), Arena.anonymous(ROOM_BYTES)]
        for turn, name in enumerate(["nothing", *names]):
            try:
                CHANGES[name](life)
            except RuntimeError:
                continue  # torch refuses this after that
            shoot(shooter, slots[turn % 2], turn)
            assert_image(slots[turn % 2], state_bytes(life.state))


@pytest.mark.parametrize("name", CHANGES)
def test_after_every_single_change_the_image_is_the_state(name: str) -> None:
    """Before and after the optimizer has its state, and when it happens twice."""
    life = Life()
    with snapshotter(life.state) as shooter:
        slot = Arena.anonymous(ROOM_BYTES)
        for turn, change in enumerate(["nothing", name, "a step", name, name, "nothing"]):
            if change == "another shape at the address" and not life.square.is_contiguous():
                continue
            CHANGES[change](life)
            shoot(shooter, slot, turn)
            assert_image(slot, state_bytes(life.state))


@pytest.mark.parametrize(
    ("first", "second"),
    [(lambda m: m.a.data, lambda m: m.b.data), (lambda m: m.a.data, lambda m: m.a.data.t()),
     (lambda m: m.a.data, lambda m: m.a.data.clone())],
    ids=["another tensor", "other strides", "a copy"],
)  # fmt: skip
def test_an_alias_that_becomes_something_else_is_saved_as_that(
    first: Callable[[Any], torch.Tensor], second: Callable[[Any], torch.Tensor]
) -> None:
    """A "best weights" reference that moves on: same name, shape and dtype, other bytes."""
    model: Any = Module([("a", torch.randn(5, 5)), ("b", torch.randn(5, 5))])
    best = Holder({"best": first(model)})
    state = LiveState.of(model=model, ours=best)
    with snapshotter(state) as shooter:
        slot = slot_for(shooter)
        shoot(shooter, slot)
        assert saved(slot)["ours.best"] == bytes_of(first(model))
        best.state = {"best": second(model)}
        shoot(shooter, slot, 2)
        assert saved(slot)["ours.best"] == bytes_of(second(model))


# --- what is kept between snapshots --------------------------------------------------------------


def test_what_to_copy_is_worked_out_once_for_a_training_that_only_trains() -> None:
    """Recipe, layout and the jobs of each slot; new numbers come by the addresses."""
    life = Life()
    step(life.model, life.optimizer)
    with snapshotter(life.state) as shooter:
        slots = [slot_for(shooter), slot_for(shooter)]
        first = shoot(shooter, slots[0])
        jobs = first.recipe.jobs[slots[0]]
        for turn in range(1, 5):
            step(life.model, life.optimizer)
            life.optimizer.param_groups[0]["lr"] *= 0.5
            again = shoot(shooter, slots[turn % 2], turn)
            assert_image(slots[turn % 2], state_bytes(life.state))
            assert again.recipe is first.recipe
            assert again.layout is first.layout
            assert again.recipe.jobs[slots[0]] is jobs


def test_a_slot_that_is_gone_is_not_kept_for_its_jobs() -> None:
    """Slots are gigabytes: nothing of ours may hold one that the keeper replaced."""
    with snapshotter(Life().state) as shooter:
        slot = slot_for(shooter)
        recipe = shoot(shooter, slot).recipe
        shooter.current = None
        assert len(recipe.jobs) == 1
        del slot
        assert len(recipe.jobs) == 0


def test_an_image_fills_its_slot_to_the_last_byte_or_is_refused() -> None:
    """Nothing behind its end is touched; with one byte less there is no snapshot at all."""
    state = LiveState.of(model=Module([("a", random_tensor("float32", (3001,), 1))]))
    with snapshotter(state) as shooter:
        size = shooter.plan({"step": 0}).image_bytes
        arena = Arena.anonymous(size + SLACK_BYTES)
        arena.view[size:] = b"\xaa" * (arena.nbytes - size)
        shooter.begin(arena, {"step": 0}, lazy=True, capacity=size)
        assert shooter.fence() == []
        assert_image(arena, state_bytes(state))
        held_before = bytes(arena.view)
        assert set(held_before[size:]) == {0xAA}
        with pytest.raises(ConfigError, match=f"grew to {size} bytes, the slot has {size - 1}"):
            shooter.begin(arena, {"step": 0}, lazy=True, capacity=size - 1)
        assert bytes(arena.view) == held_before


def test_pages_that_were_given_back_get_their_header_again() -> None:
    """`preallocate: false` releases a slot's pages before every save: then it reads as zeros."""
    life = Life()
    with snapshotter(life.state) as shooter:
        slot = Arena.create_shared(ROOM_BYTES, name="slot")
        for turn in range(3):
            shoot(shooter, slot, turn)
            assert_image(slot, state_bytes(life.state))
            slot.release_pages()
        slot.close()


def test_a_text_that_grows_is_always_whole() -> None:
    """Beyond its room the layout is planned anew, with room for more; nothing else moves."""
    notes = Holder({"notes": ""})
    state = LiveState.of(model=Module([("w", torch.randn(2000))]), notes=notes)
    with snapshotter(state) as shooter:
        slot = Arena.anonymous(ROOM_BYTES)
        layouts = set()
        for turn in range(12):
            notes.state = {"notes": "ß\0\n" * 2**turn}
            layouts.add(id(shoot(shooter, slot, turn).layout))
            skeleton, _ = state.extra({"step": turn})
            text = json.loads(saved(slot)[EXTRA])
            assert text["others"] == json.loads(json.dumps(skeleton["others"]))
            assert_image(slot, state_bytes(state))
        assert 2 <= len(layouts) <= 8


def test_a_shorter_text_leaves_nothing_of_the_longer_one() -> None:
    """The rest of its room is blanks."""
    notes = Holder({"notes": "secret" * 300})
    with snapshotter(LiveState.of(model=Module([("w", torch.ones(3))]), notes=notes)) as shooter:
        slot = slot_for(shooter)
        shoot(shooter, slot)
        notes.state = {"notes": ""}
        shoot(shooter, slot, 2)
        assert b"secret" not in saved(slot)[EXTRA]


def test_tensors_that_turn_out_to_change_are_in_every_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a device the copy thread says so at any time, also while a snapshot is being begun:
    lazy for one half of it and held for the other, a tensor would be in no image at all."""
    state = LiveState.of(model=Module([("a", torch.randn(9)), ("b", torch.randn(9))]))
    describe = tensor_specs.describe

    def late(*arguments: Any) -> Any:
        state.not_lazy.add("model.b")
        return describe(*arguments)

    def later(*arguments: Any) -> Any:
        state.not_lazy.add("model.a")
        return plan(*arguments)

    with snapshotter(state) as shooter:
        plan = shooter._planned
        slot = Arena.anonymous(ROOM_BYTES)
        monkeypatch.setattr(snapshot, "describe", late)
        monkeypatch.setattr(shooter, "_planned", later)
        for turn in range(3):
            shoot(shooter, slot, turn)
            assert_image(slot, state_bytes(state))
            state.not_lazy.clear()


def test_random_numbers_are_those_of_the_boundary() -> None:
    """Drawn on while the copy stands still: the saved state is the one from before."""
    state = LiveState.of(model=Module([("w", torch.randn(2000))]))
    with snapshotter(state) as shooter:
        slot = slot_for(shooter)
        before = bytes_of(torch.get_rng_state())
        with held(shooter.engine):
            shooter.begin(slot, {"step": 1}, lazy=True)
            torch.randn(7)
        assert shooter.fence() == []
        assert saved(slot)["rng.torch"] == before != bytes_of(torch.get_rng_state())
