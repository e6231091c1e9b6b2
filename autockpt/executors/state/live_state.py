"""The live state of one rank: its tensors, their names, and when they change.

Names come from our own walk of named parameters; optimizer state is joined to them by identity.
`get_optimizer_state_dict` is not used: before the first step it would run a step.  There are two
groups.  `lazy` tensors (parameters and optimizer state of fenced optimizers) are constant from one
optimizer step to the next and may be copied under compute.  Everything else is small and copied at
the boundary.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from autockpt.executors.image.dtypes import stored_form
from autockpt.executors.sharding.adapters.collectors import declared
from autockpt.executors.sharding.adapters.deepspeed import is_zero
from autockpt.executors.sharding.adapters.fsdp2_gathered import gathering_units, shard_again
from autockpt.executors.sharding.adapters.zero_optimizer import ZeroView
from autockpt.executors.sharding.fqns import ModelNames
from autockpt.executors.sharding.local_shard import LocalShard, holding_of, ranks_sharing, whole_of
from autockpt.executors.sharding.optimizers import owns_state
from autockpt.executors.sharding.rules.plain_tensors import (
    RankRules,
    placed_parameters,
    renamed,
    with_places,
)
from autockpt.executors.sharding.rules.rules import Placed
from autockpt.executors.state import state_tree
from autockpt.executors.state.own_state import ModuleState, OwnState, inner_optimizers
from autockpt.executors.state.rng import rng_state
from autockpt.executors.state.skeleton import KeptOptimizers, KeptRandomState
from autockpt.executors.state.state_tree import parts_of
from autockpt.executors.state.tensor_index import Structure, TensorIndex, memory_of, take_inventory
from autockpt.executors.state.tensor_index import local_part as local_part
from autockpt.executors.state.wrapping import unwrapped_optimizer
from autockpt.values.errors import AutockptError, ConfigError


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state and take it back."""

    def state_dict(self) -> Any:
        """State of tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes what `state_dict` gave."""


