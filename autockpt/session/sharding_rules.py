"""Rules as a script gives them to attach: an object, data or a file; and where this rank stands."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autockpt.executors.sharding.mesh import Coordinates
from autockpt.executors.sharding.rules.plain_tensors import RankRules
from autockpt.executors.sharding.rules.rules import Rules
from autockpt.executors.sharding.rules.rules_file import load_rules
from autockpt.values.errors import ConfigError


def rank_rules(rules: Any, axes: Any, *, rank: int, world_size: int) -> RankRules | None:
    """Return one rank's rules from `attach(rules=..., axes=...)`; None without rules.

    Raises ConfigError naming what is wrong with them.
    """
    if rules is None:
        if axes is not None:
            raise ConfigError("attach(axes=...): says where ranks stand, for rules; pass rules=...")
        return None
    return RankRules(rules=_rules(rules), at=_coordinates(axes, rank, world_size))


def _rules(given: Any) -> Rules:
    if isinstance(given, Rules):
        return given
    if isinstance(given, str | Path):
        return _read(Path(given))
    if isinstance(given, Mapping):
        return _loaded(given, "attach(rules=...)")
    raise ConfigError(
        f"attach(rules=...): expected autockpt.Rules, a dict as in a rules file, or the path of "
        f"one, got {type(given).__qualname__}"
    )


def _read(path: Path) -> Rules:
    from autockpt import yaml_text

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return _loaded(yaml_text.load(text, str(path)), str(path))


def _loaded(data: Any, where: str) -> Rules:
    try:
        return load_rules(data)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _coordinates(axes: Any, rank: int, world_size: int) -> Coordinates:
    """From {"dp": 2, "tp": 4}, the last axis fastest, or a DeviceMesh; all ranks stand in it."""
    if axes is None or isinstance(axes, Mapping):
        sizes = dict(axes or {})
        total = math.prod(sizes.values())
    else:
        names, shape = getattr(axes, "mesh_dim_names", None), tuple(axes.mesh.shape)
        if not names:
            raise ConfigError("attach(axes=...): the DeviceMesh needs mesh_dim_names, for rules")
        sizes, total = dict(zip(names, shape, strict=True)), math.prod(shape)
    if total != world_size:
        raise ConfigError(
            f"attach(axes=...): {sizes} are {total} ranks, this job has {world_size}; name all "
            'axes, slowest first, as in axes={"dp": 2, "tp": 4}'
        )
    if axes is None or isinstance(axes, Mapping):
        return Coordinates(axes=sizes, rank=rank)
    return Coordinates.of(axes, rank)
