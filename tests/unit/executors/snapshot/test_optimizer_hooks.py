"""What the proof of a snapshot sees: every way to change a whole tensor behind the fence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot import copy_engine
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks, StateProof
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from tests.unit.executors.shots import assert_image, copied_but_unproven, snapshotter, state_bytes
from tests.unit.executors.states import Module, step, trained

Job = tuple[torch.nn.Module, torch.optim.Optimizer]


def first(model: torch.nn.Module) -> torch.nn.Parameter:
    """The 64 x 40 weight of the first layer."""
    return next(model.parameters())


def fused_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The update that no version counter sees."""
    other = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()


def foreach_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["foreach"] = True
    step(model, optimizer)


def no_grad_add(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        first(model).add_(1)


def foreach_add(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 1.0)


def swap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.utils.swap_tensors(first(model), torch.nn.Parameter(torch.zeros(64, 40)))


def assign(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    copy = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(copy, assign=True)


def set_data(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first(model).data = torch.zeros(64, 40)


def vector(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    torch.nn.utils.vector_to_parameters(torch.zeros(count), model.parameters())


def dlpack(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.from_dlpack(first(model).detach()).fill_(2)


def storage(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = first(model)
    weight.untyped_storage().copy_(torch.ones_like(weight).untyped_storage())


def unsafe(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = first(model).detach()
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.add_(1)


def moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[first(model)]["exp_avg"].data.mul_(0.5)


SEEN: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], object]] = {
    "for-loop step": step,
    "foreach step": foreach_step,
    "fused step": fused_step,
    "no_grad in-place": no_grad_add,
    "detach().add_": lambda model, _: first(model).detach().add_(1),
    "_foreach_add_": foreach_add,
    "nn.init": lambda model, _: torch.nn.init.zeros_(first(model)),
    "load_state_dict": lambda model, _: model.load_state_dict(trained()[0].state_dict()),
    "load_state_dict(assign=True)": assign,
    ".data = new": set_data,
    ".to(float64)": lambda model, _: model.to(torch.float64),
    "vector_to_parameters": vector,
    "share_memory_": lambda model, _: first(model).share_memory_(),
    "swap_tensors": swap,
    ".data.add_": lambda model, _: first(model).data.add_(1),
    "numpy view": lambda model, _: first(model).detach().numpy().__iadd__(1),
    "dlpack alias": dlpack,
    "untyped_storage().copy_": storage,
    "_unsafe_preserve_version_counter": unsafe,
    "moments .data": moments,
    "a new parameter": lambda model, _: setattr(model, "late", torch.nn.Parameter(torch.ones(1))),
}

UNCHANGED: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], object]] = {
    "nothing": lambda model, optimizer: None,
    "forward and backward": lambda model, _: model(torch.randn(8, 40)).sum().backward(),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "zero_grad in place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "clip_grad_norm_": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "reading": lambda model, _: model.state_dict(),
    "train and eval": lambda model, _: model.eval().train(),
}


@pytest.fixture
def job() -> Job:
    """A trained model without gradients of its own making."""
    return trained()


@pytest.mark.parametrize("name", SEEN)
def test_every_change_of_a_whole_tensor_is_seen(job: Job, name: str) -> None:
    """By version, pointer or canary; the hook alone would not do."""
    model, optimizer = job
    state = LiveState.of(model=model, optimizer=optimizer)
    proof = StateProof(state.lazy_tensors())
    SEEN[name](model, optimizer)
    assert proof.changed(state.lazy_tensors())


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_nothing_is_not_reported(job: Job, name: str) -> None:
    """A false alarm costs a checkpoint."""
    model, optimizer = job
    state = LiveState.of(model=model, optimizer=optimizer)
    proof = StateProof(state.lazy_tensors())
    UNCHANGED[name](model, optimizer)
    assert proof.changed(state.lazy_tensors()) == []


def test_memory_that_was_given_back_is_not_read() -> None:
    """FSDP frees and fills the storage of a tensor in place; reading it would end the process."""
    weight, other = torch.zeros(1000, 1000), torch.zeros(9)
    tensors = {"w": weight, "other": other}
    proof = StateProof(tensors)
    weight.untyped_storage().resize_(0)
    assert proof.changed(tensors) == ["w"]


def test_memory_that_went_elsewhere_is_read_there() -> None:
    """As long as something of it is there, what changed beside it is seen as well."""
    weight, other = torch.zeros(1000, 1000), torch.zeros(9)
    tensors = {"w": weight, "other": other}
    proof = StateProof(tensors)
    weight.untyped_storage().resize_(0)
    elsewhere = torch.ones(1000, 1000)  # where it may have been
    weight.untyped_storage().resize_(4 * weight.numel())
    weight.data.fill_(1.0)
    other.data.fill_(1.0)
    assert set(proof.changed(tensors)) == {"w", "other"}
    assert elsewhere.sum() == elsewhere.numel()


@pytest.mark.parametrize("set_to", [float("nan"), -0.0])
def test_canaries_compare_bits(set_to: float) -> None:
    """NaN equals itself, and -0.0 is not 0.0."""
    weight = torch.zeros(100)
    proof = StateProof({"w": weight})
    weight.data.fill_(set_to)
    assert proof.changed({"w": weight})
    proof = StateProof({"w": weight})
    assert proof.changed({"w": weight}) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()), torch.zeros(0), torch.zeros(1), torch.zeros(3), torch.zeros(7, 5).t(),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(50)[::2],
        torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int64),
        torch.zeros(6, dtype=torch.bool), torch.zeros(6).to(torch.float8_e4m3fn),
        torch.zeros(6, dtype=torch.complex64),
    ],
    ids=lambda t: f"{str(t.dtype)[6:]}{tuple(t.shape)}",
)  # fmt: skip
def test_every_form_of_tensor_has_canaries(tensor: torch.Tensor) -> None:
    """Scalars, empty ones, strided ones, all dtypes that may be parameters."""
    proof = StateProof({"w": tensor})
    assert proof.changed({"w": tensor}) == []
    tensor.data.copy_(torch.ones_like(tensor, dtype=torch.float32))
    assert bool(proof.changed({"w": tensor})) == bool(tensor.numel())


