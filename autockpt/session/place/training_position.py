"""Where the training stands: loaders and their positions, counters of a framework, random state.

docs/howto/frameworks/adapters.md says which moment is the right one.
"""

import contextlib
import copy
import itertools
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.restore.resume import Resumed
from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.data.epoch_loader import EpochLoader
from autockpt.executors.state.rng import rng_mark, set_rng_state
from autockpt.executors.storage.directory.records import lossy_notice
from autockpt.session.base import RankState
from autockpt.session.place.gradient_buckets import GradientBuckets
from autockpt.session.place.position import is_script
from autockpt.session.place.script.generators import ScriptGenerators
from autockpt.values import telemetry as t
from autockpt.values.errors import AutockptError, ConfigError

Extra = Callable[[], Mapping[str, Any]]
"""Counters of the framework as of now, as JSON can hold them."""
ONLY = "data"
"""Name of the loader where there is one; its place is stored as that of attach(data=...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint that the training went on from."""

    step: int
    """Iterations trained."""
    source: str
    """memory, peer, parity or disk."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What `attach(extra=...)` gave at that step; empty where it gave nothing."""


def _plain(value: Any) -> Any:
    """A number of numpy or torch as JSON can hold it: metrics often are.

    Raises ConfigError for anything but a single number.
    """
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError, TypeError):
        raise ConfigError(
            f"extra(): a {type(value).__module__}.{type(value).__qualname__} is no JSON; give "
            "numbers, strings, lists and dicts"
        ) from None


