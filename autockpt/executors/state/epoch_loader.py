"""A loader that knows its place and its shuffle, while the loop is another's.

One pass is one epoch.  A framework may fetch batches ahead of the training (accelerate does: one):
at a boundary those belong to the iterations that come.  The generators' states before each such
fetch are kept, so that a resumed pass fetches the same batches under the same random numbers.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from autockpt.executors.state.data_position import DataPosition
from autockpt.executors.state.loader_rng import forget
from autockpt.executors.state.rng import rng_mark, rng_state, set_rng_state
from autockpt.executors.state.sampler_state import sampler_of
from autockpt.executors.state.shuffle_rng import (
    others_of,
    put_back,
    require_generators,
    shuffle_of,
)
from autockpt.values.errors import ConfigError


class _Fetch(NamedTuple):
    """The state before a batch was fetched."""

    rng: Any
    own: Any
    """State of a loader that has one; None for others."""
    drawing: Any
    """States of the generators that loading a sample draws from, by name."""


class EpochLoader:
    """Iterates a loader one epoch a pass; looks like that loader in every other way."""

    def __init__(
        self,
        loader: Any,
        *,
        ahead: int = 0,
        begin: Callable[[], None],
        first: Callable[[], None] = lambda: None,
        fetches: Callable[[], None] = lambda: None,
    ) -> None:
        """`ahead`: batches that the framework fetches before it trains the one that it has; with
        more than one it says `trained` at each boundary.

        `begin()` is called once, before the first batch of a resumed training is fetched, and
        `first()` behind it; in each training before the first batch.  `fetches()` is called
        before an epoch begins, and before each batch is fetched.
        Raises ConfigError for a loader that cannot be resumed at a batch.
        """
        if ahead < 0:
            raise ConfigError(f"ckpt.loader(ahead=...): got {ahead}; expected 0 or more batches")
        place = _Epochs(loader)
        self.__dict__.update(
            _place=place, _ahead=ahead, _begin=begin, _before=deque(maxlen=ahead + 1),
            _under_way=False, _resumed=None, _asked=False,
            _trained=None, _ended=False, _first=first, _fetches=fetches, left_after=0,
        )  # fmt: skip

    # ------------------------------------------------------------------ the public face

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is, or goes on with; where a loop over epochs begins."""
        self.__dict__["_asked"] = True
        return int(self._place.epoch)

    @property
    def first_batch(self) -> int:
        """The number of the batch that the next pass begins with; 0 for a whole epoch.

        For a loop that counts: `enumerate(loader, loader.first_batch)`.
        """
        is_whole = self._resumed is None or not self._place.under_way
        return 0 if is_whole else int(self._place.index)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch that a checkpoint was made in, else a whole one."""
        if self._resumed is not None:
            # Lazily: frameworks make iterators while they are set up, before the state is final.
            return self._resumed_pass()
        self.end_left_epoch()
        self.__dict__["_under_way"] = True
        self._fetches()
        return self._pass(self._place.begin())

    @property
    def place(self) -> DataPosition:
        """Its position."""
        return self._place  # type: ignore[no-any-return]

    @property
    def ahead(self) -> int:
        """Batches that the framework fetches before it trains the one that it has."""
        return int(self._ahead)

    def end_epoch(self) -> None:
        """The loop has left this epoch, though the loader may have had more."""
        if self._under_way or self._resumed is not None:
            self.__dict__["_resumed"] = None
            self._next_epoch()

    def end_left_epoch(self) -> None:
        """Another pass begins: the last one has ended, though the loader may have had more."""
        if self._under_way and self._resumed is None:
            self.__dict__["left_after"] = self._place.index
            self._next_epoch()

    @property
    def resumes(self) -> bool:
        """The next pass is the rest of an epoch."""
        return self._resumed is not None and bool(self._place.under_way)

    def trained(self, count: int) -> None:
        """So many batches of this epoch are trained, at a boundary.

        Needed with more than one batch ahead: how many are left at an epoch's end is not known.
        """
        self.__dict__["_trained"] = count
        if self._ended and count >= self._place.index:
            self._next_epoch()

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._place.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_place"].loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._place.loader, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Frameworks ask with isinstance whether it is a DataLoader."""
        return type(self.__dict__["_place"].loader)

    # ------------------------------------------------------------------ for the session

    def state(self) -> dict[str, Any]:
        """The place as of now: behind the batch that the training has had."""
        place = self._place
        if self._ahead > 1 and self._trained is None:
            raise ConfigError(
                f"ckpt.loader(ahead={self._ahead}): call loader.trained(count) before ckpt.step(), "
                "else it is not known which batches are trained"
            )
        count = self._ahead if self._trained is None else place.index - self._trained
        count = max(0, min(count, place.index, len(self._before)))
        pending = list(self._before)[len(self._before) - count :]
        state: dict[str, Any] = place.state()
        state["index"] -= len(pending)
        if pending and "loader" in state:
            state["loader"] = pending[0].own
        if pending:
            state["fetches"] = [fetch.rng for fetch in pending]
        if any(fetch.drawing for fetch in pending):
            state["fetches_drawing"] = [fetch.drawing for fetch in pending]
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave; the next pass goes on from there."""
        self._place.load(state)
        fetches = state.get("fetches", ())
        drawing = state.get("fetches_drawing") or [{}] * len(fetches)
        self.__dict__["_resumed"] = list(zip(fetches, drawing, strict=True))

    @property
    def asked(self) -> bool:
        """The script has read where its loop begins."""
        return bool(self._asked)

    @property
    def by_index(self) -> bool:
        """The epoch under way is resumed by skipping."""
        return bool(self._place.by_index)

    # ------------------------------------------------------------------ a pass

    def _resumed_pass(self) -> Iterator[Any]:
        self._begin()
        fetches, self.__dict__["_resumed"] = self._resumed or [], None
        self._begin_first()
        place, now = self._place, rng_state()
        drawn = place.drawn()
        self.__dict__["_under_way"] = True
        within = place.under_way
        iterator = place.begin_again() if place.is_undrawn else place.begin()
        if within:
            set_rng_state(now)
        for rng, drawing in fetches:
            self._note(_Fetch(rng, self._own_state(), drawing))
            set_rng_state(rng)
            place.draw_on(drawing)
            if not place.index:
                place.draw()
            batch = next(iterator, _NOTHING)
            place.tell_sampler_as_then()
            set_rng_state(now)
            place.draw_on(drawn)
            if batch is _NOTHING:
                raise ConfigError(
                    f"data: the epoch ends after {place.index} batches, and the checkpoint was "
                    "made with more; give the loader the data set of the checkpoint"
                )
            place.index += 1
            yield place.moved(batch)
        yield from self._pass(iterator)

    def _pass(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._begin_first()
        place = self._place
        number = place.epoch
        while True:
            self._fetches()
            if self._ahead:
                self._note(_Fetch(rng_state(), self._own_state(), place.drawn()))
            if not place.index:
                place.draw()
            batch = next(iterator, _NOTHING)
            place.tell_sampler_as_then()
            if place.epoch != number:
                return  # another pass has begun meanwhile
            if batch is _NOTHING:
                left = 0 if self._trained is None else place.index - self._trained
                if self._ahead:
                    self._before.pop()  # no batch came
                self.__dict__["_ended"] = True
                if left <= 0:
                    self._next_epoch()
                return
            place.index += 1
            yield place.moved(batch)

    def _begin_first(self) -> None:
        first, self.__dict__["_first"] = self._first, None
        if first is not None:
            first()

    def _note(self, fetch: _Fetch) -> None:
        if self._ahead:
            self._before.append(fetch)

    def _own_state(self) -> Any:
        return self._place.own_state() if self._ahead and not self._place.by_index else None

    def _next_epoch(self) -> None:
        self._before.clear()
        self.__dict__.update(_under_way=False, _ended=False)
        if self._trained is not None:
            self.__dict__["_trained"] = 0
        self._place.end_epoch()


_NOTHING = object()


class _Epochs(DataPosition):
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
