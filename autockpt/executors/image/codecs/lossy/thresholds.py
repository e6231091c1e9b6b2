"""ExCP's joint weight-momentum pruning: which entries of a parameter are worth storing.

* Kept weight: |dW| > min(CLAMP, alpha / sqrt(mean v)) * median |dW|.
* Kept momentum: |m| > beta * mean |m|, and its weight is kept; v goes with m.

dW is the residual against the reconstructed predecessor, m and v are Adam's first and second
moment.  Source: Li et al., ExCP (ICML 2024), section 3.2, with the tensor's mean of v as in the
authors' repository; their constants.

alpha has the unit of a gradient: it was chosen for 410 million parameters.  At one gradient norm
(training clips it) the size of an element's gradient, sqrt(v), is proportional to 1 /
sqrt(parameters).  `for_parameters` scales alpha in the same way, so that models of every size are
pruned alike.

Entries that the clamp prunes wait for a later checkpoint.  With 2.5 medians a restore lags by more
than one checkpoint interval.  With 1.4 medians it lags by half an interval, at less than half the
ratio (`make bench-excp`).  `BALANCED` is the default of archives.
"""

from dataclasses import dataclass, replace

import torch

from autockpt.values.errors import ConfigError

ALPHA = 5e-5
BETA = 2.0
PUBLISHED_PARAMETERS = 405_334_016
"""Parameters of Pythia-410M, on which alpha was chosen."""
CLAMP = 2.5
"""Limit of the weight threshold, in medians of |dW|: v near zero must not prune everything."""
CENTRES = 15
"""2^4 - 1: with 0 for "pruned" a symbol has four bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of pruning; the defaults are the published ones."""

    alpha: float = ALPHA
    """Weights: larger prunes more, up to `clamp` medians."""
    beta: float = BETA
    """Momentum, in means of |m|."""
    clamp: float = CLAMP
    """Weights, in medians of |dW|."""
    centres: int = CENTRES
    """Number of centres of the kept residuals; 1 to 15."""

    def __post_init__(self) -> None:
        sound = 0 <= self.alpha < 1 and 0 <= self.beta < 100 and 0 <= self.clamp < 100
        if not sound or not 1 <= self.centres <= CENTRES:
            raise ConfigError(
                f"{self}: expected alpha in [0, 1), beta and clamp in [0, 100), 1 to 15 centres"
            )

    def for_parameters(self, count: int) -> "Thresholds":
        """With alpha moved to a model of `count` parameters."""
        return replace(
            self, alpha=min(0.99, self.alpha * (PUBLISHED_PARAMETERS / max(1, count)) ** 0.5)
        )


PUBLISHED = Thresholds()
BALANCED = Thresholds(clamp=1.4, centres=6)


def kept(
    delta: torch.Tensor, first: torch.Tensor, second: torch.Tensor, by: Thresholds
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kept weights, kept moments) as masks of the shape of `delta`; all three are float32.

    The second mask is a subset of the first.  Finite input only.
    """
    size = delta.abs()
    # An overflow of the mean is an infinite mean: the threshold is 0, so everything is kept.
    share = by.alpha / max(float(second.mean(dtype=torch.float64)), 1e-300) ** 0.5
    weights = size > min(by.clamp, share) * float(size.flatten().median())
    strength = first.abs()
    moments = weights & (strength > by.beta * float(strength.mean(dtype=torch.float64)))
    return weights, moments
