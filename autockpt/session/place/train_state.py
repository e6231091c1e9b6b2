"""Plain values that a training carries from one iteration or epoch to the next."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from autockpt.executors.state.live_state import SeparateValues
from autockpt.session.place.script.refill import refilled
from autockpt.values.errors import ConfigError


class TrainState(SeparateValues):
    """Values of the script that each checkpoint contains: a best accuracy, a patience, a rate.

        state = autockpt.TrainState(best=0.0, bad_epochs=0)
        ckpt = autockpt.attach(model=model, optimizer=optimizer, state=state)
        state.best = max(state.best, accuracy)

    A value is a number, a string, a bool, None, a tensor, an array, or a list, deque or dict of
    them.  A restart finds the values of its checkpoint; a value that the checkpoint lacks stays as
    it is.  `TrainState.of` keeps attributes of an object of the script's.

    A value of another kind that comes in the middle of a run is in no checkpoint.  All else is
    saved, autockpt says so again and again, and a restart says that it lacks the value.
    """

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError for a name that the object itself uses."""
        for name in values:
            if hasattr(type(self), name):
                raise ConfigError(f"TrainState({name}=...): this name is taken; choose another one")
        self.__dict__.update(values)

    @staticmethod
    def of(owner: Any, *names: str) -> "AttributeState":
        """Each checkpoint contains these attributes of `owner`, which may be dotted.

            state = autockpt.TrainState.of(trainer, "global_step", "stopper.best")

        Values and restart as above; lists, deques and dicts stay the same objects.  Raises
        ConfigError where there are no names, or no attribute of a name.
        """
        return AttributeState(owner, names)

    def state_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dict(self.__dict__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them back; a tensor goes to the device of the one that it replaces."""
        for name, value in state_dict.items():
            self.__dict__[name] = _put_back(self.__dict__.get(name), value)

    def __repr__(self) -> str:
        """As it was made."""
        return f"TrainState({', '.join(f'{k}={v!r:.40}' for k, v in self.__dict__.items())})"


class AttributeState(SeparateValues):
    """Attributes of an object of the script's, read and written where they are."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self._owner, self.names = owner, names
        if not names:
            raise ConfigError(
                'TrainState.of(object): which attributes? As in TrainState.of(trainer, "best")'
            )
        for name in names:
            self._require(name)

    def place_of(self, name: str) -> tuple[Any, str]:
        """The object that has the attribute at present, and the last part of the name.

        Raises ConfigError where an object on the way is missing.
        """
        holder = self._owner
        *path, last = name.split(".")
        for part in path:
            try:
                holder = _part(holder, part)
            except (AttributeError, LookupError, ValueError):
                raise ConfigError(
                    f"TrainState.of(..., {name!r}): a {type(holder).__qualname__} has no "
                    f"attribute or item {part}; assign it before, or correct the name"
                ) from None
        return holder, last

    def kept(self, name: str) -> tuple[int, str]:
        """(id of the object, attribute) of a name."""
        holder, last = self.place_of(name)
        return id(holder), last

    def state_dict(self) -> dict[str, Any]:
        """The values by name; one whose object is missing is left out."""
        absent = self.absent_values()
        places = {name: self.place_of(name) for name in self.names if name not in absent}
        return {name: getattr(holder, last) for name, (holder, last) in places.items()}

    def absent_values(self) -> dict[str, str]:
        """By name of a value that is not there now the reason."""
        found: dict[str, str] = {}
        for name in self.names:
            try:
                self._require(name)
            except ConfigError as error:
                found[name] = str(error)
        return found

    def _require(self, name: str) -> None:
        """Raises ConfigError where an object on the way, or the attribute itself, is missing."""
        holder, last = self.place_of(name)
        if not hasattr(holder, last):
            raise ConfigError(
                f"TrainState.of(..., {name!r}): a {type(holder).__qualname__} has no attribute "
                f"{last}; assign it before, or correct the name"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes back the values that are still named; a tensor goes to the device of the former."""
        for name in self.names:
            if name in state_dict:
                holder, last = self.place_of(name)
                setattr(holder, last, _put_back(getattr(holder, last, None), state_dict[name]))


def _part(holder: Any, name: str) -> Any:
    """Its attribute, or its item where it is a list, a tuple or a dict."""
    if isinstance(holder, list | tuple):
        return holder[int(name)]
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _put_back(former: Any, value: Any) -> Any:
    """A value like `former`, which is the same object where it is a list, a deque or a dict."""
    if isinstance(former, torch.Tensor) and isinstance(value, torch.Tensor):
        return copy.deepcopy(value.to(former.device))
    value = copy.deepcopy(value)
    return refilled(former, value) if type(former) is type(value) else value