# --- in a snapshot -------------------------------------------------------------------------------


def shot(model: torch.nn.Module) -> tuple[Snapshotter, Arena]:
    """A snapshot in flight."""
    shooter = Snapshotter(LiveState.of(model=model), memoryview(bytearray(64)))
    arena = Arena.anonymous(2**20)
    shooter.begin(arena, {"step": 1}, lazy=True)
    return shooter, arena


def test_the_fence_names_the_tensor_that_changed() -> None:
    """So that it can be copied at the boundary from then on."""
    model = Module([("a", torch.randn(50, 50)), ("b", torch.randn(50, 50))])
    with snapshotter(LiveState.of(model=model)) as shooter:
        _, barrier = copied_but_unproven(shooter, Arena.anonymous(2**20))
        model.b.data.add_(1)
        barrier.opened.set()
        assert shooter.fence() == ["model.b"]


def test_what_changes_after_the_last_byte_was_copied_does_no_harm() -> None:
    """It is proven then, not at the fence: the checkpoint counts at once, and no false alarm."""
    model = Module([("a", torch.randn(50, 50))])
    state, verdicts = LiveState.of(model=model), []
    with snapshotter(state) as shooter:
        arena, expected = Arena.anonymous(2**20), state_bytes(state)
        shooter.begin(arena, {"step": 1}, lazy=True, completed=lambda s: verdicts.append(s.changed))
        shooter.engine.wait()
        assert verdicts == [[]]
        model.a.data.add_(1)
        assert shooter.fence() == []
        assert_image(arena, expected)
    assert verdicts == [[]]


def test_one_element_beside_the_canaries_is_found_by_the_sample() -> None:
    """The rotating sample compares whole tensors with the slot."""
    model = Module([("a", torch.zeros(50, 50))])
    state = LiveState.of(model=model)
    proof = StateProof(state.lazy_tensors())
    with snapshotter(state) as shooter:
        _, barrier = copied_but_unproven(shooter, Arena.anonymous(2**20))
        model.a.data[0, 3] = 1
        assert proof.changed(state.lazy_tensors()) == []
        barrier.opened.set()
        assert shooter.fence() == ["model.a"]


