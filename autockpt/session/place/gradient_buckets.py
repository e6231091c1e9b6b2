"""The buckets in which DistributedDataParallel sums gradients, stored and put back.

A reducer sums gradients bucket by bucket.  Three or more ranks add a gradient in an order that
depends on its place in the bucket.  After the first iteration of a process it groups the
gradients anew, in the order in which they came.  A resumed process would begin with the first
grouping, and sum other last bits in its first iteration.  So a checkpoint holds the grouping, and
the reducer of a resumed process is made with it.

Torch has no public call for that.  `DistributedDataParallel` makes its reducer in the same way in
`__setstate__`.  Where a version of torch does so otherwise, the grouping stays as it is.
"""

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

Layout = list[list[int]]
"""The parameters of each bucket, by their number in the reducer."""
_log = logging.getLogger(__name__)


class GradientBuckets:
    """The reducers in the models of a session, by the names of their modules."""

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._models = models
        self._wrappers: dict[str, weakref.ref[Any]] = {}
        self._known: dict[str, tuple[int, Layout]] = {}
        """(id of the reducer, its layout), by name; a layout changes once."""
        if _ranks() > 2:
            self._wrappers = {
                name: weakref.ref(wrapper) for name, wrapper in _wrappers_of(models).items()
            }

    def layouts(self) -> dict[str, Layout]:
        """Of the reducers that have grouped the gradients anew."""
        found: dict[str, Layout] = {}
        for name, reference in self._wrappers.items():
            wrapper = reference()
            if wrapper is None or (wrapper.find_unused_parameters and not wrapper.static_graph):
                continue  # gone, or it keeps its first grouping
            known = self._known.get(name)
            if known is None or known[0] != id(wrapper.reducer):
                layout = _layout(wrapper)
                if not layout:
                    continue
                known = self._known[name] = id(wrapper.reducer), layout
            found[name] = known[1]
        return found

    def put_back(self, saved: Mapping[str, Layout]) -> list[str]:
        """Groups the gradients as they were; the names where that cannot be done.

        All ranks of a reducer call this together, also one without a layout: they agree first.
        """
        left = []
        for name, reference in sorted(self._wrappers.items()):
            wrapper = reference()
            if wrapper is not None and not _regroup(wrapper, saved.get(name, [])):
                left += [name] if name in saved else []
        return left


def _ranks() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _wrappers_of(models: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Every DistributedDataParallel around a module of the models, by the module's name."""
    from torch.nn.parallel import DistributedDataParallel

    names = {
        id(module): f"{prefix}.{name}" if name else prefix
        for prefix, model in models.items()
        for name, module in model.named_modules()
    }
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), DistributedDataParallel):
            with contextlib.suppress(AttributeError):  # one that is half made
                module = one.module
                if id(module) in names and one.process_group.size() > 2:
                    found[names[id(module)]] = one
    return found


def _layout(wrapper: Any) -> Layout:
    """As the reducer groups gradients now; empty: not anew yet, or this torch does not say."""
    try:
        told = wrapper._get_ddp_logging_data()
        if not told.get("has_rebuilt_buckets"):
            return []
        text = str(told.get("rebuilt_per_bucket_param_indices", ""))
        return [[int(word) for word in one.split()] for one in text.split(",") if one.split()]
    except Exception as error:
        _log.debug("the buckets of DDP are not known: %r", error)
        return []


def _regroup(wrapper: Any, layout: Layout) -> bool:
    """Whether all ranks of a reducer have one with this layout now."""
    made = None
    with contextlib.suppress(Exception):
        made = _prepared(wrapper, layout)
    if not _agreed(wrapper, made is not None):
        return False
    assert made is not None
    done = False
    with contextlib.suppress(Exception):
        _make_reducer(wrapper, *made, layout=layout)
        done = True
    if _agreed(wrapper, done):
        return True
    _make_reducer(wrapper, *made, layout=None)  # as it was when the script made it
    return False


def _prepared(wrapper: Any, layout: Layout) -> tuple[list[Any], list[bool]] | None:
    """(parameters, whether each has sparse gradients); None: it cannot be done."""
    plain = wrapper.mixed_precision is None and not getattr(wrapper, "_use_python_reducer", False)
    own_hook = bool(wrapper._get_ddp_logging_data().get("comm_hook")) and not wrapper._comm_hooks
    parameters, sparse = wrapper._build_params_for_reducer()
    numbers = sorted(number for one in layout for number in one)
    fits = bool(layout) and numbers == list(range(len(parameters)))
    if not plain or own_hook or not fits:
        return None
    return parameters, sparse


def _make_reducer(
    wrapper: Any, parameters: list[Any], sparse: list[bool], *, layout: Layout | None
) -> None:
    """As `DistributedDataParallel.__setstate__` does."""
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    with contextlib.nullcontext() if layout is None else _grouped(layout):
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    dist: Any = torch.distributed
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)


@contextlib.contextmanager
def _grouped(layout: Layout) -> Iterator[None]:
    """Reducers that are made in it group gradients so."""
    dist: Any = torch.distributed
    real = dist._compute_bucket_assignment_by_size

    def grouped(*arguments: Any, **more: Any) -> tuple[Layout, list[int]]:
        _, limits = real(*arguments, **more)
        # The caller turns both around.
        return layout[::-1], [limits[-1]] * len(layout)

    dist._compute_bucket_assignment_by_size = grouped
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = real


def _agreed(wrapper: Any, here: bool) -> bool:
    """Whether it is so on all ranks of a reducer."""
    device = next(iter(wrapper.module.parameters())).device
    flag = torch.tensor([int(here)], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=wrapper.process_group)
    return bool(flag.item())
