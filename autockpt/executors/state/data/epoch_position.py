"""A position whose epochs begin and end when the loop of another says so."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.data.loader_rng import forget
from autockpt.executors.state.data.sampler_state import sampler_of
from autockpt.executors.state.data.shuffle_rng import (
    others_of,
    put_back,
    require_generators,
    shuffle_of,
)
from autockpt.executors.state.rng import rng_mark


class EpochPosition(DataPosition):
    """A position whose epochs begin and end when the loop of another says so."""

    _sampler_epoch: int | None = None
    """The epoch that the framework had set on the sampler when the epoch began."""
    _sampler_then: int | None = None
    """The other one that it had set at the boundary, until the order of this epoch is drawn."""

    @property
    def under_way(self) -> bool:
        """A resumed epoch goes on."""
        return self._resuming or self._going_on

    def moved(self, batch: Any) -> Any:
        """Where the framework's loader would have put it."""
        return self._moved(batch)

    def own_state(self) -> Any:
        """Of a loader that has one."""
        return self._own_state()

    _made: list[Any] | None = None
    """Random numbers when the iterator of an epoch had been made, until its first batch."""
    _late: list[Any] | None = None
    """State of generators before the first batch, if they were used since the iterator was made."""

    def begin(self) -> Iterator[Any]:
        """The iterator of the epoch, or of its rest."""
        if not self.under_way:
            self._late = None
        iterator = self._begin()
        self._made = rng_mark()
        return iterator

    def draw(self) -> None:
        """The order is about to be drawn, where no worker has asked for it."""
        made, self._made = self._made, None
        if made is not None and made != rng_mark() and self.by_index and not self._has_workers:
            self._late = [shuffle_of(self.loader), others_of(self.loader)]

    def _before_order(self) -> None:
        if self._late is not None:
            put_back(self.loader, *self._late)

    @property
    def _has_workers(self) -> bool:
        return bool(getattr(self.loader, "num_workers", 0))

    @property
    def is_undrawn(self) -> bool:
        """A resumed epoch has an iterator, and its order will be drawn with its first batch."""
        within = self._resuming and not self.index and not self._start
        return within and self.by_index and not self._has_workers

    def begin_again(self) -> Iterator[Any]:
        """The iterator of an undrawn epoch: it has drawn what it drew when it was made."""
        self._tell_sampler()
        self._resuming = False
        iterator: Iterator[Any] = iter(self.loader)
        self._made = []  # whatever it drew: the order comes from the generators of the boundary
        return iterator

    def end_epoch(self) -> None:
        """The next pass is another epoch."""
        forget(self.loader)
        self._resuming = self._going_on = False
        self.epoch, self.index, self._start = self.epoch + 1, 0, 0
        self._shuffle = self._others = None
        self._stand(None)
        self.by_index = not self._stateful

    def state(self) -> dict[str, Any]:
        """As of DataPosition."""
        state = super().state()
        if self._sampler_epoch is not None:
            state["sampler_epoch"] = self._sampler_epoch
            now = getattr(self._told_sampler(), "epoch", self._sampler_epoch)
            now = now if self._sampler_then is None else self._sampler_then
            if now != self._sampler_epoch:
                state["sampler_then"] = int(now)
        if self._late is not None:
            state["late"] = self._late
        if self.by_index and self._shuffle is None and (between := self._between()):
            state["between"] = between
        return state

    def _between(self) -> dict[str, Any]:
        """States of the generators that draw shuffles alone, before the epoch has begun."""
        given, own = shuffle_of(self.loader)[1:], others_of(self.loader).get("own", {})
        return {"given": given, "own": own} if given or own else {}

    def load(self, state: dict[str, Any]) -> None:
        """As of DataPosition."""
        self._sampler_epoch, self._late = state.get("sampler_epoch"), state.get("late")
        self._sampler_then = state.get("sampler_then")
        super().load(state)
        between = state.get("between")
        if between:
            shuffle = [torch.get_rng_state(), *between["given"]]
            require_generators(self.loader, shuffle, between)
            put_back(self.loader, shuffle, {"own": between["own"]})

    def _tell_sampler(self) -> None:
        """The framework tells it, or does not, as it would without us."""
        sampler = self._told_sampler()
        if sampler is None:
            return
        if self.under_way and self._sampler_epoch is not None:
            sampler.set_epoch(self._sampler_epoch)
        self._sampler_epoch = int(sampler.epoch)

    def tell_sampler_as_then(self) -> None:
        """The order is drawn: the sampler is as it was at the boundary.

        Ignite tells it the next epoch before this one has ended for the loader.
        """
        if self._sampler_then is None:
            return
        then, self._sampler_then = self._sampler_then, None
        sampler = self._told_sampler()
        if sampler is not None and sampler.epoch == self._sampler_epoch:
            sampler.set_epoch(then)

    def _told_sampler(self) -> Any:
        """The sampler, if it takes an epoch; None for others."""
        sampler: Any = sampler_of(self.loader) if isinstance(self.loader, DataLoader) else None
        told = hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch")
        return sampler if told else None
