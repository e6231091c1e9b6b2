"""Compression, by tensor class: none, or the measured codec that outruns the storage it feeds.

W writers each encode a chunk and then write it.  k of them encode at min(k, E) B_codec.  E is the
measured speed of all encoders beside this job's training, in encoders with an idle core.  The
storage takes B_link / rho of raw bytes, rho = encoded / raw.  A writer waits where the others are
before it.  Raw bytes therefore pass at the rate of a closed network of two stations with W
customers:

        B = G(W - 1) / G(W)   G(n) = sum over k <= n of (rho / B_link)^(n-k) prod_{j <= k} 1 / B_j
                              B_j = min(j, E) B_codec

With many writers that is the pipelined rule, min(E B_codec, B_link / rho).  With one writer it is
the serial rule, which pays if and only if B_codec > B_link / (1 - rho).  Encoding pays where B >
1.05 B_link and the training hardly feels it: encoders slow iterations down by at most 3 % while a
checkpoint is written.  If encoders were not measured beside the training, they keep less than a
tenth of a core busy.  Their slow-down of the training is part of the cost of a checkpoint.  The
best interval does not depend on the time until durable, so a smaller ratio alone gains nothing.
Trained fp32 tensors (rho near 0.83) on a disk of 2 GB/s are written raw.

A delta needs its base in memory and, to be read back, on disk.  It is a candidate where every save
is a disk save, because then the previous save is still in its slot.  The interval must not exceed
the one of the measurement, because differences grow with time.  The chain of bases is as long as a
restore may take for it.

Source: docs/concepts/policy.md, "Codec"; Buzen 1973, closed queueing networks, for B.
"""

import math
from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import Encoding, ranks_per_node
from autockpt.policies.staging.write_path import WriteChoice, choose_write
from autockpt.values.goal import Goal
from autockpt.values.plan import Choice
from autockpt.values.profile import CodecMeasure, Profile, StorageMeasure
from autockpt.values.units import format_fraction, format_rate

ADVANTAGE = 1.05
"""An encoder must beat the bare link by this factor: less is within the noise of both measures."""
SPARE_CORES = 0.1
"""Cores that encoding may take if it was not measured beside the training: less than a write
takes."""
FELT = 0.03
"""Largest slow-down of iterations by encoding while a checkpoint is written."""
ASSUMED_WORTH = 0.5
"""E for encoders that were not measured beside the training: one gets half a core of a busy node.
It also stands for pinned encoders that got nothing done in a tenth of the rounds."""

CHAIN_SHARE, LONGEST_CHAIN = 0.1, 8
"""Share of a recovery from disk that bases may add, and their largest number: all stay on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """Codec by tensor class, its effect on the write, and the reason."""

    codec: dict[str, str]
    """Classes that are encoded; a missing class is `none`."""
    encoding: Encoding
    choice: Choice
    chain: int = 0
    """Older generations that a restore may have to read; 0 without deltas."""
    stored_share: float = 1.0
    """Stored over raw bytes of the whole state; the mean of a chain where there are deltas."""
    crowded: bool = False
    """The training feels the encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """The stages that a chunk passes on its way to storage."""

    link_bytes_per_s: float
    """A rank's share of the storage; 0: not measured."""
    writers: int
    worth: float = ASSUMED_WORTH
    """E: of all writers encoding at once beside the training, in encoders with an idle core."""
    slowdown: float | None = None
    """Of iterations meanwhile, fraction; None: not measured."""

    def bytes_per_s(self, measure: CodecMeasure) -> float:
        """B: raw bytes per second through this codec and the storage."""
        link, codec = self.link_bytes_per_s * measure.ratio, measure.encode_bytes_per_s
        if link <= 0.0 or codec <= 0.0 or self.worth <= 0.0:
            return 0.0
        share, waiting = 1.0, 1.0  # of the link that is taken: G(n - 1) / G(n) in its units
        for encoding in range(1, self.writers + 1):
            waiting *= share * link / (codec * min(encoding, self.worth))
            if not math.isfinite(waiting):  # encoders that get nothing done
                return 0.0
            share = 1.0 / (1.0 + waiting)
        return link * share

    def busy_cores(self, measure: CodecMeasure) -> float:
        """Cores that encode while a checkpoint is written."""
        return self.bytes_per_s(measure) / max(measure.encode_bytes_per_s, 1e-9)

    def pays(self, measure: CodecMeasure) -> bool:
        """Whether it beats the bare storage by 5 % and the training does not feel it."""
        fast = self.bytes_per_s(measure) > ADVANTAGE * self.link_bytes_per_s
        return fast and not self.felt(measure)

    def felt(self, measure: CodecMeasure) -> bool:
        """Whether the training is slower for it while a checkpoint is written."""
        if self.slowdown is None:
            return self.busy_cores(measure) > SPARE_CORES
        return self.slows(measure) > FELT

    def slows(self, measure: CodecMeasure) -> float:
        """Slow-down of iterations while a checkpoint is written; 0 if unknown."""
        if not self.slowdown or self.worth <= 0.0:
            return 0.0
        return self.slowdown * self.busy_cores(measure) / self.worth

    def saves_s(self, measure: CodecMeasure, count: int) -> float:
        """Seconds by which encoding writes `count` bytes sooner, less its cost to the training."""
        through = self.bytes_per_s(measure)
        if through <= 0.0 or self.link_bytes_per_s <= 0.0:
            return 0.0
        return count / self.link_bytes_per_s - (1.0 + self.slows(measure)) * count / through


