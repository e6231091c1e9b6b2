"""Quantiles of the Gamma distribution, for bands over a failure-rate posterior.

Pure Python on purpose: scipy would cost a second of import for one function.  Accurate to 1e-9
relative, which is far beyond what a handful of failures can tell.
"""

import math

from autockpt.values.errors import ConfigError


def gamma_cdf(shape: float, x: float) -> float:
    """P(X <= x) for X ~ Gamma(shape, rate 1): the regularised lower incomplete gamma function.

    Source: series for x < shape + 1 and Lentz's continued fraction above (Numerical Recipes 6.2).
    """
    if x <= 0:
        return 0.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1.0:
        return front * _series(shape, x)
    return 1.0 - front * _fraction(shape, x)


def gamma_quantile(probability: float, shape: float, rate: float) -> float:
    """x with P(X <= x) = `probability` for X ~ Gamma(shape, rate), in units of 1 / rate.

    Bisection on the logarithm of x: 100 halvings, no failure modes.
    Raises ConfigError unless 0 < probability < 1 and shape and rate are positive.
    """
    if not 0 < probability < 1 or shape <= 0 or rate <= 0:
        raise ConfigError(f"no Gamma({shape}, {rate}) quantile at {probability}")
    low, high = -700.0, math.log(shape + 50.0 * math.sqrt(shape) + 50.0)
    for _ in range(100):
        middle = (low + high) / 2.0
        if gamma_cdf(shape, math.exp(middle)) < probability:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2.0) / rate


def _series(shape: float, x: float) -> float:
    term = total = 1.0 / shape
    n = shape
    while abs(term) > abs(total) * 1e-16:
        n += 1.0
        term *= x / n
        total += term
    return total


def _fraction(shape: float, x: float) -> float:
    tiny = 1e-300
    b = x + 1.0 - shape
    c, d = 1.0 / tiny, 1.0 / b
    result = d
    for i in range(1, 10_000):
        an = -i * (i - shape)
        b += 2.0
        d = 1.0 / (an * d + b or tiny)
        c = b + an / c or tiny
        result *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return result
