"""The tensors of a live state: walked once, confirmed cheaply, walked again after a change.

Walking the modules and the optimizers of 600 tensors costs 4 ms of Python, twice per checkpoint.
Everything the walk reads hangs in a few hundred dicts and lists.  An anchor remembers the objects
in one of them.  As long as all anchors hold, the walk would find the same (30 us per 600 tensors).
State that cannot be anchored (optimizer state of numbers, which are new objects at every step) is
walked every time.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch

from autockpt.executors.sharding.adapters.fsdp2_gathered import gathering_units
from autockpt.executors.sharding.fqns import ModelNames, has_extra_state
from autockpt.executors.sharding.local_memory import own_elements
from autockpt.executors.sharding.local_shard import Declared, LocalShard, holding_of
from autockpt.executors.sharding.optimizers import state_holding, state_of
from autockpt.executors.state import state_tree
from autockpt.values.errors import ConfigError


class Anchors:
    """Dicts, lists and compounds, and the objects that were in them."""

    def __init__(
        self,
        dicts: Sequence[Mapping[Any, Any]],
        lists: Sequence[Sequence[Any]],
        compounds: Sequence[Any] = (),
    ) -> None:
        self._dicts, self._lists = dicts, lists
        opened = [_opened(one) for one in compounds]
        self._compounds = [
            (one, parts, copy.deepcopy(forms))
            for one, (parts, forms) in zip(compounds, opened, strict=True)
        ]
        self._lengths = self._measure()
        self._full = [each for each in dicts if each]
        """The non-empty dicts.  For the others the length is enough: most modules have no buffers
        or no children."""
        self._keys = tuple(chain.from_iterable(self._full))
        self._values = tuple(chain.from_iterable(map(_values, self._full)))
        self._items = tuple(chain.from_iterable(lists))

    def hold(self) -> bool:
        """Exactly the same objects under the same keys, in the same order."""
        return (
            self._measure() == self._lengths
            and all(map(is_, chain.from_iterable(self._full), self._keys))
            and all(map(is_, chain.from_iterable(map(_values, self._full)), self._values))
            and all(map(is_, chain.from_iterable(self._lists), self._items))
            and all(_is_as_opened(*one) for one in self._compounds)
        )

    def _measure(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._lists)]


_values = methodcaller("values")


def _opened(compound: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """(parts, forms) of a tensor that wraps others, and of those in it."""
    names, form = compound.__tensor_flatten__()
    parts: list[torch.Tensor] = [getattr(compound, name) for name in names]
    forms = [form]
    for part in list(parts):
        if (inner := state_tree.compound_of(part)) is not None:
            found, of_it = _opened(inner)
            parts, forms = parts + found, [*forms, of_it]
    return parts, forms


def _is_as_opened(compound: Any, parts: list[torch.Tensor], forms: list[Any]) -> bool:
    now, of_now = _opened(compound)
    return len(now) == len(parts) and all(map(is_, now, parts)) and bool(of_now == forms)


@dataclass(slots=True)
class OptimizerParts:
    """The part of an optimizer's skeleton that changes only with its structure."""

    regular: dict[str, list[list[int]]]
    """Parameters as [group, index] by the keys of their state, when it is tensors only."""
    irregular: dict[str, Any]
    """State of the other parameters by name: encoded anew at every checkpoint."""
    fixed: dict[str, Any]
    """Skeletons by name of state that is tensors only, some of which wrap others."""
    names: list[str | list[str]]
    """Names of the parameters of each group, one per line; a list where a name has line breaks."""
    loose: list[Any]
    """Keys of its state that are no parameters."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The names that a script builds and a checkpoint fills, without the optimizers' state."""

    named: frozenset[str]
    """Parameters and persistent buffers of the models."""
    groups: dict[str, list[str | list[str]]]
    """By optimizer the parameters of each group, as `OptimizerParts.names`."""

    def added(self, other: "Structure") -> list[str]:
        """Return the names that only this one has, or has in other groups, in words."""
        more = sorted(self.named - other.named)
        regrouped = [p for p, names in self.groups.items() if other.groups.get(p) != names]
        return more or [f"the parameter groups of {prefix}" for prefix in regrouped]


