"""Slot or file -> live state: bit-exact, or refused before a byte is written where it can be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from autockpt.executors.image.container import ImageIndex, chunk_digest, header_bytes
from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.apply_state import apply_state, left_as_built
from autockpt.executors.restore.shard_sources import SlotSource
from autockpt.executors.state import state_tree
from autockpt.executors.state.live_state import Dispensable, LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import CHUNK, commit_state, open_file, restore_shard
from tests.unit.executors.states import (
    DTYPES,
    Holder,
    Module,
    bytes_of,
    random_tensor,
    snapshot,
    step,
    trained,
)

G = Generation(term=1, step=1)


def sealed(arena: Arena, image_bytes: int, chunk_bytes: int = CHUNK) -> SlotSource:
    """An image in memory with the digests of what it holds now."""
    image = arena.view[:image_bytes]
    digests = tuple(
        chunk_digest(image[i : i + chunk_bytes]) for i in range(0, image_bytes, chunk_bytes)
    )
    index = ImageIndex(
        run_id="run", generation=G, step=1, rank=0, world_size=1, layout_digest="",
        image_bytes=image_bytes, chunk_bytes=chunk_bytes, digests=digests,
    )  # fmt: skip
    return SlotSource(arena, index)


def in_memory(state: LiveState, **how: Any) -> SlotSource:
    """A snapshot of a state, sealed."""
    arena, shooter = snapshot(state)
    shooter.close()
    assert shooter.layout is not None
    return sealed(arena, shooter.layout.image_bytes, **how)


def contents(state: LiveState) -> dict[str, bytes]:
    """Every tensor's bytes."""
    return {name: bytes_of(tensor) for name, tensor in state.tensors.items()}


@pytest.mark.parametrize("source", ["memory", "small chunks", "none", "planes", "zstd"])
def test_a_trained_job_goes_on_bit_for_bit(source: str, tmp_path: Path) -> None:
    """Restored into a new process's objects, it trains exactly as the one that was not killed."""
    model, optimizer = trained()
    other = Holder({"best": torch.randn(3), "epochs": [1, (2, None)], "name": "x"})
    state = LiveState.of(model=model, optimizer=optimizer, other=other)
    if source in ("none", "planes", "zstd"):
        directory = CheckpointDirectory(str(tmp_path))
        run_id = directory.open()
        directory.claim(run_id, "launch", 0, force=False)
        folder = commit_state(directory, run_id, G, state, codec=source)
        chunks: Any = open_file(folder)
    else:
        chunks = in_memory(state, chunk_bytes=4096 if source == "small chunks" else CHUNK)

    torch.manual_seed(99)
    twin, twin_optimizer = trained()
    holder = Holder(None)
    fresh = LiveState.of(model=twin, optimizer=twin_optimizer, other=holder)
    restored = restore_shard(chunks, fresh)
    apply_state(restored, fresh)
    chunks.close()
    assert contents(fresh) == contents(state)
    assert holder.state["epochs"] == [1, (2, None)]
    assert bytes_of(holder.state["best"]) == bytes_of(other.state["best"])
    for one in ((model, optimizer), (twin, twin_optimizer)):
        torch.manual_seed(1)
        step(*one)
        step(*one)
    assert contents(fresh) == contents(state)


