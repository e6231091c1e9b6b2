"""What comes out of a group, how far it is from what went in, and that errors do not add up."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.image.codecs.lossy import frame
from autockpt.executors.image.codecs.lossy.coding import (
    SMALL,
    Method,
    decode,
    encode_lossless,
    form_of,
)
from tests.unit.executors.image.codecs.lossy.groups import Group, coded, decoded, trained_group
from tests.unit.executors.states import DTYPES, bytes_of, random_tensor

METHODS: tuple[Method, ...] = ("excp", "quantised", "none")
SHAPES = [(96, 64), (8, 16, 48), (4096, 1), (1, 5000), (64,), (1,), (), (0,), (3, 0), (40, 40)]
QUICK = settings(max_examples=40, deadline=None)


def kinds(frames: tuple[bytes, ...]) -> list[str]:
    """Of each frame."""
    return [frame.parse(data).kind for data in frames]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_restore_gets_what_the_encoder_said(
    method: Method, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """To the bit, for matrices, vectors, scalars and nothing at all."""
    padded = shape or (1,)
    group, base = trained_group(padded, dtype=dtype)
    group, base = tuple(t.reshape(shape) for t in group), base.reshape(shape)
    found = coded(group, base, method)
    out = decoded(found.frames, group, base)
    for made, tensor, whole in zip(out, found.tensors, group, strict=True):
        assert form_of(made) == form_of(whole)
        assert bytes_of(made) == bytes_of(tensor)
    if method == "none":
        assert [bytes_of(t) for t in out] == [bytes_of(t) for t in group]


def test_a_large_matrix_is_pruned_and_a_small_one_is_not() -> None:
    """Tables and factors must be worth their bytes; weights of `quantised` are exact."""
    group, base = trained_group()
    assert group[0].numel() > SMALL
    assert kinds(coded(group, base).frames) == ["pruned"]
    assert kinds(coded(group, None).frames) == ["lossless", "signed8", "unsigned8"]
    assert kinds(coded(group, base, "quantised").frames) == ["lossless", "signed8", "unsigned8"]
    small, its = trained_group((64,))
    assert kinds(coded(small, its).frames) == ["residual8", "signed8", "unsigned8"]
    assert kinds(coded((its, *small[1:]), its, "quantised").frames)[0] == "same"


@QUICK
@given(seed=st.integers(0, 10**6), size=st.floats(-30, 8), shape=st.sampled_from([(70, 64), (9,)]))
def test_no_weight_is_further_off_than_if_nothing_was_stored(
    seed: int, size: float, shape: tuple[int, ...]
) -> None:
    """Element by element: the error is at most the residual (but for the rounding of a sum)."""
    group, base = trained_group(shape, seed)
    scale = 10.0**size
    weight, base = group[0] * scale, base * scale
    (made, _, _) = coded((weight, *group[1:]), base).tensors
    slack = 2e-7 * torch.maximum(weight.abs(), base.abs()) + 1e-44
    assert bool(((weight - made).abs() <= (weight - base).abs() + slack).all())


def test_errors_do_not_add_up_over_a_chain() -> None:
    """After 20 members the error is that of 10; against true predecessors it would have grown."""
    (weight, first, second), made = trained_group((128, 96))
    true, open_loop = made.clone(), made.clone()
    errors = []
    noise = torch.Generator().manual_seed(1)
    for _ in range(20):
        step = torch.randn(weight.shape, generator=noise) * 1e-4
        (alone, _, _) = coded((true + step, first, second), true).tensors
        open_loop = open_loop + (alone - true)
        true = true + step
        (made, _, _) = coded((true, first, second), made).tensors
        errors.append(float((true - made).norm() / step.norm()))
    assert errors[19] < 1.1 * max(errors[5:10])
    assert errors[19] < 0.6 * float((true - open_loop).norm() / step.norm())


@pytest.mark.parametrize("method", ["excp", "quantised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (300,)], ids=str)
def test_no_live_second_moment_comes_back_as_zero(
    method: Method, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Nor a dead row as alive: Adam's next step there is what it would have been."""
    group, base = trained_group(shape, dtype=dtype)
    weight, first, second = group
    tiny = torch.finfo(dtype).smallest_normal
    second[0] = 0
    first[0] = 0
    second[1] = second[1].clamp(min=tiny, max=tiny)
    _, _, made = coded((weight, first, second), base, method).tensors
    assert bool((made[second > 0] > 0).all())
    assert bool((made[0] == 0).all())


