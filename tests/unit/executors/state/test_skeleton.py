"""The text of a skeleton is that of now, though most of it is not written again."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from autockpt.executors.state import state_tree
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rng import rng_state
from autockpt.executors.state.skeleton import SkeletonText
from autockpt.executors.state.skeleton_schema import require_skeleton

Change = Callable[[dict[str, Any]], object]


def live(count: int = 2) -> LiveState:
    """A trained layer under AdamW."""
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return LiveState.of(model=model, optimizer=optimizer)


def group_of(state: LiveState) -> dict[str, Any]:
    group: dict[str, Any] = state.optimizers["optimizer"].param_groups[0]
    return group


CHANGES: dict[str, Change] = {
    "a number": lambda group: group.update(lr=0.25),
    "its type": lambda group: group.update(weight_decay=1),
    "its type again": lambda group: group.update(weight_decay=1.0),
    "to a truth": lambda group: group.update(weight_decay=True),
    "to zero": lambda group: group.update(weight_decay=0.0),
    "its sign": lambda group: group.update(weight_decay=-0.0),
    "no number": lambda group: group.update(weight_decay=float("nan")),
    "inside a tuple": lambda group: group.update(betas=(0.8, 0.99)),
    "a tuple of tuples": lambda group: group.update(betas=((0.8, 0.1), 0.99)),
    "a list": lambda group: group.update(betas=[0.8, 0.99]),
    "inside a list": lambda group: group["betas"].append(0.5),
    "a tensor": lambda group: group.update(lr=torch.tensor(0.125)),
    "inside a tensor": lambda group: group["lr"].fill_(0.75),
    "numpy's number": lambda group: group.update(eps=np.float64(0.0)),
    "numpy's other number": lambda group: group.update(eps=np.int64(0)),
    "a key": lambda group: group.update(name="body"),
    "a key less": lambda group: group.pop("name"),
}


def test_every_change_of_a_group_is_written() -> None:
    """Equal values of other types too: a checkpoint brings back 1.0 for 1.0 and 1 for 1."""
    state, text = live(), SkeletonText()
    former = None
    for name, change in CHANGES.items():
        change(group_of(state))
        skeleton, tensors = state.extra({"step": 1})
        written = text.of(skeleton)
        saved = state_tree.decode(json.loads(written), tensors)["optimizers"]["optimizer"]
        values = {k: v for k, v in group_of(state).items() if k != "params"}
        assert repr(saved["groups"][0]["values"]) == repr(values), name
        inside = name == "inside a tensor"  # its bytes are in the image, not in the text
        assert (written == former) == inside, name
        former = written


def test_a_text_is_the_json_of_its_skeleton() -> None:
    """Whatever was drawn, stepped or added between two boundaries."""
    state, text = live(), SkeletonText()
    optimizer = state.optimizers["optimizer"]
    steps: list[Callable[[], object]] = [
        lambda: None, random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn,
        lambda: torch.rand(1), optimizer.step,
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}),
        lambda: optimizer.state.clear(),
    ]  # fmt: skip
    for turn, step in enumerate([*steps, *reversed(steps[:7])]):
        step()
        fresh = LiveState(state.models, state.optimizers, state.others)
        skeleton, tensors = state.extra({"step": turn})
        expected, expected_tensors = fresh.extra({"step": turn})
        assert skeleton == expected
        assert text.of(skeleton) == json.dumps(expected, separators=(",", ":")).encode()
        assert list(tensors) == list(expected_tensors)
        assert all(torch.equal(tensors[name], expected_tensors[name]) for name in tensors)


def test_what_did_not_change_is_the_same_object() -> None:
    """Then its text is kept: at most boundaries only the step is written."""
    state = live()
    first, _ = state.extra({"step": 1})
    second, _ = state.extra({"step": 2})
    assert first["optimizers"] is second["optimizers"]
    assert first["rng"] is second["rng"]
    group_of(state)["lr"] = 0.1
    random.random()
    third, _ = state.extra({"step": 3})
    assert third["optimizers"] != second["optimizers"]
    assert first["optimizers"] == second["optimizers"]


def test_a_random_state_that_was_read_before_is_the_one_that_is_written() -> None:
    """A session hands in that of the boundary, and not that of now."""
    state = live()
    before = rng_state()
    random.random(), np.random.rand(), torch.rand(1)
    state.extra({})
    _, tensors = state.extra({}, rng=before)
    assert torch.equal(tensors["rng.torch"], before["torch"])
    assert tensors["rng.python.1"].numpy().tolist() == before["python"][1].tolist()


def test_state_under_keys_of_its_own_is_written_every_time() -> None:
    """Nothing says when it changed."""
    state, text = live(), SkeletonText()
    optimizer: Any = state.optimizers["optimizer"]
    optimizer.state["own"] = {"count": 1}
    for count in (1, 2):
        optimizer.state["own"]["count"] = count
        skeleton, tensors = state.extra({})
        saved = state_tree.decode(json.loads(text.of(skeleton)), tensors)
        assert saved["optimizers"]["optimizer"]["loose"] == {"own": {"count": count}}


def test_an_entry_that_cannot_be_saved_is_named_each_time() -> None:
    """Also when all was well at the boundary before."""
    state = live()
    state.extra({})
    group_of(state)["lr"] = object()
    for _ in range(2):
        with pytest.raises(Exception, match=r"optimizer\.group0\.lr"):
            state.extra({})
    group_of(state)["lr"] = 0.5
    state.extra({})


@pytest.mark.parametrize("default", ["device", "type"])
def test_it_is_read_under_the_defaults_of_a_script(default: str) -> None:
    """They were read as damage: no checkpoint could be restored."""
    state = live()
    skeleton, _ = state.extra({"step": 1}, rng=rng_state())
    former = torch.get_default_dtype()
    try:
        if default == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.bfloat16)
        require_skeleton(skeleton, "here")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(former)