def test_optimizer_state_under_keys_of_its_own_comes_back() -> None:
    """Some optimizers keep a counter or a scale beside the state of their parameters."""
    model, optimizer = trained()
    loose: dict[Any, Any] = optimizer.state
    loose["scale"], loose["seen"] = torch.tensor([2.5, 3.5]), {"steps": 7, 3: "x"}
    chunks = in_memory(LiveState.of(model=model, optimizer=optimizer), chunk_bytes=CHUNK)
    twin, twin_optimizer = trained()
    fresh = LiveState.of(model=twin, optimizer=twin_optimizer)
    apply_state(restore_shard(chunks, fresh), fresh)
    restored: dict[Any, Any] = twin_optimizer.state
    assert restored["seen"] == {"steps": 7, 3: "x"}
    assert torch.equal(restored["scale"], loose["scale"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {"max_iter": 2}),
        (torch.optim.NAdam, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_every_kind_of_optimizer_goes_on_bit_for_bit(kind: Any, options: dict[str, Any]) -> None:
    """State that exists from the start (Adagrad), lists (LBFGS), scalars, none at all (SGD)."""

    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(6, 3)
        return model, kind(model.parameters(), lr=0.05, **options)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = torch.linspace(0, 1, 24).view(4, 6)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(data).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    torch.manual_seed(2)
    model, optimizer = job()
    train(model, optimizer)
    train(model, optimizer)
    state = LiveState.of(model=model, optimizer=optimizer)
    chunks = in_memory(state)
    twin, twin_optimizer = job()
    fresh = LiveState.of(model=twin, optimizer=twin_optimizer)
    apply_state(restore_shard(chunks, fresh), fresh)
    assert contents(fresh) == contents(state)
    train(model, optimizer)
    train(twin, twin_optimizer)
    assert contents(fresh) == contents(state)


@pytest.mark.parametrize("features", [4, 512])  # from torch's allocator, and in pages of its own
def test_optimizer_state_has_the_memory_format_of_its_parameter(features: int) -> None:
    """A fused step walks through the memory of both: what stands otherwise trains otherwise."""

    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        convolutions = torch.nn.Conv2d(4, features, 3), torch.nn.Conv2d(features, 2, 1)
        model = torch.nn.Sequential(*convolutions).to(memory_format=torch.channels_last)
        model.odd = torch.nn.Parameter(torch.ones(4, 6, 8)[:, :, ::2].transpose(0, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        data = torch.linspace(-1, 1, 288).view(2, 4, 6, 6).to(memory_format=torch.channels_last)
        (model(data).square().mean() + model.odd.square().sum()).backward()
        optimizer.step()

    torch.manual_seed(3)
    model, optimizer = job()
    train(model, optimizer)
    chunks = in_memory(LiveState.of(model=model, optimizer=optimizer))
    twin, twin_optimizer = job()
    fresh = LiveState.of(model=twin, optimizer=twin_optimizer)
    apply_state(restore_shard(chunks, fresh), fresh)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            expected, found = optimizer.state[ours][key], twin_optimizer.state[theirs][key]
            assert (found.stride(), bytes_of(found)) == (expected.stride(), bytes_of(expected))
    train(model, optimizer)
    train(twin, twin_optimizer)
    assert contents(fresh) == contents(LiveState.of(model=model, optimizer=optimizer))


def test_an_object_that_shows_the_models_own_tensors_comes_back() -> None:
    """`state_dict()` of a trainer object often returns references: stored once, restored twice."""

    def job(value: float) -> tuple[torch.nn.Module, Holder, LiveState]:
        model = Module([("w", torch.full((5,), value))])
        model.register_buffer("b", torch.full((3,), value))
        holder = Holder({"model": dict(model.state_dict())})
        return model, holder, LiveState.of(model=model, trainer=holder)

    chunks = in_memory(job(3.0)[2])
    model, holder, fresh = job(0.0)
    apply_state(restore_shard(chunks, fresh), fresh)
    assert (model.w.tolist(), model.b.tolist()) == ([3.0] * 5, [3.0] * 3)
    assert holder.state["model"]["w"].tolist() == [3.0] * 5
    assert holder.state["model"]["b"].tolist() == [3.0] * 3


def test_weights_that_are_tied_no_more_are_both_restored() -> None:
    """Each name gets its bytes."""
    tied, untied = torch.nn.Module(), torch.nn.Module()
    tied.one = tied.two = torch.nn.Parameter(torch.full((4,), 2.0))
    untied.one = torch.nn.Parameter(torch.zeros(4))
    untied.two = torch.nn.Parameter(torch.zeros(4))
    fresh = LiveState.of(model=untied)
    apply_state(restore_shard(in_memory(LiveState.of(model=tied)), fresh), fresh)
    assert untied.one.tolist() == untied.two.tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(dtype: str) -> None:
    """Into live tensors and, for stateful objects, into new ones."""
    state = LiveState.of(
        model=Module([("w", random_tensor(dtype, (17, 6), 1)), ("s", random_tensor(dtype, (), 2))]),
        other=Holder({"t": random_tensor(dtype, (5,), 3), "e": random_tensor(dtype, (0,))}),
    )
    holder = Holder(None)
    model = Module([("w", random_tensor(dtype, (17, 6), 8)), ("s", random_tensor(dtype, (), 9))])
    fresh = LiveState.of(model=model, other=holder)
    apply_state(restore_shard(in_memory(state), fresh), fresh)
    assert contents(fresh) == contents(state)
    assert bytes_of(holder.state["t"]) == bytes_of(random_tensor(dtype, (5,), 3))
    assert (holder.state["e"].shape, holder.state["e"].dtype) == ((0,), getattr(torch, dtype))


def test_restored_tensors_do_not_live_in_the_slot() -> None:
    """It is overwritten by the next snapshot."""
    state = LiveState.of(model=Module([("w", torch.ones(9))]), other=Holder({"t": torch.ones(4)}))
    chunks = in_memory(state)
    holder = Holder(None)
    fresh = LiveState.of(model=Module([("w", torch.zeros(9))]), other=holder)
    apply_state(restore_shard(chunks, fresh), fresh)
    chunks._arena.view[:] = bytes(chunks._arena.nbytes)
    assert holder.state["t"].tolist() == [1] * 4
    assert fresh.tensors["model.w"].tolist() == [1] * 9


class Extra(torch.nn.Module):
    """A module with state of its own."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.value = value

    def get_extra_state(self) -> int:
        return self.value

    def set_extra_state(self, value: int) -> None:
        self.value = value


def test_extra_state_of_modules_comes_back_under_wrappers_too() -> None:
    """torch.compile puts `_orig_mod` into the names; a checkpoint fits with and without it."""
    saved, compiled = torch.nn.Module(), torch.nn.Module()
    saved.block = torch.nn.Sequential(Extra(7))
    compiled._orig_mod = torch.nn.Module()
    compiled._orig_mod.block = torch.nn.Sequential(Extra(0))
    fresh = LiveState.of(model=compiled)
    apply_state(restore_shard(in_memory(LiveState.of(model=saved)), fresh), fresh)
    assert compiled._orig_mod.block[0].value == 7


class Counted(torch.nn.Module):
    """A parameter, a buffer and an extra state."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), float(value)))
        self.register_buffer("seen", torch.full((2,), value))
        self.extra = Extra(value)


def test_a_model_inside_another_comes_back_beside_its_like() -> None:
    """`module.` is taken off names of wrappers; what is below it may have a namesake beside it."""

    def job(inner: int, outer: int) -> tuple[Any, Any, LiveState]:
        model: Any = torch.nn.Module()
        model.module = torch.nn.ModuleDict({"head": Counted(inner)})
        model.head = Counted(outer)
        optimizer = torch.optim.AdamW(
            [{"params": model.module.parameters()}, {"params": model.head.parameters(), "lr": 0.1}]
        )
        return model, optimizer, LiveState.of(model=model, optimizer=optimizer)

    model, optimizer, state = job(1, 2)
    (model.module["head"].w.sum() + 3 * model.head.w.sum()).backward()
    optimizer.step()
    model2, optimizer2, fresh = job(0, 0)
    apply_state(restore_shard(in_memory(state), fresh), fresh)
    assert contents(fresh) == contents(state)
    for before, after in zip(model.buffers(), model2.buffers(), strict=True):
        assert torch.equal(before, after)
    assert (model2.module["head"].extra.value, model2.head.extra.value) == (1, 2)
    for before, after in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(before, after)
        for key, value in optimizer.state[before].items():
            assert torch.equal(value, optimizer2.state[after][key])


def test_two_models_with_one_name_are_refused() -> None:
    """One of two tensors would be in no checkpoint."""
    inner = torch.nn.ModuleDict({"ema": torch.nn.Linear(1, 1)})
    state = LiveState.of(model={"model": inner, "ema": torch.nn.Linear(1, 1)})
    with pytest.raises(ConfigError, match=r"model\.ema\.weight: two parts of the state have this"):
        state.dry_encode()


def test_an_extra_state_of_tensors_comes_back() -> None:
    """They are no weights that the model lacks; those of a module that has none now are."""
    value: Any = {"scale": torch.arange(3.0), "history": [torch.ones(2)]}
    chunks = in_memory(LiveState.of(model=torch.nn.ModuleDict({"block": Extra(value)})))
    model = torch.nn.ModuleDict({"block": Extra(0)})
    fresh = LiveState.of(model=model)
    apply_state(restore_shard(chunks, fresh), fresh)
    found: Any = model["block"].value
    assert found["scale"].tolist() == [0, 1, 2]
    assert found["history"][0].tolist() == [1, 1]
    bare = torch.nn.ModuleDict({"other": torch.nn.Module()})
    bare.block = Module([("weight", torch.ones(2))])
    with pytest.raises(ConfigError, match=r"first 'model\.block\._extra_state\.history\.0'"):
        restore_shard(chunks, LiveState.of(model=bare))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([("w", torch.zeros(5))], r"model.w: is \(5,\) torch.float32 now, \(4,\)"),
        ([("w", torch.zeros(4, dtype=torch.float64))], r"model.w: is \(4,\) torch.float64 now"),
        ([("w", torch.zeros(4)), ("x", torch.zeros(1))], "not in the checkpoint, first 'model.x'"),
        ([("v", torch.zeros(4))], "not in the checkpoint, first 'model.v'"),
    ],
)
def test_a_changed_model_is_refused_before_a_byte_is_written(
    model: list[tuple[str, torch.Tensor]], message: str
) -> None:
    """ConfigError: no other source would help."""
    chunks = in_memory(LiveState.of(model=Module([("w", torch.ones(4))])))
    fresh = LiveState.of(model=Module(model))
    with pytest.raises(ConfigError, match=message):
        restore_shard(chunks, fresh)
    assert not any(tensor.any() for tensor in fresh.tensors.values())


def test_a_tensor_that_the_model_lost_is_refused() -> None:
    """Weights that nobody reads would be forgotten silently."""
    chunks = in_memory(LiveState.of(model=Module([("w", torch.ones(4)), ("x", torch.ones(1))])))
    with pytest.raises(ConfigError, match=r"1 tensors the model has not, first 'model.x'"):
        restore_shard(chunks, LiveState.of(model=Module([("w", torch.zeros(4))])))


class Cache(torch.nn.Module):
    """A buffer that no state dict has, and a weight."""

    def __init__(self, cache: torch.Tensor | None, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), weight))
        self.register_buffer("cache", cache, persistent=False)


