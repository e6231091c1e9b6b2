"""Samples -> measures, with spreads.  Pure: numpy, no files, no clocks, no torch.

Times of machines are skewed: most samples sit near the floor and some are late.  So fits ignore
points far off the line.  Comparisons are made pair by pair on logarithms (twice as fast and half as
fast cancel out) with the extremes cut.  Any remaining unsteadiness becomes a sentence that says by
how much and which command to run again.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from autockpt.profiles.samples import (
    PHASES,
    CodecSample,
    IterationSample,
    StorageSample,
    StorageSamples,
    TensorFacts,
    TransferSample,
    UnitSample,
)
from autockpt.values.errors import ConfigError
from autockpt.values.profile import (
    CodecMeasure,
    Distribution,
    EncoderMeasure,
    HeldElsewhere,
    InterferenceMeasure,
    LinkMeasure,
    StateClass,
    StateInventory,
    StorageMeasure,
)
from autockpt.values.units import format_fraction, format_multiple

Floats = npt.NDArray[np.float64]

STABLE_SPREAD = 0.35
"""(p90 - p10) / p50 above which a warning is given; quiet machines measured 0.05 to 0.25."""

_TUKEY = 4.685
"""Cut-off of the bisquare weights, in robust deviations: 95 % efficient on normal noise."""
_BOOTSTRAPS = 400
_TRIM = 0.15
"""Part of the pairs cut at each end of a comparison."""


def distribution(samples: Iterable[float]) -> Distribution:
    """Mean and percentiles.  Raises ConfigError when there is no finite sample."""
    values = np.asarray(list(samples), dtype=np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        raise ConfigError("a distribution needs at least one sample; measure again")
    p10, p50, p90, p95 = (float(p) for p in np.percentile(values, (10, 50, 90, 95)))
    return Distribution(
        n=int(values.size), mean=float(values.mean()), p10=p10, p50=p50, p90=p90, p95=p95
    )


def maybe(samples: Iterable[float]) -> Distribution | None:
    """`distribution`, or None when nothing was sampled."""
    values = [value for value in samples if np.isfinite(value)]
    return distribution(values) if values else None


def fit_link(link: str, samples: Sequence[TransferSample], *, note: str = "") -> LinkMeasure:
    """Least squares of seconds = alpha_s + bytes / bytes_per_s, blind to far outliers.

    Residuals are taken relative to the time (noise grows with it) and bisquare-weighted, starting
    from the median slope.  alpha_s is never negative; one size alone gives a pure rate.
    Raises ConfigError without samples or with non-positive ones.
    """
    size = np.asarray([s.bytes for s in samples], dtype=np.float64)
    time = np.asarray([s.seconds for s in samples], dtype=np.float64)
    if not size.size or (size <= 0).any() or (time <= 0).any():
        raise ConfigError(f"link {link}: needs samples of positive sizes and times")
    alpha, beta = _robust_line(size, time)
    residuals = time - (alpha + beta * size)
    return LinkMeasure(
        link=link,
        alpha_s=alpha,
        bytes_per_s=1.0 / beta,
        relative_spread=float(np.sqrt(np.mean(residuals**2)) / time.mean()),
        n=int(size.size),
        note=note,
    )


def _robust_line(size: Floats, time: Floats) -> tuple[float, float]:
    """(alpha >= 0, beta > 0) of time = alpha + beta * size."""
    alpha, beta = _median_line(size, time)
    for _ in range(20):
        relative = (time - (alpha + beta * size)) / time
        scale = max(1.4826 * float(np.median(np.abs(relative))), 1e-6)
        inside = np.clip(1.0 - (relative / (_TUKEY * scale)) ** 2, 0.0, None)
        weight = inside**2 / time**2
        fitted = _weighted_line(size, time, weight)
        if fitted is None:
            break
        moved = abs(fitted[1] / beta - 1.0)
        alpha, beta = fitted
        if moved < 1e-9:
            break
    return alpha, beta


def _median_line(size: Floats, time: Floats) -> tuple[float, float]:
    """Theil and Sen: the median of the slopes between all pairs of different size."""
    rows, columns = np.triu_indices(size.size, k=1)
    step = size[columns] - size[rows]
    apart = step != 0
    slopes = (time[columns] - time[rows])[apart] / step[apart]
    slope = float(np.median(slopes)) if slopes.size else 0.0
    if slope <= 0.0:
        return 0.0, float(np.median(time / size))
    return max(0.0, float(np.median(time - slope * size))), slope


def _weighted_line(size: Floats, time: Floats, weight: Floats) -> tuple[float, float] | None:
    """Weighted least squares under alpha >= 0; None where the weights leave no line."""
    total = weight.sum()
    if total <= 0.0:
        return None
    mean_size, mean_time = (weight * size).sum() / total, (weight * time).sum() / total
    variance = (weight * (size - mean_size) ** 2).sum()
    if variance > 0.0:
        beta = float((weight * (size - mean_size) * (time - mean_time)).sum() / variance)
        alpha = float(mean_time - beta * mean_size)
        if alpha >= 0.0 and beta > 0.0:
            return alpha, beta
    through_zero = float((weight * size * time).sum() / (weight * size**2).sum())
    return (0.0, through_zero) if through_zero > 0.0 else None


def slowdown(quiet_s: Sequence[float], busy_s: Sequence[float], *, seed: int = 0) -> Distribution:
    """Relative slow-down busy/quiet - 1 of interleaved pairs; busy_s[i] belongs to quiet_s[i].

    The mean is the trimmed mean of the pairs' log ratios.  The percentiles come from its bootstrap,
    so p10..p90 is how well it is known, not how much iterations scatter.
    Raises ConfigError without pairs.
    """
    if not quiet_s or len(quiet_s) != len(busy_s):
        raise ConfigError(
            f"slow-down: {len(quiet_s)} quiet and {len(busy_s)} busy samples are not pairs"
        )
    logs = np.log(np.asarray(busy_s, dtype=np.float64) / np.asarray(quiet_s, dtype=np.float64))
    draws = np.random.default_rng(seed).integers(0, logs.size, size=(_BOOTSTRAPS, logs.size))
    means = np.expm1(_trimmed_mean(logs[draws]))
    p10, p50, p90, p95 = (float(p) for p in np.percentile(means, (10, 50, 90, 95)))
    center = float(np.expm1(_trimmed_mean(logs[None, :])[0]))
    return Distribution(n=int(logs.size), mean=center, p10=p10, p50=p50, p90=p90, p95=p95)


def _trimmed_mean(rows: Floats) -> Floats:
    """Mean of each row without the `_TRIM` smallest and largest parts."""
    cut = round(rows.shape[1] * _TRIM)
    ordered = np.sort(rows, axis=1)
    kept: Floats = ordered[:, cut : rows.shape[1] - cut]
    return np.asarray(kept.mean(axis=1), dtype=np.float64)


def interference(units: Sequence[UnitSample], *, seed: int = 0) -> tuple[InterferenceMeasure, ...]:
    """Every kind of work against the quiet units of the same rounds."""
    quiet = {u.round: u.total_s / u.iterations for u in units if u.work == "quiet"}
    by_work: dict[str, list[UnitSample]] = defaultdict(list)
    for unit in units:
        if unit.work != "quiet" and unit.round in quiet:
            by_work[unit.work].append(unit)
    return tuple(
        InterferenceMeasure(
            work=work,
            slowdown=slowdown(
                [quiet[u.round] for u in members],
                [u.total_s / u.iterations for u in members],
                seed=seed,
            ),
            busy_s=sum(u.busy_s for u in members) / sum(u.iterations for u in members),
            stall_s=maybe(stall_s for u in members for stall_s in u.stalls_s),
        )
        for work, members in by_work.items()
    )


def storage_measures(probe: StorageSamples) -> tuple[StorageMeasure, ...]:
    """One measure per configuration: alpha from the almost empty file, the rest is the rate."""
    alpha_s = float(np.median(probe.empty_write_s)) if probe.empty_write_s else 0.0
    grouped: dict[tuple[str, bool, int, int], list[float]] = defaultdict(list)
    first: dict[tuple[str, bool, int, int], StorageSample] = {}
    for sample in probe.samples:
        first.setdefault(sample.configuration, sample)
        fixed = alpha_s if sample.operation == "write" else 0.0
        # A fixed part above half of the sample would be noise on noise: the rate takes the rest.
        grouped[sample.configuration].append(
            sample.bytes / max(sample.seconds - fixed, sample.seconds / 2)
        )
    return tuple(
        StorageMeasure(
            operation=first[key].operation,
            direct=first[key].direct,
            writers=first[key].writers,
            chunk_bytes=first[key].chunk_bytes,
            alpha_s=alpha_s if first[key].operation == "write" else 0.0,
            bytes_per_s=distribution(rates),
        )
        for key, rates in grouped.items()
    )


def codec_measures(samples: Sequence[CodecSample]) -> tuple[CodecMeasure, ...]:
    """Ratio and speeds per codec and tensor class, all bytes of the samples together."""
    grouped: dict[tuple[str, str], list[CodecSample]] = defaultdict(list)
    for sample in samples:
        grouped[(sample.codec, sample.tensor_class)].append(sample)
    measures = []
    for group in grouped.values():
        raw = sum(s.raw_bytes for s in group)
        measures.append(
            CodecMeasure(
                codec=group[0].codec,
                tensor_class=group[0].tensor_class,
                ratio=raw / max(1, sum(s.encoded_bytes for s in group)),
                encode_bytes_per_s=raw / max(1e-9, sum(s.encode_s for s in group)),
                decode_bytes_per_s=raw / max(1e-9, sum(s.decode_s for s in group)),
                sample_bytes=raw,
                gap_steps=max(s.gap_steps for s in group),
            )
        )
    return tuple(measures)


def encoders(
    units: Sequence[UnitSample], samples: Sequence[CodecSample], *, threads: int
) -> EncoderMeasure | None:
    """Return the throughput of `threads` encoders beside the training, against one alone.

    Both encode the same bytes.  None where either was not measured.
    """
    alone = [s for s in samples if not s.gap_steps]
    beside = [u.encoded_bytes_per_s for u in units if u.work == "encode"]
    if not alone or not beside:
        return None
    one_bytes_per_s = sum(s.raw_bytes for s in alone) / sum(s.encode_s for s in alone)
    worth = [min(float(threads), rate / one_bytes_per_s) for rate in beside]
    return EncoderMeasure(threads=threads, worth=distribution(worth))


def phases(samples: Sequence[IterationSample]) -> dict[str, Distribution]:
    """A distribution for every phase.  Raises ConfigError without samples."""
    return {
        name: distribution(sample.phases_s.get(name, 0.0) for sample in samples) for name in PHASES
    }


def inventory(
    tensors: Sequence[TensorFacts],
    *,
    layout_digest: str,
    extra_bytes: int = 0,
    restored_bytes: int = 0,
) -> StateInventory:
    """Bytes by class and by group; `extra_bytes` of JSON are copied at the boundary."""
    lazy = sum(t.bytes for t in tensors if t.lazy)
    total = sum(t.bytes for t in tensors) + extra_bytes
    names: tuple[Literal["parameters", "moments", "other"], ...]
    names = ("parameters", "moments", "other")
    return StateInventory(
        total_bytes=total,
        layout_digest=layout_digest,
        lazy_bytes=lazy,
        boundary_bytes=total - lazy,
        classes=tuple(_state_class(name, tensors) for name in names),
        elsewhere=_elsewhere(tensors),
        restored_bytes=restored_bytes,
    )


def _elsewhere(tensors: Sequence[TensorFacts]) -> tuple[HeldElsewhere, ...]:
    nbytes: dict[tuple[int, ...], int] = defaultdict(int)
    for tensor in tensors:
        nbytes[tensor.elsewhere] += tensor.bytes
    return tuple(HeldElsewhere(nodes=k, bytes=v) for k, v in sorted(nbytes.items()) if k and v)


def _state_class(
    name: Literal["parameters", "moments", "other"], tensors: Sequence[TensorFacts]
) -> StateClass:
    members = [t for t in tensors if t.tensor_class == name]
    dtypes: dict[str, int] = defaultdict(int)
    for tensor in members:
        dtypes[tensor.dtype] += tensor.bytes
    return StateClass(
        name=name, tensors=len(members), bytes=sum(t.bytes for t in members), dtypes=dict(dtypes)
    )


def relative_spread(measured: Distribution) -> float:
    """(p90 - p10) / |p50|, 0 for a constant; inf when only the median is zero."""
    width = measured.p90 - measured.p10
    if width == 0.0:
        return 0.0
    return width / abs(measured.p50) if measured.p50 else float("inf")


def stability_warning(
    what: str, measured: Distribution, *, limit: float = STABLE_SPREAD, rerun: str
) -> str | None:
    """A sentence when `measured` is unsteady or rests on one sample, else None."""
    if measured.n < 2:
        return f"{what}: one sample only, its spread is unknown; {rerun}"
    spread = relative_spread(measured)
    if spread <= limit:
        return None
    return (
        f"{what}: p10 to p90 spans {format_multiple(spread)} of the median "
        f"(n={measured.n}, limit {format_fraction(limit)}); {rerun}"
    )
