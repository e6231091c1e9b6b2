"""Notices about state that a restart would lose or overwrite, as far as this training shows it."""

import contextlib
import sys
import time
import weakref

import torch

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.state.live_state import inner_objects
from autockpt.executors.state.wrapping import unattached_schedulers
from autockpt.session.base import RankState
from autockpt.session.place.place_check import PlaceCheck
from autockpt.session.place.position import (
    feeds_from_loader,
    framework_of,
    may_hold_place,
    may_keep_values,
)
from autockpt.session.place.script.carried_attributes import CarriedAttributes
from autockpt.session.place.script.carried_values import (
    carried_numbers,
    carried_values,
    counted_batches,
)
from autockpt.session.place.script.unattached import UnattachedState
from autockpt.session.place.train_state import AttributeState
from autockpt.session.place.training_position import TrainingPosition
from autockpt.values.errors import ConfigError

LOOK_PAUSE_S, LOOK_GROWTH, MOST_PAUSE_S = 1.0, 1.5, 600.0
"""Between looks for attributes that change: the first pause, each next one's ratio, the longest."""
LOOK_SHARE = 1e-2
"""Largest share of the time that these looks take."""
MOST_NOTICES = 3
"""About attributes."""

_LOAD_BEFORE = "Load before attach, by attach(load=...), or only where ckpt.restored is None"