@pytest.mark.parametrize(
    ("saved", "built", "left"),
    [
        (torch.ones(2), torch.zeros(2), False),
        (torch.ones(2), None, True),
        (torch.ones(2), torch.zeros(1), True),
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), True),
        (None, torch.zeros(2), True),
        (None, None, False),
    ],
    ids=["the same", "made later", "grown", "another dtype", "lost", "never made"],
)
def test_a_buffer_that_does_not_persist_comes_back_where_it_fits(
    saved: torch.Tensor | None, built: torch.Tensor | None, left: bool
) -> None:
    """A forward that makes a cache, or makes it larger, makes it again; nothing is refused."""
    chunks = in_memory(LiveState.of(model=Cache(saved, 3.0)))
    model = Cache(None if built is None else built.clone())
    fresh = LiveState.of(model=model)
    restored = restore_shard(chunks, fresh)
    apply_state(restored, fresh)
    assert model.weight.tolist() == [3.0] * 4
    expected = saved if saved is not None and built is not None and not left else built
    assert (model.cache is None) == (expected is None)
    assert expected is None or torch.equal(model.cache, expected)
    told = "".join(left_as_built(restored, fresh))
    assert ("1 buffers that do not persist do not fit" in told) == left


def test_a_buffer_of_which_the_model_says_nothing_yet_is_known_by_the_image() -> None:
    """It is registered in the forward; one that persists is still missed."""
    model = Cache(torch.ones(2), 3.0)
    chunks = in_memory(LiveState.of(model=model))
    bare = LiveState.of(model=Module([("weight", torch.zeros(4))]))
    restored = restore_shard(chunks, bare)
    assert restored.as_built == ("model.cache",)
    assert bare.tensors["model.weight"].tolist() == [3.0] * 4
    model._non_persistent_buffers_set.clear()
    lacks = "the model has not, first 'model.cache'"
    with pytest.raises(ConfigError, match=lacks):
        restore_shard(in_memory(LiveState.of(model=model)), bare)