def choose_codec(
    profile: Profile,
    goal: Goal,
    *,
    write: StorageMeasure | None,
    writers: int,
    delta_steps: int | None = None,
    smallest: bool = False,
) -> CodecChoice:
    """Codec of each class; a pinned codec is obeyed for every class it was measured on.

    `smallest`: encode every class that shrinks, even where raw bytes would be written sooner.
    `delta_steps`: iterations since the previous save, if that one is still in its slot.  None: it
    is not, and only a pin stores differences.
    """
    pipe = _pipe(profile, write, writers)
    pin = goal.pins.codec
    measures = _candidates(profile, pin, delta_steps, pipe, smallest=smallest)
    best = _best_of_each_class(measures, pipe)
    taken = [m for m in best if pin or pipe.pays(m) or (smallest and m.ratio > 1.0)]
    if pin == "none":
        taken = []
    codec: dict[str, str] = {m.tensor_class: m.codec for m in taken}
    if pin not in (None, "none") and not measures:
        codec = dict.fromkeys(("parameters", "moments"), str(pin))
    offered = sorted({m.codec for m in measures})
    # Taken although rounds got nothing done: its duration was not measured.
    known = all(pipe.bytes_per_s(m) > 0.0 for m in taken)
    reckoned = pipe if known else replace(pipe, worth=ASSUMED_WORTH)
    chain = _chain(profile, taken, write) if "delta" in codec.values() else 0
    return CodecChoice(
        codec=codec,
        encoding=_encoding(profile, taken, reckoned),
        choice=Choice(
            name="codec",
            chosen=", ".join(f"{name}: {kind}" for name, kind in codec.items()) or "none",
            reason=_reason(profile, goal, best, pipe),
            numbers=_numbers(best, pipe),
            runner_up="none" if codec else (offered or ["planes"])[0],
            binding="disk.codec" if pin else "",
        ),
        chain=chain,
        stored_share=_stored_share(profile, taken, chain),
        crowded=any(reckoned.felt(m) for m in taken),
    )


def choose_writing(profile: Profile, goal: Goal) -> tuple[WriteChoice, CodecChoice]:
    """How bytes are written and encoded: with several writers where encoding pays with them."""
    write = choose_write(profile, goal, encoding=True)
    codec = choose_codec(profile, goal, write=write.measure, writers=write.writers)
    if not codec.codec:
        write = choose_write(profile, goal)
        codec = choose_codec(profile, goal, write=write.measure, writers=write.writers)
    return write, codec


def _pipe(profile: Profile, write: StorageMeasure | None, writers: int) -> Pipe:
    """Return the pipe of the encoders.

    The speed is the 10th percentile and the slow-down the 90th, so uncertainty counts against
    encoding.  More writers than were measured encode no faster, fewer at least their part.
    """
    link = write.bytes_per_s.mean / ranks_per_node(profile) if write is not None else 0.0
    encoders, beside = profile.encoders, profile.under("encode")
    if encoders is None or beside is None:
        return Pipe(link_bytes_per_s=link, writers=writers)
    part = min(1.0, writers / encoders.threads)
    return Pipe(
        link_bytes_per_s=link,
        writers=writers,
        worth=part * encoders.worth.p10,
        slowdown=max(0.0, beside.slowdown.p90),
    )


def _candidates(
    profile: Profile, pin: str | None, delta_steps: int | None, pipe: Pipe, *, smallest: bool
) -> list[CodecMeasure]:
    """A shard has one codec: the pinned one, else that which saves more of planes and zstd.

    Planes where neither saves anything; `smallest`: the one that leaves less to be stored.
    """
    if pin not in (None, "none"):
        return [m for m in profile.codecs if m.codec == pin]
    near = [
        m
        for m in profile.codecs
        if m.codec == "delta" and m.gap_steps >= (delta_steps or m.gap_steps + 1)
    ]
    planes = [m for m in profile.codecs if m.codec == "planes"]
    zstd = [m for m in profile.codecs if m.codec == "zstd"]
    if not planes:
        return zstd

    def gain(measures: list[CodecMeasure]) -> float:
        best = _best_of_each_class(measures, pipe)
        if smallest:
            return -_stored_share(profile, [m for m in best if m.ratio > 1.0], 0)
        paying = [m for m in best if pipe.pays(m)]
        return sum(pipe.saves_s(m, _class_bytes(profile, m.tensor_class)) for m in paying)

    return zstd if zstd and gain(zstd) > gain([*planes, *near]) else [*planes, *near]