@dataclass(slots=True)
class TensorIndex:
    """One walk of a live state."""

    lazy: dict[str, torch.Tensor]
    """Parameters and optimizer state, themselves; in the order in which optimizers change them."""
    locals: dict[str, torch.Tensor]
    """The bytes of each that this rank holds (the tensor itself, unless it is distributed or
    padded)."""
    parts: dict[str, tuple[str, ...]]
    """Names of `lazy` by the optimizer that changes them; "" for names that no optimizer
    changes."""
    needs: dict[str, tuple[str, ...]]
    """Parts that a step of an optimizer changes: its own, and those it shares tensors with."""
    buffers: dict[str, torch.Tensor]
    passing: list[str]
    """Names of the buffers that do not persist."""
    extras: list[tuple[str, torch.nn.Module]]
    """(name, module) of modules with an extra state of their own."""
    optimizers: dict[str, OptimizerParts]
    anchors: Anchors
    roots: list[tuple[torch.optim.Optimizer, Any, Any, list[Any]]]
    """(optimizer, its state, its groups, the list of parameters of each group)."""
    holdings: dict[str, LocalShard]
    """The holdings of tensors in `lazy` that are a part of something, or that other ranks hold as
    well."""
    distributed: tuple[str, ...]
    """Tensors whose local part is asked for anew every time."""
    units: list[Any]
    """Modules that may hold gathered parameters after an evaluation."""
    cacheable: bool
    """False: something in it cannot be anchored."""
    structure: Structure
    """The structure that the script built."""

    def holds(self) -> bool:
        """A new walk would find the same objects."""
        return (
            self.cacheable
            and all(_same_roots(*root) for root in self.roots)
            and self.anchors.hold()
        )

    def renew_locals(self) -> None:
        """Asks distributed tensors for their local part again."""
        for name in self.distributed:
            self.locals[name] = local_part(self.lazy[name], self.holdings.get(name))


def _same_roots(
    optimizer: torch.optim.Optimizer, state: Any, groups: Any, parameters: list[Any]
) -> bool:
    """`load_state_dict` replaces both; a group may be given another list."""
    return (
        state_of(optimizer) is state
        and optimizer.param_groups is groups
        and len(groups) == len(parameters)
        and all(group["params"] is kept for group, kept in zip(groups, parameters, strict=True))
    )