class TrainingPosition:
    """The part of a checkpoint beside the attached objects: stored, and put back."""

    def __init__(self, rank: RankState, data: Any, *, extra: Extra | None, deferred: bool) -> None:
        """`deferred`: `finish_restore` puts the random state back, not `attach`."""
        self._rank, self._job = rank, rank.job
        self.data = None if data is None or is_script(data) else DataPosition(data)
        """That of attach(data=...)."""
        self.loaders: dict[str, EpochLoader] = {}
        """The loaders that `loader` made, by name."""
        self.restored: Restored | None = None
        """What `attach` found; None: the training begins at step 0."""
        self._generators = ScriptGenerators(lambda text: rank.say(text, always=True))
        rank.live.script_generators = self._generators.states
        self._extra = extra
        self._deferred = deferred
        self._saved_places: dict[str, Any] = {}
        """Of loaders that were not made yet, by name."""
        self._saved_rng: Any = None
        self._thread = threading.get_ident()
        self._resumed_rng: Any = None
        """Put back by `attach`, and again where the loop begins: a script may have drawn meanwhile,
        as it does at every start.  None: it is not known to belong there."""
        self._passed_rng: Any = None
        """The same, while a pass over a loader has begun that may train nothing."""
        self.was_over = False
        """The checkpoint is of a loop's end: random numbers go on as the script then draws."""
        self._over_rng: Any = None
        """The random state of such a checkpoint."""
        self._has_passed = False
        """Its loop has been passed, or the training went on."""
        self._are_passes: bool | None = None
        """As `are_passes`; None: there was no such loop, or it is not known."""
        self.is_over = False
        """A loop has ended, or may: code behind it draws for the next iteration."""
        self._mesh = rank.live.mesh()
        self._buckets = GradientBuckets(
            rank.live.models, has_trained=lambda: rank.step != rank.start_step
        )
        self.watch_fetch: Callable[[str], None] = lambda loader: None
        """As `fetches` of an `EpochLoader`, with the name of one of `loaders`."""
        self.asks_epoch: Callable[[types.FrameType], None] = lambda frame: None
        """Called where the script asks one of `loaders` for its epoch; and"""
        self.goes_on: Callable[[], None] = lambda: None
        """where the rest of an epoch begins, with random numbers as they are; and"""
        self.begins: Callable[[], None] = lambda: None
        """when the training begins."""
        self._known_nan: list[str] = []
        """As `LiveState.known_nan`, in order."""
        rank.live.dry_encode({} if self.data is None else {"data": self.data.require_state()})

    # ------------------------------------------------------------------ stored

    def progress(self) -> dict[str, Any]:
        """As of now, for a checkpoint."""
        rank = self._rank
        progress = {
            "step": rank.step, "lead": rank.lead_resumed + rank.lead, "data": self.position(),
            "mesh": self._mesh, "nan": self._known_nan,
        }  # fmt: skip
        if self.is_over or (rank.total is not None and rank.step >= rank.total):
            progress["over"] = True
        if self._are_passes is False:
            progress["passes"] = False
        layouts = self._buckets.layouts()
        if layouts:
            progress["buckets"] = layouts
        if self._extra is not None:
            progress["extra"] = json.dumps(dict(self._extra()), default=_plain)
        return progress

    def position(self) -> dict[str, Any] | None:
        """Of the data, or of all loaders; None: there is none."""
        if not self.loaders:
            return None if self.data is None else self.data.state()
        places = {name: loader.state() for name, loader in self.loaders.items()}
        return places[ONLY] if list(places) == [ONLY] else {"loaders": places}

    @property
    def is_within_epoch(self) -> bool:
        """The script's loop, or one of ours, goes on within an epoch."""
        if self.data is not None:
            return self.data.is_within and self.data.left != 0
        return not self._deferred and any(one.is_within for one in self.loaders.values())

    @property
    def is_at_epoch_end(self) -> bool:
        """A loader of the script's loop has no batch left in this epoch."""
        return not self._deferred and any(one.is_at_end for one in self.loaders.values())

    @property
    def epoch(self) -> int:
        """As `Session.epoch`.

        A checkpoint of a loop's end lacks the work that follows in the script.  Then it is the
        epoch that is over: its loop has nothing left, and the work behind it runs.
        """
        data = self.data
        if data is not None:
            began = bool(data.epoch) or data.is_within
            if self.restored is not None and self.restored.step and not began:
                raise AutockptError(
                    "ckpt.epoch: no batch came from ckpt.batches(), so the epoch is known to the "
                    "script alone. Leave `data` out of attach, and take ckpt.loader(loader)"
                )
            if self._are_passes is False:
                raise AutockptError(
                    "ckpt.epoch: the script's loops (until=...) are no passes over the loader, so "
                    "its epochs are not known. Begin at epoch 0: loops that are trained have "
                    "nothing left, and the work behind them is taken back"
                )
            return data.epoch + (data.left == 0 and not (self.was_over and not self._has_passed))
        if len(self.loaders) == 1:
            return next(iter(self.loaders.values())).epoch
        raise AutockptError(
            "ckpt.epoch needs one loader: attach(data=...), or loader = ckpt.loader(...) and "
            f"loader.epoch; there are {len(self.loaders)}"
        )

    @property
    def are_passes(self) -> bool:
        """Each loop of the script that ends early is one pass over the attached loader."""
        return self.data is not None and self._are_passes is not False

    def begin_loop(self, steps: int) -> None:
        """A loop that ends early has so many steps; none: it is trained already."""
        left = None if self.data is None else self.data.left
        if steps > 0 and left is not None and self.data is not None:
            self._are_passes = self._are_passes is not False and steps == (left or self._whole())
        if steps >= 0:
            self._has_passed = True

    def _whole(self) -> int:
        return len(self.data.loader) if self.data is not None else 0

    def script_states(self) -> dict[str, Any]:
        """States of the script's own generators, by name."""
        return self._generators.states()

    def put_over_back(self, script: Mapping[str, Any]) -> None:
        """Random numbers as behind the loop that the checkpoint is of; `script`: its generators."""
        if self._over_rng is not None:
            set_rng_state(self._over_rng)
            self._generators.put_back(script)

    def copy(self) -> tuple[Any, Any] | None:
        """(random state, position of the data) as of now; the loader's own may go on meanwhile."""
        try:
            return self._rank.live.random_state(), copy.deepcopy(self.position())
        except Exception as error:
            if is_from_handler(error):
                raise
            self._rank.report_degraded("data", f"its position cannot be kept: {error!r}")
            return None

    def random_mark(self) -> list[Any]:
        """Another one when the script has drawn random numbers meanwhile."""
        return [*rng_mark(), *self._generators.mark()]

    # ------------------------------------------------------------------ put back

    @property
    def has_begun(self) -> bool:
        """The script trains: its generators are put back no more."""
        return self._generators.has_begun

    def look_for_generators(
        self, *, begins: bool, trains: bool = False, again: bool = False
    ) -> None:
        """The script's own generators get their states, until the training `begins`.

        `trains`: it may have drawn already; generators that were found before have their states.
        `again`: so it may, if this is not the first search.  A framework's loop has not begun
        before `finish_restore`.
        """
        generators = self._generators
        if begins:
            self._resumed_rng = None
            self.begins()
        is_early = self._deferred and not (trains and self._saved_rng is None)
        if generators.has_begun or is_early:
            return
        generators.has_drawn |= trains
        self._look(sys._getframe(1), again=again)
        if begins:
            generators.begin()

    def _look(self, frame: types.FrameType, *, again: bool = False) -> None:
        try:
            places = [] if self.data is None else [self.data]
            places += [each.place for each in self.loaders.values()]
            resumed = self.restored is not None
            known = [one for each in places for one in each.kept_generators(resumed=resumed)]
            self._generators.look(frame, self._rank.live.models, known, again=again)
        except Exception as error:
            if is_from_handler(error):
                raise
            text = f"the script's own random generators are not saved: {error!r:.200}"
            self._rank.say(text, always=True)

    @property
    def may_put_back(self) -> bool:
        """The restored random state may still be put back where the loop begins.

        Not in a thread that watches the training: it may have begun meanwhile.
        """
        return self._resumed_rng is not None and self.is_own_thread

    @property
    def is_own_thread(self) -> bool:
        """This thread called `attach`, and trains."""
        return threading.get_ident() == self._thread

    def put_random_back(self) -> None:
        """The loop may begin here: random numbers drawn since `attach` are of no iteration."""
        if self.may_put_back:
            set_rng_state(self._resumed_rng)

    def finish_restore(self) -> None:
        """As `Session.finish_restore`, for the script's own generators too."""
        rng, self._saved_rng = self._saved_rng, None
        if rng is not None:
            set_rng_state(rng)
        if self._deferred and not self._generators.has_begun:
            self._look(sys._getframe(1))

    def _training_mark(self) -> Any:
        """Another one when an optimizer has stepped, an iteration ended, or gradients came."""
        rank = self._rank
        if rank.is_closed or not self.is_own_thread:
            return object()  # not known: each pass counts
        grads = (p.grad for m in rank.live.models.values() for p in m.parameters())
        with contextlib.suppress(RuntimeError):  # tensors of inference count no writes
            marks = [(id(one), one._version) for one in grads if one is not None]
            return rank.optimizer_steps, rank.step, marks
        return rank.optimizer_steps, rank.step

    def _begin_again(self) -> None:
        """The resumed epoch begins once more, behind a pass that trained nothing.

        Random numbers that were drawn meanwhile are of no iteration.
        """
        if self._passed_rng is not None:
            self._resumed_rng, self._passed_rng = self._passed_rng, None

    def _begin_pass(self) -> None:
        """A loader's first batch is asked for, and the script will draw with it."""
        self._passed_rng, self._resumed_rng = self._resumed_rng, None
        if not self._generators.has_begun:
            self._look(sys._getframe(1))
            self._generators.has_drawn = True

    def loader(
        self, dataloader: Any, *, ahead: int = 0, name: str = ONLY, replace: bool = False
    ) -> EpochLoader:
        """As `Session.loader`.  Raises ConfigError for one that cannot be resumed at a batch."""
        if self.data is not None:
            raise ConfigError(
                "ckpt.loader(): attach(data=...) has a loader already; leave `data` out of attach"
            )
        former = self.loaders.get(name)
        if former is not None and not replace:
            raise ConfigError(
                f"ckpt.loader(name={name!r}): there is one of that name already. Give this one a "
                f'name of its own: ckpt.loader(..., name="{self._free_name(name)}"). Or '
                f"{'' if name == ONLY else f'name={name!r}, '}replace=True, where it goes on in "
                "the place of that one"
            )

        def begin() -> None:
            self.finish_restore()
            if loader.resumes:  # at an epoch's edge the script may seed between two passes
                self.goes_on()
                self.put_random_back()

        rank = self._rank
        judged: dict[str, Any] = {}
        if not (ahead or self._deferred):  # a loop of a framework's trains in each pass
            judged = {
                "mark": self._training_mark, "evaluates": lambda: not torch.is_grad_enabled(),
                "again": self._begin_again, "empty": lambda: self._end_others(name),
                "say": lambda text: rank.report_degraded("loop", text),
            }  # fmt: skip
        loader: EpochLoader = EpochLoader(
            dataloader, ahead=ahead, begin=begin, first=self._begin_pass,
            fetches=lambda: self.watch_fetch(name),
            asks_epoch=lambda frame: self.asks_epoch(frame), **judged,
        )  # fmt: skip
        saved = self._saved_places.pop(name, None)
        if saved is not None:
            loader.load_if_same(saved)
            self._say_of_rest(loader.place)
        elif former is not None:
            loader.take_over(former)
        self.loaders[name] = loader
        return loader

    def _free_name(self, name: str) -> str:
        numbered = (f"{name}{number}" for number in itertools.count(2))
        return next(one for one in numbered if one not in self.loaders)

    def _end_others(self, name: str) -> None:
        for other, loader in self.loaders.items():
            if other != name:
                loader.end_with_another()

    def _take_extra(self, resumed: Resumed) -> None:
        progress = resumed.progress or {}
        if resumed.generation is not None:
            extra = json.loads(progress.get("extra") or "{}")
            self.restored = Restored(step=resumed.step, source=resumed.source, extra=extra)
        if self.data is None and progress.get("data") is not None:
            place = progress["data"]
            self._saved_places = dict(place.get("loaders", {ONLY: place}))

    def _take_rng(self, rng: Any, *, is_over: bool) -> None:
        self._generators.expect(rng.get("script", {}))
        if self._deferred:
            self._saved_rng = rng
        else:
            set_rng_state(rng)
            self._resumed_rng, self.was_over = None if is_over else rng, is_over
            self._over_rng = rng if is_over else None

    def take_progress(self, resumed: Resumed) -> None:
        """Puts back what came with the checkpoint."""
        for notice in resumed.notices:
            self._rank.say(notice)
        if resumed.progress is None:
            return
        if left_out := resumed.progress.get("left_out"):
            self._rank.report_degraded(
                "left out",
                f"the checkpoint lacks {', '.join(map(str, left_out))}, which could not be saved: "
                "the values of the script hold, and the training may go on otherwise",
            )
        if self.data is not None and resumed.progress.get("data") is not None:
            self.data.load(resumed.progress["data"])
            self._say_of_rest(self.data)
            self.data.prepare()
        self._take_extra(resumed)
        self._are_passes = False if resumed.progress.get("passes") is False else None
        if resumed.rng is not None:  # a checkpoint of another system has none
            self._take_rng(resumed.rng, is_over=bool(resumed.progress.get("over")))
        self._group_gradients(resumed.progress)
        if resumed.lossy:
            self._rank.say(lossy_notice(f"checkpoint {resumed.generation}", resumed.lossy))
            self._rank.emit(
                t.LossyRestored(
                    at_s=time.monotonic(), rank=self._job.rank,
                    generation=str(resumed.generation), step=resumed.step, lost=resumed.lossy,
                )
            )  # fmt: skip

    def _group_gradients(self, progress: Mapping[str, Any]) -> None:
        """Of as many ranks as before: others sum other parts anyhow."""
        if progress.get("mesh", "") != self._mesh:
            return
        left = self._buckets.put_back(progress.get("buckets", {}))
        if left:
            self._rank.say(
                f"DDP of {', '.join(left)} groups its gradients anew: the first iteration may "
                "differ in last bits from that of a run that went on"
            )

    def _say_of_rest(self, data: DataPosition) -> None:
        if data.resized:
            self._rank.say(data.resized)
        workers = int(getattr(data.loader, "num_workers", 0))
        if workers and data.is_within and data.by_index and not data.is_read_again:
            self._rank.say(
                "data: new workers load the rest of this epoch. Random numbers that they draw, for "
                "an augmentation, are other ones. Seed each sample by its index where that matters"
            )
        if data.is_read_again and data.index:
            self._rank.say(
                f"data: {data.index} batches of this epoch are read again and passed over: a "
                "streamed data set does not say where its shuffle buffer stands",
                always=True,
            )

    def note_nan(self, resumed: Resumed) -> None:
        """What held NaN before the first step: on a restart the checkpoint says it."""
        kept = (resumed.progress or {}).get("nan")
        self._known_nan = self._rank.live.with_nan() if kept is None else [*map(str, kept)]
        self._rank.live.known_nan = frozenset(self._known_nan)
        if self._known_nan and kept is None:
            more = f" and {len(self._known_nan) - 1} more" if len(self._known_nan) > 1 else ""
            self._rank.say(
                f"{self._known_nan[0]}{more} holds NaN before the training; that alone makes no "
                "checkpoint suspect",
                always=True,
            )