@pytest.mark.parametrize("method", ["excp", "quantised"])
def test_the_first_adam_step_is_not_longer_than_before(method: Method) -> None:
    """With v at 0 it would be 3.2 learning rates everywhere; it stays near one."""
    group, base = trained_group((256, 128))
    gradient = group[2].sqrt() * torch.randn(group[2].shape, generator=torch.Generator())
    _, first, second = coded(group, base, method).tensors
    after = 0.999 * second + 0.001 * gradient.square()
    step = (0.9 * first + 0.1 * gradient).abs() / after.sqrt()
    without = (0.1 * gradient).abs() / (0.001 * gradient.square()).sqrt()
    assert float(without.median()) > 3
    assert float(step.quantile(0.999)) < 1.6
    assert float(step.max()) < 3.2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_not_finite_is_kept_to_the_bit(method: Method, which: int, value: float) -> None:
    """The whole group is lossless then; so it is with a negative second moment."""
    group, base = trained_group()
    group[which][3, 5] = value
    found = coded(group, base, method)
    if value == -1.0 and which < 2:
        return
    assert not found.lossy
    out = decoded(found.frames, group, base)
    assert [bytes_of(t) for t in out] == [bytes_of(t) for t in group]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_are_kept_to_the_bit(dtype: str) -> None:
    """Alone, or as a group that no lossy way knows."""
    tensor = random_tensor(dtype, (5, 7))
    found = encode_lossless(tensor)
    (out,) = decode(found.frames[0], [form_of(tensor)], None)
    assert bytes_of(out) == bytes_of(tensor)
    same = encode_lossless(tensor, tensor)
    assert kinds(same.frames) == ["same"]
    assert bytes_of(decode(same.frames[0], [form_of(tensor)], tensor)[0]) == bytes_of(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_groups_of_other_dtypes_are_lossless(dtype: torch.dtype) -> None:
    """Only floats of 16 and 32 bits are touched."""
    group = tuple(torch.arange(6000).reshape(60, 100).to(dtype) for _ in range(3))
    found = coded(group, group[0] + 1)
    assert not found.lossy
    assert kinds(found.frames) == ["lossless"] * 3


@pytest.mark.parametrize("value", [0.0, 1.0, 3e38, 1e-38, 1e-45])
@pytest.mark.parametrize("method", METHODS)
def test_constant_tensors_of_any_size(value: float, method: Method) -> None:
    """No median, no spread, no room above: still finite, and a v above 0 still is."""
    constant = torch.full((80, 64), value)
    for base in (constant.clone(), -constant, torch.zeros(80, 64)):
        group: Group = (constant, constant.clone(), constant.clone())
        found = coded(group, base, method)
        out = decoded(found.frames, group, base)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in out)
        assert bool((out[2] > 0).all()) == (value > 0)


def test_the_same_group_gives_the_same_frames() -> None:
    """Nothing is drawn at random."""
    group, base = trained_group()
    assert coded(group, base).frames == coded(group, base).frames


def test_pruning_is_what_makes_it_small() -> None:
    """Against 12 bytes per parameter, with the tables of a small matrix in it."""
    group, base = trained_group((512, 512))
    for method, least in (("excp", 40.0), ("quantised", 2.0), ("none", 1.0)):
        size = sum(map(len, coded(group, base, method).frames))
        assert 12 * group[0].numel() / size > least