Geometry = tuple[list[int], list[torch.Size], list[tuple[int, ...]], list[torch.dtype]]


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where each begins."""
    return [tensor.data_ptr() for tensor in tensors]


def geometry(tensors: Collection[torch.Tensor]) -> Geometry:
    """Addresses, shapes, strides, dtypes: `p.data = other` changes them and no anchor."""
    return (
        addresses(tensors),
        [tensor.shape for tensor in tensors],
        list(map(torch.Tensor.stride, tensors)),
        [tensor.dtype for tensor in tensors],
    )


def take_inventory(
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    name_of: Callable[[torch.Tensor], str],
    path_of: Callable[[str, str, torch.Tensor], str],
    names: Mapping[str, ModelNames],
    declared: Declared,
    outer: Mapping[str, str] | None = None,
) -> TensorIndex:
    """Walks everything.

    `optimizers` are in the order in which they step.  `path_of` returns the name of a parameter
    from its prefix and its name in the module.  `names` has the other names by prefix.  `outer`
    has, by prefix, another optimizer whose step changes the state.  Raises ConfigError for
    optimizer state that cannot be saved or named, and for two things of one name.
    """
    walk = _Walk(name_of, path_of, names, declared, outer or {})
    for prefix, module in models.items():
        walk.module(prefix, module)
    for prefix, optimizer in optimizers.items():
        walk.optimizer(prefix, optimizer)
    return walk.finish()


class _Walk:
    """The result so far of a walk."""

    def __init__(
        self,
        name_of: Callable[[torch.Tensor], str],
        path_of: Callable[[str, str, torch.Tensor], str],
        names: Mapping[str, ModelNames],
        declared: Declared,
        outer: Mapping[str, str],
    ) -> None:
        self._outer = outer
        self._name_of = name_of
        self._path_of = path_of
        self._model_names = names
        self._named: dict[str, Any] = {}
        """Parameters, buffers and modules with an extra state."""
        self._declared = declared
        self._holdings: dict[str, LocalShard] = {}
        self._parameters: dict[int, dict[str, torch.Tensor]] = {}
        """By id of the tensor all its names, in the order of the modules."""
        self._owner: dict[int, str] = {}
        """By id of a parameter the first optimizer that has it."""
        self._needs: dict[str, dict[str, None]] = {}
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._passing: set[str] = set()
        self._extras: list[tuple[str, torch.nn.Module]] = []
        self._optimizers: dict[str, OptimizerParts] = {}
        self._dicts: list[Mapping[Any, Any]] = []
        self._lists: list[Sequence[Any]] = []
        self._compounds: list[torch.Tensor] = []
        self._roots: list[tuple[torch.optim.Optimizer, Any, Any, list[Any]]] = []
        self._units: list[Any] = []
        self._cacheable = True

    def module(self, prefix: str, module: torch.nn.Module) -> None:
        self._units += gathering_units(module)
        own = self._model_names[prefix]
        for name, child in module.named_modules():
            self._dicts += [child._parameters, child._buffers, child._modules]
            if has_extra_state(child):
                path = self._claim(f"{prefix}.{own.of_state(name)}", child)
                self._extras.append((path, child))
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names = self._parameters.setdefault(id(parameter), {})
            path = self._claim(self._path_of(prefix, name, parameter), parameter)
            names.update(state_tree.parts_of(path, parameter))
            if (compound := state_tree.compound_of(parameter)) is not None:
                self._compounds.append(compound)
                continue
            holding = holding_of(parameter) or self._declared.get(id(parameter))
            if holding is not None:
                self._holdings[path] = holding
        for name, buffer in module.named_buffers(remove_duplicate=False):
            path = self._claim(f"{prefix}.{own.of(name)}", buffer)
            self._buffers.update(state_tree.parts_of(path, buffer))
            if (compound := state_tree.compound_of(buffer)) is not None:
                self._compounds.append(compound)
        passing = {f"{prefix}.{name}" for name in own.passing}
        inside = tuple(f"{name}." for name in passing)
        self._passing |= {n for n in self._buffers if n in passing or n.startswith(inside)}

    def _claim(self, name: str, thing: Any) -> str:
        """The name; the image has one place for it.  Raises ConfigError when another has it."""
        if self._named.setdefault(name, thing) is not thing:
            raise ConfigError(
                f"{name}: two parts of the state have this name; rename a module, or the key under "
                "which a model is attached"
            )
        return name

    def optimizer(self, prefix: str, optimizer: torch.optim.Optimizer) -> None:
        groups, states = optimizer.param_groups, state_of(optimizer)
        # Some wrappers compute both at every access: nothing to hold on to.
        self._cacheable &= state_of(optimizer) is states and optimizer.param_groups is groups
        self._roots.append((optimizer, states, groups, [group["params"] for group in groups]))
        self._lists.append(groups)
        self._dicts.append(states)
        parts = OptimizerParts(regular={}, irregular={}, fixed={}, names=[], loose=[])
        changer = self._outer.get(prefix, prefix)
        self._needs.setdefault(changer, {changer: None})
        part = self._parts.setdefault(changer, {})
        for g, group in enumerate(groups):
            self._lists.append(group["params"])
            names = [self._own(changer, parameter, part) for parameter in group["params"]]
            broken = any("\n" in name for name in names)
            parts.names.append(names if broken else "\n".join(names))
            for i, parameter in enumerate(group["params"]):
                self._sort(parts, states.get(parameter), prefix, names[i], [g, i])
        for parameter, values in states.items():
            if isinstance(parameter, torch.Tensor):
                if self._owner.get(id(parameter)) is None:
                    raise ConfigError(f"{prefix}: holds state of a parameter that is in no group")
                found: dict[str, torch.Tensor] = {}
                self._state(f"{prefix}.{self._name_of(parameter)}", values, found)
                part.update(found)
                known = self._declared.get(id(parameter))
                for name, tensor in found.items():
                    holding = state_holding(optimizer, parameter, tensor, known)
                    if holding is not None:
                        self._holdings[name] = holding
            else:
                parts.loose.append(parameter)
        self._optimizers[prefix] = parts

    def _own(self, prefix: str, parameter: torch.Tensor, part: dict[str, torch.Tensor]) -> str:
        """Gives a parameter to the first optimizer that has it; its name."""
        name = self._name_of(parameter)
        owner = self._owner.setdefault(id(parameter), prefix)
        self._needs[prefix][owner] = None
        if owner == prefix:
            loose = dict(state_tree.parts_of(name, parameter))
            part.update(self._parameters.pop(id(parameter), loose))
        return name

    def _sort(
        self, parts: OptimizerParts, values: Any, prefix: str, name: str, place: list[int]
    ) -> None:
        if not values:
            return
        keys = _tensor_keys(values)
        if keys is None and _are_tensors(values):
            parts.fixed[name] = state_tree.encode(values, f"{prefix}.{name}", {})
        elif keys is None:
            parts.irregular[name] = values
        else:
            parts.regular.setdefault(keys, []).append(place)

    def _state(self, path: str, values: Any, part: dict[str, torch.Tensor]) -> None:
        """The tensors of one parameter's optimizer state; plain dicts of tensors are fast."""
        if type(values) is not dict:
            self._cacheable = False
            state_tree.encode(values, path, part)
            return
        self._dicts.append(values)
        for key, value in values.items():
            is_tensor = isinstance(value, torch.Tensor) and type(key) is str
            compound = state_tree.compound_of(value) if is_tensor else None
            if compound is not None:
                self._compounds.append(compound)
                state_tree.encode(value, f"{path}.{key}", part)
            elif is_tensor:
                part[f"{path}.{key}"] = value
            elif value is not None:
                self._cacheable = False  # a number is a new object at every step
                if not isinstance(value, bool | int | float | str):
                    state_tree.encode(value, f"{path}.{key}", part)

    def finish(self) -> TensorIndex:
        rest: dict[str, torch.Tensor] = {}
        for names in self._parameters.values():
            rest.update(names)
        if rest:
            self._parts[""] = rest
        lazy = {name: tensor for part in self._parts.values() for name, tensor in part.items()}
        held = self._holdings
        local = {name: local_part(tensor, held.get(name)) for name, tensor in lazy.items()}
        named = {name for name, one in self._named.items() if isinstance(one, torch.Tensor)}
        return TensorIndex(
            structure=Structure(
                frozenset(named - self._passing), {p: o.names for p, o in self._optimizers.items()}
            ),
            lazy=lazy,
            locals=local,
            parts={prefix: tuple(part) for prefix, part in self._parts.items()},
            needs={prefix: tuple(needs) for prefix, needs in self._needs.items()},
            buffers=self._buffers,
            passing=sorted(self._passing),
            extras=self._extras,
            optimizers=self._optimizers,
            anchors=Anchors(self._dicts, self._lists, self._compounds),
            roots=self._roots,
            units=self._units,
            holdings=held,
            distributed=tuple(n for n, t in lazy.items() if local[n] is not t),
            cacheable=self._cacheable,
        )


