"""Compression, by tensor class: none, or zstd where it outruns the storage it feeds.

In a pipeline the slower of encoder and link decides, so encoding pays if and only if

    min(B_codec, B_link / rho) > 1.05 B_link        rho = encoded / raw bytes

and cores are idle to run it.  Because the best interval does not depend on the time until durable,
a smaller ratio alone buys nothing: on trained fp32 tensors (rho near 0.9) the answer is usually no.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """Codec by tensor class, what it does to the write, and why."""

    codec: dict[str, str]
    """Classes that are encoded; a missing class is `none`."""
    encoding: Encoding
    choice: Choice


def pays(measure: CodecMeasure, *, link_bytes_per_s: float, encoders: int) -> bool:
    """Whether encoding makes the pipeline at least 5 % faster than writing raw bytes."""
    return pipelined_bytes_per_s(measure, link_bytes_per_s, encoders) > ADVANTAGE * link_bytes_per_s


def pipelined_bytes_per_s(measure: CodecMeasure, link_bytes_per_s: float, encoders: int) -> float:
    """Raw bytes per second through encoders and link: min(B_codec, B_link / rho)."""
    return min(measure.encode_bytes_per_s * encoders, link_bytes_per_s * measure.ratio)


def choose_codec(
    profile: Profile, goal: Goal, *, write: StorageMeasure | None, writers: int
) -> CodecChoice:
    """Codec of each class; a pinned codec is obeyed for every class it was measured on."""
    measures = [m for m in profile.codecs if m.codec == "zstd"]
    link = write.bytes_per_s.mean / ranks_per_node(profile) if write is not None else 0.0
    idle = profile.fingerprint.cores // ranks_per_node(profile) - 1
    encoders = max(1, min(writers, idle))
    if goal.pins.codec == "none":
        taken: list[CodecMeasure] = []
    elif goal.pins.codec == "zstd":
        taken = measures
    else:
        fit = write is not None and idle >= writers
        taken = [m for m in measures if fit and pays(m, link_bytes_per_s=link, encoders=encoders)]
    codec: dict[str, str] = {m.tensor_class: m.codec for m in taken}
    if goal.pins.codec == "zstd" and not measures:
        codec = {"parameters": "zstd", "moments": "zstd"}
    reason = _reason(profile, goal, measures, link=link, encoders=encoders, idle=idle)
    return CodecChoice(
        codec=codec,
        encoding=_encoding(profile, taken, link=link, encoders=encoders),
        choice=Choice(
            name="codec",
            chosen=", ".join(f"{name}: {kind}" for name, kind in codec.items()) or "none",
            reason=reason,
            numbers=_numbers(measures, link),
            runner_up="none" if codec else "zstd",
            binding="disk.codec" if goal.pins.codec else "",
        ),
    )


def _reason(
    profile: Profile,
    goal: Goal,
    measures: list[CodecMeasure],
    *,
    link: float,
    encoders: int,
    idle: int,
) -> str:
    if goal.pins.codec:
        return f"{goal.pins.codec} is pinned by disk.codec"
    if not measures:
        return "no codec was measured on this job's tensors, so bytes are written as they are"
    if link == 0.0:
        return "storage was not measured, so bytes are written as they are"
    largest = max(measures, key=lambda m: _class_bytes(profile, m.tensor_class))
    through = pipelined_bytes_per_s(largest, link, encoders)
    limit = (
        f"{encoders} encoder(s) at {format_rate(largest.encode_bytes_per_s)} each"
        if largest.encode_bytes_per_s * encoders <= link * largest.ratio
        else f"a ratio of {largest.ratio:.2f}"
    )
    verdict = (
        f"zstd on {largest.tensor_class} would pass {format_rate(through)} ({limit}) where the "
        f"storage takes {format_rate(link)} raw; it must beat that by 5 %"
    )
    return verdict if idle >= 1 else f"{verdict}, and no core is idle"


def _encoding(
    profile: Profile, taken: list[CodecMeasure], *, link: float, encoders: int
) -> Encoding:
    if not taken or link == 0.0:
        return Encoding()
    raw_s = profile.state.total_bytes / link
    saved_s = decode_s = 0.0
    for measure in taken:
        count = _class_bytes(profile, measure.tensor_class)
        saved_s += count / link - count / pipelined_bytes_per_s(measure, link, encoders)
        decode_s += count / (measure.decode_bytes_per_s * encoders)
    return Encoding(write_factor=max(0.0, raw_s - saved_s) / raw_s, decode_s=decode_s)


def _class_bytes(profile: Profile, name: str) -> int:
    return sum(c.bytes for c in profile.state.classes if c.name == name)


def _numbers(measures: list[CodecMeasure], link: float) -> dict[str, float]:
    numbers = {"link_bytes_per_s": link}
    for m in measures:
        numbers[f"{m.tensor_class}_ratio"] = m.ratio
        numbers[f"{m.tensor_class}_encode_bytes_per_s"] = m.encode_bytes_per_s
    return numbers
