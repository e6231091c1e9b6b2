"""The random state is that of now, however it came about, though mostly it is not read again."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from autockpt.executors.state.rng import rng_mark, rng_state, set_rng_state

numpy_random: Any = np.random
"""Untyped: its stubs lack some of it."""
START = np.random.RandomState(5).get_state()
DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random": random.random,
    "random gauss": lambda: random.gauss(0.0, 1.0),
    "random bits": lambda: random.getrandbits(5),
    "random seed": lambda: random.seed(3),
    "numpy": np.random.rand,
    "numpy gauss": np.random.randn,
    "numpy binomial": lambda: np.random.binomial(10, 0.5),
    "numpy seed": lambda: np.random.seed(3),
    "numpy state": lambda: np.random.set_state(START),
    "torch": lambda: torch.rand(3),
    "torch seed": lambda: torch.manual_seed(3),
}


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """As they were, after each test."""
    bits, kept = numpy_random.get_bit_generator(), rng_state()
    yield
    numpy_random.set_bit_generator(bits)
    set_rng_state(kept)


def plain(state: Any) -> Any:
    """Comparable, and apart from what it was read from."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor | np.ndarray) else state


def read_anew() -> Any:
    """What the generators say themselves."""
    return plain(
        {
            "python": list(random.getstate()),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
        }
    )


def test_whatever_is_drawn_or_seeded_is_seen() -> None:
    """2000 steps in an order drawn from a generator of its own, read after about every other."""
    own = random.Random(11)
    for _ in range(2000):
        DRAWS[own.choice(list(DRAWS))]()
        if own.random() < 0.5:
            assert plain(rng_state()) == read_anew()


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_the_mark_is_another_one_when_somebody_drew(bits: Any) -> None:
    """And when nobody did, the same."""
    for name, draw in DRAWS.items():
        if name not in ("numpy seed", "numpy state") or bits is np.random.MT19937:
            numpy_random.set_bit_generator(bits(7))
            random.seed(7), torch.manual_seed(7)
            mark = rng_mark()
            draw()
            assert (rng_mark() == mark) == (name == "nothing"), name


def test_a_second_normal_number_is_seen_behind_the_same_seed() -> None:
    """Bits and position are equal after one and after two of them: one is left over, or none."""
    states = []
    for count in (2, 1, 2):
        np.random.seed(0)
        np.random.randn(count)
        assert plain(rng_state()) == read_anew()
        states.append(plain(rng_state())["numpy"])
    assert states[0] == states[2] != states[1]
    assert states[0]["state"] == states[1]["state"]


def test_another_bit_generator_is_read() -> None:
    """Of another kind, and another one of the same kind in the same state."""
    numpy_random.set_bit_generator(np.random.PCG64(1))
    np.random.rand()
    assert plain(rng_state())["numpy"]["bit_generator"] == "PCG64"
    for seed in (1, 1, 2):
        numpy_random.set_bit_generator(np.random.MT19937(seed))
        assert plain(rng_state()) == read_anew()


def test_what_was_read_stays_as_it_was() -> None:
    """A state that waits for its snapshot is not changed by what is drawn meanwhile."""
    before = rng_state()
    kept = plain(before)
    for draw in DRAWS.values():
        draw()
        rng_state()
    assert plain(before) == kept
    set_rng_state(before)
    assert read_anew() == kept


def test_generators_that_nobody_used_are_not_read_again() -> None:
    """The same objects, so that nothing of them is encoded again either."""
    random.random(), np.random.rand()
    first, second = rng_state(), rng_state()
    assert first["python"] is second["python"]
    assert first["numpy"] is second["numpy"]