@pytest.mark.parametrize("persistent", [True, False])
def test_an_expanded_buffer_comes_back(persistent: bool) -> None:
    """Its elements stand in memory once, and are stored as often as they show."""

    def job(value: float) -> LiveState:
        model = torch.nn.Module()
        rows = torch.full((1, 4, 1), value).expand(3, 4, 2)
        model.register_buffer("mask", rows, persistent=persistent)
        return LiveState.of(model=model)

    fresh = job(0.0)
    restore_shard(in_memory(job(float("nan"))), fresh)
    assert fresh.tensors["model.mask"].isnan().all()
    assert fresh.tensors["model.mask"].stride() == (0, 1, 0)


def test_an_expanded_buffer_takes_no_others_part() -> None:
    """What differs cannot all be shown by one element."""
    saved, built = torch.nn.Module(), torch.nn.Module()
    saved.register_buffer("mask", torch.arange(6.0).view(3, 2))
    built.register_buffer("mask", torch.zeros(1, 2).expand(3, 2))
    with pytest.raises(ConfigError, match=r"a tensor of \(3, 2\) is expanded now and was not"):
        restore_shard(in_memory(LiveState.of(model=saved)), LiveState.of(model=built))


def test_an_object_attached_later_is_named() -> None:
    """It has no state to take back."""
    chunks = in_memory(LiveState.of(model=Module([("w", torch.ones(4))])))
    fresh = LiveState.of(model=Module([("w", torch.zeros(4))]), ema=Holder({}))
    with pytest.raises(ConfigError, match="ema: is not in the checkpoint; it was attached later"):
        apply_state(restore_shard(chunks, fresh), fresh)


