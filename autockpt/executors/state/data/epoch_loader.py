"""A loader that knows its place and its shuffle, while the loop is another's.

One pass is one epoch, if it trains.  A pass that trains nothing (an evaluation, a look at a batch)
gives its place back, and a pass around it goes on.

A framework may fetch batches ahead of the training (accelerate does: one):
at a boundary those belong to the iterations that come.  The generators' states before each such
fetch are kept, so that a resumed pass fetches the same batches under the same random numbers.
"""

import dis
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
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


class _Standing(NamedTuple):
    """A loader in front of a pass, which may turn out to train nothing."""

    place: dict[str, Any]
    """Attributes of the position."""
    own: dict[str, Any]
    """Attributes of the loader, as far as a pass changes them."""


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass, while its iterator lives."""

    mark: Any
    """The mark of the training when the pass began."""
    front: _Standing | None
    """The loader in front of it; None: the pass has trained, and is an epoch."""
    is_rest: bool = False
    """It is the rest of the epoch that a checkpoint was made in."""
    loop: "tuple[types.CodeType, int, int] | None" = None
    """The `for` that asks for its batches: code, and the offsets of its body."""
    is_quiet: bool = False
    """It began as evaluations do."""
    is_over: bool = False
    """Its iterator is gone."""
    batches: int = 0
    """Batches that it handed out."""
    is_given_back: bool = False
    """It trained nothing, and the loader stands where it stood in front of it."""


_OF_A_PASS = ("_under_way", "_ended", "_trained", "_current")


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
        asks_epoch: Callable[[types.FrameType], None] = lambda frame: None,
        mark: Callable[[], Any] = object,
        evaluates: Callable[[], bool] = lambda: False,
        again: Callable[[], None] = lambda: None,
        empty: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`ahead`: batches that the framework fetches before it trains the one that it has; with
        more than one it says `trained` at each boundary.

        `begin()` is called once, before the first batch of a resumed training is fetched, and
        `first()` behind it; in each training before the first batch.  `fetches()` is called
        before an epoch begins, and before each batch is fetched.  `asks_epoch()` is called where
        the script reads `epoch`.

        `mark()` is another one when the training has gone on: a pass during which it stays trains
        nothing.  `evaluates()`: a pass that begins now is an evaluation, unless it trains.
        `again()` is called where the resumed epoch begins once more, behind a pass that gave it
        back, and `empty()` where it has no batch left.  `say` gets notices.
        Raises ConfigError for a loader that cannot be resumed at a batch.
        """
        if ahead < 0:
            raise ConfigError(f"ckpt.loader(ahead=...): got {ahead}; expected 0 or more batches")
        place = EpochPosition(loader)
        self.__dict__.update(
            _place=place, _ahead=ahead, _begin=begin, _before=deque(maxlen=ahead + 1),
            _under_way=False, _resumed=None, _asked=False,
            _trained=None, _ended=False, _first=first, _fetches=fetches, left_after=0,
            _training=mark, _evaluates=evaluates, _again=again, _empty=empty, _say=say,
            _asks_epoch=asks_epoch,
            _current=None, _loaded=None, _is_left=False, _left_loop=False, _unstarted=None,
            _ends_with_another=False,
            _asks=set(), _other_data=None, _trains_quietly=False,
        )  # fmt: skip

    # ------------------------------------------------------------------ the public face

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is, or goes on with; where a loop over epochs begins."""
        self.__dict__["_asked"] = True
        self._settle_left()
        self._asks_epoch(sys._getframe(1))
        return int(self._place.epoch)

    @property
    def first_batch(self) -> int:
        """The number of the batch that the next pass begins with; 0 for a whole epoch.

        For a loop that counts: `enumerate(loader, loader.first_batch)`.  With another batch size
        or number of ranks than before, the rest of an epoch is numbered from its end.
        """
        self._require_same_data()
        self._settle_left()
        if self._resumed is not None and self._asks_again(sys._getframe(1)):
            self.end_epoch()
        is_whole = self._resumed is None or not self._place.under_way
        return 0 if is_whole else int(self._place.number)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch that a checkpoint was made in, else a whole one."""
        is_quiet = self._evaluates()
        is_waited_for = self._resumed is not None or self._other_data is not None
        if is_quiet and not self._trains_quietly and (is_waited_for or self._is_in_pass()):
            return self._evaluation(iter(self._place.loader), _TRAINS_WITHOUT_GRADIENTS)
        self._require_same_data()
        if self._is_within_loop(sys._getframe(1)):
            return self._evaluation(iter(self._place.loader), _SIDE_BY_SIDE)
        self._settle(None)
        if self._ends_with_another and self._unstarted() is None:
            self.end_epoch()
        if self._resumed is not None:
            # Lazily: frameworks make iterators while they are set up, before the state is final.
            made = self._resumed_pass()
            self.__dict__["_unstarted"] = weakref.ref(made)
            return made
        front = self._standing()
        self.end_left_epoch()
        if not is_quiet:
            self._fetches()
        current = self._enter(front)
        current.is_quiet = is_quiet
        return self._pass(self._place.begin(), current)

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
        self._settle(None)
        if self._under_way or self._resumed is not None:
            self.__dict__["_resumed"] = None
            self._next_epoch()

    def end_left_epoch(self) -> None:
        """Another pass begins: the last one has ended, though the loader may have had more."""
        if self._under_way and self._resumed is None:
            self.__dict__["left_after"] = self._place.number
            self._next_epoch()

    @property
    def is_within(self) -> bool:
        """The next pass goes on within an epoch, behind its first batch."""
        return self.resumes and self._place.is_within and self._place.left != 0

    @property
    def is_at_end(self) -> bool:
        """The epoch under way has no batch left; False where that is not known."""
        return bool(self._under_way and not self._ahead and self._place.left == 0)

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
        if self._is_idle():
            return self._state_in_front()
        place = self._place
        more = {"quiet": True} if self._trains_quietly else {}
        if self._ahead > 1 and self._trained is None:
            raise ConfigError(
                f"ckpt.loader(ahead={self._ahead}): call loader.trained(count) before ckpt.step(), "
                "else it is not known which batches are trained"
            )
        count = self._ahead if self._trained is None else place.index - self._trained
        count = max(0, min(count, place.index, len(self._before)))
        pending = list(self._before)[len(self._before) - count :]
        state: dict[str, Any] = place.state() | more
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
        self.__dict__["_other_data"] = None
        self._place.load(state)
        fetches = state.get("fetches", ())
        drawing = state.get("fetches_drawing") or [{}] * len(fetches)
        self.__dict__["_resumed"] = list(zip(fetches, drawing, strict=True))
        self.__dict__.update(_loaded=state, _trains_quietly=bool(state.get("quiet")))

    def load_if_same(self, state: dict[str, Any]) -> None:
        """As `load`; where the data are other ones, the error waits until a batch is asked for.

        A script that has other data in each epoch replaces this loader until then.
        """
        try:
            self.load(state)
        except ConfigError as error:
            self.__dict__.update(_loaded=state, _other_data=error)
            self._place.epoch = state["epoch"]

    def _require_same_data(self) -> None:
        if self._other_data is not None:
            raise self._other_data

    def end_with_another(self) -> None:
        """The rest of another loader's epoch had no batch, as in `zip(other, this)`.

        A resumed pass of this one that the script has begun ends with that epoch.
        """
        if self._resumed is None:
            self._keep_pass()
        elif self._unstarted is not None and self._unstarted() is not None:
            self.__dict__["_ends_with_another"] = True

    def take_over(self, former: "EpochLoader") -> None:
        """This one goes on in the place of another, which is iterated no more."""
        former._settle(None)
        self.__dict__["_asked"] = former._asked
        if former._resumed is not None or former._other_data is not None:
            self.load_if_same(former._loaded)
            return
        if former._under_way:
            former._next_epoch()
        self._place.epoch = former._place.epoch

    @property
    def asked(self) -> bool:
        """The script has read where its loop begins."""
        return bool(self._asked)

    @property
    def by_index(self) -> bool:
        """The epoch under way is resumed by skipping."""
        return bool(self._place.by_index)

    # ------------------------------------------------------------------ a pass

    def _resumed_pass(self) -> Generator[Any]:
        if self._resumed is not None and self._asks_again(sys._getframe(1)):
            self.end_epoch()
        if self._resumed is None:
            yield from self
            return
        asking = sys._getframe(1)
        if self._is_left:
            self.__dict__["_is_left"] = False
            self._again()
        front = self._standing()
        self._begin()
        fetches, self.__dict__["_resumed"] = self._resumed, None
        self._begin_first()
        current = self._enter(front, is_rest=True)
        current.loop = _loop_of(asking)
        try:
            place, now = self._place, rng_state()
            drawn = place.drawn()
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
                current.batches += 1
                yield place.moved(batch)
        except BaseException:
            self._leave(current)
            raise
        yield from self._pass(iterator, current)

    def _pass(self, iterator: Iterator[Any], current: _Pass) -> Iterator[Any]:
        current.loop = current.loop or _loop_of(sys._getframe(1))
        try:
            self._begin_first()
            place = self._place
            while True:
                if not self._is_current(current):
                    if not current.is_given_back:
                        return  # another pass has begun meanwhile, and is the training's
                    self._say(_SIDE_BY_SIDE)
                    yield from map(place.moved, iterator)
                    return
                if not current.is_quiet:
                    self._fetches()
                if self._ahead:
                    self._note(_Fetch(rng_state(), self._own_state(), place.drawn()))
                if not place.index:
                    place.draw()
                batch = next(iterator, _NOTHING)
                place.tell_sampler_as_then()
                if not self._is_current(current):
                    return
                if batch is _NOTHING:
                    self._end_pass(current)
                    return
                place.index += 1
                current.batches += 1
                yield place.moved(batch)
        finally:
            self._leave(current)

    def _end_pass(self, current: _Pass) -> None:
        """The loader has no batch more."""
        left = 0 if self._trained is None else self._place.index - self._trained
        if self._ahead:
            self._before.pop()  # no batch came
        self.__dict__["_ended"] = True
        if current.batches and self._is_idle():
            self._give_back()
            return
        if self._place.is_within and not current.batches:
            self._empty()
        if left <= 0:
            self._next_epoch()

    def _asks_again(self, frame: types.FrameType) -> bool:
        """The script has been here, and left the rest of the epoch: its loop wants the next one."""
        here = _stack(frame)
        if self._is_left and self._left_loop and here in self._asks:
            return True
        self._asks.add(here)
        return False

    def _is_in_pass(self) -> bool:
        """An iterator of the training's lives."""
        return self._current is not None and not self._current.is_over

    def _is_within_loop(self, frame: types.FrameType) -> bool:
        """The body of a `for` over a pass runs, so another pass that begins is no epoch."""
        loop = None if self._current is None else self._current.loop
        if loop is None:
            return False
        code, begin, end = loop
        return any(one is code and begin < offset < end for one, offset in _stack(frame))

    def _evaluation(self, iterator: Iterator[Any], notice: str) -> Iterator[Any]:
        """All batches.  The epoch under way goes on behind it, and a resumed one waits."""
        place, mark, is_said = self._place, self._training(), False
        for batch in iterator:
            yield place.moved(batch)
            if not is_said and self._training() != mark:
                is_said = True
                self._say(notice)
        if not place.by_index:
            self._say_of_own_state()

    # ------------------------------------------------------------------ passes that train nothing

    def _standing(self) -> _Standing:
        own = {name: self.__dict__[name] for name in _OF_A_PASS}
        own["_before"] = self._before.copy()
        return _Standing(vars(self._place).copy(), own)

    def _stand_at(self, standing: _Standing) -> None:
        vars(self._place).clear()
        vars(self._place).update(standing.place)
        self.__dict__.update(standing.own)

    def _enter(self, front: _Standing, *, is_rest: bool = False) -> _Pass:
        """A pass begins."""
        current = _Pass(self._training(), front, is_rest)
        self.__dict__.update(_under_way=True, _ended=False, _current=current)
        return current

    def _is_idle(self) -> bool:
        """The pass under way has trained nothing so far."""
        current = self._current
        if current is None or current.front is None:
            return False
        if self._training() != current.mark:
            self._keep_pass()
        return current.front is not None

    def _keep_pass(self) -> None:
        """The pass under way is an epoch, for good."""
        if self._current is not None:
            self._current.front = None
            self.__dict__["_trains_quietly"] = self._current.is_quiet

    def _settle(self, current: _Pass | None) -> None:
        """Passes that trained nothing give their place back, up to that of `current`."""
        while self._current is not current and self._is_idle():
            self._give_back()

    def _settle_left(self) -> None:
        """As `_settle`, for passes whose iterators are gone."""
        while self._current is not None and self._current.is_over and self._is_idle():
            self._give_back()

    def _is_current(self, current: _Pass) -> bool:
        self._settle(current)
        return self._current is current

    def _leave(self, current: _Pass) -> None:
        """The iterator of a pass is gone.

        One that stands in no other pass may still train: `next(iter(loader))` drops it before.
        """
        current.is_over = True
        if self._current is not current or not self._is_idle() or current.front is None:
            return
        around = current.front.own["_current"]
        if around is not None and not around.is_over:
            self._give_back()

    def _give_back(self) -> None:
        """The loader stands where it stood in front of the pass."""
        current = self._current
        current.is_given_back = True
        was_left = not self._ended
        stood_within = current.front.own["_under_way"] and not self._place.by_index
        self._stand_at(current.front)
        if current.is_rest:
            self.load(self._loaded)
            self.__dict__["_is_left"] = True
            self.__dict__["_left_loop"] = was_left and current.loop is not None
        elif stood_within:
            self._say_of_own_state()

    def _say_of_own_state(self) -> None:
        self._say(
            "a pass over ckpt.loader within another one trained nothing. This loader says itself "
            "where it is, and that is the inner pass now. A checkpoint of the outer pass does not "
            "resume at its batch. Evaluate on a loader of its own"
        )

    def _state_in_front(self) -> dict[str, Any]:
        """As `state`, in front of the pass under way."""
        current = self._current
        if current.is_rest:
            loaded: dict[str, Any] = self._loaded
            return loaded
        now = self._standing()
        self._stand_at(current.front)
        try:
            return self.state()
        finally:
            self._stand_at(now)

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
        self.__dict__.update(
            _under_way=False, _ended=False, _current=None, _loaded=None, _is_left=False,
            _ends_with_another=False, _asks=set(),
        )  # fmt: skip
        if self._trained is not None:
            self.__dict__["_trained"] = 0
        self._place.end_epoch()


