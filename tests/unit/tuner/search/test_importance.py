"""Importances: made-up times whose true shares are known."""

import math
import random

import pytest

from autockpt.tuner.search.importance import importances
from autockpt.tuner.search.record import Trial
from autockpt.tuner.search.space import MIB, Candidate

SPACE = [
    Candidate(chunk_bytes=chunk * MIB, writers=writers, direct_io=direct, codec=codec)
    for chunk in (1, 2, 4, 8, 16, 32)
    for writers in (1, 2, 4)
    for direct in (True, False)
    for codec in ("none", "zstd")
]


def searched(seconds, *, writes: int = 25, noise: float = 0.0, seed: int = 0) -> list[Trial]:
    """A search of `writes` candidates of `SPACE`, each taking `seconds` of it."""
    chance = random.Random(seed)
    return [
        Trial(
            number=i,
            stage="search",
            candidate=candidate,
            seconds=seconds(candidate) * math.exp(chance.gauss(0.0, noise)),
        )
        for i, candidate in enumerate(chance.choices(SPACE, k=writes))
    ]


def test_shares_are_those_of_the_true_effects():
    """log t: +-1.2 by codec, +-0.4 by path, writers 0.2 a doubling; variances 1.44, 0.16, 0.027."""

    def seconds(c: Candidate) -> float:
        effect = 2.4 * (c.codec == "zstd") + 0.8 * (not c.direct_io) + 0.2 * math.log2(c.writers)
        return math.exp(effect)

    found = importances(SPACE, searched(seconds, noise=0.02, writes=40))
    assert list(found.shares)[:3] == ["codec", "direct", "writers"]
    total = 1.44 + 0.16 + 0.04 * 2 / 3
    assert found.shares["codec"] == pytest.approx(1.44 / total, abs=0.03)
    assert found.shares["direct"] == pytest.approx(0.16 / total, abs=0.03)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.explained > 0.99


def test_the_best_place_of_a_number_in_the_middle_is_seen():
    """A parabola of the chunk explains it alone."""
    found = importances(
        SPACE, searched(lambda c: math.exp(0.3 * (math.log2(c.chunk_bytes) - 22) ** 2))
    )
    assert next(iter(found.shares)) == "chunk"
    assert found.shares["chunk"] > 0.95


def test_noise_is_not_explained():
    """Equal candidates under noise of 30 %: what is found explains little of it."""
    found = importances(SPACE, searched(lambda c: 1.0, noise=0.3, writes=200))
    assert found.explained < 0.1


def test_a_search_that_measured_nothing_says_nothing():
    """Failures have no time."""
    failed = [
        Trial(number=i, stage="seed", candidate=SPACE[i], seconds=0.0, failure="disk full")
        for i in range(5)
    ]
    assert set(importances(SPACE, failed).shares.values()) == {0.0}