class Average:
    """Built when a training begins."""

    def __init__(self) -> None:
        self.mean: torch.Tensor | None = None

    def state_dict(self) -> dict[str, object]:
        """Raises AttributeError until it is built."""
        return {"mean": self.mean.clone()}  # type: ignore[union-attr]

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Into what is built."""
        self.mean.copy_(state["mean"])  # type: ignore[union-attr]


def test_a_found_object_that_is_not_in_the_checkpoint_is_said() -> None:
    """The training goes on; of an attached object it does not."""
    chunks = in_memory(LiveState.of(model=Module([("w", torch.ones(4))])))
    said: list[str] = []
    found = Dispensable("ema", Average(), said.append)
    fresh = LiveState.of(model=Module([("w", torch.zeros(4))]), ema=found)
    apply_state(restore_shard(chunks, fresh), fresh)
    assert said == ["ema: is not in the checkpoint; the training goes on with the object as it is"]


def test_a_found_object_is_restored_when_it_is_built() -> None:
    """And until then the state that it is to have is the one that is saved."""
    said: list[str] = []
    built = Average()
    built.mean = torch.full((3,), 7.0)
    model = Module([("w", torch.ones(4))])
    saved = LiveState.of(model=model, ema=Dispensable("ema", built, said.append))
    later = Average()
    found = Dispensable("ema", later, said.append)
    fresh = LiveState.of(model=Module([("w", torch.zeros(4))]), ema=found)
    fresh.dry_encode()
    apply_state(restore_shard(in_memory(saved), fresh), fresh)
    assert later.mean is None
    assert found.state_dict()["mean"].tolist() == [7.0] * 3
    later.mean = torch.zeros(3)
    found.begin()
    assert later.mean.tolist() == [7.0] * 3
    assert not said
    later.mean.zero_()
    found.begin()
    assert later.mean.tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [None, object(), torch.zeros(2).to_sparse()])
def test_a_found_object_that_cannot_be_saved_is_left_out_and_said_once(bad: object) -> None:
    """It raises, or has something that no checkpoint holds; it may be built later."""
    said: list[str] = []
    average = Average()
    found = Dispensable("ema", average, said.append)
    live = LiveState.of(model=Module([("w", torch.ones(4))]), ema=found)
    live.dry_encode()
    assert not said
    found.begin()
    if bad is not None:
        average.state_dict = lambda: {"fine": torch.ones(1), "bad": bad}  # type: ignore[method-assign]
    for _ in range(2):
        skeleton, tensors = live.extra({})
        assert skeleton["others"] == {"ema": None}
        assert "ema.fine" not in tensors
    assert len(said) == 1
    assert said[0].startswith("ema: is not in the checkpoints, its state cannot")
    fresh = LiveState.of(model=Module([("w", torch.ones(4))]), ema=found)
    apply_state(restore_shard(in_memory(live), fresh), fresh)
    assert said[1:] == [
        "ema: the checkpoint has no state of it; the training goes on with the object as it is"
    ]


def test_a_found_object_that_refuses_its_state_is_said() -> None:
    """Of another shape, as an example."""
    said: list[str] = []
    average = Average()
    average.mean = torch.zeros(2)
    found = Dispensable("ema", average, said.append)
    found.load_state_dict({"mean": torch.zeros(3)})
    found.begin()
    assert len(said) == 1
    assert "did not take its saved state: RuntimeError" in said[0]


def test_a_schedule_that_has_a_counter_goes_on() -> None:
    """MultiStepLR counts its milestones in one, which it asks for its elements."""

    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, LiveState]:
        model, optimizer = trained()
        schedule = lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1, 3])],
            [3],
        )
        return (
            model,
            optimizer,
            schedule,
            LiveState.of(model=model, optimizer=optimizer, schedule=schedule),
        )

    def rates(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> list[Any]:
        found = []
        for _ in range(8):
            step(model, optimizer)
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    *first, state = job()
    first[2].optimizer.step()
    first[2].step()
    *second, fresh = job()
    apply_state(restore_shard(in_memory(state), fresh), fresh)
    assert rates(*second) == rates(*first)


class OnDevice(torch.nn.Module):
    """A weight on a device, and an extra state of a tensor."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(2))
        self.weight = torch.nn.Parameter(torch.ones(3, device=device))
        self.own: Any = torch.ones(2)

    def get_extra_state(self) -> Any:
        return self.own

    def set_extra_state(self, state: Any) -> None:
        self.own = state


