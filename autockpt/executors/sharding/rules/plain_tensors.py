"""Plain parameters that are parts of global tensors, and their names in the whole model.

Rules, and modules that tell by themselves (Megatron), place a parameter: they know its part of a
global tensor and its name there.  A tensor that a wrapper only divides keeps its name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autockpt.executors.sharding.adapters.megatron import megatron_names
from autockpt.executors.sharding.fqns import Assembled, ModelNames
from autockpt.executors.sharding.local_shard import Declared, LocalShard
from autockpt.executors.sharding.mesh import Coordinates
from autockpt.executors.sharding.rules.rules import Placed, Rules
from autockpt.values.errors import ConfigError

MODEL = "model."
"""In front of every parameter's name in a checkpoint, and left out in rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """The rules of a job, and the rank that they are asked for."""

    rules: Rules
    at: Coordinates

    @property
    def axes(self) -> str:
        """The grid of ranks as text: "dp 2, tp 4"."""
        return ", ".join(f"{axis} {size}" for axis, size in self.at.axes.items())


def placed_parameters(
    models: Mapping[str, torch.nn.Module],
    attached: Mapping[str, torch.nn.Module],
    known: Declared,
    ruled: RankRules | None,
) -> dict[int, Placed]:
    """Return the place of each placed parameter by id; names as rules see them.

    `models` by prefix without their wrappers, `attached` with them; `known` by wrappers.  Raises
    ConfigError for rules that do not fit, or that cover tensors that a wrapper divides.
    """
    found = dict(_told(attached, known))
    if ruled is not None:
        own = list(_named(models))
        by_rule = ruled.rules.place_all(own, ruled.at)
        for name, parameter in own:
            if id(parameter) in by_rule:
                _require_undivided(name, parameter, known)
        ruled.rules.require_used((name for name, _ in own), ruled.at)
        found |= by_rule
    return found


def _told(attached: Mapping[str, torch.nn.Module], known: Declared) -> Iterator[tuple[int, Placed]]:
    for prefix, module in attached.items():
        for part in module.parts if isinstance(module, Assembled) else (module,):
            for number, name in megatron_names(part).items():
                if number in known:
                    seen = seen_name(f"{prefix}.{name}")
                    yield number, Placed(name=seen, holding=known[number])


def _named(models: Mapping[str, torch.nn.Module]) -> Iterable[tuple[str, torch.Tensor]]:
    for prefix, module in models.items():
        names = ModelNames(module)
        for name, parameter in module.named_parameters():
            yield seen_name(f"{prefix}.{names.of(name)}"), parameter


def _require_undivided(name: str, parameter: torch.Tensor, known: Declared) -> None:
    holding = known.get(id(parameter))
    flat = hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping")
    if flat or (holding is not None and not holding.is_whole):
        raise ConfigError(
            f"{name}: a rule matches it, and its wrapper (FSDP1, DeepSpeed, Megatron) divides it "
            "already. Narrow the rule, or cut the tensor with DTensors, which wrappers understand"
        )


def seen_name(stored: str) -> str:
    """A parameter's name in rules, from that in checkpoints."""
    return stored.removeprefix(MODEL)


def renamed(models: Mapping[str, torch.nn.Module], placed: Mapping[int, Placed]) -> dict[int, str]:
    """By id of a parameter its name in checkpoints, where that is not its own.

    One that keeps its name keeps all of them: a tied weight has several.
    """
    found = {}
    for prefix, module in models.items():
        names = ModelNames(module)
        for name, parameter in module.named_parameters():
            path, place = f"{prefix}.{names.of(name)}", placed.get(id(parameter))
            if place is not None and place.name != seen_name(path):
                start = MODEL if path.startswith(MODEL) else ""
                found[id(parameter)] = f"{start}{place.name}"
    return found


def with_places(known: Declared, placed: Mapping[int, Placed]) -> dict[int, LocalShard]:
    """Return the known holdings of parameters, with the places that they have."""
    return {**known, **{number: place.holding for number, place in placed.items()}}
