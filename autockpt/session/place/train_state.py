"""Plain values that a training carries from one iteration or epoch to the next."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from autockpt.values.errors import ConfigError


class TrainState:
    """Values of the script that each checkpoint contains: a best accuracy, a patience, a rate.

        state = autockpt.TrainState(best=0.0, bad_epochs=0)
        ckpt = autockpt.attach(model=model, optimizer=optimizer, state=state)
        state.best = max(state.best, accuracy)

    A value is a number, a string, a bool, None, a tensor, an array, or a list or dict of them.  A
    restart finds the values of its checkpoint; a value that the checkpoint lacks stays as it is.
    """

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError for a name that the object itself uses."""
        for name in values:
            if hasattr(type(self), name):
                raise ConfigError(f"TrainState({name}=...): this name is taken; choose another one")
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dict(self.__dict__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them back; a tensor goes to the device of the one that it replaces."""
        for name, value in state_dict.items():
            former = self.__dict__.get(name)
            if isinstance(former, torch.Tensor) and isinstance(value, torch.Tensor):
                value = value.to(former.device)
            self.__dict__[name] = copy.deepcopy(value)

    def __repr__(self) -> str:
        """As it was made."""
        return f"TrainState({', '.join(f'{k}={v!r:.40}' for k, v in self.__dict__.items())})"
