"""Random state of Python, numpy, torch and every GPU: read at each boundary, put back once.

Reading Python's and numpy's generators takes 75 us, because both walk 624 numbers.  A check of 2
us, by the memory of their objects, shows that they have not been used since.
"""

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Random state of Python, numpy, torch CPU and every GPU; its arrays are read-only."""
    state: dict[str, Any] = {
        "python": _python.read(),
        "torch": torch.get_rng_state(),
        "numpy": _numpy.read(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def rng_mark() -> list[Any]:
    """Return a mark that changes when a generator is used; takes 1 us.

    Of GPUs the current one's: of each it is as much again as of all else.
    """
    numpy = _numpy.mark() or repr(np.random.get_state(legacy=False))
    mark = [_python.mark(), numpy, torch.get_rng_state().numpy().tobytes()]
    if torch.cuda.is_initialized():
        mark.append(torch.cuda.get_rng_state().numpy().tobytes())
    return mark


def generator_mark(generator: Any) -> Any:
    """Changes with every draw from a generator of torch, Python or numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False)["gauss"]), _bits_mark(generator)
    return _bits_mark(generator)


def _bits_mark(generator: Any) -> Any:
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    if type(bits) is np.random.MT19937:
        return bytes(_view(bits.ctypes.state_address, _MT19937_BYTES))
    return repr(bits.state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` gave."""
    set_python_state(random, state["python"])
    torch.set_rng_state(state["torch"].cpu())
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        # The machine may have another number of GPUs than the one that saved.
        for device, part in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(part.cpu(), device)


def python_state(generator: Any) -> list[Any]:
    """[version, words and position, number left over] of the module's generator or another one."""
    version, internal, gauss = generator.getstate()
    # As an array: 625 numbers are 10 times faster to encode this way.
    words = np.array(internal, dtype=np.uint32)
    words.setflags(write=False)
    return [version, words, gauss]


def set_python_state(generator: Any, state: Sequence[Any]) -> None:
    """Puts back what `python_state` gave."""
    version, internal, gauss = state
    generator.setstate((version, tuple(internal.tolist()), gauss))


class _Python:
    """Python's generator: an object of C, and a number that is left over of a pair."""

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._memory = _memory_of(self._generator)
        self._mark: Any = None
        self._state: list[Any] = []

    def mark(self) -> Any:
        """All that it holds, to be compared."""
        return bytes(self._memory), self._generator.gauss_next

    def read(self) -> list[Any]:
        """As `python_state`; not to be changed."""
        mark = self.mark()
        if mark != self._mark:
            self._state, self._mark = python_state(random), mark
        return self._state


class _Numpy:
    """numpy's: an object that draws, with a number left over, and one with the bits."""

    def __init__(self) -> None:
        self._memory = _memory_of(np.random.get_state.__self__)  # type: ignore[attr-defined]
        self._bits: Any = None
        self._words = memoryview(b"")
        self._mark: Any = None
        self._state: Any = None

    def mark(self) -> Any:
        """All that it holds, to be compared; None where the bits are of another kind than usual."""
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(bits) is not np.random.MT19937:
            return None
        if bits is not self._bits:
            self._bits, self._mark = bits, None
            self._words = _view(bits.ctypes.state_address, _MT19937_BYTES)
        return bytes(self._words), bytes(self._memory)

    def read(self) -> Any:
        """As `np.random.get_state`; not to be changed."""
        mark = self.mark()
        if mark is None:
            return np.random.get_state(legacy=False)
        if mark != self._mark:
            self._state, self._mark = np.random.get_state(legacy=False), mark
            self._state["state"]["key"].setflags(write=False)
        return self._state


_MT19937_BYTES = 625 * 4
"""624 words and the position among them."""


def _memory_of(thing: Any) -> memoryview:
    """View the contents of an immortal C object behind the header that all objects have."""
    header = object.__basicsize__
    return _view(id(thing) + header, type(thing).__basicsize__ - header)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


_python, _numpy = _Python(), _Numpy()