class Dispensable:
    """An object without whose state a training goes on: found, and not attached by its owner.

    The state of a checkpoint waits until `begin`, for an object that is built by then.
    """

    def __init__(self, name: str, inner: Any, say: Callable[[str], None]) -> None:
        """`say` is given a sentence for people."""
        self.inner = inner
        self._name, self._say = name, say
        self._begun, self._left_out = False, False
        self._awaits: tuple[Any, ...] = ()
        """The state that it is to have at the beginning, if there is one."""

    def state_dict(self) -> Any:
        """As the object says it, or the state that it is to have."""
        return self._awaits[0] if self._awaits else self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Takes it at once, or at the beginning."""
        self._awaits = (state,)
        if self._begun:
            self.begin()

    def begin(self) -> None:
        """The object is built; further calls change nothing."""
        self._begun = True
        awaited, self._awaits = self._awaits, ()
        for state in awaited:
            if state is None:
                self.is_absent("the checkpoint has no state of it")
                continue
            try:
                self.inner.load_state_dict(state)
            except Exception as error:
                self.is_absent(f"it did not take its saved state: {error!r:.200}")

    def is_absent(self, why: str) -> None:
        """Nothing could be restored."""
        self._say(f"{self._name}: {why}; the training goes on with the object as it is")

    def left_out(self, error: Exception) -> None:
        """Its state could not be saved: said once, and not before the beginning."""
        if self._begun and not self._left_out:
            self._left_out = True
            self._say(f"{self._name}: is not in the checkpoints, its state cannot be saved: "
                      f"{error!r:.300}")  # fmt: skip


class SeparateValues:
    """An attached object of values that stand each for itself.

    A value that cannot be saved any more is left out of a checkpoint, and said.  All else is saved.
    """

    __slots__ = ()

    def state_dict(self) -> dict[str, Any]:
        """The values by name."""
        raise NotImplementedError

    def absent_values(self) -> dict[str, str]:
        """By name of a value that is not there now the reason."""
        return {}


def inner_objects(others: Iterable[Any]) -> list[Any]:
    """Attached objects, and those inside a `Dispensable` in its place."""
    return [one.inner if isinstance(one, Dispensable) else one for one in others]


class LiveState:
    """References to a job's state; reads it, never owns it."""

    def __init__(
        self,
        models: dict[str, torch.nn.Module],
        optimizers: dict[str, torch.optim.Optimizer],
        others: dict[str, Any],
        holdings: dict[int, LocalShard] | None = None,
        placed: Mapping[int, Placed] | None = None,
        axes: str = "",
    ) -> None:
        """`holdings`: by id of a parameter what its wrapper knows of it; `placed`: what rules say,
        on ranks that stand along these `axes`."""
        self.models = models
        inner = list(inner_optimizers(optimizers))
        self.optimizers = {**optimizers, **{name: one for name, _, one in inner}}
        """Attached ones, and those inside them."""
        self.outer = {name: outer for name, outer, _ in inner}
        """By name of an optimizer inside another one the attached one around it."""
        self.others = others
        self.not_lazy: set[str] = set()
        """Tensors that were seen to change behind the fence; copied at the boundary since."""
        self.left_out: dict[str, str] = {}
        """By name of a value that the newest encoding left out the reason."""
        self.step_order: list[str] = []
        """Optimizers in the order in which they step, as far as seen."""
        self.known_nan: frozenset[str] = frozenset()
        """Parameters in which NaN stood before the training: it says nothing of the state."""
        self._placed = placed or {}
        self._declared = with_places(holdings or {}, self._placed)
        self._renamed = renamed(models, self._placed)
        self._axes = axes
        self._inventory: TensorIndex | None = None
        self._built: Structure | None = None
        """The structure that `attach` found."""
        self.script_generators: Callable[[], Mapping[str, Any]] = dict
        """States of the random generators that the script holds, by name."""
        self._random, self._groups = KeptRandomState(), KeptOptimizers()
        self._own, self.module_state = OwnState(self.optimizers), ModuleState(models)
        self._model_names: dict[str, ModelNames] = {}
        self._names = self._parameter_names()

    @classmethod
    def of(
        cls,
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        ruled: RankRules | None = None,
        **others: Any,
    ) -> "LiveState":
        """The state of a job as `attach` receives it.  Raises ConfigError naming a bad entry."""
        if model is None:
            raise ConfigError("attach(model=...): expected a torch.nn.Module, got None")
        attached = _named(model, "model", torch.nn.Module)
        for module in attached.values():
            shard_again(gathering_units(module))  # else its parameters are not the optimizer's
        # Not the wrapper: whoever keeps DDP alive keeps gloo's threads alive past the end.
        models = {name: unwrapped(module) for name, module in attached.items()}
        _require_shapes(models)
        optimizers = _named(_viewed(optimizer), "optimizer", torch.optim.Optimizer)
        for name, value in others.items():
            _require_keyword(name, value)
            if value is not None and not isinstance(value, Stateful):
                raise ConfigError(
                    f"attach({name}=...): a {type(value).__qualname__} has no "
                    "state_dict/load_state_dict; wrap it in an object that has both"
                )
        kept = {name: value for name, value in others.items() if value is not None}
        known = declared(attached.values())
        placed = placed_parameters(models, attached, known, ruled)
        return cls(models, optimizers, kept, known, placed, "" if ruled is None else ruled.axes)

    def holding(self, tensor: torch.Tensor) -> LocalShard:
        """Return this rank's part of the whole tensor."""
        found = holding_of(tensor) or self._declared.get(id(tensor))
        return whole_of(tensor) if found is None else found

    def mesh(self) -> str:
        """How parameters are divided and replicated, as text: equal on ranks that divide alike."""
        kinds = {f"rules over {self._axes}"} if self._axes else set()
        for tensor in self.parameters().values():
            mesh = getattr(tensor, "device_mesh", None)
            if mesh is not None:
                kinds.add(f"{tuple(mesh.shape)} {tensor.placements}")  # type: ignore[attr-defined]
            elif id(tensor) in self._declared:
                holding = self._declared[id(tensor)]
                kinds.add(f"{len(holding.holders)} of {'a whole' if holding.is_whole else 'parts'}")
        return "; ".join(sorted(kinds))

    def has_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
        """This rank has the optimizer state of a parameter: it is what steps it.

        Every rank has optimizer state of a DTensor, even of no rows.  FSDP1 gives no gradient to a
        parameter of which a rank has nothing, so its step count would stand still.  A parameter
        that a rule places is an ordinary parameter here, even if all of it is padding.
        """
        if not owns_state(optimizer, parameter):
            return False
        ordinary = hasattr(parameter, "to_local") or self.is_placed(parameter)
        return ordinary or bool(self.holding(parameter).boxes)

    def is_placed(self, parameter: torch.Tensor) -> bool:
        """A rule says what it is a part of, or its module by itself."""
        return id(parameter) in self._placed

    @property
    def drifting(self) -> dict[str, int]:
        """Return the number of copies by name, for parameters whose copies drift apart."""
        places = ((self._names[number], placed) for number, placed in self._placed.items())
        return {name: placed.copies for name, placed in places if placed.copies}

    def _path(self, prefix: str, name: str, parameter: torch.Tensor) -> str:
        """Return the name of a model's parameter in a checkpoint."""
        return self._renamed.get(id(parameter)) or f"{prefix}.{self._model_names[prefix].of(name)}"

    def model_names(self) -> dict[str, ModelNames]:
        """Return the names in each model as it is now, by prefix."""
        self._model_names = {prefix: ModelNames(module) for prefix, module in self.models.items()}
        return self._model_names

    def is_alike(self, world_size: int) -> bool:
        """Every rank is known to have all parameters that this one has, and no others."""
        return all(
            ranks_sharing(parameter, self._declared.get(id(parameter))) == world_size
            for parameter in self.parameters().values()
        )

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        self.model_names()
        for prefix, module in self.models.items():
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), self._path(prefix, name, parameter))
        for prefix, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    names.setdefault(id(parameter), f"{prefix}.group{g}.param{i}")
        return names

    def at_boundary(self) -> TensorIndex:
        """Return the index, once every module holds the tensors that its optimizer steps.

        After an evaluation it may not.
        """
        kept = self._inventory
        if kept is not None:
            shard_again(kept.units)
            if self._confirmed(kept):
                return kept
        for module in self.models.values():
            shard_again(gathering_units(module))
        return self._walked()

    def refresh(self) -> None:
        """After a restore: what wrappers derive from parameters.  All ranks call it."""
        for optimizer in self.optimizers.values():
            if isinstance(optimizer, ZeroView):
                optimizer.refresh()

    def inventory(self) -> TensorIndex:
        """Return the present index; walk again only after something was added, replaced or removed.

        Raises ConfigError for optimizer state that cannot be saved or named.
        """
        kept = self._inventory
        return kept if kept is not None and self._confirmed(kept) else self._walked()

    def _confirmed(self, kept: TensorIndex) -> bool:
        """Nothing came, went or was replaced since that walk; its local parts are up to date."""
        holds = kept.holds()
        if holds and kept.distributed:
            kept.renew_locals()
        return holds

    def _walked(self) -> TensorIndex:
        self._names = self._parameter_names()
        order = [*self.step_order, *(p for p in self.optimizers if p not in self.step_order)]
        self._inventory = take_inventory(
            self.models, {prefix: self.optimizers[prefix] for prefix in order}, self.name_of,
            self._path, self._model_names, self._declared, self.outer,
        )  # fmt: skip
        return self._inventory

    @property
    def attached_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Without those inside others."""
        return {name: one for name, one in self.optimizers.items() if name not in self.outer}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, in the order of the optimizer; aliases not resolved."""
        inventory = self.inventory()
        return {**inventory.lazy, **inventory.buffers}

    @property
    def lazy(self) -> set[str]:
        """Names of the tensors that are copied lazily."""
        return set(self.lazy_tensors()) - self.not_lazy

    def lazy_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer state tensors, themselves and not detached, by name."""
        return dict(self.inventory().lazy)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return parameters of the models, and parameters that only an optimizer knows.

        Of one that has no memory of its own its parts.
        """
        return _parts(self.whole_parameters())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Return the same ones as the script has them."""
        found: dict[str, torch.Tensor] = {}
        self.model_names()
        for prefix, module in self.models.items():
            for name, own in module.named_parameters(remove_duplicate=False):
                found[self._path(prefix, name, own)] = own
        for prefix, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    loose = self._names.get(id(parameter), "")
                    if loose.startswith(f"{prefix}.group"):
                        found[loose] = parameter
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Module buffers (running statistics change in the forward)."""
        names = self.model_names()
        return _parts(
            {
                f"{prefix}.{names[prefix].of(name)}": buffer
                for prefix, module in self.models.items()
                for name, buffer in module.named_buffers(remove_duplicate=False)
            }
        )

    def extra_places(self) -> dict[str, torch.nn.Module]:
        """Modules by the names of their extra states, whether they have one or not."""
        names = self.model_names()
        return {
            f"{prefix}.{names[prefix].of_state(path)}": child
            for prefix, module in self.models.items()
            for path, child in module.named_modules()
        }

    def with_nan(self) -> list[str]:
        """Names of parameters and optimizer state that hold NaN now; reads all of them."""
        floats = {n: t for n, t in self.inventory().locals.items() if t.is_floating_point()}
        sums: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in floats.items():
            if tensor.dtype.itemsize > 1:  # sums of shorter ones are not implemented
                total = tensor.detach().sum(dtype=torch.float32)
                sums.setdefault(tensor.device, {})[name] = total
        found = []
        for each in sums.values():
            flags = torch.stack([*each.values()]).isnan().tolist()  # one wait for a device
            odd = (name for name, flag in zip(each, flags, strict=True) if flag)
            found += [name for name in odd if floats[name].isnan().any()]  # or two infinities
        return found

    def device(self) -> torch.device | None:
        """The accelerator that the first tensor of the models on one is on; None: all are in host
        memory."""
        for module in self.models.values():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.device.type != "cpu":
                    return tensor.device
        return None

    def passing_buffers(self) -> set[str]:
        """Return the names of the buffers that a state dict leaves out (`persistent=False`).

        Buffers that are None now count too.
        """
        names = self.model_names()
        passing = {f"{prefix}.{name}" for prefix, own in names.items() for name in own.passing}
        inside = tuple(f"{name}." for name in passing)
        return passing | {name for name in self.buffers() if name.startswith(inside)}

    def stepped(self, optimizer: torch.optim.Optimizer) -> str:
        """Notes the order in which optimizers step (what changes first is copied first); which
        one it was."""
        for name in self.step_order:  # mostly one
            if self.optimizers[name] is optimizer:
                return name
        name = next(prefix for prefix, known in self.optimizers.items() if known is optimizer)
        self.step_order.append(name)
        self._inventory = None
        return name

    def name_of(self, parameter: torch.Tensor) -> str:
        """Name of a parameter.  Raises ConfigError if no attached object owns it."""
        name = self._names.get(id(parameter))
        if name is None:
            self._names = self._parameter_names()
            name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                "optimizer: holds state of a parameter that is neither in the model nor in its "
                "param_groups; attach the module that owns it"
            )
        return name

    def tensor_class(self, name: str, tensor: torch.Tensor) -> str:
        """parameters, moments or other."""
        if any(name.startswith(f"{prefix}.") for prefix in self.models):
            return "parameters" if tensor.is_floating_point() else "other"
        return "moments" if tensor.numel() > 1 else "other"

    def extra(
        self,
        progress: dict[str, Any],
        *,
        rng: Any = None,
        inventory: TensorIndex | None = None,
        strict: bool = False,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """(skeleton, boundary tensors) of everything that is not a lazy tensor, as of now.

        `progress` is the session's own record (step, position of the loader); `rng` replaces the
        random state of now.  Raises ConfigError naming the entry that cannot be saved; only if
        `strict` for one of `SeparateValues`.
        """
        tensors: dict[str, torch.Tensor] = {}
        left_out: dict[str, str] = {}
        inventory = inventory or self.inventory()
        skeleton = {
            "progress": state_tree.encode(progress, "progress", tensors),
            "rng": self._random.encode(rng or self.random_state(), tensors),
            "optimizers": self._groups.encode(self.optimizers, inventory.optimizers, tensors),
            "modules": {
                path: state_tree.encode(module.get_extra_state(), path, tensors)
                for path, module in inventory.extras
            },
            "others": {
                name: _encoded(name, value, tensors, left_out)
                for name, value in self.others.items()
            },
        }
        if strict and left_out:
            raise ConfigError(next(iter(left_out.values())))
        self.left_out = left_out
        if left_out:
            skeleton["progress"]["left_out"] = sorted(left_out)
        if self._built is not None and self._structure(inventory) != self._built:
            skeleton["rebuilt"] = True
        if changed := self.module_state.encode(tensors):
            skeleton["changed"] = changed
        own = self._own.encode(lambda: self._places_by_name(inventory), tensors)
        if own:
            skeleton["own"] = own
        if inventory.passing:
            skeleton["passing"] = inventory.passing
        tensors.update(inventory.buffers)
        return skeleton, tensors

    def random_state(self) -> dict[str, Any]:
        """As `rng_state`, with the script's own generators under `script`."""
        script = self.script_generators()
        return {**rng_state(), "script": dict(script)} if script else rng_state()

    def load_own(
        self, section: Mapping[str, Any], decode: Callable[[Any], Any], again: Callable[[str], None]
    ) -> None:
        """Load the own state of optimizers from a skeleton; see `OwnState.load`."""
        self._own.load(section, decode, lambda: self._places_by_name(self.inventory()), again)

    def _places_by_name(self, inventory: TensorIndex) -> dict[str, Any]:
        """Parameters, optimizer state and modules by name."""
        return {**self.extra_places(), **self.whole_parameters(), **inventory.lazy}

    def changes(self) -> list[str]:
        """Return the script's changes of structure since `attach`, as of the newest snapshot."""
        now, built = self._inventory, self._built
        structure = None if now is None else self._structure(now)
        if structure is None or built is None or structure == built:
            return []
        return structure.added(built) or built.added(structure)

    def _structure(self, inventory: TensorIndex) -> Structure:
        """Without buffers that the script registered: a forward may fill or empty them."""
        named = inventory.structure.named - self.module_state.buffers
        return replace(inventory.structure, named=named)

    def dry_encode(self, progress: Mapping[str, Any] | None = None) -> None:
        """Encodes everything once and throws it away, the session's `progress` too.

        Raises ConfigError naming a bad entry.
        """
        _, tensors = self.extra(dict(progress or {}), strict=True)
        inventory = self.inventory()
        self._built = self._structure(inventory)
        tensors.update(inventory.lazy)
        for name, tensor in tensors.items():
            _require_storable(name, tensor, inventory.holdings.get(name))


def _require_storable(name: str, tensor: torch.Tensor, holding: LocalShard | None = None) -> None:
    stored_form(tensor.dtype, tuple(tensor.shape))
    if tensor.layout != torch.strided:
        raise ConfigError(f"{name}: a {tensor.layout} tensor cannot be saved")
    memory_of(name, local_part(tensor, holding))


def _parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for path in tensors for name, one in parts_of(path, tensors[path])}


