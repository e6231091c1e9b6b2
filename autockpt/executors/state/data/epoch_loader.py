"""A loader that knows its place and its shuffle, while the loop is another's.

One pass is one epoch.  A framework may fetch batches ahead of the training (accelerate does: one):
at a boundary those belong to the iterations that come.  The generators' states before each such
fetch are kept, so that a resumed pass fetches the same batches under the same random numbers.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.data.epoch_position import EpochPosition
from autockpt.executors.state.rng import rng_state, set_rng_state
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
        place = EpochPosition(loader)
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
