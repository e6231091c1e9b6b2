"""Recovery probabilities: closed forms against every pattern, and against what is published."""

import itertools
import math
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.redundancy.survival import (
    patterns,
    survived,
    survived_alone,
    survived_domains,
    survived_mix,
)
from autockpt.values.errors import ConfigError
from autockpt.values.placement import place
from tests.unit.values.test_placement import SCHEMES, parity, racks, replicas

SMALL = [
    (scheme, nodes)
    for scheme in (
        replicas(2), replicas(3), replicas(4), replicas(2, "ring"), replicas(3, "ring"),
        parity(2), parity(3), parity(4), parity(8), parity(4, 2), parity(5, 3), parity(8, 2),
    )
    for nodes in range(scheme.tolerates + 1, 11)
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "nodes"), SMALL)
def test_patterns_are_those_that_enumeration_finds(scheme, nodes):
    """Up to 10 nodes, every set of lost nodes."""
    placement = place(scheme, nodes)
    counted = [
        sum(map(placement.survives, itertools.combinations(range(nodes), k)))
        for k in range(nodes + 1)
    ]
    assert list(patterns(placement, nodes)) == counted


@settings(deadline=None)
@given(st.data(), SCHEMES, st.integers(2, 9))
def test_patterns_within_a_rack_are_those_that_enumeration_finds(data, scheme, nodes):
    """Only some nodes can be lost: every subset of them."""
    if nodes <= scheme.tolerates:
        return
    placement = place(scheme, nodes)
    rack = sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1)))
    for k, found in enumerate(patterns(placement, len(rack), rack)):
        assert found == sum(map(placement.survives, itertools.combinations(rack, k)))


@pytest.mark.parametrize(("scheme", "nodes"), SMALL[::3])
@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 0.9, 1.0])
def test_independent_losses_sum_up_over_all_patterns(scheme, nodes, p):
    """P = sum_k patterns(k) p^k (1 - p)^(N - k)."""
    placement = place(scheme, nodes)
    counts = patterns(placement, nodes)
    expected = sum(count * p**k * (1 - p) ** (nodes - k) for k, count in enumerate(counts))
    assert survived_alone(placement, p) == pytest.approx(expected, abs=1e-12)


PUBLISHED = [
    (replicas(2, "group"), 16, {2: 93.33, 3: 80.00, 4: 61.54, 5: 41.03, 6: 22.38, 8: 1.99}),
    (replicas(2, "ring"), 16, {2: 86.67, 3: 62.86, 4: 36.26, 5: 15.38, 6: 4.20, 8: 0.02}),
    (replicas(2), 15, {2: 91.43, 3: 74.73}),
    (replicas(3), 16, {3: 98.57, 4: 94.45, 5: 86.54, 6: 74.18, 8: 38.39}),
    (replicas(3, "ring"), 64, {3: 99.85, 4: 99.40, 5: 98.51, 8: 92.17}),
    (parity(8), 64, {2: 88.89, 3: 68.82, 4: 45.13}),
    (parity(4), 64, {2: 95.24, 3: 86.02, 4: 73.33}),
    (parity(8, 2), 64, {2: 100.0, 3: 98.92, 4: 95.96, 5: 90.53}),
    (parity(16, 4), 64, {4: 100.0, 5: 99.77, 6: 98.84}),
]


@pytest.mark.parametrize(("scheme", "nodes", "percent"), PUBLISHED)
def test_published_figures_come_out(scheme, nodes, percent):
    """16 nodes, 2 copies, 2 lost: 93.33 % in groups (Gemini) and 86.67 % in a ring."""
    placement = place(scheme, nodes)
    found = {k: round(100 * survived(placement, k), 2) for k in percent}
    assert found == percent