def _encoded(
    name: str, value: Any, tensors: dict[str, torch.Tensor], left_out: dict[str, str]
) -> Any:
    """The skeleton of an attached object; None where a training goes on without it."""
    if isinstance(value, SeparateValues):
        return _encoded_values(name, value, tensors, left_out)
    if not isinstance(value, Dispensable):
        return state_tree.encode(_state_dict_of(name, value), name, tensors)
    own: dict[str, torch.Tensor] = {}
    try:
        skeleton = state_tree.encode(value.state_dict(), name, own)
        for path, tensor in own.items():
            _require_storable(path, tensor)
    except Exception as error:
        value.left_out(error)
        return None
    tensors.update(own)
    return skeleton


def _encoded_values(
    name: str, value: SeparateValues, tensors: dict[str, torch.Tensor], left_out: dict[str, str]
) -> Any:
    """The skeleton of the values that can be saved; notes the others."""
    values = value.state_dict()
    left_out.update({f"{name}.{key}": why for key, why in value.absent_values().items()})
    own: dict[str, torch.Tensor] = {}
    try:
        skeleton = state_tree.encode(values, name, own)
    except ConfigError:
        kept, own = {}, {}
        for key, one in values.items():
            try:
                state_tree.encode(one, f"{name}.{key}", {})
            except ConfigError as error:
                left_out[f"{name}.{key}"] = str(error)
            else:
                kept[key] = one
        skeleton = state_tree.encode(kept, name, own)
    tensors.update(own)
    return skeleton


