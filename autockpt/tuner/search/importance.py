"""Which knob matters: how much of the spread of write times each one explains.

The logarithm of a time is modelled as a sum with one part for each knob.  Chunk and writers are
numbers (a parabola of their doublings), path and codec are words.  Least squares over every write,
slightly ridged, as a search visits good places more often than others.  A knob's importance is the
variance of its part over all allowed candidates, as a share of that of all parts.

Source: functional ANOVA (Hutter, Hoos, Leyton-Brown 2014), of an additive model instead of a forest
of trees.  With 25 writes only the main effects can be learnt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autockpt.tuner.search.record import Trial
from autockpt.tuner.search.space import Candidate

RIDGE = 1e-2
"""Of one write's weight: a knob that was never varied gets no part."""
KNOBS: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
    "chunk": lambda c: (math.log2(c.chunk_bytes), math.log2(c.chunk_bytes) ** 2),
    "writers": lambda c: (math.log2(c.writers), math.log2(c.writers) ** 2),
    "direct": lambda c: (float(c.direct_io),),
    "codec": lambda c: (float(c.codec != "none"),),
}
"""A knob's features."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Importances:
    """Shares by knob, which add up to 1 unless no knob made a difference."""

    shares: dict[str, float]
    """Most important first."""
    explained: float
    """Fraction of the variance of all writes that the sum explains, 0..1; the rest is noise, and
    knobs that act together."""


def importances(allowed: Sequence[Candidate], trials: Sequence[Trial]) -> Importances:
    """Of the successful writes among `trials`; nothing matters where fewer than three succeeded."""
    done = [trial for trial in trials if not trial.failure]
    if len(done) < 3:
        return Importances(shares=dict.fromkeys(KNOBS, 0.0), explained=0.0)
    times = np.log([trial.seconds for trial in done])
    space, seen = _features(allowed), _features([trial.candidate for trial in done])
    middle, scale = space.mean(axis=0), space.std(axis=0)
    scale[scale == 0] = np.inf  # the same for all: no part
    weights = _ridge((seen - middle) / scale, times)
    parts = (space - middle) / scale * weights
    variances = {name: float(parts[:, own].sum(axis=1).var()) for name, own in _columns().items()}
    total = sum(variances.values())
    ranked = sorted(variances, key=lambda name: -variances[name])
    fitted = (seen - middle) / scale @ weights
    return Importances(
        shares={name: variances[name] / total if total > 0 else 0.0 for name in ranked},
        explained=_explained(times, fitted),
    )


def _features(candidates: Sequence[Candidate]) -> Matrix:
    return np.array([[x for of in KNOBS.values() for x in of(c)] for c in candidates])


def _columns() -> dict[str, list[int]]:
    """Which columns of the features are a knob's."""
    some = Candidate(chunk_bytes=2**20, writers=1, direct_io=True, codec="none")
    columns, at = {}, 0
    for name, of in KNOBS.items():
        columns[name] = list(range(at, at + len(of(some))))
        at += len(columns[name])
    return columns


def _ridge(rows: Matrix, values: Matrix) -> Matrix:
    """Weights of centred rows, the constant not ridged."""
    rows, values = rows - rows.mean(axis=0), values - values.mean()
    return np.asarray(
        np.linalg.solve(rows.T @ rows + RIDGE * np.eye(rows.shape[1]), rows.T @ values)
    )


def _explained(values: Matrix, fitted: Matrix) -> float:
    spread = float(values.var())
    left = float((values - fitted).var())
    return max(0.0, 1.0 - left / spread) if spread > 0 else 0.0
