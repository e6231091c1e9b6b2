"""Ranks of process groups, in the numbers of the world."""

from typing import Any

import torch


def ranks_of(group: Any) -> tuple[int, ...]:
    """Ranks of a group, ascending; (): the group is this rank alone."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()
