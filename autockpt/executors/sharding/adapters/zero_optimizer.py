"""DeepSpeed's optimizer as an optimizer of the model's parameters, state by state.

DeepSpeed's inner optimizer knows flat partitions only.  Here every parameter has its rank's part of
its fp32 copy and of its state, as live views.  A save reads them, a restore writes them.  The
elements that pad a partition belong to no state; DeepSpeed never uses them.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from autockpt.executors.sharding.adapters.deepspeed import Part, part_of
from autockpt.values.errors import ConfigError

MASTER = "fp32"
"""Key of the fp32 copy from which the optimizer computes the parameter."""

State = dict[str, Any]
"""Tensors, and the numbers that some optimizers count their steps with."""


class ZeroView(torch.optim.Optimizer):
    """The interface of an optimizer that `attach` needs; it cannot step."""

    def __init__(self, zero: Any) -> None:
        # Not torch's own: it copies the groups, which must stay DeepSpeed's.
        self._zero = zero
        self.inner: torch.optim.Optimizer = zero.optimizer
        """The optimizer that steps."""
        groups = zip(self.inner.param_groups, _parameters(zero), strict=True)
        self.param_groups: Any = [_Group(group, params) for group, params in groups]
        self._state = _States(zero, [p for group in self.param_groups for p in group["params"]])

    @property
    def state(self) -> Any:  # type: ignore[override]
        """By parameter its state on this rank."""
        return self._state

    def refresh(self) -> None:
        """Makes ZeRO-3's small parameters, which are kept whole, equal to their restored parts.

        All ranks call it: it communicates.
        """
        kept = getattr(self._zero, "persistent_parameters", ())
        if kept:
            kept[0].all_gather(kept)

    def part(self, parameter: torch.Tensor) -> Part | None:
        """Where this rank's state of a parameter is; None when it has none."""
        return self._state.parts.get(parameter)


def _parameters(zero: Any) -> list[list[torch.Tensor]]:
    """The model's parameters of each group of the inner optimizer."""
    if hasattr(zero, "bit16_groups"):
        return [list(group) for group in zero.bit16_groups]
    found: list[list[torch.Tensor]] = [[] for _ in zero.optimizer.param_groups]
    for number, group in enumerate(zero.fp16_groups):
        found[zero.sub_group_to_group_id[number]] += group
    return found


class _Group(MutableMapping[str, Any]):
    """A group's own settings, with the model's parameters."""

    def __init__(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        self._group, self._parameters = group, parameters

    def __getitem__(self, key: str) -> Any:
        return self._parameters if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


class _States(MutableMapping[torch.Tensor, State]):
    """Views of the partitions; values put into it are copied into them."""

    def __init__(self, zero: Any, parameters: list[torch.Tensor]) -> None:
        found = ((parameter, part_of(zero, parameter)) for parameter in parameters)
        self.parts = {parameter: part for parameter, part in found if part is not None}
        self._inner: MutableMapping[Any, MutableMapping[str, Any]] = zero.optimizer.state
        self._views: dict[torch.Tensor, tuple[list[int], State]] = {}

    def __getitem__(self, parameter: torch.Tensor) -> State:
        part = self.parts[parameter]
        found = {MASTER: part.flat, **self._inner.get(part.flat, {})}
        ids = [id(value) for value in found.values()]
        kept = self._views.get(parameter)
        if kept is None or kept[0] != ids:
            views = {key: part.of(v) if _is_flat(v) else v for key, v in found.items()}
            kept = self._views[parameter] = ids, views
        return kept[1]

    def __setitem__(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        part = self.parts[parameter]
        if MASTER not in values:  # another optimizer saved it: the parameter is all there is
            part.of(part.flat).copy_(part.trained(parameter))
        for key, value in values.items():
            if not _is_flat(value):
                self._inner.setdefault(part.flat, {})[key] = value
                continue
            if value.numel() != part.holding.count:
                raise ConfigError(
                    f"DeepSpeed: {key} has {value.numel()} elements, this rank's part of "
                    f"{part.holding.global_shape} has {part.holding.count}"
                )
            part.of(self._flat(part, key)).copy_(value.view(-1))

    def _flat(self, part: Part, key: str) -> torch.Tensor:
        """The partition or its state; made here before the first step has made it."""
        if key == MASTER:
            return part.flat
        state = self._inner.setdefault(part.flat, {})
        if key not in state:
            state[key] = torch.zeros_like(part.flat).detach()
        flat: torch.Tensor = state[key]
        return flat

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise ConfigError(
            "DeepSpeed: the state of one parameter cannot be taken out of a partition"
        )

    def clear(self) -> None:
        """Keeps the partitions: they are written over."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def _is_flat(value: Any) -> bool:
    """It has an element for every one of the partition; steps are scalars or numbers."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
