"""What wrappers know of the plain parameters inside them.

One function per kind of wrapper: module -> (parameter, holding) of those it speaks for.  Modules
are seen as the script attached them, wrappers included.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from autockpt.executors.sharding.holdings import Holding, whole_of

Found = Iterator[tuple[torch.Tensor, Holding]]


def of_ddp(module: torch.nn.Module) -> Found:
    """DistributedDataParallel keeps its parameters equal on all ranks of its group."""
    from torch.nn.parallel import DistributedDataParallel

    for wrapped in module.modules():
        if isinstance(wrapped, DistributedDataParallel):
            holders = _ranks(wrapped.process_group)
            ignored = set(wrapped.parameters_to_ignore)
            for name, parameter in wrapped.module.named_parameters():
                if name not in ignored and not hasattr(parameter, "to_local"):
                    yield parameter, whole_of(parameter, holders)


def _ranks(group: object) -> tuple[int, ...]:
    ranks = torch.distributed.get_process_group_ranks(group)  # type: ignore[arg-type]
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


COLLECTORS: tuple[Callable[[torch.nn.Module], Found], ...] = (of_ddp,)


def declared(modules: Iterable[torch.nn.Module]) -> dict[int, Holding]:
    """By id of a parameter what its wrapper knows; the first collector that knows it wins."""
    found: dict[int, Holding] = {}
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    for module in modules:
        for collect in COLLECTORS:
            for parameter, holding in collect(module):
                found.setdefault(id(parameter), holding)
    return found
