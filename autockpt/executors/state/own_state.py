"""Own state of optimizers and modules beside torch's `state`, `param_groups` and tensors.

Three places hold it.  An optimizer inside another one (SAM, Lookahead) is saved like an attached
one, under the name of its attribute.  If an object has its own `state_dict`, its own
`load_state_dict` takes the result back.  Tensors that are parameters or optimizer state stand in it
by name.  Attributes that changed since `attach`, or hold tensors, are put back in place.  Any other
state is refused by name.
"""

import collections
import copy
import enum
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from autockpt.executors.sharding.fqns import ModelNames
from autockpt.executors.sharding.optimizers import is_divided
from autockpt.executors.state import state_tree
from autockpt.executors.state.data.shuffle_rng import (
    GENERATORS,
    generator_state,
    set_generator_state,
)
from autockpt.values.errors import ConfigError, CorruptCheckpointError

_ONE = torch.zeros(1, dtype=torch.float32, device="cpu")
_TORCHS = frozenset(vars(torch.optim.SGD([_ONE]))) | {
    "step", "_step_count", "_opt_called", "grad_scale", "found_inf",
}  # fmt: skip
"""Attributes that torch's own classes, schedulers and scalers set."""
_OPAQUE = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
"""Top-level packages whose objects are tools (locks, loggers, streams), not state."""
_SIMPLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size,
    np.generic, np.ndarray, set, frozenset, enum.Enum,
)  # fmt: skip
_MARK = "autockpt:"
_DEPTH = 24


def inner_optimizers(
    attached: Mapping[str, Optimizer],
) -> Iterator[tuple[str, str, Optimizer]]:
    """(name, name of the attached one around it, optimizer) of those in attributes, at any depth.

    Raises ConfigError for an attached one whose steps torch does not tell of.
    """
    known = {id(optimizer) for optimizer in attached.values()}
    for outer, optimizer in attached.items():
        found: list[tuple[str, Optimizer]] = [(outer, optimizer)]
        for prefix, one in found:  # which grows
            for name, inner in _inside(one):
                if id(inner) not in known:
                    known.add(id(inner))
                    found.append((f"{prefix}.{name}", inner))
                    yield f"{prefix}.{name}", outer, inner
        if not is_divided(optimizer) and not any(map(_is_hooked, (o for _, o in found))):
            raise ConfigError(
                f"attach({outer}=...): torch does not tell of the steps of a "
                f"{type(optimizer).__qualname__}, so its checkpoints would be torn. Call "
                "super().__init__(params, defaults) in its constructor, or attach the optimizer "
                "that it steps"
            )


def _inside(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    if is_divided(optimizer):
        return
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, Mapping) and name != "state":
            yield from ((f"{name}.{k}", v) for k, v in value.items() if isinstance(v, Optimizer))
        elif isinstance(value, list | tuple):
            each = enumerate(value)
            yield from ((f"{name}.{i}", v) for i, v in each if isinstance(v, Optimizer))


def _is_hooked(optimizer: Optimizer) -> bool:
    return bool(getattr(type(optimizer).step, "hooked", False))