def _are_tensors(values: Any) -> bool:
    """A dict of nothing but tensors, by words."""
    return type(values) is dict and all(
        isinstance(value, torch.Tensor) and type(key) is str for key, value in values.items()
    )


def _tensor_keys(values: Any) -> str | None:
    """`key:mark` of a dict of nothing but tensors, joined; None for anything else."""
    if type(values) is not dict:
        return None
    marks = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or type(key) is not str or set(": ") & set(key):
            return None
        if state_tree.compound_of(value) is not None:
            return None
        marks.append(key + (":h" if value.device.type == "cpu" else ":d"))
    return " ".join(marks)


def local_part(tensor: torch.Tensor, holding: LocalShard | None = None) -> torch.Tensor:
    """The bytes that this rank holds: a DTensor's local tensor, else the tensor itself.

    `holding`: the elements that count, where that is known; see `own_elements`.
    """
    if holding is not None:
        return own_elements(tensor, holding)
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def memory_of(name: str, local: torch.Tensor) -> int:
    """The address of its storage.  Raises ConfigError for a tensor that only wraps others."""
    try:
        return local.untyped_storage().data_ptr()
    except RuntimeError:
        kind = type(local)
        if isinstance(local, torch.nn.Parameter):
            kind = type(local.data)
        raise ConfigError(
            f"{name}: a {kind.__module__}.{kind.__qualname__} has no memory of its own and cannot "
            "be saved; keep dense tensors in the model and its optimizer"
        ) from None
