"""An optimizer as the skeletons of a checkpoint describe it, by parameter name.

Each rank of a pipeline has other parameters, each rank of a partitioned optimizer other state.  One
skeleton may not know all of it, so several are put together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autockpt.executors.state import state_tree
from autockpt.values.errors import CorruptCheckpointError


@dataclass(slots=True)
class SavedGroup:
    """A parameter group of one rank."""

    names: tuple[str, ...]
    values: Any
    """Skeleton of its settings."""


@dataclass(slots=True)
class SavedOptimizer:
    """An optimizer of all ranks whose skeletons were read; the home shard's word comes first."""

    groups: list[SavedGroup] = field(default_factory=list)
    """The groups, the home shard's first, in its order."""
    own_groups: int = 0
    """How many of them are the home shard's."""
    keys: dict[str, list[tuple[str, bool]]] = field(default_factory=dict)
    """By parameter the keys of its state, and whether each stood on the parameter's device."""
    irregular: dict[str, Any] = field(default_factory=dict)
    """By parameter the skeleton of state that is not only tensors."""
    loose: Any = field(default_factory=dict)
    """Skeleton of state under keys that are no parameters."""
    divided: bool = False
    """Parameters without state in the home shard may have it in others."""

    def knows(self, parameter: str) -> bool:
        """Some group that was read has this parameter."""
        return any(parameter in group.names for group in self.groups)

    def tensors_of(self, prefix: str, parameter: str) -> Iterator[str]:
        """Names of the tensors that are the state of a parameter."""
        for key, _ in self.keys.get(parameter, ()):
            yield f"{prefix}.{parameter}.{key}"
        yield from state_tree.tensor_names(self.irregular.get(parameter))

    def parts_of_compounds(self, parameter: str) -> set[str]:
        """Names of tensors in others that are the state of a parameter: never divided with it."""
        return state_tree.compound_names(self.irregular.get(parameter))

    def private_tensors(self) -> Iterator[str]:
        """Names of tensors in the home shard's settings and loose state."""
        for group in self.groups[: self.own_groups]:
            yield from state_tree.tensor_names(group.values)
        yield from state_tree.tensor_names(self.loose)

    def group_of(self, names: tuple[str, ...]) -> SavedGroup | None:
        """The group that has all of these parameters, alone or with others that agree with it."""
        found = [group for group in self.groups if set(names) & set(group.names)]
        if not found or set(names) - {name for group in found for name in group.names}:
            return None
        return found[0] if all(g.values == found[0].values for g in found) else None


def add_skeleton(
    saved: SavedOptimizer, data: Any, called: Callable[[str], str] = lambda name: name
) -> None:
    """Takes in what one rank's skeleton says; `called`: the name of a stored parameter here.

    Raises CorruptCheckpointError.
    """
    try:
        groups = [_group(row, called) for row in data["groups"]]
        if not saved.groups:
            saved.own_groups, saved.loose = len(groups), data.get("loose", {})
            saved.divided = bool(data.get("divided", False))
        saved.groups += groups
        for keys, places in data["regular"].items():
            marks = [mark.rsplit(":", 1) for mark in keys.split(" ")]
            for g, i in places:
                saved.keys.setdefault(groups[g].names[i], [(k, m == "d") for k, m in marks])
        for name, values in data["irregular"].items():
            saved.irregular.setdefault(called(name), values)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"image: its optimizer is malformed: {error!r:.200}") from None


def _group(row: Any, called: Callable[[str], str]) -> SavedGroup:
    names = row["params"]
    if not isinstance(names, list):
        names = str(names).split("\n") if names else []
    return SavedGroup(tuple(called(str(name)) for name in names), row["values"])