def _chain(profile: Profile, taken: list[CodecMeasure], write: StorageMeasure | None) -> int:
    """Bases in a row, so that reading them makes a recovery from disk at most 10 % longer.

    Each costs its own bytes, read as fast as they are written, and their decoding.
    """
    if write is None:
        return LONGEST_CHAIN
    recovery = profile.recovery
    whole_s = recovery.detect.value_s + recovery.restart.value_s + recovery.restore_disk.value_s
    deltas = [(m, _class_bytes(profile, m.tensor_class)) for m in taken if m.codec == "delta"]
    link = write.bytes_per_s.mean / ranks_per_node(profile)
    link_s = sum(n / m.ratio for m, n in deltas) / link
    each_s = link_s + sum(n / m.decode_bytes_per_s for m, n in deltas)
    return max(1, min(LONGEST_CHAIN, int(CHAIN_SHARE * whole_s / max(each_s, 1e-9))))


def _stored_share(profile: Profile, taken: list[CodecMeasure], chain: int) -> float:
    """Of a state; a chain of deltas begins with one that stands alone."""
    planes = {m.tensor_class: m.ratio for m in profile.codecs if m.codec == "planes"}
    saved = 0.0
    for measure in taken:
        alone = planes.get(measure.tensor_class, 1.0) if measure.codec == "delta" else measure.ratio
        share = (1.0 / alone + chain / measure.ratio) / (1 + chain)
        saved += _class_bytes(profile, measure.tensor_class) * (1.0 - share)
    return 1.0 - saved / max(1, profile.state.total_bytes)


def _best_of_each_class(measures: list[CodecMeasure], pipe: Pipe) -> list[CodecMeasure]:
    best: dict[str, CodecMeasure] = {}
    for measure in measures:
        other = best.setdefault(measure.tensor_class, measure)
        if pipe.bytes_per_s(measure) > pipe.bytes_per_s(other):
            best[measure.tensor_class] = measure
    return list(best.values())


def _reason(profile: Profile, goal: Goal, best: list[CodecMeasure], pipe: Pipe) -> str:
    if goal.pins.codec:
        return f"{goal.pins.codec} is pinned by disk.codec"
    if not best:
        return "no codec was measured on this job's tensors, so bytes are written as they are"
    if pipe.link_bytes_per_s == 0.0:
        return "storage was not measured, so bytes are written as they are"
    largest = max(best, key=lambda m: _class_bytes(profile, m.tensor_class))
    through, encoding = pipe.bytes_per_s(largest), largest.encode_bytes_per_s
    how = "at least" if pipe.slowdown is not None else "unmeasured, assumed to be"
    verdict = (
        f"{largest.codec} on {largest.tensor_class} would pass {format_rate(through)} (a ratio of "
        f"{largest.ratio:.2f}, {pipe.writers} writers encoding beside the training at "
        f"{format_rate(pipe.worth * encoding)}, {how} {pipe.worth:.2g} times what one does alone) "
        f"where the storage takes {format_rate(pipe.link_bytes_per_s)} raw; it must beat that by "
        "5 %"
    )
    busy = f"{verdict}; encoding keeps {pipe.busy_cores(largest):.2g} cores busy meanwhile"
    slows = pipe.slows(largest)
    if not pipe.felt(largest):
        told = f" and slows iterations down by {format_fraction(slows)}, a cost of each checkpoint"
        return busy + (told if slows else "")
    if pipe.slowdown is None:
        return f"{busy}, and what that does to the training was not measured"
    return f"{busy} and slows iterations down by up to {format_fraction(slows)}, above 3 %"


def _encoding(profile: Profile, taken: list[CodecMeasure], pipe: Pipe) -> Encoding:
    link = pipe.link_bytes_per_s
    if not taken or link == 0.0:
        return Encoding()
    raw_s = profile.state.total_bytes / link
    readers = max(1, min(pipe.writers, profile.fingerprint.cores // ranks_per_node(profile)))
    saved_s = decode_s = slowdown_s = 0.0
    for measure in taken:
        count = _class_bytes(profile, measure.tensor_class)
        saved_s += count / link - count / pipe.bytes_per_s(measure)
        slowdown_s += pipe.slows(measure) * count / pipe.bytes_per_s(measure)
        decode_s += count / (measure.decode_bytes_per_s * readers)
    encoded_s = max(0.0, raw_s - saved_s)
    slows = slowdown_s / encoded_s if encoded_s else 0.0
    return Encoding(write_factor=encoded_s / raw_s, decode_s=decode_s, slows=slows)


def _class_bytes(profile: Profile, name: str) -> int:
    return sum(c.bytes for c in profile.state.classes if c.name == name)


def _numbers(best: list[CodecMeasure], pipe: Pipe) -> dict[str, float]:
    numbers = {"link_bytes_per_s": pipe.link_bytes_per_s, "encoders_worth": pipe.worth}
    if pipe.slowdown is not None:
        numbers["encoders_slowdown"] = pipe.slowdown
    for m in best:
        numbers[f"{m.tensor_class}_ratio"] = m.ratio
        numbers[f"{m.tensor_class}_encode_bytes_per_s"] = m.encode_bytes_per_s
        numbers[f"{m.tensor_class}_bytes_per_s"] = pipe.bytes_per_s(m)
        numbers[f"{m.tensor_class}_busy_cores"] = pipe.busy_cores(m)
    return numbers
