"""Which codec pays on a storage that is slower or faster than it was when it was profiled.

A run observes how long its checkpoints take, but it has no profile.  The function that chooses a
plan's codec therefore computes each codec's effect at each speed in advance.
"""

from dataclasses import dataclass, replace

from autockpt.policies.codec import choose_codec
from autockpt.policies.staging.quota import storage_matters
from autockpt.policies.staging.write_path import choose_write
from autockpt.values.goal import Goal
from autockpt.values.profile import Distribution, Profile, StorageMeasure

SPEEDS = tuple(2.0**n for n in range(-2, 8))
"""Times as slow as profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecAtSpeed:
    """The encoding for a storage of one speed."""

    slower: float
    """Times as slow as profiled."""
    codec: dict[str, str]
    """By class of tensors; never empty."""
    factor: float
    """Time of the encoded write over that of the raw one, on that storage."""


def codecs_by_speed(profile: Profile, goal: Goal) -> tuple[CodecAtSpeed, ...]:
    """The codec at each of `SPEEDS` at which one pays, from fast to slow.

    Empty where the codec is not to be chosen by time: pinned, or chosen for what storage costs.
    """
    if goal.pins.codec is not None or storage_matters(goal):
        return ()
    write = choose_write(profile, goal, encoding=True)
    if write.measure is None:
        return ()
    found = []
    for slower in SPEEDS:
        measure = _slower(write.measure, slower)
        choice = choose_codec(profile, goal, write=measure, writers=write.writers)
        if choice.codec:
            factor = choice.encoding.write_factor
            found.append(CodecAtSpeed(slower=slower, codec=choice.codec, factor=factor))
    return tuple(found)


def _slower(measure: StorageMeasure, times: float) -> StorageMeasure:
    rate = measure.bytes_per_s
    scaled = {name: getattr(rate, name) / times for name in ("mean", "p10", "p50", "p90", "p95")}
    return replace(
        measure, alpha_s=measure.alpha_s * times, bytes_per_s=Distribution(n=rate.n, **scaled)
    )
