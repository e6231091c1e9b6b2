"""Generator states as an epoch begins, put back to draw the epoch's order again.

torch's samplers draw from torch's global generator, or from one that they or the loader were given.
Others shuffle by Python's or numpy's, have their own of any of the three kinds, count epochs, and
shuffle the order of the epoch before.
"""

import contextlib
import copy
import dis
import itertools
import random
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from autockpt.executors.state.rng import python_state, rng_state, set_python_state, set_rng_state
from autockpt.values.errors import ConfigError

Shuffle = list[torch.Tensor]
"""State of torch's global generator, then of each that `generator` arguments gave."""


def shuffle_of(loader: Any) -> Shuffle:
    """As of now."""
    return [torch.get_rng_state(), *(g.get_state() for g in _given(loader))]


def others_of(loader: Any) -> dict[str, Any]:
    """Of generators that samplers hold by themselves, and of Python's and numpy's.

    Without these two where all samplers are torch's: they would cost every snapshot 17 us.
    """
    found = {name: generator_state(generator) for name, generator in _held(loader).items()}
    others: dict[str, Any] = {"own": found} if found else {}
    if _own_samplers(loader):
        now = rng_state()
        others |= {"python": now["python"], "numpy": now["numpy"]}
    return others


def put_back(loader: Any, shuffle: Shuffle, others: dict[str, Any]) -> None:
    """All generators as they were then."""
    set_rng_state({**rng_state(), **others, "torch": shuffle[0]})
    for given, state in zip(_given(loader), shuffle[1:], strict=True):
        given.set_state(state)
    held = _held(loader)
    for name, state in others.get("own", {}).items():
        set_generator_state(held[name], state)
    for path, sampler in _own_samplers(loader):
        for name, value in others.get("values", {}).get(path, {}).items():
            former = _attributes(sampler).get(name)
            setattr(sampler, name, _as_list(value) if isinstance(former, list) else value)


Values = dict[str, dict[str, Any]]
"""By place of a sampler, and name of the attribute."""


def values_of(loader: Any) -> Values:
    """Copies of numbers and orders, of batches too, in samplers that are not torch's."""
    return {
        path: {
            name: _as_arrays(value) if type(value) is list else copy.deepcopy(value)
            for name, value in _attributes(sampler).items() if _is_value(value)
        }
        for path, sampler in _own_samplers(loader)
    }  # fmt: skip


def changed_values(now: Values, built: Values) -> Values:
    """Without all that is as the script built it."""
    found = {
        path: {
            name: value for name, value in values.items()
            if name not in built.get(path, {}) or not _is_same(value, built[path][name])
        }
        for path, values in now.items()
    }  # fmt: skip
    return {path: values for path, values in found.items() if values}


def _is_value(value: Any) -> bool:
    if type(value) is list:
        return _are_numbers(value) or all(
            type(i) in (list, tuple) and _are_numbers(i) for i in value
        )
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return value is None or type(value) in (bool, int, float, str)


def _are_numbers(items: Any) -> bool:
    return all(type(item) is int and abs(item) < 2**63 for item in items)


def _as_arrays(items: list[Any]) -> Any:
    """Numbers as an array; lists or tuples of numbers as one of all, with their lengths."""
    if _are_numbers(items):
        return np.array(items)
    numbers = np.fromiter(itertools.chain.from_iterable(items), dtype=np.int64)
    are_lists = np.array([type(item) is list for item in items])
    return {"numbers": numbers, "lengths": np.array([*map(len, items)]), "lists": are_lists}


def _as_list(value: Any) -> list[Any]:
    """The list that `_as_arrays` got."""
    if not isinstance(value, dict):
        return list(value.tolist())
    parts = np.split(value["numbers"], np.cumsum(value["lengths"])[:-1])
    kinds = zip(parts, value["lists"].tolist(), strict=True)
    return [part.tolist() if is_list else tuple(part.tolist()) for part, is_list in kinds]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _own_samplers(loader: Any) -> list[tuple[str, Any]]:
    return [
        (path, sampler) for path, sampler in _samplers(loader)
        if not type(sampler).__module__.startswith("torch.")
    ]  # fmt: skip


def require_generators(loader: Any, shuffle: Shuffle | None, others: dict[str, Any] | None) -> None:
    """Raises ConfigError when states that were saved have no generator to go to.

    One that a sampler makes with its first order is made now.
    """
    _make_generators(loader, (others or {}).get("own", {}))
    if shuffle is not None and len(shuffle) - 1 != len(_given(loader)):
        raise ConfigError(
            f"data: the loader that wrote the checkpoint had {len(shuffle) - 1} generators of its "
            f"own, this one has {len(_given(loader))}; attach it with the same `generator` "
            "arguments"
        )
    held = {name: type(generator).__name__ for name, generator in _held(loader).items()}
    for name in (others or {}).get("own", {}):
        if name not in held:
            raise ConfigError(
                f"data: the order of the checkpoint was drawn from the generator {name}, which "
                f"this loader does not have (it has {', '.join(held) or 'none'}). Attach it with "
                "the sampler that wrote the checkpoint"
            )


def _make_generators(loader: Any, saved: dict[str, Any]) -> None:
    for path, sampler in _samplers(loader):
        for name, value in list(_attributes(sampler).items()):
            if value is None and isinstance(saved.get(f"{path}.{name}"), torch.Tensor):
                setattr(sampler, name, torch.Generator())


