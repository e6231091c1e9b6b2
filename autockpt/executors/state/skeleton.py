"""The state apart from its lazy tensors: a skeleton that is written as JSON at every boundary.

Most of the skeleton is unchanged since the boundary before.  The encoder of an unchanged section
returns the same object again, and the text of that object is kept.
"""

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from autockpt.executors.sharding.optimizers import is_divided, state_of
from autockpt.executors.state import state_tree
from autockpt.executors.state.tensor_index import Anchors, OptimizerParts

Tensors = dict[str, torch.Tensor]


class SkeletonText:
    """Writes skeletons; a section that is the same object as before is not written again."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, str]] = {}
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def of(self, skeleton: Mapping[str, Any]) -> bytes:
        """The JSON of a skeleton, whose sections are never changed in place."""
        texts = []
        for name, section in skeleton.items():
            kept = self._kept.get(name)
            if kept is None or kept[0] is not section:
                text = f'"{name}":{"{}" if section == {} else self._encode(section)}'
                kept = self._kept[name] = (section, text)
            texts.append(kept[1])
        return f"{{{','.join(texts)}}}".encode()


class KeptRandomState:
    """The section of the random state; generators that were not used are the same objects."""

    def __init__(self) -> None:
        self._generators: dict[str, tuple[Any, Any, Tensors]] = {}
        self._section: dict[str, Any] = {}

    def encode(self, state: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
        """As `state_tree.encode` of the result of `rng_state`."""
        section = {name: self._generator(name, value, tensors) for name, value in state.items()}
        kept = self._section
        if section.keys() != kept.keys() or any(section[name] is not kept[name] for name in kept):
            self._section = section
        return self._section

    def _generator(self, name: str, value: Any, tensors: Tensors) -> Any:
        own: Tensors
        former, skeleton, own = self._generators.get(name, (None, None, {}))
        if isinstance(value, torch.Tensor) and isinstance(former, torch.Tensor):
            own = {f"rng.{name}": value}  # another tensor each time, under the same name
        elif value is not former:
            own = {}
            skeleton = state_tree.encode(value, f"rng.{name}", own)
        self._generators[name] = (value, skeleton, own)
        tensors.update(own)
        return skeleton


class KeptOptimizers:
    """The section of the optimizers: the same object until a value of a group is another one."""

    def __init__(self) -> None:
        self._parts: dict[str, OptimizerParts] | None = None
        self._values: Anchors | None = None
        """Values of the groups, if they are only numbers and words, which are immutable."""
        self._mark: list[str] | None = None
        self._section: dict[str, Any] = {}

    def encode(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        parts: dict[str, OptimizerParts],
        tensors: Tensors,
    ) -> dict[str, Any]:
        """Which state belongs to which parameter (its tensors are lazy), and the groups' values.

        Raises ConfigError naming the entry that cannot be saved.
        """
        same = parts is self._parts  # then the groups are the same dicts
        if same and self._values is not None and self._values.hold():
            return self._section
        mark = _mark(optimizers, parts)
        if mark is None or mark != self._mark or not same:
            self._section = {
                prefix: _optimizer_skeleton(prefix, optimizer, parts[prefix], tensors)
                for prefix, optimizer in optimizers.items()
            }
            self._parts, self._mark = parts, mark
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        self._values = None if mark is None else Anchors(groups, [])
        return self._section


def _mark(
    optimizers: Mapping[str, torch.optim.Optimizer], parts: Mapping[str, OptimizerParts]
) -> list[str] | None:
    """Equal if and only if the values of all groups are; None where that is not known."""
    mark = []
    for prefix, optimizer in optimizers.items():
        if parts[prefix].irregular or parts[prefix].loose:
            return None
        for group in optimizer.param_groups:
            values = _values(group)
            tuples = [value for value in values.values() if type(value) is tuple]
            kinds = {*map(type, chain(values.values(), *tuples))}
            if not kinds <= _PLAIN or any(tuple in map(type, value) for value in tuples):
                return None
            mark.append(repr(values))  # exact: 1, 1.0, True, -0.0 are all different
    return mark


_PLAIN = frozenset((bool, int, float, str, tuple, type(None)))


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _optimizer_skeleton(
    prefix: str,
    optimizer: torch.optim.Optimizer,
    parts: OptimizerParts,
    tensors: Tensors,
) -> Any:
    """Parameters with the same keys are listed together as [group, index]: a few kilobytes for any
    model, written in well under a millisecond."""
    irregular = dict(parts.fixed)
    irregular |= {
        name: state_tree.encode(values, f"{prefix}.{name}", {})
        for name, values in parts.irregular.items()
    }
    groups = [
        {
            "params": parts.names[g],
            "values": state_tree.encode(_values(group), f"{prefix}.group{g}", tensors),
        }
        for g, group in enumerate(optimizer.param_groups)
    ]
    states = state_of(optimizer)
    loose = {key: states[key] for key in parts.loose}
    return {
        "regular": parts.regular,
        "irregular": irregular,
        "groups": groups,
        "loose": state_tree.encode(loose, f"{prefix}.state", tensors),
        "divided": is_divided(optimizer),
    }
