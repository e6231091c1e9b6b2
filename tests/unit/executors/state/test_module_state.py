"""What modules keep beside the values of their tensors comes back in a new process."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.executors.restore.apply_state import apply_state
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.own_state import ModuleState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_state, open_file, restore_shard

X = torch.ones(2, 3)


class Filled(nn.Module):
    """A queue of all outputs so far."""

    def __init__(self, first: torch.Tensor | None) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("queue", first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Less their mean."""
        y: torch.Tensor = self.inner(x)
        self.queue = y.detach() if self.queue is None else torch.cat([self.queue, y.detach()])
        return y - self.queue.mean(0)


class Emptied(nn.Module):
    """A start value that the first forward drops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("start", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Once with the start value."""
        y: torch.Tensor = self.inner(x) + (0 if self.start is None else self.start)
        self.start = None
        return y


class Counting(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divided by their number."""
        self.calls += 1
        return torch.as_tensor(self.inner(x) / self.calls)


class Speaking(Counting):
    """Says it in a `state_dict` of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """With the number of calls."""
        said = super().state_dict(*args, **kwargs)
        said[f"{kwargs.get('prefix', '')}calls"] = {"n": torch.tensor(self.calls), "as": "calls"}
        return said

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes it back."""
        rest = dict(state_dict)
        self.calls = int(rest.pop("calls")["n"])
        return super().load_state_dict(rest, *args, **kwargs)


class Hooked(Counting):
    """Says it by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self.say)
        self.register_load_state_dict_pre_hook(self.take)

    @staticmethod
    def say(module: Any, said: dict[str, Any], prefix: str, _: Any) -> None:
        """Behind `state_dict`."""
        said[f"{prefix}calls"] = module.calls

    @staticmethod
    def take(module: Any, said: dict[str, Any], prefix: str, *_: Any) -> None:
        """Ahead of `load_state_dict`."""
        module.calls = said.pop(f"{prefix}calls")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a buffer that grows": lambda: Filled(torch.zeros(0, 3)),
    "a buffer that was None": lambda: Filled(None),
    "a buffer that becomes None": Emptied,
    "a state_dict of its own": Speaking,
    "hooks of its own": Hooked,
    "inside another module": lambda: nn.Sequential(Speaking(), nn.ReLU(), Hooked()),
}


def state_of(model: nn.Module) -> LiveState:
    """As `attach` sees it."""
    state = LiveState.of(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    state.dry_encode()
    return state


def resumed(
    trained: LiveState, make: Callable[[], nn.Module], folder: Path
) -> tuple[Any, LiveState]:
    """Another model, with a checkpoint of the first one in it, and its state."""
    directory, generation = CheckpointDirectory(str(folder / "c")), Generation(term=1, step=1)
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    place = commit_state(directory, run_id, generation, trained)
    model = make()
    state = state_of(model)
    apply_state(restore_shard(open_file(place), state), state)
    return model, state


@pytest.mark.parametrize("name", MODELS)
def test_what_calls_have_changed_comes_back(name: str, tmp_path: Path) -> None:
    """The next calls give the same, and so do those behind a second resume."""
    model = MODELS[name]()
    state = state_of(model)
    for number in range(2):
        for _ in range(3):
            model(X)
        back, again = resumed(state, MODELS[name], tmp_path / str(number))
        assert torch.equal(model(X), back(X))
        assert torch.equal(model(X), back(X))
        model, state = back, again


def test_what_was_frozen_or_set_to_evaluate_comes_back(tmp_path: Path) -> None:
    """A script that freezes at one step resumed behind it, and trained everything."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))

    model = make()
    state = state_of(model)
    model[0].requires_grad_(False)
    model[1].eval()
    back, _ = resumed(state, make, tmp_path)
    assert [p.requires_grad for p in back.parameters()] == [False] * 2 + [True] * 4
    assert [one.training for one in back] == [True, False, True]


def test_what_is_as_it_was_built_is_the_scripts(tmp_path: Path) -> None:
    """A restart may freeze what the first start trained."""
    skeleton, _ = state_of(Speaking()).extra({"step": 1})
    assert "changed" not in skeleton
    back, _ = resumed(state_of(Counting()), lambda: Counting().requires_grad_(False), tmp_path)
    assert not any(p.requires_grad for p in back.parameters())


def test_an_older_checkpoint_finds_buffers_as_they_were_built() -> None:
    """The newer one, tried before it, had given them another form."""
    model = Filled(torch.zeros(0, 3))
    state = state_of(model)
    state.module_state.take_forms({"model.queue": ((4, 3), torch.float32)})
    assert model.queue.shape == (4, 3)
    state.module_state.take_forms({})
    assert model.queue.shape == (0, 3)


def test_a_state_that_is_not_taken_back_is_refused_by_name(tmp_path: Path) -> None:
    """What went wrong stands in the message."""

    class Deaf(Speaking):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("nothing")

    model = Deaf()
    state = state_of(model)
    model(X)
    with pytest.raises(ConfigError, match=r"model: .*Deaf.load_state_dict\(\) raised KeyErr"):
        resumed(state, Deaf, tmp_path)


def test_flags_are_of_the_last_iteration_once_the_training_is_over() -> None:
    """A script tests and exports its model before the last checkpoint is made."""
    model = nn.Linear(3, 3)
    state = ModuleState({"model": model})
    model.bias.requires_grad_(False)
    state.note()
    state.end()
    model.eval().requires_grad_(False)
    state.note()
    assert state.encode({}) == {"trained": {"model.bias": False}}


class Handle(nn.Module):
    """Says more in its state dict than can be compared."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """A lock, and an object that equals only itself."""
        said = super().state_dict(*args, **kwargs)
        return {**said, "lock": threading.Lock(), "object": object(), "count": 3}


def test_what_cannot_be_compared_is_not_saved() -> None:
    """Nor does it end the attach."""
    assert ModuleState({"model": Handle()}).encode({}) == {}