def test_tensors_of_objects_go_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average of weights that keeps what it gets meets the weights there; what was in host
    memory stays there.  `meta` stands for the device."""

    def marked(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
        tensors[path] = value.detach()
        return {"$tensor" if path.endswith("host") else "$device_tensor": path}

    def job(device: str) -> tuple[OnDevice, torch.optim.Optimizer, Holder, LiveState]:
        model, holder = OnDevice(device), Holder({"ema": torch.ones(3), "host": torch.ones(1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state["shared"] = {"scale": torch.ones(1)}  # type: ignore[index]
        state = LiveState.of(model=model, optimizer=optimizer, ema=holder)
        return model, optimizer, holder, state

    with monkeypatch.context() as patch:
        patch.setattr(state_tree, "_encode_tensor", marked)
        chunks = in_memory(job("cpu")[-1])
    model, optimizer, holder, fresh = job("meta")
    apply_state(restore_shard(chunks, fresh), fresh)
    found = [model.own, holder.state["ema"], holder.state["host"]]
    found.append(optimizer.state["shared"]["scale"])  # type: ignore[index]
    assert [tensor.device.type for tensor in found] == ["meta", "meta", "cpu", "meta"]


# --- hostile images ------------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, Any]], None]) -> SlotSource:
    """An image whose header somebody rewrote, with right digests."""
    state = LiveState.of(
        model=Module([("w", torch.ones(64, 40))]), other=Holder({"t": torch.ones(9)})
    )
    arena, shooter = snapshot(state)
    shooter.close()
    assert shooter.layout is not None
    image_bytes = shooter.layout.image_bytes
    length = header_bytes(arena.view, image_bytes)
    table = json.loads(bytes(arena.view[8:length]))
    change(table)
    text = json.dumps(table).encode()
    assert len(text) <= length - 8
    arena.view[8:length] = text.ljust(length - 8)
    return sealed(arena, image_bytes)


def skeleton(text: bytes) -> SlotSource:
    """An image with another skeleton."""
    chunks = rewritten(lambda table: None)
    length = header_bytes(chunks._arena.view, chunks.index.image_bytes)
    start, stop = json.loads(bytes(chunks._arena.view[8:length]))["__extra"]["data_offsets"]
    chunks._arena.view[length + start : length + stop] = text.ljust(stop - start)
    return sealed(chunks._arena, chunks.index.image_bytes)


def view(name: str, dtype: str) -> Callable[[dict[str, Any]], None]:
    """Claims another true dtype."""
    return lambda table: table["__metadata__"].update({f"view:{name}": dtype})


HOSTILE: dict[str, Callable[[], SlotSource]] = {
    "fewer bytes than copied, live": lambda: rewritten(view("model.w", "int8")),
    "fewer bytes than copied, new": lambda: rewritten(view("other.t", "int8")),
    "more bytes than there are": lambda: rewritten(view("other.t", "complex64")),
    "a pair of nothing": lambda: rewritten(view("other.t", "complex128")),
    "no skeleton": lambda: rewritten(lambda table: table.pop("__extra")),
    "skeleton of floats": lambda: rewritten(view("__extra", "float32")),
    "no JSON": lambda: skeleton(b"{"),
    "deep": lambda: skeleton(b"[" * 3000),
    "a list": lambda: skeleton(b"[]"),
    "buffers without names": lambda: skeleton(
        b'{"progress":{},"rng":{},"others":{},"modules":{},"optimizers":{},"passing":[[]]}'
    ),
    "a part missing": lambda: skeleton(b'{"progress":{},"rng":{},"others":{},"modules":{}}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_corrupt_and_writes_nowhere(name: str) -> None:
    """Its digests are right; lengths that lie would write beyond a tensor's memory."""
    fresh = LiveState.of(model=Module([("w", torch.zeros(64, 40))]), other=Holder(None))
    with pytest.raises(CorruptCheckpointError, match=r"image|cannot be"):
        restore_shard(HOSTILE[name](), fresh)


