"""The knowledge of wrappers about the plain parameters inside them.

One function per kind of wrapper: module -> (parameter, holding) of those it speaks for.  Modules
are seen as the script attached them, wrappers included.  DTensors (FSDP2, HSDP, tensor parallel
and any mesh of them) need no collector: `holding_of` asks them.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from autockpt.executors.sharding.adapters.deepspeed import of_deepspeed
from autockpt.executors.sharding.adapters.fsdp1 import of_fsdp1
from autockpt.executors.sharding.adapters.megatron import of_megatron
from autockpt.executors.sharding.fqns import Assembled
from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.executors.sharding.process_groups import ranks_of

Found = Iterator[tuple[torch.Tensor, LocalShard]]


def of_ddp(module: torch.nn.Module) -> Found:
    """DistributedDataParallel keeps its parameters equal on all ranks of its group."""
    from torch.nn.parallel import DistributedDataParallel

    for wrapped in module.modules():
        if isinstance(wrapped, DistributedDataParallel):
            holders = ranks_of(wrapped.process_group)
            ignored = set(wrapped.parameters_to_ignore)
            for name, parameter in wrapped.module.named_parameters():
                if name not in ignored and not hasattr(parameter, "to_local"):
                    yield parameter, whole_of(parameter, holders)


COLLECTORS: tuple[Callable[[torch.nn.Module], Found], ...] = (
    of_fsdp1,
    of_deepspeed,
    of_megatron,
    of_ddp,
)
"""Collectors that know more come first: DDP shows only that its ranks are alike."""


def declared(modules: Iterable[torch.nn.Module]) -> dict[int, LocalShard]:
    """By id of a parameter what its wrapper knows; the first collector that knows it wins.

    Raises ConfigError for a wrapper whose tensors are no parts of the model's.
    """
    found: dict[int, LocalShard] = {}
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    for module in modules:
        for part in module.parts if isinstance(module, Assembled) else (module,):
            for collect in COLLECTORS:
                for parameter, holding in collect(part):
                    found.setdefault(id(parameter), holding)
    return found
