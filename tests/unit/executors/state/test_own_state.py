"""Optimizers with state of their own: a resumed training is equal to the undisturbed one."""

import collections
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.executors.restore.apply_state import apply_state
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import ConfigError
from tests.unit.executors.checkpoints import restore_shard
from tests.unit.executors.restore.test_reader import in_memory


class Counting(torch.optim.SGD):
    """A counter in an attribute, which its state dict says and its step uses."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        """Every third one is larger."""
        self.updates += 1
        for group in self.param_groups:
            group["lr"] = 0.3 if self.updates % 3 == 0 else 0.1
        return super().step(closure)

    def state_dict(self) -> Any:
        """With the counter."""
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes it out again."""
        state_dict = dict(state_dict)
        self.updates = state_dict.pop("updates")
        super().load_state_dict(state_dict)


class Silent(torch.optim.SGD):
    """As `Counting`, and its state dict says nothing of it."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        """Every third one is larger."""
        self.updates += 1
        for group in self.param_groups:
            group["lr"] = 0.3 if self.updates % 3 == 0 else 0.1
        return super().step(closure)


class Nameless(Counting):
    """Its state dict and torch's have nothing in common."""

    def state_dict(self) -> Any:
        """As some wrappers of precision write it."""
        return {"mine": {"n": self.updates, "loaded": True}}

    def load_state_dict(self, state_dict: Any) -> None:
        """The counter alone."""
        self.updates = state_dict["mine"]["n"]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as most scripts have it."""

    def __init__(self, params: Any, base: Any, **more: Any) -> None:
        super().__init__(params, {"rho": 0.05, **more})
        self.base_optimizer = base(self.param_groups, **more)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Up the hill, once more the gradients, back and down."""
        every = [p for group in self.param_groups for p in group["params"]]
        for p in every:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for p in every:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Ties the groups again."""
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Lookahead(torch.optim.Optimizer):
    """Never calls the constructor of its base; slow weights in a state of its own."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 3) -> None:
        self.inner, self.every, self.count = inner, every, 0
        self.defaults, self.param_groups = inner.defaults, inner.param_groups
        self.state: Any = defaultdict(dict)
        for one in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{one}_hooks", OrderedDict())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Of the one inside; every third time half the way back."""
        self.inner.step(closure)
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.count % self.every == 0:
                p.copy_(slow.add_(p - slow, alpha=0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the one inside."""
        self.inner.zero_grad(set_to_none)


class Moments:
    """An object with tensors and numbers."""

    __slots__ = ("beta", "mean", "seen")

    def __init__(self, like: torch.Tensor) -> None:
        self.beta, self.seen, self.mean = 0.9, 0, torch.zeros_like(like)


class Shampoo(torch.optim.Optimizer):
    """Keeps everything in attributes: by parameter, by index, in objects, by id, in a deque."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        every = [p for group in self.param_groups for p in group["params"]]
        self.moments = [Moments(p) for p in every]
        self.by_id = {id(p): float(i) for i, p in enumerate(every)}
        self.scales: dict[Any, Any] = {}
        self.last: Any = collections.deque(maxlen=3)
        self.every = every
        self.drawing = torch.Generator().manual_seed(5)
        self.log: Any = print

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Something that depends on all of them."""
        for p, moments in zip(self.every, self.moments, strict=True):
            moments.seen += 1
            moments.mean.mul_(moments.beta).add_(p.grad)
            self.by_id[id(p)] += 0.5
            scale = self.scales.setdefault(p, torch.ones(()))
            scale.add_(p.grad.abs().mean())
            self.last.append(float(scale))
            noise = 1 + 0.1 * torch.rand((), generator=self.drawing)
            rate = 0.01 * noise * (1 + sum(self.last)) / (moments.seen + self.by_id[id(p)])
            p.sub_(rate * moments.mean / scale)


class EightBit(torch.optim.Optimizer):
    """Bytes and a table that all parameters share; its `load_state_dict` keeps the types."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Momentum in 256 steps."""
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["bits"] = torch.full(p.shape, 128, dtype=torch.uint8)
                state["table"], state["largest"] = self.table, torch.ones((), dtype=torch.float64)
            value = self.table[state["bits"].long()] * state["largest"] * 0.9 + p.grad
            state["largest"] = value.abs().max().double()
            scaled = (value / state["largest"] + 1) * 127.5
            state["bits"] = scaled.round().clamp(0, 255).to(torch.uint8)
            p.sub_(0.05 * value)

    def load_state_dict(self, state_dict: Any) -> None:
        """torch's would make floats of the bytes."""
        self.state = defaultdict(dict)
        every = [p for group in self.param_groups for p in group["params"]]
        for i, values in state_dict["state"].items():
            self.state[every[i]] = values


MAKERS: dict[str, Callable[[Any], Any]] = {
    "counting": lambda p: Counting(p, lr=0.1, momentum=0.9),
    "silent": lambda p: Silent(p, lr=0.1, momentum=0.9),
    "nameless": lambda p: Nameless(p, lr=0.1, momentum=0.9),
    "sam": lambda p: SAM(p, torch.optim.SGD, lr=0.1, momentum=0.9),
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.1)),
    "twice": lambda p: Lookahead(Lookahead(Counting(p, lr=0.1, momentum=0.9)), every=2),
    "shampoo": Shampoo,
    "eight bits": EightBit,
}


