"""Optimizers whose checkpoint numbers its parameters: the attached optimizer's order names them.

torch's own state dicts have numbers where most trainers write them.  An import keeps the numbers;
at a restore the groups of the attached optimizer say which parameter each of them is.
"""

from collections.abc import Callable, Mapping
from typing import Any

from autockpt.executors.restore.plan.state_index import LiveOptimizer
from autockpt.executors.restore.plan.stored import Stored
from autockpt.executors.state import state_tree
from autockpt.values.errors import ConfigError

NUMBER = "#"
"""In front of a number that stands for a name."""
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""Keys of state with the shape of its parameter, in torch's optimizers."""


def names_by_number(
    prefix: str, data: Mapping[str, Any], live: LiveOptimizer, stored: Stored
) -> Callable[[str], str] | None:
    """The name of each number; None where the checkpoint has names.

    Raises ConfigError where the attached optimizer has other groups or shapes.
    """
    rows = [row["params"] for row in data["groups"]]
    numbers = [name for row in rows if isinstance(row, list) for name in row]
    if not numbers or not all(str(name).startswith(NUMBER) for name in numbers):
        return None
    saved, own = [len(row) for row in rows], [len(group) for group in live.groups]
    if saved != own:
        raise ConfigError(
            f"{prefix}: the checkpoint numbers its parameters, in groups of "
            f"{', '.join(map(str, saved))}; the attached optimizer has groups of "
            f"{', '.join(map(str, own))}. Make the groups as the training of the checkpoint did"
        )
    called = dict(zip(numbers, (name for group in live.groups for name in group), strict=True))
    for number, name in called.items():
        _require_shape(prefix, number, name, data["irregular"].get(number), live, stored)
    return lambda stored_name: called.get(stored_name, stored_name)


def _require_shape(
    prefix: str, number: str, name: str, values: Any, live: LiveOptimizer, stored: Stored
) -> None:
    expected = live.parameters[name].holding.global_shape
    for tensor in state_tree.tensor_names(values):
        pieces = stored.pieces(tensor)
        if tensor.rpartition(".")[2] in _SHAPED and pieces and pieces[0].global_shape != expected:
            raise ConfigError(
                f"{prefix}: parameter {number} of the checkpoint has the shape "
                f"{list(pieces[0].global_shape)}, and {name}, which has that number in the "
                f"attached optimizer, has {list(expected)}. Give it its parameters in the order "
                "of the training that wrote the checkpoint"
            )
