"""The chunk order of a torch pipeline schedule, read from torch's own schedule objects.

torch computes the order of every rank when a schedule is made, before a process group is needed.
So a schedule can be read without a job, with stages that only know their position.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from autockpt.values.errors import ConfigError
from autockpt.values.pipeline import Order, gpipe_orders, one_f_one_b_orders, parse_order

LOOPS = {"GPipe": gpipe_orders, "1F1B": one_f_one_b_orders}
"""Schedules that are loops in torch's source and have no order that they run."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Rank r has the stages r and 2p - 1 - r."""


class _Place:
    """A stage as far as the making of a schedule looks at it."""

    def __init__(self, stage: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.has_backward, self.group, self.device = True, None, "cpu"
        self.submod, self.stage_index_to_group_rank = torch.nn.Identity(), None


def planned_orders(
    name: str, ranks: int, microbatches: int, *, stages_per_rank: int = 2
) -> tuple[Order, ...]:
    """The orders of a schedule by torch's name for it: 1F1B, GPipe, Interleaved1F1B, LoopedBFS, ...

    Raises ConfigError when torch does not know it, or refuses these numbers.
    """
    if name in LOOPS:
        return LOOPS[name](ranks, microbatches)
    stages = 2 * ranks if name in V_SHAPED else stages_per_rank * ranks
    own = (0, stages - 1) if name in V_SHAPED else range(0, stages, ranks)
    try:
        kind: Any = schedules.get_schedule_class(name)
        made = kind([_Place(s, 0, ranks, stages) for s in own], microbatches, loss_fn=_no_loss)
    except ValueError as error:
        raise ConfigError(f"pipeline schedule {name!r}: {_reason(name, error)}") from None
    return orders_of(made)


def _reason(name: str, error: ValueError) -> str:
    """Return torch's complaint; for an unknown name, the names that it knows."""
    if not str(error).startswith("Unknown schedule name"):
        return str(error)
    found = re.search(r"\[(.*)\]", str(error))
    listed = re.findall(r"'(\w+)'", found.group(1)) if found else []
    names = [one for one in listed if not one.startswith("PipelineSchedule")]
    return f"unknown; torch knows {', '.join(dict.fromkeys([*names, *LOOPS]))}"


def orders_of(schedule: Any) -> tuple[Order, ...]:
    """Return the chunks of each rank under a torch schedule object, a live one too."""
    name = schedule_name(schedule)
    if name in LOOPS:
        return LOOPS[name](schedule._num_stages, schedule._n_microbatches)
    table: dict[int, Sequence[Any]] = schedule.pipeline_order_with_comms
    return tuple(parse_order(map(str, table[rank])) for rank in sorted(table))


def schedule_name(schedule: Any) -> str:
    """torch's name for a schedule object."""
    return type(schedule).__name__.removeprefix("Schedule")


def _no_loss(output: Any, target: Any) -> Any:
    raise AssertionError("a schedule that was only planned does not run")