def built(name: str, dtype: torch.dtype) -> tuple[LiveState, torch.nn.Module, Any]:
    """A job before its first step, as `attach` sees it."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)).to(dtype)
    optimizer = MAKERS[name](list(model.parameters()))
    state = LiveState.of(model=model, optimizer=optimizer)
    state.dry_encode()
    return state, model, optimizer


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    """Every step has its own inputs."""
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        inputs = inputs.to(next(model.parameters()).dtype)

        def closure(inputs: torch.Tensor = inputs) -> Any:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure if isinstance(optimizer, SAM) else None)


CASES = [*((name, torch.float32) for name in MAKERS), ("eight bits", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_state_of_its_own_is_resumed(name: str, dtype: torch.dtype) -> None:
    """Nine steps in three lives end in the bits of nine in one; none costs precision."""
    _, whole, optimizer = built(name, dtype)
    train(whole, optimizer, range(9))
    state, model, optimizer = built(name, dtype)
    train(model, optimizer, range(4))
    for steps in (range(4, 7), range(7, 9)):
        saved = in_memory(state)
        state, model, optimizer = built(name, dtype)
        apply_state(restore_shard(saved, state), state)
        train(model, optimizer, steps)
    assert all(map(torch.equal, model.parameters(), whole.parameters()))


def test_a_session_sees_the_steps_of_an_optimizer_around_another(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """Its iterations count once each, and it is resumed where it was."""
    run_dir = new_run()

    def lived(steps: range) -> list[torch.Tensor]:
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        optimizer = MAKERS["twice"](list(model.parameters()))
        ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
        assert ckpt.step_count == steps.start
        for step in ckpt.steps(steps.stop):
            train(model, optimizer, range(step, step + 1))
        assert not ckpt._rank.warned & {"iterations", "snapshot", "final checkpoint"}
        return [p.detach().clone() for p in model.parameters()]

    _, whole, optimizer = built("twice", torch.float32)
    train(whole, optimizer, range(7))
    lived(range(4))
    assert all(map(torch.equal, lived(range(4, 7)), whole.parameters()))


def attached(optimizer: Any, model: torch.nn.Module | None = None) -> LiveState:
    """As `attach` sees it first."""
    state = LiveState.of(model=model or torch.nn.Linear(2, 1), optimizer=optimizer)
    state.dry_encode()
    return state


class Unhooked(torch.optim.Optimizer):
    """Nobody inside, and torch does not know of it."""

    def __init__(self, params: Any) -> None:
        self.param_groups, self.state = [{"params": list(params)}], defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """By itself."""


class Mute(torch.optim.SGD):
    """Its state is somebody else's business."""

    def state_dict(self) -> Any:
        """As Distributed Shampoo does."""
        raise NotImplementedError("use distributed_state_dict()")


def with_attribute(value: Any) -> Callable[[Any], Any]:
    """An optimizer with one more attribute."""

    def make(parameters: Any) -> Any:
        optimizer = Silent(parameters, lr=0.1)
        optimizer.more = value  # type: ignore[attr-defined]
        return optimizer

    return make


REFUSED = {
    "unhooked": (Unhooked, "torch does not tell of the steps of a Unhooked"),
    "mute": (lambda p: Mute(p, lr=0.1), r"Mute.state_dict\(\) raised NotImplementedError"),
    "iterator": (with_attribute(itertools.count()), "optimizer.attributes.more: a count cannot"),
    "odd key": (with_attribute({object(): 1.0}), "attributes.more: has a object as a key"),
    "sparse": (
        with_attribute(torch.eye(2).to_sparse()),
        "attributes.more: a torch.sparse_coo tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_back_is_refused_by_name(name: str) -> None:
    """Before a step is trained."""
    make, said = REFUSED[name]
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=said):
        attached(make(model.parameters()), model)


def test_tools_and_the_model_itself_are_left_alone() -> None:
    """Functions, classes, locks and the attached model are no state; nothing else is saved."""
    model = torch.nn.Linear(2, 1)
    optimizer = Silent(model.parameters(), lr=0.1)
    more: Any = optimizer
    more.model, more.hook, more.kind, more.rate = model, print, dict, 0.5
    state = attached(optimizer, model)
    assert "own" not in state.extra({})[0]
    optimizer.updates = 3
    assert state.extra({})[0]["own"] == {"optimizer": {"attributes": {"updates": 3}}}


def test_an_object_made_in_training_is_refused_when_it_is_saved() -> None:
    """A restart would have nothing to put its contents into."""
    model = torch.nn.Linear(2, 1)
    optimizer: Any = Silent(model.parameters(), lr=0.1)
    state = attached(optimizer, model)
    optimizer.late = Moments(model.weight)
    with pytest.raises(ConfigError, match="late: a Moments that was made in training"):
        state.extra({})


def test_torchs_own_optimizers_are_saved_as_ever() -> None:
    """They have no such section and cost nothing more."""
    model = torch.nn.Linear(2, 1)
    assert "own" not in attached(torch.optim.LBFGS(model.parameters()), model).extra({})[0]


def test_a_step_within_a_step_is_one() -> None:
    """Told before each of them and once behind the outermost, also after an exception."""
    parameters = [torch.nn.Parameter(torch.ones(1))]
    inner = Silent(parameters, lr=0.1)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            inner.step()
            return closure() if closure else None

    outer = Outer(parameters, lr=0.1)
    before: list[Any] = []
    after: list[Any] = []
    hooks = OptimizerHooks([outer], before.append, after.append, {inner: outer})
    outer.step()
    assert set(before) == {outer}
    assert after == [outer]
    with pytest.raises(ZeroDivisionError, match="division"):
        outer.step(lambda: 1 / 0)
    outer.step()
    assert after == [outer, outer]
    hooks.remove()
