"""The buckets in which DistributedDataParallel sums gradients, stored and put back.

A reducer sums gradients bucket by bucket.  Three or more ranks add a gradient in an order that
depends on its place in the bucket.  After the first iteration of a process it groups the
gradients anew, in the order in which they came.  A resumed process would begin with the first
grouping, and sum other last bits in its first iteration.  So a checkpoint holds the grouping, and
the reducer of a resumed process is made with it.

Torch has no public call for that.  `DistributedDataParallel` makes its reducer in the same way in
`__setstate__`.  Where a version of torch does so otherwise, the grouping stays as it is.

A script may wrap its model after `attach`.  So the constructor of `DistributedDataParallel`, which
all ranks call together, tells of each wrapper that it made.
"""

import contextlib
import functools
import gc
import logging
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Layout = list[list[int]]
"""The parameters of each bucket, by their number in the reducer."""
_log = logging.getLogger(__name__)


class GradientBuckets:
    """The reducers in the models of a session, by the names of their modules."""

    def __init__(
        self, models: Mapping[str, torch.nn.Module], *, has_trained: Callable[[], bool]
    ) -> None:
        """`has_trained`: an iteration has ended in this process."""
        self._models, self._has_trained = models, has_trained
        self._wrappers: dict[str, list[weakref.ref[Any]]] = {}
        """By name; more than one only where the script has wrapped a module twice."""
        self._known: dict[int, Layout] = {}
        """By id of a reducer that has grouped the gradients anew: it does that once."""
        self._saved: Mapping[str, Layout] | None = None
        """As put back, for wrappers that come yet; None: nothing was put back."""
        if _ranks() > 2:
            self._wrappers = _wrappers_of(models)
        if torch.distributed.is_available():
            _tell_of_wrappers()
            _watching.add(self)

    def layouts(self) -> dict[str, Layout]:
        """Of the reducers that have grouped the gradients anew."""
        return {
            name: layout
            for name in self._wrappers
            for wrapper in self._living(name)
            if (layout := self._layout(wrapper))
        }

    def put_back(self, saved: Mapping[str, Layout]) -> list[str]:
        """Groups the gradients as they were; the names where that cannot be done.

        All ranks of a reducer call this together, also one without a layout: they agree first.
        """
        left, self._saved = set(), saved
        self._known.clear()
        for name in sorted(self._wrappers):
            for wrapper in self._living(name):
                if not _regroup(wrapper, saved.get(name, [])) and name in saved:
                    left.add(name)
        return sorted(left)

    def take_wrapper(self, wrapper: Any) -> None:
        """One that the script has just made, on all of its ranks."""
        name = _name_of(wrapper, _names(self._models))
        if name is None or wrapper.process_group.size() <= 2:
            return
        if name in self._wrappers:  # the former one may be gone, with its reducer's id
            self._known.clear()
        self._wrappers.setdefault(name, []).append(weakref.ref(wrapper))
        if self._saved is not None and not self._has_trained():
            _regroup(wrapper, self._saved.get(name, []))

    def _living(self, name: str) -> list[Any]:
        found = [reference() for reference in self._wrappers[name]]
        return [wrapper for wrapper in found if wrapper is not None]

    def _layout(self, wrapper: Any) -> Layout:
        if wrapper.find_unused_parameters and not wrapper.static_graph:
            return []  # it keeps its first grouping
        number = id(wrapper.reducer)
        if number not in self._known and (layout := _layout(wrapper)):
            self._known[number] = layout
        return self._known.get(number, [])


def _ranks() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _wrappers_of(models: Mapping[str, torch.nn.Module]) -> dict[str, list[weakref.ref[Any]]]:
    """Every DistributedDataParallel around a module of the models, by the module's name.

    All ranks must find the same ones, so wrappers that nothing refers to any more go first.
    """
    names = _names(models)
    found = _around(names)
    if any(len(wrappers) > 1 for wrappers in found.values()):
        del found
        gc.collect()
        found = _around(names)
    return {name: [weakref.ref(one) for one in wrappers] for name, wrappers in found.items()}


def _names(models: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Of every module of the models, by its id."""
    return {
        id(module): f"{prefix}.{name}" if name else prefix
        for prefix, model in models.items()
        for name, module in model.named_modules()
    }


def _name_of(wrapper: Any, names: Mapping[int, str]) -> str | None:
    """That of the module in it, or of the first part that is in a model; None: it has none."""
    parts = (names.get(id(module)) for module in wrapper.module.modules())
    return next((name for name in parts if name is not None), None)


_watching: weakref.WeakSet[GradientBuckets] = weakref.WeakSet()


@functools.cache
def _tell_of_wrappers() -> None:
    """From now on, of each that is made in this process."""
    from torch.nn.parallel import DistributedDataParallel

    real = DistributedDataParallel.__init__

    @functools.wraps(real)
    def made(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        for buckets in list(_watching):
            try:
                buckets.take_wrapper(self)
            except Exception as error:
                _log.debug("the buckets of a wrapper are not kept: %r", error)

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]


def _around(names: Mapping[int, str]) -> dict[str, list[Any]]:
    from torch.nn.parallel import DistributedDataParallel

    found: dict[str, list[Any]] = {}
    for one in gc.get_objects():
        if issubclass(type(one), DistributedDataParallel):
            with contextlib.suppress(
                AttributeError, RuntimeError, ValueError
            ):  # half made, or over
                name = _name_of(one, names)
                if name is not None and one.process_group.size() > 2:
                    found.setdefault(name, []).append(one)
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
    # Ranks that grouped differently would sum different gradients.
    mark = zlib.crc32(repr(layout).encode()) >> 2
    if not _agreed(wrapper, None if made is None else mark):
        return False
    assert made is not None
    done = False
    with contextlib.suppress(Exception):
        _make_reducer(wrapper, *made, layout=layout)
        done = True
    if _agreed(wrapper, mark if done else None):
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


def _agreed(wrapper: Any, mark: int | None) -> bool:
    """Whether all ranks of a reducer have the same mark, below 2**30; None: this one has none."""
    device = next(iter(wrapper.module.parameters())).device
    own = -1 if mark is None else mark
    ends = torch.tensor([own, -own], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MIN, group=wrapper.process_group)
    least, most = ends.tolist()
    return bool(least == -most and least >= 0)
