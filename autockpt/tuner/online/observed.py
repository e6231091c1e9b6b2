"""Observations of a run: telemetry events in, `Costs` and failure rates out."""

import math
from dataclasses import dataclass, field, replace
from functools import partial

from autockpt.policies.cost_model.costs import ASSUMED_SLOWDOWN, Costs, PeerCosts
from autockpt.tuner.online.estimates import BLOCKS, Contrast, Window
from autockpt.tuner.online.turns.compare import KEPT
from autockpt.values.profile import FailureRates, RecoveryTimes
from autockpt.values.telemetry import (
    CheckpointDurable,
    Event,
    GenerationReplicated,
    IterationsTimed,
    PersistFailed,
    SettingMeasured,
    SnapshotBegan,
    SnapshotDiscarded,
    SnapshotSealed,
)

BOUNDARY_BLOCKS = 8
"""Blocks in a mean of the time at boundaries: a stall may be reported a block after its time."""
OUTDATED_SAVES = 4
"""So many saves without a quiet iteration between them, and older quiet ones tell nothing."""
KNOWN = 3
"""Samples of a cost before they count instead of the profile's figure: the first one is cold."""
STUCK_S = 600.0
"""A save without an end after this long no longer holds back a change of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A save that began and has not ended."""

    began_s: float
    disk: bool


