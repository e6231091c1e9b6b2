"""State that is kept while a restart repeats work of the script, to be put back."""

import copy
from typing import Any

import torch

from autockpt.executors.state.live_state import Dispensable, LiveState, local_part
from autockpt.session.place.replay_check import state_digest


class HeldState:
    """Settings of optimizers and the state of other objects; of tensors only sums of bytes."""

    def __init__(self, live: LiveState, *, sums: bool = True) -> None:
        """`sums`: of all tensors, which reads them."""
        self._groups = {name: _settings(one) for name, one in live.optimizers.items()}
        self._others = {
            name: copy.deepcopy(one.state_dict())
            for name, one in live.others.items()
            if not isinstance(one, Dispensable)
        }
        self._sums = _sums(live) if sums else {}

    def put_back(self, live: LiveState) -> set[str]:
        """Names of the objects that had another state."""
        again = set()
        for name, state in self._others.items():
            if state_digest(live.others[name].state_dict()) != state_digest(state):
                live.others[name].load_state_dict(copy.deepcopy(state))
                again.add(name)
        for name, groups in self._groups.items():
            optimizer = live.optimizers[name]
            if state_digest(_settings(optimizer)) == state_digest(groups):
                continue
            again.add(name)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, value in settings.items():
                    if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                        group[key].copy_(value)  # a compiled step may hold this one
                    else:
                        group[key] = copy.deepcopy(value)
        return again

    def changed_tensors(self, live: LiveState) -> list[str]:
        """Names of parameters, buffers and optimizer state that were written to since."""
        now = _sums(live)
        return [name for name, total in self._sums.items() if now.get(name) != total]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group what is no parameter."""
    groups = ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    return [copy.deepcopy(group) for group in groups]


def _sums(live: LiveState) -> dict[str, int]:
    """The sum of each tensor's bytes: it changes with nearly every write, `.data` included."""
    named = {**live.inventory().locals, **{n: local_part(b) for n, b in live.buffers().items()}}
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        sums.setdefault(tensor.device, {})[name] = flat.sum(dtype=torch.int64)
    found: dict[str, int] = {}
    for each in sums.values():
        found |= zip(each, torch.stack([*each.values()]).tolist(), strict=True)  # one wait
    return found
