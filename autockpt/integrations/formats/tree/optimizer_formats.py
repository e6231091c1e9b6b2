"""The ways in which others write down an optimizer: numbered, named, or flat.

    numbered   {"state": {0: {...}}, "param_groups": [{"params": [0, 1], ...}]}, some named
    named      the same with names instead of numbers: get_optimizer_state_dict
    flat       {"state.<name>.<key>": ..., "param_groups.<name>.<key>": ...}: the same function,
               with flatten_optimizer_state_dict=True

TorchTitan saves the flat form.
"""

from collections.abc import Collection
from typing import Any

from autockpt.executors.restore.plan.numbered import NUMBER
from autockpt.executors.sharding.fqns import plain_fqn
from autockpt.integrations.formats.tree.lazy_tree import Tree

_STATE, _GROUPS = "state.", "param_groups."


def is_optimizer(value: Any) -> bool:
    """Has the form of an optimizer's state dict, numbered or named."""
    return isinstance(value, dict) and set(value) == {"state", "param_groups"}


def is_flat(value: Any) -> bool:
    """Has the flat form."""
    return (
        isinstance(value, dict)
        and any(str(key).startswith(_GROUPS) for key in value)
        and all(str(key).startswith((_STATE, _GROUPS)) for key in value)
    )


def numbered(optimizer: Tree) -> Tree:
    """As `optimizer.state_dict()`: parameters by their place instead of their name."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: place for place, name in enumerate(names)}
    groups = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    state = {number[name]: values for name, values in optimizer["state"].items()}
    return {"state": state, "param_groups": groups}


def named(optimizer: Tree, names: Collection[str]) -> Tree | None:
    """With the bare names of parameters.

    None when it does not say them, says others than `names`, or has state of no parameter.
    """
    if is_flat(optimizer):
        return _unflattened(optimizer, names)
    groups: list[Tree] = []
    state: Tree = {}
    given = {str(place): values for place, values in optimizer["state"].items()}  # as DCP has them
    for group in optimizer["param_groups"]:
        own = group.get("param_names") or group["params"]
        if len(own) != len(group["params"]) or not all(isinstance(name, str) for name in own):
            return None
        bare = [plain_fqn(name) for name in own]
        groups.append({**_settings(group), "params": bare})
        places = zip(bare, group["params"], strict=True)
        state |= {name: given.pop(str(p)) for name, p in places if str(p) in given}
    if given or any(name not in names for group in groups for name in group["params"]):
        return None
    return {"state": state, "param_groups": groups}


def by_number(optimizer: Tree) -> Tree | None:
    """A numbered one with `#0`, `#1`, ... as names; None for any other form.

    At a restore the order of the attached optimizer's groups gives the names.  DCP makes texts of
    the numbers of the state.
    """
    if is_flat(optimizer):
        return None
    places = [place for group in optimizer["param_groups"] for place in group["params"]]
    if not all(type(place) is int for place in places) or len(set(places)) != len(places):
        return None
    called: dict[Any, str] = {place: f"{NUMBER}{number}" for number, place in enumerate(places)}
    groups = [
        {**_settings(group), "params": [called[place] for place in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    called |= {str(place): name for place, name in called.items()}
    if not called.keys() >= optimizer["state"].keys():
        return None
    state = {called[place]: values for place, values in optimizer["state"].items()}
    return {"state": state, "param_groups": groups}


def _settings(group: Tree) -> Tree:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _unflattened(optimizer: Tree, names: Collection[str]) -> Tree | None:
    """Parameters with the same settings become a group; a key is what follows the longest name."""
    state: dict[str, Tree] = {}
    settings: dict[str, Tree] = {}
    for key, value in optimizer.items():
        kind = _STATE if key.startswith(_STATE) else _GROUPS
        name, last = _split(key.removeprefix(kind), names)
        if not last:
            return None
        (state if kind == _STATE else settings).setdefault(name, {})[last] = value
    groups: list[Tree] = []
    for name, values in settings.items():
        same = next((g for g in groups if _settings(g) == values), None)
        if same is None:
            groups.append({**values, "params": [name]})
        else:
            same["params"].append(name)
    return {"state": state, "param_groups": groups}


def _split(text: str, names: Collection[str]) -> tuple[str, str]:
    """(parameter, key), ("", "") when it begins with no parameter's name."""
    name, key = text, ""
    while "." in name:
        name, _, last = name.rpartition(".")
        key = f"{last}.{key}" if key else last
        if plain_fqn(name) in names:
            return plain_fqn(name), key
    return "", ""