def test_a_blocking_snapshot_needs_no_proof() -> None:
    """Everything was copied before the training went on."""
    model = Module([("a", torch.zeros(500))])
    shooter = Snapshotter(LiveState.of(model=model), memoryview(bytearray(64)))
    arena = Arena.anonymous(2**20)
    snapshot = shooter.begin(arena, {"step": 1}, lazy=False)
    model.a.data.add_(1)
    assert shooter.fence() == []
    entry = snapshot.layout.entry("model.a")
    assert not any(arena.view[entry.offset : entry.end])
    shooter.close()


def test_a_copy_that_failed_is_an_error_at_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next snapshot is good again."""

    def fail(*_: object) -> None:
        raise MemoryError("no more")

    model = Module([("a", torch.zeros(500))])
    with monkeypatch.context() as patch:
        patch.setattr(copy_engine, "copy_tensors", fail)
        patch.setattr(copy_engine, "_memcpy", fail)
        shooter, arena = shot(model)
        snapshot = shooter.current
        shooter.fence()
        assert snapshot is not None
        assert isinstance(snapshot.error, MemoryError)
    shooter.begin(arena, {"step": 2}, lazy=True)
    assert shooter.fence() == []
    shooter.close()


def test_progress_is_a_prefix_that_never_claims_too_much() -> None:
    """After the boundary group its end, after the fence the whole image."""
    shooter, _ = shot(Module([("a", torch.zeros(5000))]))
    snapshot = shooter.current
    assert snapshot is not None
    assert shooter.counters.get() >= snapshot.layout.boundary_end
    assert shooter.fence() == []
    assert shooter.counters.get() == snapshot.layout.image_bytes
    shooter.close()


# --- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}), (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"fused": True}), (torch.optim.Adagrad, {}), (torch.optim.RMSprop, {}),
        (torch.optim.Adafactor, {}),
    ],
)  # fmt: skip
def test_hooks_fire_once_around_every_step(kind: Any, options: dict[str, Any]) -> None:
    """Before and after, for every implementation."""
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    order: list[str] = []
    hooks = OptimizerHooks(
        [optimizer], lambda _: order.append("before"), lambda _: order.append("after")
    )
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    hooks.remove()
    optimizer.step()
    assert order == ["before", "after"] * 2


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_the_fence_stands_behind_a_closure_that_trains(kind: Any, by_name: bool) -> None:
    """Its forward and backward change no parameter; what they overlap is a copy under way."""
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    began = model.weight.detach().clone()
    order: list[Any] = []
    hooks = OptimizerHooks(
        [optimizer],
        lambda _: order.append(bool(torch.equal(model.weight, began))),
        lambda _: order.append("after"),
    )

    def closure() -> torch.Tensor:
        order.append("closure")
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    given: Any = {"closure": closure} if by_name else {}
    loss = optimizer.step(*(() if by_name else (closure,)), **given)
    hooks.remove()
    assert order[:2] == ["closure", True]
    assert order[-1] == "after"
    assert loss is not None


def test_only_attached_optimizers_are_fenced() -> None:
    """A discriminator that nobody attached is nobody's business."""
    mine, other = trained(), trained()
    calls: list[str] = []
    hooks = OptimizerHooks([mine[1]], lambda _: calls.append("before"), lambda _: None)
    other[1].step()
    assert calls == []
    mine[1].step()
    assert calls == ["before"]
    hooks.remove()


def test_loading_state_is_fenced() -> None:
    """It writes in place: optimizers' and modules'."""
    model, optimizer = trained()
    calls: list[str] = []
    hooks = OptimizerHooks([optimizer], lambda _: calls.append("before"), lambda _: None)
    hooks.guard_module(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(calls) == 1
    model.load_state_dict(model.state_dict())
    assert len(calls) >= 2
    hooks.remove()
    count = len(calls)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(calls) == count
