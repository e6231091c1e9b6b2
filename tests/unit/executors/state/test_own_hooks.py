"""Our hooks are called, and are in no copy, no file and no compiled form of what they are on."""

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from autockpt.executors.state import own_hooks

ONE = torch.ones(1, 2)


class Watched:
    """A module with hooks of a script, and with ours after them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.model: Any = torch.nn.Linear(2, 1)
        self.theirs = [
            self.model.register_forward_pre_hook(noted),
            self.model.register_forward_hook(noted, always_call=True),
        ]
        note = self.calls.append
        self.ours = own_hooks.around_call(
            self.model, lambda *_: note("before"), lambda *_: note("after")
        )
        self.ours.append(own_hooks.before_load(self.model, lambda *_: note("load")))


def noted(*_: Any) -> None:
    """A hook of the script; it can be pickled."""


def saved(model: Any) -> Any:
    """As `torch.save(model)` and `torch.load` give it back."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("made", [copy.deepcopy, saved, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_as_if_nobody_had_attached(made: Any) -> None:
    """Without our hooks, with those of the script, in dictionaries of torch."""
    watched = Watched()
    other = made(watched.model)
    other(ONE)
    other.load_state_dict(watched.model.state_dict())
    assert watched.calls == []
    assert list(other._forward_pre_hooks.values()) == [noted]
    assert list(other._forward_hooks.values()) == [noted]
    for name in ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks"):
        assert type(getattr(other, name)) is OrderedDict
    watched.model(ONE)
    watched.model.load_state_dict(other.state_dict())
    assert watched.calls == ["before", "after", "load"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_module_with_our_hooks_can_be_scripted() -> None:
    """torch compiles the hooks of a module with it."""
    watched = Watched()
    for handle in watched.theirs:
        handle.remove()
    assert torch.equal(torch.jit.script(watched.model)(ONE), watched.model(ONE))
    assert torch.equal(torch.jit.trace(watched.model, ONE)(ONE), watched.model(ONE))


def test_the_script_can_remove_what_it_registered_before() -> None:
    """Its handles know the dictionaries that were there."""
    watched = Watched()
    for handle in watched.theirs:
        handle.remove()
    assert len(watched.model._forward_pre_hooks) == len(watched.model._forward_hooks) == 1
    assert len(watched.model._forward_hooks_always_called) == 1
    for handle in watched.ours:
        handle.remove()
    watched.model(ONE)
    assert watched.calls == []
    assert not watched.model._forward_hooks_always_called


def test_ours_also_runs_after_a_call_that_raised() -> None:
    """What was begun is ended."""
    watched = Watched()
    with pytest.raises(RuntimeError, match="shapes"):
        watched.model(torch.ones(1, 3))
    assert watched.calls == ["before", "after"]


def test_an_optimizer_keeps_them_to_itself() -> None:
    """Some pickle all of their attributes."""
    calls: list[str] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(ONE)], lr=0.1)
    own_hooks.before_load(optimizer, lambda *_: calls.append("load"))
    hooks = optimizer.__dict__["_optimizer_load_state_dict_pre_hooks"]
    assert pickle.loads(pickle.dumps(hooks)) == OrderedDict()
    copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())
    assert calls == []
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["load"]