class OwnState:
    """Of all optimizers of a state, by prefix."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        own = {p: o for p, o in optimizers.items() if not is_divided(o)}
        self._speaking = {prefix: one for prefix, one in own.items() if _speaks(one)}
        self._holding = {
            prefix: one
            for prefix, one in own.items()
            if not type(one).__module__.startswith("torch.")
        }
        self._as_built: dict[str, dict[str, Any]] | None = None
        """Skeletons of the attributes, by prefix and name, as the script made them."""
        self._built: set[str] = set()
        """Paths of objects that a restart finds in their place."""

    def encode(
        self, known: Callable[[], Mapping[str, Any]], tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """The section of a skeleton, {} when there is nothing; the first call sees all as built.

        `known`: parameters, optimizer state and modules by name.  Raises ConfigError naming what
        cannot be saved.
        """
        if not self._speaking and not self._holding:
            return {}
        names = {id(one): name for name, one in known().items()}
        first = self._as_built is None
        before = {} if self._as_built is None else self._as_built
        section: dict[str, Any] = {}
        for prefix, optimizer in self._speaking.items():
            path = f"{prefix}.state_dict"
            said = _Plain(names, None).of(_state_dict(prefix, optimizer), path)
            section.setdefault(prefix, {})["state_dict"] = state_tree.encode(said, path, tensors)
        for prefix, optimizer in self._holding.items():
            attributes: dict[str, Any] = {}
            plain = _Plain(names, None if first or prefix in self._speaking else self._built)
            for name, value in _attributes(optimizer).items():
                path = f"{prefix}.attributes.{name}"
                found: dict[str, torch.Tensor] = {}
                skeleton = state_tree.encode(plain.of(value, path), path, found)
                if first:
                    before.setdefault(prefix, {})[name] = skeleton
                if found or before.get(prefix, {}).get(name, before) != skeleton:
                    attributes[name] = skeleton
                    tensors.update(found)
            if first:
                self._built |= plain.objects
            if attributes:
                section.setdefault(prefix, {})["attributes"] = attributes
        self._as_built = before
        return section

    def load(
        self, section: Mapping[str, Any], decode: Callable[[Any], Any],
        known: Callable[[], Mapping[str, Any]], again: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Puts back what `encode` gave.

        `again(prefix)` writes state and groups once more, which a `load_state_dict` casts to the
        type of the parameters.  Raises ConfigError naming what does not fit.
        """
        if not section:
            return
        for prefix, saved in section.items():
            if "state_dict" in saved and prefix in self._speaking:
                optimizer = self._speaking[prefix]
                said = _Put(known()).into(None, decode(saved["state_dict"]), prefix)
                try:
                    optimizer.load_state_dict(said)
                except Exception as error:
                    raise ConfigError(
                        f"{prefix}: {type(optimizer).__qualname__}.load_state_dict() raised "
                        f"{error!r:.200} for what its state_dict() gave"
                    ) from error
                again(prefix)
        put = _Put(known())
        for prefix, saved in section.items():
            attributes = saved.get("attributes", {}) if prefix in self._holding else {}
            for name, skeleton in attributes.items():
                optimizer, path = self._holding[prefix], f"{prefix}.attributes.{name}"
                put.attribute(optimizer, name, decode(skeleton), path)


def _speaks(optimizer: Optimizer) -> bool:
    """It has a say in its state dict: methods of its own, or hooks."""
    kind, own = type(optimizer), vars(optimizer)
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
        or bool({"state_dict", "load_state_dict"} & own.keys())
        or any(own.get(f"_optimizer_{hook}_hooks") for hook in hooks)
    )


def _state_dict(prefix: str, optimizer: Optimizer) -> Any:
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise ConfigError(
            f"attach({prefix}=...): {type(optimizer).__qualname__}.state_dict() raised "
            f"{error!r:.200}; an optimizer that cannot say its state cannot be saved"
        ) from error


