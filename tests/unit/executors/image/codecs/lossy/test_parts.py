"""Codebooks, 8-bit codes, fill and thresholds, each by itself."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.image.codecs.lossy.blocks import BLOCK, code, quantised, restored
from autockpt.executors.image.codecs.lossy.codebook import centres_of, nearest
from autockpt.executors.image.codecs.lossy.entropy import pack_nibbles, unpack_nibbles
from autockpt.executors.image.codecs.lossy.fill import factors, filled
from autockpt.executors.image.codecs.lossy.thresholds import (
    CENTRES,
    PUBLISHED,
    PUBLISHED_PARAMETERS,
    Thresholds,
    kept,
)
from autockpt.values.errors import ConfigError

QUICK = settings(max_examples=60, deadline=None)
finite = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32)


@QUICK
@given(values=st.lists(finite, max_size=400))
def test_few_values_are_their_own_centres(values: list[float]) -> None:
    """At most 15 ascending centres within the values; up to 15 distinct ones are exact."""
    tensor = torch.tensor(values, dtype=torch.float32)
    centres = centres_of(tensor, CENTRES)
    assert len(centres) <= CENTRES
    assert bool((centres.diff() > 0).all())
    if len(tensor):
        assert tensor.min() <= centres.min()
        assert centres.max() <= tensor.max()
    if len(tensor.unique()) <= CENTRES:
        assert torch.equal(centres[nearest(tensor, centres).long()], tensor)


def test_k_means_beats_its_first_guess() -> None:
    """And comes near the best quantiser of a Gaussian in 15 levels (1.1 % of its variance)."""
    values = torch.randn(2**17, generator=torch.Generator().manual_seed(0))
    centres = centres_of(values, CENTRES)
    error = (values - centres[nearest(values, centres).long()]).square().mean()
    assert float(error) < 0.0115


def test_codes_fit_a_byte_and_hold_zero_and_one() -> None:
    """256 of either kind, as in the paper; -1 is the one that has no room."""
    assert (len(code(signed=True)), len(code(signed=False))) == (256, 256)
    for table in (code(signed=True), code(signed=False)):
        assert {0.0, 1.0} <= set(table.tolist())
        assert bool((table.diff() > 0).all())


@QUICK
@given(values=st.lists(finite, max_size=700), signed=st.booleans())
def test_eight_bits_keep_what_matters_of_a_block(values: list[float], signed: bool) -> None:
    """An error of at most 1 % of the block's largest value; signs stay; a live v is never 0."""
    tensor = torch.tensor(values, dtype=torch.float32)
    tensor = tensor if signed else tensor.abs()
    made = restored(*quantised(tensor, signed=signed), signed=signed)
    assert bool(torch.isfinite(made).all())
    for start in range(0, len(values), BLOCK):
        block, out = tensor[start : start + BLOCK], made[start : start + BLOCK]
        assert float((block - out).abs().max()) <= 0.01 * float(block.abs().max()) + 1e-37
    assert bool((made * tensor.sign() >= 0).all())
    assert signed or bool(((made > 0) == (tensor > 0)).all())


@QUICK
@given(symbols=st.lists(st.integers(0, 15), max_size=300))
def test_nibbles_come_back(symbols: list[int]) -> None:
    """Odd and even numbers of them."""
    tensor = torch.tensor(symbols, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(tensor), len(symbols)), tensor)


@QUICK
@given(
    seed=st.integers(0, 1000), size=st.floats(-44, 36), dead=st.integers(0, 3),
    share=st.floats(0, 1),
)  # fmt: skip
def test_fill_is_alive_where_something_was(seed: int, size: float, dead: int, share: float) -> None:
    """Over forty decades; rows and columns without anything stay 0."""
    made = torch.Generator().manual_seed(seed)
    second = torch.rand((7, 9), generator=made) * 10.0**size
    second[:dead] = 0
    second[:, :dead] = 0
    pruned = torch.rand((7, 9), generator=made) <= share
    fill = filled(*factors(second, pruned))
    assert bool(torch.isfinite(fill).all())
    assert bool((fill[pruned & (second > 0)] > 0).all())
    assert bool((fill[:dead] == 0).all())
    assert bool((fill[:, :dead] == 0).all())


def test_fill_of_a_product_is_that_product() -> None:
    """What is rows times columns comes back up to the rounding, which is upwards."""
    rows, columns = torch.rand(40) + 0.1, torch.rand(30) + 0.1
    second = rows[:, None] * columns[None, :]
    share = filled(*factors(second, torch.ones_like(second).bool())) / second
    assert 0.999 <= float(share.min()) <= float(share.max()) < 1.28


def test_thresholds_are_the_published_ones() -> None:
    """A worked example: medians, means, the clamp, and that moments go with their weights."""
    delta = torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0]])
    first = torch.tensor([[9.0, 1.0, 1.0, -9.0, 1.0]])
    second = torch.full((1, 5), (5e-5) ** 2)  # alpha / sqrt(v) = 1: above the median of 3
    weights, moments = kept(delta, first, second, Thresholds())
    assert weights.tolist() == [[False, False, False, True, True]]
    assert moments.tolist() == [[False, False, False, True, False]]  # above 2 x 4.2
    weights, _ = kept(delta, first, second * 1e-9, Thresholds(clamp=1.5))
    assert weights.tolist() == [[False, False, False, False, True]]


@QUICK
@given(seed=st.integers(0, 1000), alpha=st.floats(0, 0.5), more=st.floats(0, 0.4))
def test_a_larger_alpha_never_keeps_more(seed: int, alpha: float, more: float) -> None:
    """And moments are always among the kept weights."""
    made = torch.Generator().manual_seed(seed)
    delta, first, second = (torch.randn((8, 8), generator=made) for _ in range(3))
    small, _ = kept(delta, first, second.square(), Thresholds(alpha=alpha))
    large, moments = kept(delta, first, second.square(), Thresholds(alpha=alpha + more))
    assert not bool((large & ~small).any())
    assert not bool((moments & ~large).any())


def test_alpha_moves_with_the_size_of_the_model() -> None:
    """As the size of a gradient's element at one norm of the whole."""
    assert PUBLISHED.for_parameters(PUBLISHED_PARAMETERS) == PUBLISHED
    quarter = PUBLISHED.for_parameters(PUBLISHED_PARAMETERS // 4)
    assert quarter.alpha == pytest.approx(1e-4)
    assert PUBLISHED.for_parameters(1).alpha < 1


@pytest.mark.parametrize(
    "wrong", [{"alpha": -1e-5}, {"alpha": 1.0}, {"beta": -1.0}, {"clamp": 1e9}, {"centres": 16}]
)
def test_senseless_thresholds_are_refused(wrong: dict[str, Any]) -> None:
    """Before anything is lost by them."""
    with pytest.raises(ConfigError, match="expected alpha in"):
        Thresholds(**wrong)
