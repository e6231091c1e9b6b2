"""Slots for the checkpoints of one rank: asked for, counted, and asked for again."""

import time
from functools import partial

from autockpt.executors.linux import late_threads
from autockpt.executors.snapshot.device import register_with_cuda
from autockpt.session.base import RankState
from autockpt.session.place.training_position import TrainingPosition
from autockpt.session.room import look_for_room

SLOT_SLACK_BYTES = 4 * 4096
"""A tensor that moves to the boundary group shifts the rest of the image by a page or two.  New
slots would cost a checkpoint, and the old ones with their snapshots."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Pause before slots are asked for again that the host had no room for.  A first durable checkpoint
that failed waits as long.  Each pause is twice the one before."""


def pause_s(tries: int) -> float:
    """Before the next try after so many in vain."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 64)))  # no overflow


class SlotRequests:
    """This rank's requests for slots, and the time of the next request."""

    def __init__(self, rank: RankState, position: TrainingPosition) -> None:
        self._rank, self._position = rank, position
        self._job, self._client = rank.job, rank.client
        self._seen = 0
        """Replacements of the slots that were noted."""
        self._asked: tuple[int, int] | None = None
        """Bytes of an image and number of slots that were asked for last."""
        self._asked_again = 0
        """Times that slots for which there was no room were asked for again."""
        self._are_fewer = False
        """The newest slots are fewer than were asked for."""
        self._more_asked = 0
        """Times that one more slot was asked for since the slots changed."""
        self._more_s = 0.0
        """No slot is added before, CLOCK_MONOTONIC."""

    def ask_anew(self) -> None:
        """Also where the same slots were asked for before."""
        self._asked = None
        self.ask()

    def has_work(self) -> bool:
        """Other slots came, or more of them may be asked for."""
        link = self._client
        return link.slots_changed != self._seen or bool(
            link.window_bytes or link.slots_refused or len(link.slots) < self._most
        )

    def take_news(self) -> None:
        """At a boundary: other slots came than there were."""
        link = self._client
        if link.slots_changed == self._seen:
            return
        self._seen, were_fewer = link.slots_changed, self._are_fewer
        self._are_fewer, self._more_asked = bool(link.note), 0
        self._more_s = time.monotonic() + pause_s(0) if self._are_fewer else 0.0
        if link.window_bytes:
            self._rank.report_degraded("memory tier", link.note)
            return
        if link.note:
            self._rank.say(f"memory: {link.note}", always=True)
        elif were_fewer and link.slots:
            text = f"memory: there is room for {len(link.slots)} slots now"
            self._rank.say(text, always=True)
        if self._asked_again:
            self._asked_again = 0
            self._rank.warned.discard("memory tier")
            self._rank.say("there is room for checkpoints again", always=True)
        for arena in link.slots:
            register_with_cuda(arena)

    def ask_for_more(self) -> None:
        """A window is little, and there may be room for slots by now."""
        if not self._rank.open and time.monotonic() > self._client.given_s + pause_s(
            self._asked_again
        ):
            self._asked_again += 1
            self.ask_anew()

    def ask_for_another(self) -> None:
        """Fewer slots than the plan wants were made, and there may be room for more by now.

        The former slots hold most of the memory that the host lacked at first.
        """
        link, slots = self._client, self._most
        if link.window_bytes or self._rank.open or len(link.slots) >= slots:
            return
        now_s = time.monotonic()
        if now_s > self._more_s:
            self._more_asked += 1
            self._more_s = now_s + pause_s(self._more_asked)
            limit_bytes = self._job.goal.limits.host_memory_bytes
            link.want_another_slot(slots=slots, limit_bytes=limit_bytes)

    @property
    def _most(self) -> int:
        """One is planned where no more fits; two may all the same, and serve better."""
        return max(2, self._rank.plan.slots)

    def ask(self, *, at_once: bool = False) -> None:
        """After the first step, because the optimizer's state is empty before it.

        `at_once`: also where a pause after a refusal has not passed.
        """
        if self._rank.step == self._rank.start_step or not self._rank.plan.snapshot_interval_steps:
            return
        assert self._rank.snapshotter is not None
        layout = self._rank.snapshotter.plan(self._position.progress())
        slots = self._most
        asked = (layout.image_bytes, slots)
        if asked == self._asked and not self._asks_again(at_once):
            return
        if self._asked is None and self._job.rank == 0:
            self._look_for_room(layout.image_bytes)
        self._asked = asked
        self._client.want_slots(
            image_bytes=layout.image_bytes + SLOT_SLACK_BYTES,
            chunk_bytes=self._rank.plan.staging.chunk_bytes,
            slots=slots, limit_bytes=self._job.goal.limits.host_memory_bytes,
            may_stream=self._rank.plan.tier("disk").interval_steps > 0,
        )  # fmt: skip

    def _look_for_room(self, image_bytes: int) -> None:
        """Once, when the size of a checkpoint is known."""
        if self._rank.plan.tier("disk").interval_steps:
            look = partial(
                look_for_room, self._job.checkpoints,
                state_bytes=image_bytes * self._job.world_size,
                kept=self._job.goal.retention.keep_last, say=self._rank.say,
            )  # fmt: skip
            late_threads.start(look, "autockpt-room")

    def _asks_again(self, at_once: bool) -> bool:
        """A host without room for slots may have room later; a policy does not change."""
        refused_s = self._client.no_room_s
        if refused_s is None:
            return False
        if not at_once and time.monotonic() < refused_s + pause_s(self._asked_again):
            return False
        self._asked_again += 1
        return True