def _attributes(owner: Any) -> dict[str, Any]:
    """Return an object's attributes, with the attributes of `__slots__`."""
    found = dict(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                found[name] = getattr(owner, name)
    skip = _TORCHS if isinstance(owner, Optimizer) else frozenset()
    return {name: value for name, value in found.items() if name not in skip}


class _Plain:
    """Turn values into the types that `state_tree` saves; others become a marked tuple."""

    def __init__(self, names: Mapping[int, str], built: set[str] | None) -> None:
        """`built`: paths of objects that a restart finds; None: all of them."""
        self._names, self._known = names, built
        self.objects: set[str] = set()
        self._around: list[int] = []

    def of(self, value: Any, path: str) -> Any:
        """Raises ConfigError for state that cannot be saved."""
        if isinstance(value, torch.Tensor | torch.nn.Module) and id(value) in self._names:
            return f"{_MARK}live", self._names[id(value)]
        if isinstance(value, torch.Tensor):
            return value
        if type(value) is int and value in self._names:
            return f"{_MARK}id", self._names[value]
        if isinstance(value, enum.Enum) and not state_tree.has_name(value):
            return (f"{_MARK}tool",)
        if isinstance(value, _SIMPLE):
            return value
        if id(value) in self._around or len(self._around) > _DEPTH:
            return (f"{_MARK}tool",)
        self._around.append(id(value))
        try:
            return self._compound(value, path)
        finally:
            self._around.pop()

    def _compound(self, value: Any, path: str) -> Any:
        if isinstance(value, collections.deque):
            items = [self.of(item, f"{path}.{i}") for i, item in enumerate(value)]
            return f"{_MARK}deque", items, value.maxlen
        if type(value) in (list, tuple):
            return type(value)(self.of(item, f"{path}.{i}") for i, item in enumerate(value))
        if isinstance(value, dict):
            made = _emptied(value)
            for key, item in value.items():
                made[self._key(key, path)] = self.of(item, f"{path}.{key!s:.80}")
            return made
        if isinstance(value, GENERATORS):
            self._stand(path, value)
            return f"{_MARK}generator", generator_state(value)
        if isinstance(value, Optimizer | type | io.IOBase):
            return (f"{_MARK}tool",)
        if hasattr(value, "__next__"):
            raise ConfigError(
                f"{path}: a {type(value).__qualname__} cannot say where it stands; give the "
                "optimizer a number instead of an iterator"
            )
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            if _is_module(value) and all(id(p) in self._names for p in value.parameters()):
                return (f"{_MARK}tool",)  # a wrapper of the attached model
            self._stand(path, value)
            return f"{_MARK}stateful", self.of(value.state_dict(), path)
        attributes = _attributes(value)
        if type(value).__module__.split(".")[0] in _OPAQUE or not attributes:
            return (f"{_MARK}tool",)
        self._stand(path, value)
        return f"{_MARK}object", {n: self.of(v, f"{path}.{n}") for n, v in attributes.items()}

    def _key(self, key: Any, path: str) -> Any:
        plain = self.of(key, f"{path}.<key>")
        if isinstance(plain, torch.Tensor | list) or plain == (f"{_MARK}tool",):
            raise ConfigError(
                f"{path}: has a {type(key).__qualname__} as a key, which a restart cannot name; "
                "use parameters, attached modules, numbers or strings"
            )
        return plain

    def _stand(self, path: str, value: Any) -> None:
        """Raises ConfigError for an object that a restart would not find in its place."""
        self.objects.add(path)
        if self._known is not None and path not in self._known:
            raise ConfigError(
                f"{path}: a {type(value).__qualname__} that was made in training cannot be built "
                "by a restart. Make it in the optimizer's constructor, or give the optimizer "
                "state_dict and load_state_dict"
            )


class _Put:
    """Puts saved values where live ones are, in place as far as possible."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        """`known`: parameters, optimizer state and modules by name."""
        self._known = known

    def attribute(self, owner: Any, name: str, saved: Any, path: str) -> None:
        """Of an optimizer or another object."""
        live = getattr(owner, name, None)
        value = self.into(live, saved, path)
        if value is not live or not hasattr(owner, name):
            object.__setattr__(owner, name, value)

    def into(self, live: Any, saved: Any, path: str) -> Any:
        """Return the new value: `live` with the saved contents, or another value.

        Raises ConfigError for saved contents that do not fit, CorruptCheckpointError for malformed
        ones.
        """
        try:
            return self._into(live, saved, path)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"{path}: is malformed: {error!r:.200}") from error

    def _into(self, live: Any, saved: Any, path: str) -> Any:
        if isinstance(saved, torch.Tensor):
            return _tensor_into(live, saved)
        if isinstance(saved, tuple) and saved and str(saved[0]).startswith(_MARK):
            return self._marked(live, saved[0].removeprefix(_MARK), saved[1:], path)
        if isinstance(saved, list | tuple):
            old = live if isinstance(live, list | tuple) else ()
            rest = [None] * max(0, len(saved) - len(old))
            new = [self.into(a, b, path) for a, b in zip([*old, *rest], saved, strict=False)]
            if isinstance(live, list) and isinstance(saved, list):
                live[:] = new
                return live
            return type(saved)(new)
        if isinstance(saved, dict):
            made = live if isinstance(live, dict) else saved
            former = dict(live) if isinstance(live, dict) else {}
            items = [(self.into(None, key, path), item) for key, item in saved.items()]
            fresh = {key: self.into(former.get(key), item, path) for key, item in items}
            made.clear()
            made.update(fresh)
            return made
        return saved

    def _marked(self, live: Any, mark: str, rest: tuple[Any, ...], path: str) -> Any:
        if mark in ("live", "id"):
            if rest[0] not in self._known:
                raise ConfigError(
                    f"{path}: refers to {rest[0]}, which this rank has not; resume with the code "
                    "and the number of ranks that wrote the checkpoint"
                )
            one = self._known[rest[0]]
            return one if mark == "live" else id(one)
        if mark == "deque":
            return collections.deque(self.into(None, rest[0], path), rest[1])
        if mark == "tool":
            return live
        if live is None:
            raise ConfigError(
                f"{path}: the checkpoint has the contents of an object that is not there; build "
                "the optimizer as the code did that wrote it"
            )
        if mark == "generator":
            set_generator_state(live, rest[0])
        elif mark == "stateful":
            live.load_state_dict(self.into(None, rest[0], path))
        else:
            for name, value in rest[0].items():
                self.attribute(live, name, value, f"{path}.{name}")
        return live


def _tensor_into(live: Any, saved: torch.Tensor) -> torch.Tensor:
    """Copy in place, so that tensors that share memory with `live` keep sharing it."""
    if not isinstance(live, torch.Tensor):
        return saved
    if (live.shape, live.dtype, live.layout) != (saved.shape, saved.dtype, saved.layout):
        return saved.to(live.device)
    with torch.no_grad():
        return live.copy_(saved)


def _emptied(value: dict[Any, Any]) -> dict[Any, Any]:
    """Of the same kind, as far as `state_tree` knows it."""
    if type(value) is collections.defaultdict:
        return collections.defaultdict(value.default_factory)
    kinds = (collections.OrderedDict, collections.Counter)
    return type(value)() if type(value) in kinds else {}


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


class ModuleState:
    """State of modules beside the values of their tensors, where it is not as they were built.

    Parameters may be frozen and modules set to evaluate. A forward may replace buffers by larger
    ones. A `state_dict` of one's own may add entries.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Sees all as the script built it, before `attach` puts a checkpoint in."""
        self._parameters: dict[str, tuple[torch.nn.Parameter, bool]] = {}
        self._modules: dict[str, tuple[torch.nn.Module, bool]] = {}
        self._buffers: dict[str, tuple[torch.nn.Module, str, torch.Tensor | None]] = {}
        self._forms: dict[str, Any] = {}
        self._speaking: dict[str, torch.nn.Module] = {}
        for prefix, model in models.items():
            names = ModelNames(model)
            for path, one in model.named_parameters():
                self._parameters[f"{prefix}.{names.of(path)}"] = one, one.requires_grad
            for path, module in model.named_modules():
                here = f"{prefix}.{path}" if path else prefix
                self._modules[here] = module, module.training
                if _is_module_speaking(module) and not _is_gathered(module):
                    self._speaking[here] = module
                for key, buffer in module._buffers.items():
                    name = f"{prefix}.{names.of(f'{path}.{key}' if path else key)}"
                    if key not in module._non_persistent_buffers_set:
                        self._buffers[name] = module, key, buffer
                        self._forms[name] = _form(buffer)
        self._every_parameter = [one for one, _ in self._parameters.values()]
        self._every_module = [one for one, _ in self._modules.values()]
        self._said = {path: _clones(_added(path, one)) for path, one in self._speaking.items()}
        self._noted: tuple[list[bool], list[bool]] | None = None
        """(whether each parameter is trained, whether each module is in training mode)."""
        self._is_over = False

    @property
    def buffers(self) -> frozenset[str]:
        """Names of persistent ones as the script registered them, None or not."""
        return frozenset(self._buffers)

    def note(self) -> None:
        """An iteration has ended, or its optimizer has stepped."""
        if not self._is_over:
            self._noted = self._flags()

    def end(self) -> None:
        """A script that tests or exports its model afterwards changes flags, and trains no more."""
        self._is_over = True

    def _flags(self) -> tuple[list[bool], list[bool]]:
        trained = [parameter.requires_grad for parameter in self._every_parameter]
        return trained, [module.training for module in self._every_module]

    def encode(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The section of a skeleton, {} where all is as it was built.

        Raises ConfigError naming what a `state_dict` says and cannot be saved.
        """
        over = self._noted if self._is_over else None
        parameters, modules = self._flags() if over is None else over
        trained = {
            name: now
            for (name, (_, built)), now in zip(self._parameters.items(), parameters, strict=True)
            if now is not built
        }
        modes = {
            name: now
            for (name, (_, built)), now in zip(self._modules.items(), modules, strict=True)
            if now is not built
        }
        forms = {n: _form(_buffer(m, k)) for n, (m, k, _) in self._buffers.items()}
        reshaped = [name for name, form in forms.items() if form != self._forms[name]]
        said = {}
        for path, module in self._speaking.items():
            added = _added(path, module)
            kept = self._said[path]
            added = {n: v for n, v in added.items() if n in kept or not _is_opaque(v)}
            if not _are_same(added, self._said[path]):
                said[path] = state_tree.encode(added, f"state_dict.{path}", tensors)
        every = {"trained": trained, "modes": modes, "reshaped": reshaped, "said": said}
        return {name: part for name, part in every.items() if part}

    def take_forms(self, forms: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]) -> None:
        """Makes buffers of these forms, None where one was; others are as they were built."""
        for name, (module, key, built) in self._buffers.items():
            wanted = forms.get(name, self._forms[name])
            if _form(_buffer(module, key)) == wanted:
                continue
            if wanted is None or wanted == self._forms[name]:
                module._buffers[key] = built if wanted == self._forms[name] else None
                continue
            near = built if built is not None else next(module.parameters(), None)
            device = torch.device("cpu") if near is None else near.device
            module._buffers[key] = torch.empty(wanted[0], dtype=wanted[1], device=device)

    def load(self, section: Mapping[str, Any], decode: Callable[[Any], Any]) -> None:
        """Puts back what `encode` gave, but the forms.

        Raises ConfigError for what does not fit.
        """
        for name, flag in section.get("trained", {}).items():
            if name in self._parameters and self._parameters[name][0].is_leaf:
                self._parameters[name][0].requires_grad_(flag)
        for name, flag in section.get("modes", {}).items():
            if name in self._modules:
                self._modules[name][0].training = flag
        for path, saved in section.get("said", {}).items():
            if path not in self._speaking:
                continue
            module = self._speaking[path]
            try:
                entries = {**module.state_dict(), **decode(saved)}
                try:
                    module.load_state_dict(entries)
                except RuntimeError:  # a state dict that leaves some of its own out
                    module.load_state_dict(entries, strict=False)
            except Exception as error:
                raise ConfigError(
                    f"{path}: {type(module).__qualname__}.load_state_dict() raised "
                    f"{error!r:.200} for what its state_dict() gave"
                ) from error


def _buffer(module: torch.nn.Module, key: str) -> torch.Tensor | None:
    return module._buffers[key] if key in module._buffers else None  # noqa: SIM401 - no `get` there


def _form(buffer: torch.Tensor | None) -> Any:
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def _is_module_speaking(module: torch.nn.Module) -> bool:
    """Its state dict is not torch's alone: it has methods of its own, or hooks."""
    methods = ("state_dict", "_save_to_state_dict")
    own = any(
        name in vars(module) or not _is_torchs(getattr(type(module), name)) for name in methods
    )
    kinds = ("_state_dict_hooks", "_state_dict_pre_hooks")
    hooks = [hook for kind in kinds for hook in getattr(module, kind, {}).values()]
    return own or not all(map(_is_torchs, hooks))


def _is_torchs(function: Any) -> bool:
    function = getattr(function, "hook", function)
    return str(getattr(function, "__module__", None) or "torch.").startswith("torch.")


def _added(path: str, module: torch.nn.Module) -> dict[str, Any]:
    """Return entries of its state dict beside its parameters, buffers and extra states."""
    try:
        said = dict(module.state_dict())
    except Exception as error:
        raise ConfigError(
            f"{path}: {type(module).__qualname__}.state_dict() raised {error!r:.200}; a module "
            "that cannot say its state cannot be saved"
        ) from error
    own = [*module.parameters(), *module.buffers()]
    known = {
        name
        for name, _ in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }
    places = {one.data_ptr() for one in own if one.numel()}
    return {
        name: value for name, value in said.items()
        if name not in known and not name.endswith("_extra_state")
        and not (isinstance(value, torch.Tensor) and value.numel() and value.data_ptr() in places)
    }  # fmt: skip


def _is_gathered(module: torch.nn.Module) -> bool:
    """Its state dict is a collective of all ranks, which not every one joins."""
    return any(type(one).__name__ == "FullyShardedDataParallel" for one in module.modules()) or any(
        hasattr(parameter, "ds_id") for parameter in module.parameters()
    )


def _clones(said: dict[str, Any]) -> dict[str, Any]:
    """Without what cannot be compared later: handles, locks, objects of the script's own."""
    return {
        n: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v)
        for n, v in said.items()
        if not _is_opaque(v)
    }


def _is_opaque(value: Any) -> bool:
    """No copy of it can be made, or none that is equal to it."""
    if isinstance(value, torch.Tensor):
        return False
    try:
        return not _are_same(value, copy.deepcopy(value))
    except Exception:
        return True


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _form(one) == _form(other) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_same(one[k], other[k]) for k in one)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return type(one) is type(other) and bool(one == other)
