"""Compression, by tensor class: none, or the measured codec that outruns the storage it feeds.

W writers each encode a chunk and then write it, E of them can encode at once, and the storage takes
B_link.  So raw bytes pass at

    B = min(E B_codec, B_link / rho, W / (1 / B_codec + rho / B_link))    rho = encoded / raw bytes

With many writers that is the pipelined rule, min(B_codec, B_link / rho); with one it is the serial
one, which pays if and only if B_codec > B_link / (1 - rho).  Encoding pays where B > 1.05 B_link
and the cores that it keeps busy, B / B_codec, are idle.  Because the best interval does not depend
on the time until durable, a smaller ratio alone buys nothing: trained fp32 tensors (rho near 0.83)
on a disk of 2 GB/s are written as they are.

A delta needs its base in memory and, to be read back, on disk.  It is a candidate where every save
is a disk save, so that the slot of the one before still holds it, and where the interval is no
longer than the one at which it was measured: differences grow with time.  The chain of bases is as
long as a restore may take for it.

Source: docs/policy.md, "Codec".
"""

from dataclasses import dataclass

from autockpt.policies.costs import Encoding, ranks_per_node
from autockpt.values.goal import Goal
from autockpt.values.plan import Choice
from autockpt.values.profile import CodecMeasure, Profile, StorageMeasure
from autockpt.values.units import format_rate

ADVANTAGE = 1.05
"""An encoder must beat the bare link by this factor: less is within the noise of both measures."""
SPARE_CORES = 0.1
"""What encoding may take of a node without idle cores: less than a write takes by itself."""

