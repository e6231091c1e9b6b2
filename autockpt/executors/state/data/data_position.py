"""The position in the data: resumes an epoch at the right batch, however it is shuffled.

A loader with `state_dict` says itself where it is.  A plain torch DataLoader draws its shuffle from
the global generator when its iterator is made; some samplers draw from other generators
(`shuffle_rng`).  Their states are kept from that moment.  A restart rebuilds the iterator under
them and skips by index without loading anything.

A streamed data set of Hugging Face has a state that is not its place.  A shuffle buffer is not in
it, and later passes begin there too.  Its order is drawn by its own seed.  So a restart reads the
epoch's batches again, and passes over them.

With another number of replicas, or another batch size, the position is a number of samples.  The
remaining samples of the epoch's order are distributed anew (`state/data/sampler_state.py`).
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autockpt.executors.state.data import sampler_state
from autockpt.executors.state.data.loader_rng import (
    forget,
    is_streamed,
    is_torchdata,
    load_without_rng_draw,
    preserve_rng,
    seeds_of,
)
from autockpt.executors.state.data.sampler_state import (
    EpochOrder,
    Place,
    Share,
    Sizes,
    place_in,
    place_of,
    sampler_of,
)
from autockpt.executors.state.data.shuffle_rng import (
    changed_values,
    data_generators,
    generator_state,
    kept_generators,
    order_generators,
    others_of,
    put_back,
    require_generators,
    set_generator_state,
    shuffle_of,
    values_of,
)
from autockpt.executors.state.live_state import Stateful
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.executors.state.wrapping import require_iterates, unwrapped_loader
from autockpt.values.errors import ConfigError
from autockpt.values.record import from_data, to_data


@runtime_checkable
class Reshardable(Stateful, Protocol):
    """A stateful loader that can resume with another number of ranks than saved."""

    def reshard_state(self, states: Sequence[Any], rank: int, world_size: int, /) -> Any:
        """Return the state for `load_state_dict` of `rank` out of `world_size` ranks.

        `states`: what `state_dict` gave on each rank that saved, in order; None where a rank had no
        data.  Both numbers are of all ranks: a loader that is shared among data-parallel ranks
        knows its own place among them.  Called on every rank, before the first batch.
        """


class DataPosition:
    """Iterates a loader epoch after epoch and can say and take back where it is."""

    def __init__(self, loader: Any) -> None:
        """Raises ConfigError for a loader that cannot be resumed at a batch."""
        wrapper = type(loader).__module__
        loader, self._moved = unwrapped_loader(loader)
        self.loader = loader
        self.epoch = 0
        self.index = 0
        """Batches handed out in this epoch, or since its rest was shared out anew."""
        self._start = 0
        """Samples of the epoch's order that were taken before the rest was shared out anew."""
        self.resized = ""
        """A notice that the batch size has changed within this epoch; "": it has not."""
        self._order: EpochOrder | None = None
        """The order of this epoch; None before it begins, or when its sampler is unknown."""
        self._sharing: dict[str, Any] = {}
        """The sharing in this epoch's states: start, order and share, or nothing."""
        self._shuffle: Any = None
        """The state from `shuffle_of`, from the moment the epoch's iterator was made."""
        self._others: Any = None
        """The state from `others_of`, from the same moment; None where a checkpoint has none."""
        self._new_workers = True
        """This epoch drew a seed for workers; with persistent ones only the first epoch does."""
        self._plain: Any = loader
        """The loader of plain epochs: after a resume, the clone that has the persistent workers."""
        self._resuming = False
        self._going_on = False
        """The loader has taken the state of an epoch under way, and not been iterated since."""
        self.is_read_again = is_streamed(loader)
        """A resumed epoch is read from its beginning, and not skipped by index."""
        self._tells_epoch = wrapper.startswith("accelerate.")
        """The wrapper that is left out here tells a streamed data set its epoch."""
        self._stateful = isinstance(loader, Stateful) and not self.is_read_again
        self.by_index = not self._stateful
        """This epoch is resumed by skipping; a stateful loader's when it was shared out anew."""
        if not self._stateful and not self.is_read_again:
            _require_plain_loader(loader)
        self._built = {} if self._stateful else values_of(loader)
        """Numbers of samplers as the script made them."""
        self._sizes = Sizes() if self._stateful else sampler_state.sizes_of(loader)
        """Of the loader as the script made it."""
        in_process = not self._stateful and not self.is_read_again and not loader.num_workers
        self._ordering = order_generators(loader) if in_process else {}
        """By place the generators of orders, where samples of this process may draw from them."""
        self._sampling = data_generators(loader) if in_process else {}
        """By place the generators that loading a sample draws from, in this process."""
        if self.is_read_again:
            self._sampling = data_generators(loader, of_workers=True)
        self._drawing = self._ordering | self._sampling
        self._began: dict[str, Any] = {}
        """Their states when this epoch began, and the epoch of the data set, where it is read again
        after a restart."""
        self._before: dict[str, Any] | None = None
        """States of `_sampling` before the newest batch, where that was given back.

        Drawing the order again takes the other generators to where they were.
        """
        self._before_newest: dict[str, Any] = {}
        self._unsaved: frozenset[str] = frozenset()
        """Generators of which the checkpoint that was resumed has no state."""
        self._scripts: frozenset[str] = frozenset()
        """Variables of the script of which it has none: another part of it may have that."""
        self._is_loaded = False
        """It has taken a state back."""
        self._goes_on: dict[str, Any] = {}
        """The states of the data set's generators behind the batches that are read again."""

    def state(self) -> dict[str, Any]:
        """Position as of now: between two batches."""
        state: dict[str, Any] = {"epoch": self.epoch, "index": self.index}
        state.update(self._sharing)
        if self.by_index:
            state["shuffle"], state["new_workers"] = self._shuffle, self._new_workers
            if not self._sharing:
                state["sizes"] = to_data(self._sizes)
            if self._others:
                state["others"] = self._others
            if self._drawing:
                state["drawing"] = self.drawn() if self._before is None else self._before
            if self._began:
                state["began"] = self._began
        else:
            state["loader"] = self._own_state()
            state.update(seeds_of(self.loader))
        return state

    @property
    def left(self) -> int | None:
        """Batches that this epoch still has; None for a loader without a length."""
        if self._start and self._order is not None and self._sharing:
            share = from_data(Share, self._sharing["share"], where="data: share")
            left = share.each(self._order.length - self._start)
            size = share.batch_size
            whole = left // size if _drops(self.loader) else -(-left // size)
        else:
            try:
                whole = len(self.loader)
            except (TypeError, NotImplementedError):
                return None
        return max(0, whole - self.index)

    @property
    def is_within(self) -> bool:
        """Samples of the epoch under way were taken, maybe in batches of another size."""
        return bool(self.index or self._start)

    @property
    def is_renumbered(self) -> bool:
        """The rest of this epoch has other batches than its beginning had."""
        return bool(self._start or self.resized)

    @property
    def number(self) -> int:
        """The coming batch's number in its epoch, from 0.

        Behind a change of the batch size or of the number of ranks numbers are counted from the
        end.  So the last batch has the number that it has in a whole epoch.
        """
        left = self.left if self._start else None
        return self.index if left is None else max(0, len(self.loader) - left)

    def drawn(self) -> dict[str, Any]:
        """States of the generators that loading a sample draws from."""
        return _states_of(self._drawing)

    def kept_generators(self, *, resumed: bool = False) -> list[Any]:
        """The generators that are put back with this position.

        `resumed`: there is a checkpoint, which need not have this position.
        """
        if resumed and not self._is_loaded:
            return []
        kept = kept_generators(self.loader)
        return [one for name, one in kept.items() if name not in self._scripts]

    def draw_on(self, states: dict[str, Any]) -> None:
        """Puts states of `drawn` back.

        Raises ConfigError for the state of a generator that is not there.

        Generators of workers cannot be put back.
        """
        if getattr(self.loader, "num_workers", 0) and not self.is_read_again:
            return
        for name in states:
            if name not in self._drawing:
                raise ConfigError(
                    f"data: the checkpoint has the state of the generator {name}, this data set "
                    "has none of that name; attach the data set that wrote it"
                )
        for name, one in self._drawing.items():  # one of both has the state that samples go on from
            if name in states:
                set_generator_state(one, states[name])

    def _own_state(self) -> Any:
        try:
            return self.loader.state_dict()
        except Exception as error:
            raise ConfigError(
                f"data: {type(self.loader).__qualname__}.state_dict() raised {error!r:.200}; a "
                "loader that cannot say where it is cannot be resumed. Attach the DataLoader "
                "inside it, or one whose state_dict works before its first batch"
            ) from error

    def require_state(self) -> dict[str, Any]:
        """The position as `attach` tries it.  Raises ConfigError when there is none.

        torchdata's loaders make an iterator to say their state, which draws: they are not asked.
        """
        return {} if is_torchdata(self.loader) else self.state()

    def load(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave here or, merged, on other ranks; goes on from there.

        Raises ConfigError when this loader cannot go on with the samples that are left.
        """
        self._is_loaded = True
        if "ranks" in state and isinstance(self.loader, Reshardable):
            self.epoch, self.index = state["epoch"], state["index"]
            self._load_stateful(self.loader.reshard_state(*state["ranks"]), None)
            return
        old = place_in(state)
        self._require_kind(state, old)
        self.epoch, self.index = state["epoch"], state["index"]
        self._shuffle, self._new_workers = state.get("shuffle"), state.get("new_workers", True)
        self._others = None if self._shuffle is None else state.get("others")
        self.by_index = "loader" not in state
        if old is None and self.by_index and "sizes" in state:
            self._recount(from_data(Sizes, state["sizes"], where="data: sizes"))
        self._go_on(old, self._own())
        if self.by_index:
            require_generators(self.loader, self._shuffle, self._others)
            self._began, self._goes_on = state.get("began", {}), state.get("drawing", {})
            self._unsaved = frozenset(self._drawing.keys() - self._goes_on.keys())
            own = (state.get("others") or state.get("between") or {}).get("own", {})
            missing = kept_generators(self.loader).keys() - self._goes_on.keys() - own.keys()
            self._scripts = frozenset(name for name in missing if name.endswith("()"))
            if not self.is_read_again:
                self.draw_on(self._goes_on)
            self._resuming = self._shuffle is not None or self.index > 0 or self._start > 0
        else:
            self._tell_sampler()  # now: torchdata's asks it as soon as its own state is asked for
            self._load_stateful(state["loader"], state.get("seeds"))

    def _load_stateful(self, state: Any, seeds: Any) -> None:
        self._going_on = self.index > 0
        load_without_rng_draw(self.loader, state, begun=self._going_on, seeds=seeds)

    def _go_on(self, old: Place | None, own: Place | None) -> None:
        if old is None:
            self._stand(own)
            return
        place = sampler_state.continued(old, own)
        self._stand(place)
        self.index = place.index
        if place == old:
            return
        was, size = old.share.batch_size, place.share.batch_size
        if place.start and was != size:
            self.resized = (
                f"data: the batch size was {was} and is {size}; {old.order.length - place.start} "
                f"of {old.order.length} samples are left of epoch {self.epoch}"
            )
        self.by_index = True
        if not old.order.drawn:
            # Of no use but for seeds of workers, which other ranks drew.
            self._shuffle = self._others = None
        elif self._shuffle is None and place.start:
            raise ConfigError(
                f"data: the order that the {old.order.sampler} drew is known to the loader alone; "
                "resume with the batch size and the sampler of the checkpoint"
            )

    def _recount(self, old: Sizes) -> None:
        """The order is the sampler's secret: batches of another size are counted anew."""
        taken = sampler_state.recounted(self.index, old, self._sizes, self.loader)
        if taken != self.index:
            self.resized = (
                f"data: the batch size was {old.batch} and is {self._sizes.batch}; epoch "
                f"{self.epoch} goes on at batch {taken}"
            )
        self.index = taken

    def _stand(self, place: Place | None) -> None:
        self._start, self._order, self._sharing = 0, None, {}
        if place is not None:
            self._start, self._order = place.start, place.order
            order, share = to_data(place.order), to_data(place.share)
            self._sharing = {"start": place.start, "order": order, "share": share}

    def _require_kind(self, state: dict[str, Any], old: Place | None) -> None:
        if "ranks" in state and old is None:
            raise ConfigError(
                f"data: another number of ranks can go on with a {type(self.loader).__qualname__} "
                "if it has reshard_state(states, rank, world_size), which gives what its "
                "load_state_dict takes. Add it, or resume with as many ranks as saved"
            )
        counted = self._stateful and old is not None and isinstance(self.loader, DataLoader)
        if self._stateful != ("loader" in state) and not counted:
            raise ConfigError(
                "data: the checkpoint was made with another kind of loader; attach the same kind "
                "(with or without state_dict) that wrote it"
            )

    def _own(self) -> Place | None:
        """The start of an epoch of this loader, if batches tell where it is."""
        if not isinstance(self.loader, DataLoader) or isinstance(self.loader, Reshardable):
            return None
        return place_of(self.loader)

    def batches(self) -> Iterator[Any]:
        """Batches without end, from the current position."""
        while True:
            before = (self.epoch, self.index, self._start)
            for batch in _each(self._epoch()):
                self.index += 1
                yield self._moved(batch)
            if self.index == 0 and before == (self.epoch, 0, 0):
                raise ConfigError("data: the loader gave no batch in a whole epoch; is it empty?")
            forget(self.loader)
            self.epoch, self.index, self._start = self.epoch + 1, 0, 0
            self.by_index = not self._stateful

    def next(self) -> Any:
        """The batch behind the newest one, whichever loop had that.

        After an error of the loader the epoch goes on behind its newest batch.
        """
        if self._stream is None:
            now = rng_state() if self._resuming else None
            self.prepare()
            if now is not None:
                set_rng_state(now)
            self._stream = self.batches()
        self._before, self._before_newest = None, _states_of(self._sampling)
        try:
            return next(self._stream)
        except Exception:
            self._stream = None
            self._resuming = self.by_index and bool(self.index or self._start)
            raise

    def give_back(self) -> bool:
        """The newest batch comes again after a resume; False where the loader itself counts."""
        if self.by_index:
            self.index -= 1
            self._before = self._before_newest
        return self.by_index

    def prepare(self) -> None:
        """Rebuilds the iterator of a resumed epoch; uses the global generator as it was then."""
        if self._resuming:
            self._rebuilt = self._begin()

    _rebuilt: Iterator[Any] | None = None
    _stream: Iterator[Any] | None = None
    """The iterator of `next`."""

    def _epoch(self) -> Iterator[Any]:
        if self._rebuilt is not None:
            rebuilt, self._rebuilt = self._rebuilt, None
            return rebuilt
        return self._begin()

    def _begin(self) -> Iterator[Any]:
        self._tell_sampler()
        if self._resuming:
            self._resuming = False
            return self._resumed_epoch()
        self._stand(self._own())
        if not self.by_index:
            return self._stateful_epoch()
        self._shuffle, self._others = shuffle_of(self.loader), others_of(self.loader)
        if changed := changed_values(values_of(self.loader), self._built):
            self._others["values"] = changed
        self._new_workers = not _keeps_workers(self._plain) or self._plain._iterator is None
        if self.is_read_again:
            self._began = {"drawing": self.drawn(), "epoch": _epoch_of(self.loader.dataset)}
        return iter(self._plain)

    def _stateful_epoch(self) -> Iterator[Any]:
        if not self._going_on:
            return iter(self.loader)
        self._going_on = False
        with preserve_rng():
            return iter(self.loader)

    def _tell_sampler(self) -> None:
        """DistributedSampler and its like shuffle by epoch."""
        sampler: Any = sampler_of(self.loader) if isinstance(self.loader, DataLoader) else None
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        if self.is_read_again and self._tells_epoch:
            self.loader.dataset.set_epoch(self.epoch)

    def _resumed_epoch(self) -> Iterator[Any]:
        if self._shuffle is None:
            self._shuffle = shuffle_of(self.loader)
        if self._others is None:
            self._others = others_of(self.loader)
        if self.is_read_again:
            return self._read_epoch()

        def as_then() -> None:
            put_back(self.loader, self._shuffle, self._others)

        drawn = {n: one for n, one in self.drawn().items() if n not in self._unsaved}
        if not self.index:  # the first sample goes on behind the order
            ordering = [id(one) for one in self._ordering.values()]
            drawn = {n: one for n, one in drawn.items() if id(self._drawing[n]) not in ordering}
        clone, indices = _beginning_with(self.loader, self._indices_left)
        if not self._new_workers:
            indices.before_first = as_then  # the new iterator draws a seed that the old one did not
        as_then()
        made: Any = clone._get_iterator()
        # Samplers draw with their first index, which a loader without workers asks for only when
        # the training goes on: by then the generators are those of the boundary again.
        self._before_order()
        indices.start()
        self.draw_on(drawn)  # samples, too, may draw from generators of samplers
        if not self._stateful and _keeps_workers(clone):
            self._plain = clone
        return _handing_over(clone, made)

    def _read_epoch(self) -> Iterator[Any]:
        put_back(self.loader, self._shuffle, self._others)
        self.draw_on(self._began.get("drawing", {}))
        if self._began.get("epoch") is not None:
            self.loader.dataset.set_epoch(self._began["epoch"])
        batches: Iterator[Any] = iter(self.loader)
        for _ in range(self.index):
            next(batches, None)
        self.draw_on(self._goes_on)
        return batches

    def _before_order(self) -> None:
        """Generators as they were when the order was drawn, if others drew since `iter`."""

    def _indices_left(self) -> Callable[[], Iterator[Any]]:
        """Return a function for the index sampler's rest of this epoch, which loads nothing.

        Some samplers draw when they are iterated, that is, in this call; others with their first
        index, that is, when the result is called.
        """
        own, batches, order = self._own(), self.loader.batch_sampler, self._order
        if own is not None and order is not None and (self._start or order != own.order):
            share = own.share
            return lambda: _skipped(iter(self._rest(order, share)), self.index)
        left = iter(self.loader.sampler if batches is None else batches)
        return lambda: _skipped(left, self.index)

    def _rest(self, order: EpochOrder, share: Share) -> Any:
        """Return this rank's indices, or batches of them, of the rest left when ranks changed."""
        every = sampler_state.whole_order(order, self.epoch, self.loader)
        rest = sampler_state.rest_of(every, self._start, share, sampler_state.rank_in(self.loader))
        batches = self.loader.batch_sampler
        return (
            rest if batches is None else BatchSampler(rest, batches.batch_size, batches.drop_last)
        )


def _drops(loader: Any) -> bool:
    return bool(getattr(getattr(loader, "batch_sampler", None), "drop_last", False))


def _states_of(generators: dict[str, Any]) -> dict[str, Any]:
    return {name: generator_state(one) for name, one in generators.items()}


def _each(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the remaining batches; `for` would restart loaders that are their own iterators."""
    nothing = object()
    while (batch := next(iterator, nothing)) is not nothing:
        yield batch


def _skipped(left: Iterator[Any], count: int) -> Iterator[Any]:
    """Skip `count` indices; also draw an order that is drawn with the first index."""
    for _ in range(count):
        next(left, None)
    return left if count else itertools.chain([*itertools.islice(left, 1)], left)


class _FirstDiffers:
    """An index sampler with another first iteration: later epochs are whole."""

    def __init__(self, sampler: Any, first: Callable[[], Callable[[], Iterator[Any]]]) -> None:
        self._sampler = sampler
        self._first = first
        self._newest: _Started | None = None
        self.before_first: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        if self._newest is not None and self._newest.started:
            return iter(self._sampler)  # a later epoch of a loader with persistent workers
        self.before_first()
        self._newest = _Started(self._first())
        return self._newest

    def start(self) -> None:
        """Begins now instead of with the first item, if that has not happened."""
        assert self._newest is not None
        self._newest.start()


class _Started:
    """An iterator that begins at its first item or on demand (loaders make some and drop them)."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._items: Iterator[Any] | None = None

    @property
    def started(self) -> bool:
        """It has begun."""
        return self._items is not None

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


def _beginning_with(
    loader: "DataLoader[Any]", first: Callable[[], Callable[[], Iterator[Any]]]
) -> "tuple[DataLoader[Any], _FirstDiffers]":
    """The loader with another first epoch.  Attributes are set behind DataLoader's own guard."""
    clone = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = _FirstDiffers(getattr(loader, name), first)
    clone.__dict__[name] = indices
    clone.__dict__["_iterator"] = None
    if "_initial_iter_for_state_dict" in clone.__dict__:  # torchdata: that iterator is to be used
        clone.__dict__["_initial_iter_for_state_dict"] = False
    return clone, indices


def _handing_over(clone: "DataLoader[Any]", made: Iterator[Any]) -> Iterator[Any]:
    """Iterates `clone`, which finds the iterator that was made under the generators of then.

    A subclass may do it in a generator, that is, later.  Raises ConfigError when it never asks.
    """
    asked = []

    def hand_over() -> Iterator[Any]:
        asked.append(True)
        return made

    clone.__dict__["_get_iterator"] = hand_over
    for batch in clone:
        if not asked:
            raise ConfigError(
                f"data: a {type(clone).__qualname__} does not iterate as DataLoader does, so "
                "batches cannot be skipped; give it state_dict and load_state_dict"
            )
        yield batch


def _epoch_of(dataset: Any) -> int | None:
    """Of a streamed data set, whose order depends on it; None: it has none."""
    epoch = getattr(dataset, "epoch", None)
    return int(epoch) if hasattr(dataset, "set_epoch") and epoch is not None else None


def _keeps_workers(loader: "DataLoader[Any]") -> bool:
    return bool(loader.persistent_workers and loader.num_workers > 0)


def _require_plain_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"attach(data=...): a {type(loader).__qualname__} can neither say where it is "
            "(state_dict/load_state_dict) nor be skipped by index. Add both methods, or pass a "
            "torch DataLoader, or leave `data` out and restore the position from ckpt.step_count"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "attach(data=...): a DataLoader over an IterableDataset cannot be skipped by index and "
            "does not ask the data set for its state. Use torchdata's StatefulDataLoader, which "
            "does where the data set has state_dict/load_state_dict"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConfigError(
            "attach(data=...): a DataLoader with in_order=False gives batches as they come, so a "
            "number of them does not say which. Leave in_order=True, or use torchdata's "
            "StatefulDataLoader"
        )
    require_iterates(loader)