@given(st.integers(2, 4), st.integers(1, 30), st.integers(0, 12))
def test_groups_agree_with_inclusion_and_exclusion(copies, groups, lost):
    """P = sum_j (-1)^j C(g, j) C(N - j m, k - j m) / C(N, k); Gemini's bound is its first terms."""
    nodes = copies * groups
    if lost > nodes:
        return
    terms = [
        (-1) ** j * math.comb(groups, j) * math.comb(nodes - j * copies, lost - j * copies)
        for j in range(min(groups, lost // copies) + 1)
    ]
    placement = place(replicas(copies, "group"), nodes)
    exact = Fraction(sum(terms), math.comb(nodes, lost))
    assert survived(placement, lost) == float(exact)
    assert survived(placement, lost) >= float(Fraction(sum(terms[:2]), math.comb(nodes, lost)))


@given(st.integers(2, 60), st.integers(2, 4), st.integers(0, 10))
def test_a_ring_is_never_better_than_groups(nodes, copies, lost):
    """Nor is mixed ever worse than the ring."""
    if not copies <= nodes >= lost:
        return
    ring = survived(place(replicas(copies, "ring"), nodes), lost)
    assert survived(place(replicas(copies), nodes), lost) >= ring


@given(SCHEMES, st.integers(2, 200))
def test_more_losses_are_never_survived_more_often(scheme, nodes):
    """All of the tolerated are; afterwards it only falls."""
    if nodes <= scheme.tolerates:
        return
    placement = place(scheme, nodes)
    chances = [survived(placement, k) for k in range(min(nodes, 20) + 1)]
    assert chances[: scheme.tolerates + 1] == [1.0] * (scheme.tolerates + 1)
    assert all(b <= a for a, b in itertools.pairwise(chances))


# --- distributions --------------------------------------------------------------------------------


def test_a_distribution_weighs_the_losses():
    """Its last figure is spread over more losses, halving."""
    placement = place(replicas(2), 16)
    p = [survived(placement, k) for k in range(17)]
    tail = sum(p[3 + i] * 0.5**i for i in range(1, 9)) + p[11] * 0.5**8
    assert survived_mix(placement, (0.9, 0.06, 0.02, 0.02)) == pytest.approx(
        0.9 + 0.06 * p[2] + 0.02 * p[3] + 0.02 * tail
    )
    weights = (9.0, 0.6, 0.2, 0.2)
    assert survived_mix(placement, weights) == survived_mix(placement, [w / 10 for w in weights])
    with pytest.raises(ConfigError, match="not all 0"):
        survived_mix(placement, ())


def test_more_losses_than_nodes_are_the_loss_of_all():
    """Two nodes and a distribution that knows of four."""
    assert survived_mix(place(replicas(2), 2), (1.0, 1.0)) == pytest.approx(0.5)


def test_a_rack_is_survived_or_not():
    """Pairs that know of the racks survive each; pairs made for other racks lose all of them."""
    domains = racks(*"aabbccdd")
    assert survived_domains(place(replicas(2), 8, domains), domains, "rack") == 1.0
    misled = place(replicas(2), 8, racks(*"abababab"))
    assert [cell.members for cell in misled.cells] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert survived_domains(misled, domains, "rack") == 0.0


def test_losses_within_a_rack_are_worse_where_partners_share_it():
    """Two of one rack of four: a third of the pairs are partners, or none is."""
    inside = place(replicas(2), 8, racks(*"abababab"))
    rack = (0, 2, 4, 6)
    assert survived(inside, 2, within=rack) == 1.0
    assert survived(place(replicas(2), 4), 2, within=(0, 1, 2, 3)) == pytest.approx(2 / 3)


def test_impossible_losses_are_refused():
    """More nodes than there are, and probabilities beyond 1."""
    placement = place(replicas(2), 4)
    with pytest.raises(ConfigError, match="5 of 4 nodes lost"):
        survived(placement, 5)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        survived_alone(placement, 1.5)


def test_thousands_of_nodes_take_no_time():
    """4,096 nodes, 64 losses, every scheme: a second would be ten times too long."""
    begun_s = time.process_time()
    for scheme in (replicas(2), replicas(3), replicas(3, "ring"), parity(8), parity(16, 4)):
        placement = place(scheme, 4096)
        assert 0.0 <= survived(placement, 64) <= 1.0
        assert survived_alone(placement, 1e-4) > 0.9
    assert time.process_time() - begun_s < 5.0