_NOTHING = object()
_SIDE_BY_SIDE = (
    "two passes over one ckpt.loader go on side by side, and its place is that of one of them. "
    'Give each a loader of its own: ckpt.loader(DataLoader(...), name="second")'
)
_TRAINS_WITHOUT_GRADIENTS = (
    "a pass over ckpt.loader that began under no_grad was taken for an evaluation, and trained. So "
    "it is no epoch, and no checkpoint has its place. Begin the loop outside of no_grad"
)


def _offset(frame: types.FrameType) -> int:
    """Of the instruction at hand; where that was specialised, Python may name a cache behind it."""
    code, offset = frame.f_code.co_code, frame.f_lasti
    while 0 < offset < len(code) and dis.opname[code[offset]] == "CACHE":
        offset -= 2
    return offset


def _loop_of(frame: types.FrameType) -> tuple[types.CodeType, int, int] | None:
    """Code and offsets of the `for` that asks for a batch; None: another instruction does."""
    code, begin = frame.f_code, _offset(frame)
    found = (one for one in dis.get_instructions(code) if one.offset == begin)
    asking = next(found, None)
    return (code, begin, asking.argval) if asking and asking.opname == "FOR_ITER" else None


def _stack(frame: types.FrameType | None) -> tuple[tuple[types.CodeType, int], ...]:
    """The instructions that the script stands at, innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code, _offset(frame)))
        frame = frame.f_back
    return tuple(found)