@dataclass(slots=True, kw_only=True)
class Observed:
    """Running estimates of one job, fed with the events of rank 0."""

    failures: FailureRates
    """As known before the run."""
    recovery: RecoveryTimes
    prior: Costs | None = None
    """Costs from the profile, for everything that has not been observed yet."""

    stall: Window = field(default_factory=Window)
    copy: Window = field(default_factory=Window)
    persist: Window = field(default_factory=partial(Window, rare=True))
    send: Window = field(default_factory=partial(Window, rare=True))
    """From the complete snapshot until other nodes hold it."""
    link: Window = field(default_factory=partial(Window, rare=True))
    """Seconds of a gigabyte of copies while it moved."""
    quiet: Window = field(default_factory=lambda: Window(size=BLOCKS))
    busy: Window = field(default_factory=lambda: Window(size=BLOCKS))
    pace: Window = field(default_factory=Window)
    """Quiet iterations between one snapshot and the next, one mean each."""
    quiet_sum_s: float = 0.0
    """Of the quiet blocks since the newest snapshot,"""
    quiet_blocks: int = 0
    """and their number."""
    boundary: Window = field(default_factory=Window)
    """Time at each iteration boundary, also without a checkpoint, one mean of BOUNDARY_BLOCKS each,
    """
    boundary_sum_s: float = 0.0
    """of the newest blocks, without the stalls of snapshots,"""
    boundary_steps: int = 0
    """their iterations,"""
    boundary_blocks: int = 0
    """and their number."""
    busy_saves: int = 0
    """Saves that became durable since the newest quiet iteration."""
    slower: Contrast = field(default_factory=Contrast)
    """Of iterations with background work."""
    sealed: int = 0
    persisted: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    """Time of the newest event."""
    seals_s: tuple[float, ...] = ()
    """Times of the newest snapshots."""
    saving: dict[str, UnderWay] = field(default_factory=dict)
    """By generation."""
    tried: tuple[SettingMeasured, ...] = ()
    """The newest checkpoints of the comparison under way, or of the last one."""

    def observe(self, event: Event) -> None:
        """Take in one event; kinds that say nothing about costs are ignored."""
        if self.first_s is None:
            self.first_s = event.at_s
        self.last_s = max(self.last_s, event.at_s)
        if isinstance(event, SnapshotBegan):
            self._began(event)
        elif isinstance(event, SnapshotSealed):
            self._sealed(event)
        elif isinstance(event, CheckpointDurable):
            self.persist.observe(event.latency_s)
            self.persisted += 1
            self.busy_saves += 1
            self._ended(event.generation)
        elif isinstance(event, GenerationReplicated):
            self.send.observe(max(0.0, event.latency_s - self.copy.mean))
            if event.bytes and event.moving_s > 0:
                self.link.observe(event.moving_s / event.bytes * 1e9)
        elif isinstance(event, PersistFailed | SnapshotDiscarded):
            self.saving.pop(event.generation, None)
        elif isinstance(event, IterationsTimed):
            self._iterated(event)
        elif isinstance(event, SettingMeasured):
            self.tried = (*self.tried, event)[-KEPT:]

    def _began(self, event: SnapshotBegan) -> None:
        """Add a save that began; drop saves without an end once they delay nothing."""
        recent = {k: v for k, v in self.saving.items() if event.at_s - v.began_s < STUCK_S}
        new = UnderWay(began_s=event.at_s, disk="disk" in event.tiers)
        self.saving = {**recent, event.generation: new}

    def _ended(self, generation: str) -> None:
        """A durable save ends the earlier ones: a save whose keeper died reports no end."""
        ended = self.saving.pop(generation, None)
        if ended is not None:
            self.saving = {k: v for k, v in self.saving.items() if v.began_s > ended.began_s}

    def _sealed(self, event: SnapshotSealed) -> None:
        self.stall.observe(event.boundary_stall_s + event.fence_stall_s)
        self.boundary_sum_s -= event.boundary_stall_s + event.fence_stall_s
        self.copy.observe(event.copy_s)
        under_way = self.saving.get(event.generation)
        if under_way is not None and not under_way.disk:
            del self.saving[event.generation]
        if self.quiet_blocks:
            self.pace.observe(self.quiet_sum_s / self.quiet_blocks)
            self.quiet_sum_s, self.quiet_blocks = 0.0, 0
        self.sealed += 1
        self.seals_s = (*self.seals_s, event.at_s)[-2:]

    def _iterated(self, event: IterationsTimed) -> None:
        if event.quiet_s > 0:
            self.busy_saves = 0
            self.quiet.observe(event.quiet_s)
            self.quiet_sum_s += event.quiet_s
            self.quiet_blocks += 1
        if event.busy_s > 0:
            self.busy.observe(event.busy_s)
        self.slower.observe(event.quiet_s, event.busy_s)
        self.boundary_sum_s += event.checkpoint_s
        self.boundary_steps += event.count
        self.boundary_blocks += 1
        if self.boundary_blocks >= BOUNDARY_BLOCKS:
            self.boundary.observe(self.boundary_sum_s / max(1, self.boundary_steps))
            self._forget_boundaries()

    def _forget_boundaries(self) -> None:
        self.boundary_sum_s, self.boundary_steps, self.boundary_blocks = 0.0, 0, 0

    def busy_saving(self, now_s: float) -> bool:
        """Whether a save is under way."""
        return any(now_s - save.began_s < STUCK_S for save in self.saving.values())

    @property
    def jumped(self) -> bool:
        """Whether a cost changed its level since `settle`."""
        return any(window.jumped for window in self._watched)

    def known(self, samples: int, *, falls: bool = False) -> bool:
        """Whether every level is clear, and one that jumped has been seen this often.

        `falls`: one that fell far is known at once.
        """
        return all(
            not window.doubtful
            and (window.n >= samples or not window.jumped or (falls and window.fell))
            for window in self._watched
        )

    def settle(self) -> None:
        """The plan was changed: jumps seen so far are dealt with."""
        for window in self._watched:
            window.jumped = False

    @property
    def _watched(self) -> tuple[Window, ...]:
        return self.stall, self.persist, self.quiet, self.send

    @property
    def iteration_s(self) -> float:
        """Length of a quiet iteration: observed quiet, else the profile's, else observed busy.

        Where a save is in every iteration quiet ones are long ago, and busy ones tell it.
        """
        if self.quiet.n and self.busy.n and self.busy_saves >= OUTDATED_SAVES:
            return self.busy.mean / (1.0 + self.slower.mean)
        if self.quiet.n:
            return self.quiet.mean
        return self.prior.iteration_s if self.prior is not None else self.busy.mean

    def costs(self, *, sync: bool) -> Costs:
        """Current costs of one checkpoint; call only once something was observed."""
        prior = self.prior
        stall, stall_high = _cost(
            self.stall, None if prior is None else (prior.stall_s, prior.stall_high_s)
        )
        copy, copy_high = _cost(
            self.copy, None if prior is None else (prior.copy_s, prior.copy_high_s)
        )
        persist, persist_high = _cost(
            self.persist, None if prior is None else (prior.persist_s, prior.persist_high_s)
        )
        copying, writing = self._slowdowns(copy, persist)
        recovery = self.recovered
        return Costs(
            iteration_s=self.iteration_s,
            stall_s=stall,
            stall_high_s=stall_high,
            copy_s=copy,
            copy_high_s=copy_high,
            persist_s=persist,
            persist_high_s=persist_high,
            copy_slowdown_s=copying,
            persist_slowdown_s=0.0 if sync else writing,
            blocked_s=max(0.0, persist - stall) if sync else 0.0,
            boundary_s=0.0 if sync else max(0.0, self.boundary.mean),
            restart_s=recovery.detect.value_s + recovery.restart.value_s,
            restore_memory_s=recovery.restore_memory.value_s,
            restore_disk_s=recovery.restore_disk.value_s,
            peers=self._peers(),
            samples={
                "iteration_s": self.quiet.n or self.busy.n,
                "stall_s": self.stall.n,
                "copy_s": self.copy.n,
                "persist_s": self.persist.n,
            },
        )

    @property
    def recovered(self) -> RecoveryTimes:
        """Times of recovery; assumed restores give way to saves that were seen."""
        known = self.recovery
        assumed = "assumed" in (known.restore_memory.source, known.restore_disk.source)
        if not assumed or min(self.copy.n, self.persist.n) < KNOWN:
            return known
        copy_s, persist_s = self.copy.mean, self.persist.mean
        return known.like_saves(copy_s=copy_s, persist_s=persist_s, n=self.persist.n)

    def _peers(self) -> PeerCosts | None:
        """The cost of an exchange: its time is observed, and the rest is of the profile."""
        peers = self.prior.peers if self.prior is not None else None
        if peers is None:
            return None
        send_s, send_high_s = _cost(self.send, (peers.send_s, peers.send_high_s))
        return replace(peers, send_s=send_s, send_high_s=send_high_s)

    @property
    def costed(self) -> bool:
        """The cost of a checkpoint is known, from the profile or from this run."""
        seen = min(self.stall.n, self.copy.n, self.persist.n) >= KNOWN
        return (self.prior is not None or seen) and self.iteration_s > 0

    def _slowdowns(self, copy_s: float, persist_s: float) -> tuple[float, float]:
        """Training time lost per snapshot, and per persist beyond it.

        Background work of P seconds spreads over P / busy iterations, rounded up, each longer by
        (busy - quiet).  A snapshot's share of it goes by its share of the time.
        """
        span_s = max(copy_s, persist_s)
        if not self.slower.n:
            if self.prior is not None:
                return self.prior.copy_slowdown_s, self.prior.persist_slowdown_s
            return ASSUMED_SLOWDOWN * copy_s, ASSUMED_SLOWDOWN * (span_s - copy_s)
        total_s = self.slower.mean * self._stretched_s(span_s)
        copying_s = total_s * (copy_s / span_s if span_s > 0 else 0.0)
        return copying_s, total_s - copying_s

    def _stretched_s(self, span_s: float) -> float:
        """Quiet time of the iterations that background work of `span_s` meets; the last counts as a
        whole, as it does in `slower`."""
        busy_s = self.iteration_s * (1.0 + self.slower.mean)
        return self.iteration_s * max(1, math.ceil(span_s / busy_s))

    def cost_errors_s(self, *, sync: bool) -> tuple[float, float]:
        """Return the standard errors of the training time that a snapshot and a persist cost."""
        persist_s = self.persist.error if self.persist.n >= 2 else 0.0
        if sync or self.slower.n < 2:
            return self.stall.error, persist_s if sync else 0.0
        span_s = max(self.copy.mean, self.persist.mean)
        longer = self.slower.mean / (1.0 + self.slower.mean)
        spread_s = self.slower.error * self._stretched_s(span_s)
        return self.stall.error, math.hypot(spread_s, longer * persist_s)

    def next_process(self) -> None:
        """Forget the times and the work under way of the observed process, which has ended."""
        self.first_s, self.last_s = None, 0.0
        self.seals_s, self.saving, self.busy_saves = (), {}, 0
        self.quiet_sum_s, self.quiet_blocks = 0.0, 0
        self.slower.forget_blocks()
        self._forget_boundaries()

    def rates(self) -> FailureRates:
        """Failure rates with this process's own exposure added; a failure would have ended it."""
        days = (self.last_s - self.first_s) / 86400.0 if self.first_s is not None else 0.0
        known = self.failures
        return replace(
            known,
            per_node=known.per_node.updated(events=0, exposure_days=days * known.nodes),
            per_job=known.per_job.updated(events=0, exposure_days=days),
        )


def _cost(seen: Window, prior: tuple[float, float] | None) -> tuple[float, float]:
    """(mean, 95th percentile) as observed, or the profile's while that is too little."""
    if prior is not None and seen.n < KNOWN and not seen.fell:
        return prior
    return seen.mean, max(seen.mean, seen.high)
