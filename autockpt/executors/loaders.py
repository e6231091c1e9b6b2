"""Where the data stands: resumes an epoch at the right batch, whoever shuffles it.

A loader with `state_dict` says itself where it is.  A plain torch DataLoader draws its shuffle from
the global generator when its iterator is made, so that generator's state is kept from that moment;
the iterator is rebuilt under it and skips by index without loading anything.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autockpt.executors.state import Stateful
from autockpt.values.errors import ConfigError


class DataPosition:
    """Iterates a loader epoch after epoch and can say and take back where it is."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        self.index = 0
        """Batches handed out in this epoch."""
        self._shuffle: Any = None
        """Generator states from the moment the epoch's iterator was made."""
        self._new_workers = True
        """This epoch drew a seed for workers; with persistent ones only the first epoch does."""
        self._plain: Any = loader
        """What plain epochs iterate: after a resume, the clone that has the persistent workers."""
        self._resuming = False
        self._stateful = isinstance(loader, Stateful)
        if not self._stateful:
            _require_plain_loader(loader)

    def state(self) -> dict[str, Any]:
        """Position as of now: between two batches."""
        state: dict[str, Any] = {"epoch": self.epoch, "index": self.index}
        if self._stateful:
            state["loader"] = self.loader.state_dict()
        else:
            state["shuffle"], state["new_workers"] = self._shuffle, self._new_workers
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave; the next iteration goes on from there."""
        self.epoch, self.index = state["epoch"], state["index"]
        if self._stateful != ("loader" in state):
            raise ConfigError(
                "data: the checkpoint was made with another kind of loader; attach the same kind "
                "(with or without state_dict) that wrote it"
            )
        if self._stateful:
            self.loader.load_state_dict(state["loader"])
        else:
            self._shuffle, self._new_workers = state["shuffle"], state["new_workers"]
            self._resuming = self._shuffle is not None

    def batches(self) -> Iterator[Any]:
        """Batches without end, from the current position."""
        while True:
            before = (self.epoch, self.index)
            for batch in self._epoch():
                self.index += 1
                yield batch
            if self.index == 0 and before == (self.epoch, 0):
                raise ConfigError("data: the loader gave no batch in a whole epoch; is it empty?")
            self.epoch, self.index = self.epoch + 1, 0

    def prepare(self) -> None:
        """Rebuilds the iterator of a resumed epoch; uses the global generator as it was then."""
        if not self._stateful and self._resuming:
            self._rebuilt = self._plain_epoch()

    _rebuilt: Iterator[Any] | None = None

    def _epoch(self) -> Iterator[Any]:
        if self._rebuilt is not None:
            rebuilt, self._rebuilt = self._rebuilt, None
            return rebuilt
        if self._stateful:
            return iter(self.loader)
        self._tell_sampler()
        return self._plain_epoch()

    def _tell_sampler(self) -> None:
        """DistributedSampler and its like shuffle by epoch."""
        sampler: Any = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)

    def _plain_epoch(self) -> Iterator[Any]:
        generators = _generators(self.loader)
        if not self._resuming:
            self._shuffle = [torch.get_rng_state(), *(g.get_state() for g in generators)]
            self._new_workers = not _keeps_workers(self._plain) or self._plain._iterator is None
            return iter(self._plain)
        self._resuming = False

        def as_then() -> None:
            torch.set_rng_state(self._shuffle[0])
            for generator, state in zip(generators, self._shuffle[1:], strict=True):
                generator.set_state(state)

        sampler: Any = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        clone, indices = _skipping(self.loader, self.index)
        if not self._new_workers:
            indices.before_first = as_then  # the new iterator draws a seed that the old one did not
        as_then()
        iterator = iter(clone)
        # Samplers draw with their first index, which a loader without workers asks for only when
        # the training goes on: by then the generators are those of the boundary again.
        indices.start()
        if _keeps_workers(clone):
            self._plain = clone
        return iterator


class _SkipFirst:
    """An index sampler whose first iteration leaves out its first `count` items."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._newest: _Started | None = None
        self._begun = False
        self.before_first: Callable[[], None] = lambda: None

    def __iter__(self) -> "_Started":
        self._newest = _Started(self._begin)
        return self._newest

    def __len__(self) -> int:
        return max(0, len(self._sampler) - (0 if self._begun else self._count))

    def start(self) -> None:
        """Skips now instead of with the first item, if that has not happened."""
        assert self._newest is not None
        self._newest.start()

    def _begin(self) -> Iterator[Any]:
        if not self._begun:
            self.before_first()
        items: Iterator[Any] = iter(self._sampler)
        # Not in later epochs of a loader with persistent workers.
        count, self._begun = 0 if self._begun else self._count, True
        for _ in range(count):
            next(items, None)
        return items


class _Started:
    """An iterator that begins at its first item or on demand (loaders make some and drop them)."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._items: Iterator[Any] | None = None

    def start(self) -> None:
        """Begins, if that has not happened."""
        if self._items is None:
            self._items = self._begin()

    def __iter__(self) -> "_Started":
        return self

    def __next__(self) -> Any:
        self.start()
        assert self._items is not None
        return next(self._items)


def _skipping(loader: "DataLoader[Any]", count: int) -> "tuple[DataLoader[Any], _SkipFirst]":
    """The loader without its first batches.  Attributes are set behind DataLoader's own guard."""
    clone = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = _SkipFirst(getattr(loader, name), count)
    clone.__dict__[name] = indices
    clone.__dict__["_iterator"] = None
    return clone, indices


def _keeps_workers(loader: "DataLoader[Any]") -> bool:
    return bool(loader.persistent_workers and loader.num_workers > 0)


def _generators(loader: "DataLoader[Any]") -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for owner in (loader, loader.sampler, loader.batch_sampler):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def _require_plain_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"attach(data=...): a {type(loader).__qualname__} can neither say where it is "
            "(state_dict/load_state_dict) nor be skipped by index; add both methods, or pass a "
            "torch DataLoader, or leave `data` out and restore the position from ckpt.step_count"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "attach(data=...): a DataLoader over an IterableDataset cannot be skipped by index; "
            "use torchdata's StatefulDataLoader or give the data set state_dict/load_state_dict"
        )