CHAIN_SHARE, LONGEST_CHAIN = 0.1, 8
"""What bases may add to a recovery from disk, and how many there are at most: all stay on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """Codec by tensor class, what it does to the write, and why."""

    codec: dict[str, str]
    """Classes that are encoded; a missing class is `none`."""
    encoding: Encoding
    choice: Choice
    chain: int = 0
    """Older generations that a restore may have to read; 0 without deltas."""
    stored_share: float = 1.0
    """Stored over raw bytes of the whole state; the mean of a chain where there are deltas."""
    crowded: bool = False
    """Encoding keeps more cores busy than are idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """What a chunk passes on its way to storage."""

    link_bytes_per_s: float
    """A rank's share of the storage; 0: not measured."""
    writers: int
    idle_cores: int
    """Of a rank, beside the one that it trains with."""

    @property
    def encoders(self) -> int:
        """Writers that can encode at once."""
        return max(1, min(self.writers, self.idle_cores))

    def bytes_per_s(self, measure: CodecMeasure) -> float:
        """B: raw bytes per second through this codec and the storage."""
        link, codec = self.link_bytes_per_s * measure.ratio, measure.encode_bytes_per_s
        if link <= 0.0 or codec <= 0.0:
            return 0.0
        return min(self.encoders * codec, link, self.writers / (1 / codec + 1 / link))

    def busy_cores(self, measure: CodecMeasure) -> float:
        """Cores that encode while a checkpoint is written."""
        return self.bytes_per_s(measure) / max(measure.encode_bytes_per_s, 1e-9)

    def pays(self, measure: CodecMeasure) -> bool:
        """Whether it beats the bare storage by 5 %, on cores that have nothing else to do."""
        fast = self.bytes_per_s(measure) > ADVANTAGE * self.link_bytes_per_s
        return fast and self.has_cores_for(measure)

    def has_cores_for(self, measure: CodecMeasure) -> bool:
        """Whether the cores that it keeps busy have nothing else to do."""
        return self.busy_cores(measure) <= max(self.idle_cores, SPARE_CORES)


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

    `smallest`: whatever shrinks is encoded, also where bytes as they are would be written sooner.
    `delta_steps`: iterations between a save and the one before, where that one is still in its
    slot; None: it is not, and nothing is stored as a difference unless that is pinned.
    """
    share = ranks_per_node(profile)
    pipe = Pipe(
        link_bytes_per_s=write.bytes_per_s.mean / share if write is not None else 0.0,
        writers=writers,
        idle_cores=profile.fingerprint.cores // share - 1,
    )
    pin = goal.pins.codec
    measures = _candidates(profile, pin, delta_steps)
    best = _best_of_each_class(measures, pipe)
    taken = [m for m in best if pin or pipe.pays(m) or (smallest and m.ratio > 1.0)]
    if pin == "none":
        taken = []
    codec: dict[str, str] = {m.tensor_class: m.codec for m in taken}
    if pin not in (None, "none") and not measures:
        codec = dict.fromkeys(("parameters", "moments"), str(pin))
    offered = sorted({m.codec for m in measures})
    chain = _chain(profile, taken, write) if "delta" in codec.values() else 0
    return CodecChoice(
        codec=codec,
        encoding=_encoding(profile, taken, pipe),
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
        crowded=any(not pipe.has_cores_for(m) for m in taken),
    )


def _candidates(profile: Profile, pin: str | None, delta_steps: int | None) -> list[CodecMeasure]:
    """A shard has one codec: the pinned one, else planes wherever it was measured."""
    names = {m.codec for m in profile.codecs}
    if pin not in (None, "none"):
        return [m for m in profile.codecs if m.codec == pin]
    if "planes" not in names:
        return [m for m in profile.codecs if m.codec == "zstd"]
    near = [
        m
        for m in profile.codecs
        if m.codec == "delta" and m.gap_steps >= (delta_steps or m.gap_steps + 1)
    ]
    return [m for m in profile.codecs if m.codec == "planes"] + near


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
    limit = (
        f"a ratio of {largest.ratio:.2f}"
        if through >= 0.999 * pipe.link_bytes_per_s * largest.ratio
        else f"{pipe.encoders} of {pipe.writers} writers encoding at {format_rate(encoding)}"
    )
    verdict = (
        f"{largest.codec} on {largest.tensor_class} would pass {format_rate(through)} ({limit}) "
        f"where the storage takes {format_rate(pipe.link_bytes_per_s)} raw; it must beat that by "
        "5 %"
    )
    busy = pipe.busy_cores(largest)
    if pipe.has_cores_for(largest):
        return f"{verdict}; encoding keeps {busy:.2g} cores busy meanwhile"
    return f"{verdict}, and keeps {busy:.2g} cores busy of {max(0, pipe.idle_cores)} that are idle"


def _encoding(profile: Profile, taken: list[CodecMeasure], pipe: Pipe) -> Encoding:
    link = pipe.link_bytes_per_s
    if not taken or link == 0.0:
        return Encoding()
    raw_s = profile.state.total_bytes / link
    saved_s = decode_s = 0.0
    for measure in taken:
        count = _class_bytes(profile, measure.tensor_class)
        saved_s += count / link - count / pipe.bytes_per_s(measure)
        decode_s += count / (measure.decode_bytes_per_s * pipe.encoders)
    return Encoding(write_factor=max(0.0, raw_s - saved_s) / raw_s, decode_s=decode_s)


def _class_bytes(profile: Profile, name: str) -> int:
    return sum(c.bytes for c in profile.state.classes if c.name == name)


def _numbers(best: list[CodecMeasure], pipe: Pipe) -> dict[str, float]:
    numbers = {"link_bytes_per_s": pipe.link_bytes_per_s}
    for m in best:
        numbers[f"{m.tensor_class}_ratio"] = m.ratio
        numbers[f"{m.tensor_class}_encode_bytes_per_s"] = m.encode_bytes_per_s
        numbers[f"{m.tensor_class}_bytes_per_s"] = pipe.bytes_per_s(m)
        numbers[f"{m.tensor_class}_busy_cores"] = pipe.busy_cores(m)
    return numbers