def test_a_dtype_that_this_torch_lacks_is_named() -> None:
    """A newer torch wrote it, or somebody made it up; `torch.load` is no dtype."""
    for dtype in ("float3", "load", ""):
        with pytest.raises(ConfigError, match=f"this torch has no dtype '{dtype}'"):
            restore_shard(
                rewritten(view("other.t", dtype)),
                LiveState.of(model=Module([("w", torch.zeros(64, 40))]), other=Holder(None)),
            )


def test_a_chunk_that_changed_is_corrupt() -> None:
    """Named by its number."""
    state = LiveState.of(model=Module([("w", torch.ones(64, 400))]))
    chunks = in_memory(state)
    chunks._arena.view[CHUNK + 9] ^= 1
    with pytest.raises(
        CorruptCheckpointError, match=r"memory: rank 0, chunk 1 of checkpoint step 1 \(term 1\)"
    ):
        restore_shard(chunks, LiveState.of(model=Module([("w", torch.zeros(64, 400))])))


@pytest.mark.parametrize("chunk", [0, 3])
def test_a_bad_chunk_among_many_leaves_no_reader_waiting(chunk: int, tmp_path: Path) -> None:
    """The readers behind the first chunk wait for what it says; it may say nothing."""
    state = LiveState.of(model=Module([("w", torch.ones(64, 4000))]))
    directory = CheckpointDirectory(str(tmp_path))
    directory.claim(directory.open(), "launch", 0, force=False)
    folder = commit_state(directory, directory.open(), G, state)
    record = read_commit(f"{folder}/COMMIT").records[0]
    with open(f"{folder}/{record['file']}", "r+b") as file:
        file.seek(chunk * CHUNK + 9)
        byte = file.read(1)
        file.seek(chunk * CHUNK + 9)
        file.write(bytes([byte[0] ^ 1]))
    fresh = LiveState.of(model=Module([("w", torch.zeros(64, 4000))]))
    with pytest.raises(
        CorruptCheckpointError, match=rf"chunk {chunk} of checkpoint step 1 \(term 1\)"
    ):
        restore_shard(open_file(folder), fresh)


def test_a_header_of_many_chunks_is_read_whole() -> None:
    """As in a state of tens of thousands of tensors."""
    tensors = {f"t{i}": torch.full((2,), float(i)) for i in range(300)}
    state = LiveState.of(model=Module([("w", torch.ones(4))]), other=Holder(tensors))
    chunks = in_memory(state, chunk_bytes=4096)
    assert header_bytes(chunks._arena.view, chunks.index.image_bytes) > 4 * 4096
    holder = Holder(None)
    fresh = LiveState.of(model=Module([("w", torch.zeros(4))]), other=holder)
    apply_state(restore_shard(chunks, fresh), fresh)
    assert all(holder.state[name].tolist() == [i, i] for i, name in enumerate(tensors))