def _given(loader: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for owner in (loader, loader.sampler, loader.batch_sampler):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def _held(loader: Any) -> dict[str, Any]:
    """Generators in the attributes of samplers and of the samplers in those, each once.

    Those too that methods of a script's sampler take from variables outside of it.
    """
    known = {id(generator) for generator in _given(loader)}
    found: dict[str, Any] = {}
    samplers = _samplers(loader)
    held = [(f"{path}.{n}", one) for path, each in samplers for n, one in _attributes(each).items()]
    held += [(f"{path}.{n}", one) for path, each in samplers for n, one in _named_by(each)]
    for name, value in held:
        kept = isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)
        if kept and id(value) not in known:
            known.add(id(value))
            found[name] = value
    return found


def _named_by(owner: Any) -> Iterator[tuple[str, Any]]:
    """(name, generator) of global and enclosing variables in a function, or in methods of a class.

    Methods of torch's classes name none.
    """
    owner = getattr(owner, "func", owner)  # functools.partial
    functions = [owner] if isinstance(owner, FunctionType) else _methods(type(owner))
    for function in functions:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # not set yet
                yield f"{name}()", cell.cell_contents
        codes = [function.__code__]
        for code in codes:  # which grows
            codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
            for name in code.co_names:  # of attributes too
                value = function.__globals__.get(name)
                if isinstance(value, GENERATORS) and name in _globals_in(code):
                    yield f"{name}()", value


def _globals_in(code: CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    return {one.argval for one in dis.get_instructions(code) if one.opname in loads}


def _methods(kind: type) -> list[FunctionType]:
    kinds = [each for each in kind.__mro__ if not each.__module__.startswith("torch.")]
    return [one for each in kinds for one in vars(each).values() if isinstance(one, FunctionType)]


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def data_generators(loader: Any, *, of_workers: bool = False) -> dict[str, Any]:
    """Generators of the data set and of objects in it, by place; orders may draw from them too.

    There is none with workers, because workers have copies.  `of_workers`: the ones that workers
    copy.
    """
    if loader.num_workers and not of_workers:
        return {}
    known, kinds = set[int](), set[type]()
    found: dict[str, Any] = {}
    inside = [("dataset", loader.dataset), ("collate_fn", loader.collate_fn)]

    def named_too(one: Any) -> list[tuple[str, Any]]:
        parts, owner = _parts(one), getattr(one, "func", one)
        if type(owner) not in kinds:  # methods are of the class: 60 tables are looked through once
            parts = [*parts, *_named_by(one)]
        if not isinstance(owner, FunctionType):
            kinds.add(type(owner))
        return parts

    for parts in (_parts, named_too):  # a generator that is an attribute, too, has the name of that
        for path, one in inside:  # which grows
            for name, value in parts(one):
                if id(value) in known or isinstance(value, random.SystemRandom):
                    continue
                is_box = hasattr(value, "__dict__") | isinstance(value, BOXES)
                if isinstance(value, GENERATORS):
                    found[f"{path}.{name}"] = value
                elif len(inside) < LOOKED_AT and is_box:
                    inside.append((f"{path}.{name}", value))
                else:
                    continue
                known.add(id(value))
    return found


def order_generators(loader: Any) -> dict[str, Any]:
    """By place the generators of orders, given ones first."""
    given = {f"generator{number}": one for number, one in enumerate(_given(loader))}
    return given | _held(loader)


BOXES = (list, tuple, dict)
LOOKED_AT, MOST_PARTS = 1000, 100
"""Objects of a data set, and parts of a list, that generators are looked for in."""


def _parts(one: Any) -> list[tuple[str, Any]]:
    """Attributes, or items of a short list; nothing of types, modules, tensors and arrays."""
    if isinstance(one, dict):
        return [(str(key), item) for key, item in one.items()] if len(one) <= MOST_PARTS else []
    if isinstance(one, list | tuple):
        return [(str(i), item) for i, item in enumerate(one)] if len(one) <= MOST_PARTS else []
    kinds = (type, ModuleType, torch.Tensor, np.ndarray, torch.nn.Module)
    return [] if isinstance(one, kinds) else list(_attributes(one).items())


def kept_generators(loader: Any) -> dict[str, Any]:
    """By place all that the position of a loader puts back by itself."""
    if not isinstance(loader, DataLoader):
        return {}
    return order_generators(loader) | data_generators(loader)


def _samplers(loader: Any) -> list[tuple[str, Any]]:
    """The loader's, and the samplers in their attributes."""
    found = [("sampler", loader.sampler), ("batch_sampler", loader.batch_sampler)]
    found = [(path, sampler) for path, sampler in found if sampler is not None]
    for path, sampler in found:  # which grows
        for name, value in _attributes(sampler).items():
            if isinstance(value, Sampler) and not any(value is known for _, known in found):
                found.append((f"{path}.{name}", value))
    return found


def _attributes(owner: Any) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})


def generator_state(generator: Any) -> Any:
    """Of torch, Python or numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return python_state(generator)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    """Puts back what `generator_state` gave."""
    if isinstance(generator, random.Random):
        set_python_state(generator, state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
