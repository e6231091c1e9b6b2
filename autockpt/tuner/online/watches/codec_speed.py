"""Encoding taken up when the storage became slow, and given up when it became fast.

        taken up   raw bytes take so long that a codec would make them durable 1.25 times sooner
        proven     encoded ones are durable sooner than raw ones were: later jumps are the storage's
        refused    they are not: raw bytes again, until the storage is twice as slow as then
        given up   encoded ones are durable so soon that on such a storage no codec pays

Source: docs/concepts/policy.md, "Online re-tuning".
"""

from dataclasses import dataclass, replace

from autockpt.policies.codec_speeds import CodecAtSpeed
from autockpt.tuner.online.estimates import Window
from autockpt.values.units import format_duration

BAND = 1.25
"""A codec must change the time until durable by this factor: the dead-band of the intervals."""
SIGMAS = 3.0
"""Standard errors that a difference must have."""
WORSE = 2.0
"""Times as slow as when a codec failed that the storage must be before one is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecWatch:
    """The state of encoding in this run."""

    table: tuple[CodecAtSpeed, ...] = ()
    """From fast to slow storage; empty: the codec is not changed for the storage's speed."""
    profiled_s: float = 0.0
    """Until durable without a codec, as profiled."""
    raw_s: float | None = None
    """The same as observed when a codec was taken up; None: none was, in this run."""
    proven: bool = False
    """It was durable sooner than that."""
    encoded_s: float = 0.0
    """The longest mean until durable under a codec that was taken up, at first what is expected."""
    refused_s: float | None = None
    """Until durable without one, when one was tried in vain."""


def taken_up(watch: CodecWatch, durable: Window) -> CodecAtSpeed | None:
    """The codec that bytes as they are should give way to; None: none would pay."""
    if not watch.table or watch.profiled_s <= 0:
        return None
    low_s = durable.mean - SIGMAS * durable.error
    if watch.refused_s is not None and low_s < WORSE * watch.refused_s:
        return None
    slower = [at for at in watch.table if at.slower * watch.profiled_s <= low_s]
    return slower[-1] if slower and slower[-1].factor * BAND <= 1.0 else None


def proves(watch: CodecWatch, durable: Window) -> CodecWatch:
    """The watch once the first encoded checkpoints are durable."""
    if watch.raw_s is None or durable.doubtful:
        return watch
    sooner = durable.mean + SIGMAS * durable.error < watch.raw_s
    longest_s = max(watch.encoded_s, durable.mean)
    return replace(watch, proven=watch.proven or sooner, encoded_s=longest_s)


def refused(watch: CodecWatch, durable: Window) -> str:
    """Why a codec that was taken up should go again; "" if it need not, or is proven."""
    raw_s = watch.raw_s
    if raw_s is None or watch.proven or durable.mean - SIGMAS * durable.error <= raw_s:
        return ""
    return (
        f"encoded checkpoints are durable after {format_duration(durable.mean)} (mean of "
        f"{durable.n}), and bytes as they are took {format_duration(raw_s)}: as they are again"
    )


def given_up(watch: CodecWatch, durable: Window) -> str:
    """Why bytes as they are suffice; "" while encoding pays, or where that is not known."""
    if not watch.table or watch.profiled_s <= 0:
        return ""
    least = watch.table[0]
    pays_from_s = least.slower * least.factor * watch.profiled_s
    # What an encoder holds up takes no less on fast storage: a fall says that it is the encoder.
    fell = BAND * durable.mean < watch.encoded_s
    if durable.mean >= (BAND * pays_from_s if fell else pays_from_s / BAND):
        return ""
    return (
        f"encoded checkpoints are durable after {format_duration(durable.mean)} (mean of "
        f"{durable.n}); encoding pays on storage where they take "
        f"{format_duration(pays_from_s)} or more: bytes are written as they are"
    )


def changed(watch: CodecWatch, durable: Window, *, encoded: bool) -> CodecWatch:
    """The watch after a change: `durable` is of before it, `encoded` says what is from now on."""
    if encoded:
        least_s = durable.mean * min((at.factor for at in watch.table), default=1.0)
        return replace(watch, raw_s=durable.mean, proven=False, encoded_s=least_s)
    failed_s = watch.raw_s if refused(watch, durable) else watch.refused_s
    return replace(watch, raw_s=None, proven=False, encoded_s=0.0, refused_s=failed_s)


def explains(watch: CodecWatch, durable: Window) -> bool:
    """Whether encoded checkpoints are late because the storage is at least twice as slow."""
    return any(
        at.slower >= WORSE and at.slower * at.factor * watch.profiled_s <= durable.mean
        for at in watch.table
    )


def sentence(at: CodecAtSpeed, durable: Window) -> str:
    """Why this codec is taken up."""
    names = ", ".join(dict.fromkeys(at.codec.values()))
    return (
        f"checkpoints are durable after {format_duration(durable.mean)} (mean of {durable.n}); on "
        f"such storage {names} makes that {format_duration(durable.mean * at.factor)}"
    )