def _state_dict_of(name: str, value: Any) -> Any:
    """Return the state dict of an attached object.  Raises ConfigError where it gives none."""
    try:
        return value.state_dict()
    except AutockptError:
        raise
    except Exception as error:
        raise ConfigError(
            f"attach({name}=...): {type(value).__qualname__}.state_dict() raised {error!r:.200}; "
            "attach an object whose state_dict gives its state"
        ) from error


def _require_shapes(models: Mapping[str, torch.nn.Module]) -> None:
    for prefix, module in models.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if torch.nn.parameter.is_lazy(tensor):
                raise ConfigError(
                    f"{prefix}.{name}: has no shape yet; run one forward before autockpt.attach()"
                )


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP; everything else as it is."""
    from torch.nn.parallel import DistributedDataParallel

    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def _viewed(optimizer: Any) -> Any:
    """Without wrappers; DeepSpeed's optimizers as optimizers of the model's parameters."""
    if isinstance(optimizer, Mapping):
        return {name: _viewed(one) for name, one in optimizer.items()}
    optimizer = unwrapped_optimizer(optimizer)
    return ZeroView(optimizer) if is_zero(optimizer) else optimizer


def _named(value: Any, what: str, kind: type) -> dict[str, Any]:
    if value is None:
        return {}
    items: Iterable[tuple[str, Any]]
    items = value.items() if isinstance(value, Mapping) else [(what, value)]
    result = {}
    for name, item in items:
        if not isinstance(item, kind):
            several = f"; several go in a dict by name: {what}={{'first': ..., 'second': ...}}"
            raise ConfigError(
                f"attach({what}=...): expected a {kind.__module__}.{kind.__qualname__}"
                f"{'' if name == what else f' under {name!r}'}, got {type(item).__qualname__}"
                f"{several if isinstance(item, list | tuple) else ''}"
            )
        result[attached_name(name, what)] = item
    return result


def _require_keyword(name: str, value: Any) -> None:
    """Raise ConfigError for an object that has a keyword of its own."""
    kind, several = type(value).__qualname__, "several go in a dict by name"
    if isinstance(value, torch.optim.Optimizer):
        raise ConfigError(
            f"attach({name}=...): a {kind} goes under optimizer=; {several}: "
            "optimizer={'first': ..., 'second': ...}"
        )
    if isinstance(value, torch.utils.data.DataLoader) and not isinstance(value, Stateful):
        raise ConfigError(
            f"attach({name}=...): a {kind} goes under data=, or each of several through "
            "ckpt.loader(); one for evaluations needs neither"
        )


def attached_name(name: str, what: str) -> str:
    """Return the image's name of a model or optimizer that is attached under a name."""
    return name if name.startswith(what) else f"{what}.{name}"