class RestartNotices:
    """Says once of each such state which object it is, and how to attach or keep it."""

    def __init__(self, rank: RankState, position: TrainingPosition, place: PlaceCheck) -> None:
        self._rank, self._position, self._place = rank, position, place
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped and are not attached."""
        self._attributes, self._unattached = CarriedAttributes(), UnattachedState()
        self._has_failed = False
        self._said = 0
        """Notices about attributes."""
        self._look_at_s = 0.0
        """When attributes are looked at next, CLOCK_MONOTONIC, and"""
        self._look_pause_s = LOOK_PAUSE_S
        """the pause behind that."""

    def look(self, *, is_first: bool) -> None:
        """At a boundary; `is_first`: of this process.  A failure here costs notices alone."""
        if self._has_failed:
            return
        try:
            if is_first:
                self._warn_of_schedulers()
                self._warn_of_loaders()
                self._warn_of_carried_values()
            self._warn_of_attributes()
        except Exception as error:
            if is_from_handler(error):
                raise
            self._has_failed = True
            self._rank.say(f"state that a restart would lose is not looked for: {error!r:.200}")

    def _warn_of_schedulers(self) -> None:
        """A restart would begin them anew, unless the script sees to that."""
        live = self._rank.live
        for name in unattached_schedulers(live.optimizers, inner_objects(live.others.values())):
            self._rank.say(
                f"a {name} sets the optimizer's rates and is not attached, so a restart begins it "
                "anew; add it: autockpt.attach(..., scheduler=...)"
            )

    def note_other_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """One that is not attached steps: its state is lost if it trains an attached model.

        The first step is no training yet, as where a script fills the state of an optimizer.
        """
        if "optimizer" in self._rank.warned or self._rank.is_closed or self._place.framework:
            return
        if optimizer not in self._others:
            self._others.add(optimizer)
            return
        live = self._rank.live
        attached = {id(each) for model in live.models.values() for each in model.parameters()}
        trained = (each for group in optimizer.param_groups for each in group["params"])
        if any(id(each) in attached for each in trained) and not framework_of(sys._getframe(1)):
            self._rank.report_degraded(
                "optimizer",
                f"an optimizer ({type(optimizer).__name__}) that is not attached steps on "
                "parameters of an attached model. No checkpoint has its state, and with attach "
                "alone its steps end no iteration. Attach every optimizer, as in "
                "optimizer={'g': ..., 'd': ...}. One that is made later: change the groups of "
                "the attached one, or attach again",
            )

    def note_load(self) -> None:
        """State is loaded into an attached object before the first iteration of this process."""
        if self._place.is_deferred or self._place.framework or framework_of(sys._getframe(1)):
            return
        step = self._rank.start_step
        if step:
            self._rank.report_degraded(
                "loop",
                "load_state_dict of an attached object was called between attach and the loop, "
                f"over the state of step {step} that was resumed. {_LOAD_BEFORE}",
            )
        elif not (
            self._place.has_asked or self._place.has_seen_restored or "load" in self._rank.warned
        ):
            self._rank.warned.add("load")
            self._rank.say(
                "load_state_dict of an attached object is called behind attach: a restart would "
                f"call it again, over the state that it has resumed. {_LOAD_BEFORE}"
            )

    def note_late_load(self, step: int) -> None:
        """State is loaded into an attached object behind so many steps."""
        saves = self._rank.client.saves
        begun = saves.newest_on_disk
        is_saved = begun is not None and begun.generation.step >= step
        if not (is_saved or self._place.framework or framework_of(sys._getframe(1))):
            self._rank.loaded_behind = step

    def _warn_of_loaders(self) -> None:
        """A script that begins its loop at the step count may still begin its data anew."""
        position, others = self._position, self._rank.live.others.items()
        has_place = position.data is not None or position.loaders or may_hold_place(others)
        begins_there = (
            self._place.has_asked or self._rank.total is not None
        )  # else a resume is refused
        if self._rank.job.rank or has_place or self._place.is_by_script or not begins_there:
            return
        if framework_of(sys._getframe(1)) is None and feeds_from_loader():
            self._rank.say(
                "a DataLoader that is not attached feeds the training: after a restart it begins "
                "anew, in another order. Give it its place: loader = ckpt.loader(loader). If the "
                'script does so by itself, say so by attach(data="script")'
            )

    def _warn_of_carried_values(self) -> None:
        """An attached object of the script's may put them back; else the user reads of them.

        With `attach` alone a model's call is the boundary, which may stand in a loop of its own.
        """
        frame = sys._getframe(1)
        if self._rank.job.rank or self._place.framework or framework_of(frame):
            return
        keeps_own = may_keep_values(self._rank.live.others.items())
        numbers = None if self._rank.start_step or keeps_own else carried_numbers(frame)
        counted = "" if self._rank.start_step else counted_batches(frame)
        for notice in (counted, "" if numbers is None else numbers.notice):
            if notice:
                self._rank.say(notice)
        if not self._rank.owns_boundary:
            return
        found = None if keeps_own else carried_values(frame)
        if found is not None:
            self._rank.report_degraded("carried values", found.warning)

    def _warn_of_attributes(self) -> None:
        """Objects of the script may carry values on, which show when they have changed."""
        now_s, began_s = time.monotonic(), time.thread_time()
        if now_s < self._look_at_s or self._said >= MOST_NOTICES:
            return
        frame, live = sys._getframe(1), self._rank.live
        if self._rank.job.rank or self._place.framework or framework_of(frame):
            self._said = MOST_NOTICES  # whoever saves its own
        elif not may_keep_values(live.others.items()):
            kept = {(id(one), "") for one in inner_objects(live.others.values())}
            states = [one for one in live.others.values() if isinstance(one, AttributeState)]
            for one in states:
                for name in one.names:
                    with contextlib.suppress(ConfigError):  # the script has taken it away
                        kept.add(one.kept(name))
            attached = [*live.models.values(), *inner_objects(live.others.values())]
            for notice in (
                self._attributes.look(frame, kept), self._unattached.look(frame, attached)
            ):  # fmt: skip
                if notice:
                    self._said += 1
                    self._rank.say(notice)
        took_s = time.thread_time() - began_s
        self._look_at_s = now_s + max(self._look_pause_s, took_s / LOOK_SHARE)
        self._look_pause_s = min(self._look_pause_s * LOOK_GROWTH, MOST_PAUSE_S)
