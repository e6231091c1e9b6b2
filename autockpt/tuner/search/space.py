"""The candidates for a write, and the excluded ones with the reason against each."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.policies.cost_model.costs import ranks_per_node
from autockpt.policies.staging.slots import host_room_bytes, slot_bytes
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import CheckpointPlan, Staging
from autockpt.values.profile import Profile
from autockpt.values.units import format_bytes

MIB = 2**20
CHUNKS_BYTES = tuple(mib * MIB for mib in (1, 2, 4, 8, 16, 32, 64))
WRITERS = (1, 2, 4, 8)
BASED = frozenset({"delta"})
"""Codecs of differences to a save before: a measured write has none before it."""
SLOTS = (1, 2, 3)
"""More than three change nothing unless several checkpoints are in flight, which is a pin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to write a checkpoint: everything about it that a measurement can tell apart."""

    chunk_bytes: int
    writers: int
    direct_io: bool
    """O_DIRECT, or through the page cache."""
    codec: str
    """`none`, or a codec for every class of tensors that it was measured on."""

    def __post_init__(self) -> None:
        Staging(chunk_bytes=self.chunk_bytes, writers=self.writers)  # its checks are ours

    def __str__(self) -> str:
        writers = "1 writer" if self.writers == 1 else f"{self.writers} writers"
        way = "direct" if self.direct_io else "buffered"
        return f"{writers} x {self.chunk_bytes / MIB:g} MiB {way} {self.codec}"

    @property
    def category(self) -> tuple[bool, str]:
        """Path and codec: of each category the best predicted one is measured."""
        return (self.direct_io, self.codec)


def candidate_of(plan: CheckpointPlan) -> Candidate:
    """How a plan writes; a codec on some classes only counts as that codec.

    Where the plan writes differences, the candidate is its full writes.
    """
    staging = plan.staging
    codecs = set(plan.tier("disk").codec.values()) - {"none", *BASED}
    return Candidate(
        chunk_bytes=staging.chunk_bytes,
        writers=staging.writers,
        direct_io=staging.direct_io,
        codec=min(codecs, default="none"),
    )


@dataclass(frozen=True, slots=True)
class Space:
    """All candidates and the predicate that thins them out; `default` is what runs untuned."""

    profile: Profile
    goal: Goal
    default: Candidate
    default_slots: int
    sample_bytes: int
    """Of one measured write of one rank: too few chunks in it would measure something else."""
    chunks_bytes: tuple[int, ...] = CHUNKS_BYTES
    writers: tuple[int, ...] = WRITERS

    def candidates(self) -> list[Candidate]:
        """Every combination, allowed or not; pinned values are among them."""
        pins, default = self.goal.pins, self.default
        measured = {m.codec for m in self.profile.codecs} - BASED
        codecs = {"none", default.codec, *measured}
        axes: tuple[Sequence[int], Sequence[int], Sequence[bool], Sequence[str]] = (
            sorted(
                {*self.chunks_bytes, default.chunk_bytes, pins.chunk_bytes or default.chunk_bytes}
            ),
            sorted({*self.writers, default.writers, pins.writers or default.writers}),
            (True, False),
            sorted(codecs),
        )
        return [
            Candidate(chunk_bytes=chunk, writers=writers, direct_io=direct, codec=codec)
            for chunk, writers, direct, codec in itertools.product(*axes)
        ]

    def refusal(self, candidate: Candidate) -> str:
        """Why a candidate may not be chosen, "" if it may; the default always may."""
        if candidate == self.default:
            return ""
        return (
            pinned(candidate, self.goal.pins)
            or self._immeasurable(candidate)
            or ("" if self.slots(candidate) else self._too_large(candidate))
        )

    def slots(self, candidate: Candidate) -> tuple[int, ...]:
        """Numbers of images in host memory that fit beside the buffers of a candidate."""
        pins, default = self.goal.pins, self.default_slots
        asked = {pins.slots} if pins.slots is not None else {*SLOTS, default}
        memory = pins.memory_enabled or pins.memory_interval_steps or pins.memory_interval_s
        least = max(pins.in_flight or 1, 2 if memory else 1)
        fitting = tuple(
            n for n in sorted(asked) if n >= least and self._need_bytes(candidate, n) <= self._room
        )
        return fitting or ((default,) if candidate == self.default else ())

    def refusals(self) -> Counter[str]:
        """How many candidates each reason takes out."""
        return Counter(filter(None, map(self.refusal, self.candidates())))

    def allowed(self) -> list[Candidate]:
        """Return the allowed candidates.

        Raises ConfigError where nothing is left beside the default.
        """
        everything = self.candidates()
        allowed = [c for c in everything if not self.refusal(c)]
        if len(allowed) < 2:
            reasons = self.refusals().most_common()
            said = "; ".join(f"{count} are out: {why}" for why, count in reasons)
            raise ConfigError(
                f"nothing to tune: of {len(everything)} ways to write only the default "
                f"({self.default}) is left; {said}; nearest: without `{reasons[0][0]}` "
                f"{reasons[0][1]} more could be tried"
            )
        return allowed

    @property
    def _room(self) -> int:
        return host_room_bytes(self.profile, self.goal)[0]

    def _need_bytes(self, candidate: Candidate, slots: int) -> int:
        """On a node: the images, and for a codec a frame and its aligned copy a writer."""
        buffers = 2 * candidate.writers * candidate.chunk_bytes if candidate.codec != "none" else 0
        return (slots * slot_bytes(self.profile) + buffers) * ranks_per_node(self.profile)

    def _immeasurable(self, candidate: Candidate) -> str:
        if 2 * candidate.chunk_bytes * candidate.writers <= self.sample_bytes:
            return ""
        whole = self.sample_bytes >= self.profile.state.total_bytes
        where = "the whole state" if whole else "a measured sample"
        return f"not two chunks a writer in {where} of {format_bytes(self.sample_bytes)}"

    def _too_large(self, candidate: Candidate) -> str:
        room, name = host_room_bytes(self.profile, self.goal)
        return f"{name} leaves {format_bytes(room)}, less than its images and buffers"


def pinned(candidate: Candidate, pins: Pins) -> str:
    """Which pins of the policy a candidate breaks, "" for none."""
    wanted = (
        ("disk.writers", pins.writers, candidate.writers),
        ("disk.chunk", pins.chunk_bytes, candidate.chunk_bytes),
        ("disk.direct", pins.direct_io, candidate.direct_io),
        ("disk.codec", None if pins.codec in BASED else pins.codec, candidate.codec),
    )
    broken = [name for name, pin, value in wanted if pin is not None and pin != value]
    return f"pinned by {' and '.join(broken)}" if broken else ""
