"""Rules for what geometry alone cannot say of plain tensors that differ by rank.

A rule matches names of parameters and says how the parts make the whole.  Optimizer state that has
the shape of its parameter follows it, for any optimizer.  At most one rule matches a name.  Along
an axis that a rule does not name, ranks have other parameters (the stages of a pipeline).  The
exception is an axis that the rules as a whole call an axis of `copies`.

Source: Universal Checkpointing (ATC 2025), its patterns of parameters.
"""

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from autockpt.executors.image.layout.boxes import whole
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.sharding.mesh import Coordinates
from autockpt.executors.sharding.ranges import slab_boxes
from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Cut along one dimension, in the order of ranks; all but the last hold the same size."""

    dim: int
    over: str
    """Axis whose ranks hold the parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedVocabulary:
    """Rows beyond the true ones only make the parts even: neither saved nor loaded."""

    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """Modules `experts.N` that every rank counts from 0: consecutive ones of all."""

    over: str
    """Axis whose ranks have them."""
    total: int
    """Experts of all ranks together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The division of the parameters that one pattern matches."""

    match: str
    """fnmatch pattern of the whole name, or `re:` and a regular expression for all of it."""
    sharded: Sharded | None = None
    sub_parameters: int | tuple[int, ...] = 1
    """Fused parts, each cut by itself: how many equal ones, or their widths over all ranks."""
    padded_vocabulary: PaddedVocabulary | None = None
    expert: Expert | None = None
    replicated: tuple[str, ...] = ()
    """Axes along which every rank holds the same bytes."""
    averaged: tuple[str, ...] = ()
    """Axes along which copies drift apart; another number of ranks takes their mean."""
    unique: tuple[str, ...] = ()
    """Axes along which every rank has a tensor of its own, numbered in its name."""

    def __post_init__(self) -> None:
        dim = None if self.sharded is None else self.sharded.dim
        if dim is None and (self.sub_parameters != 1 or self.padded_vocabulary):
            self._refuse("sub_parameters and padded_vocabulary need `sharded: {dim: 0, over: tp}`")
        if self.padded_vocabulary and (dim != 0 or self.sub_parameters != 1):
            self._refuse("a padded vocabulary is cut in dim 0 and has no sub_parameters")
        axes = [*self.divided, *self.replicated]
        if self.averaged and self.unique:
            self._refuse("a tensor of each rank's own is not averaged; keep one of the two")
        if not axes:
            self._refuse("says nothing; add sharded, replicated, averaged, expert or unique")
        if len(axes) != len(set(axes)):
            self._refuse(f"an axis stands twice: {', '.join(axes)}")

    @property
    def divided(self) -> tuple[str, ...]:
        """Axes along which ranks hold different bytes."""
        over = [way.over for way in (self.sharded, self.expert) if way is not None]
        return (*over, *self.averaged, *self.unique)

    def matches(self, name: str) -> bool:
        """It speaks for a parameter of this name.  Raises ConfigError for a bad expression."""
        if not self.match.startswith("re:"):
            return fnmatch.fnmatchcase(name, self.match)
        try:
            return re.fullmatch(self.match[3:], name) is not None
        except re.error as error:
            self._refuse(f"no regular expression: {error}")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"rule {self.match!r}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The place that a rule gives to one live tensor."""

    name: str
    """The name of the global tensor."""
    holding: LocalShard
    """Boxes of the first `holding.count` elements; what follows them is padding."""
    copies: int = 0
    """So many copies drift apart; of another number their mean is the tensor.  0: none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All rules of a job."""

    rules: tuple[Rule, ...] = ()
    copies: tuple[str, ...] = ()
    """Axes along which every matched parameter is equal: data parallelism."""

    def rule_for(self, name: str) -> Rule | None:
        """The rule that matches; None without one.  Raises ConfigError when several do."""
        found = [rule for rule in self.rules if rule.matches(name)]
        if len(found) > 1:
            patterns = ", ".join(repr(rule.match) for rule in found)
            raise ConfigError(
                f"{name}: {len(found)} rules match: {patterns}; narrow them so that one does"
            )
        return found[0] if found else None

    def place(self, name: str, shape: Sequence[int], at: Coordinates) -> Placed | None:
        """Name and part of the local tensor of a rank; None when no rule matches.

        Raises ConfigError when several rules match or the shape cannot be what the rule says.
        """
        rule = self.rule_for(name)
        if rule is None:
            return None
        numbers = [f"[{axis}={at.at(axis)}]" for axis in (*rule.unique, *rule.averaged)]
        return Placed(
            name="".join([_expert_name(name, rule, at), *numbers]),
            holding=self._holding(name, tuple(shape), rule, at),
            copies=math.prod(map(at.size, rule.averaged)) if rule.averaged else 0,
        )

    def apply(self, name: str, shape: Sequence[int], at: Coordinates) -> LocalShard | None:
        """The holding that `place` finds."""
        placed = self.place(name, shape, at)
        return None if placed is None else placed.holding

    def place_all(
        self, parameters: Iterable[tuple[str, torch.Tensor]], at: Coordinates
    ) -> dict[int, Placed]:
        """By id of a plain parameter what a rule says of it; DTensors speak for themselves."""
        found = {}
        for name, parameter in parameters:
            if not hasattr(parameter, "to_local"):
                placed = self.place(name, parameter.shape, at)
                if placed is not None:
                    found[id(parameter)] = placed
        return found

    def require_used(self, names: Iterable[str], at: Coordinates | None = None) -> None:
        """Raises ConfigError for a rule that matches none of `names`, of all ranks together.

        `at`: they are the names of this rank alone.  A rule then counts only if all ranks have the
        parameters it matches: no axis is left along which other parameters stand.
        """
        known = list(names)
        for rule in self.rules:
            if at is not None and self._others(rule, at):
                continue
            if not any(rule.matches(name) for name in known):
                raise ConfigError(
                    f"rule {rule.match!r} matches none of {len(known)} parameters, among them "
                    f"{', '.join(known[:3]) or 'none'}; correct the pattern or remove the rule"
                )

    def _others(self, rule: Rule, at: Coordinates) -> set[str]:
        """Return axes along which other ranks may lack the parameters of a rule."""
        several = {axis for axis, size in at.axes.items() if size > 1}
        return several - {*self.copies, *rule.replicated, *rule.divided}

    def _holding(
        self, name: str, shape: tuple[int, ...], rule: Rule, at: Coordinates
    ) -> LocalShard:
        holders = at.along({*self.copies, *rule.replicated} - set(rule.divided))
        cut = rule.sharded
        if cut is None:
            return LocalShard(global_shape=shape, boxes=(whole(shape),), holders=holders)
        if not 0 <= cut.dim < len(shape):
            raise ConfigError(f"{name}: rule {rule.match!r} cuts dim {cut.dim} of {list(shape)}")
        total, ranges = _ranges(name, rule, cut, shape[cut.dim], at)
        full = (*shape[: cut.dim], total, *shape[cut.dim + 1 :])
        boxes = slab_boxes(full, cut.dim, ranges)
        return LocalShard(global_shape=full, boxes=boxes, holders=holders)


def _ranges(
    name: str, rule: Rule, cut: Sharded, local: int, at: Coordinates
) -> tuple[int, list[tuple[int, int]]]:
    """(size of the whole, [first, past the last) of every part that a rank joins) along `dim`."""
    number, count, padded = at.at(cut.over), at.size(cut.over), rule.padded_vocabulary
    base, ranges = 0, []
    for width in _widths(name, rule, local, count):
        step = -(-width // count) if padded is None else local
        low, high = (min(n * step, width) for n in (number, number + 1))
        ranges.append((base + low, base + high))
        base += width
    held = sum(high - low for low, high in ranges)
    if held > local or (held < local and padded is None):
        raise ConfigError(
            f"{name}: rule {rule.match!r} gives rank {number} of {count} along {cut.over} {held} "
            f"of {base} in dim {cut.dim}, its tensor has {local}; correct the rule's widths"
        )
    return base, ranges


def _widths(name: str, rule: Rule, local: int, count: int) -> tuple[int, ...]:
    """Widths of the parts over all ranks."""
    parts = rule.sub_parameters
    if rule.padded_vocabulary is not None:
        rows = rule.padded_vocabulary.rows
        if rows > local * count:
            raise ConfigError(
                f"{name}: rule {rule.match!r} says {rows} true rows, and {count} ranks of {local} "
                f"rows hold {local * count}"
            )
        return (rows,)
    if isinstance(parts, tuple):
        return parts
    if local % parts:
        raise ConfigError(
            f"{name}: rule {rule.match!r} says {parts} equal parts, and {local} local rows are no "
            "multiple of that. List their widths over all ranks, as sub_parameters: [8, 4, 4]"
        )
    return (local // parts * count,) * parts


def _expert_name(name: str, rule: Rule, at: Coordinates) -> str:
    """`experts.1` of the second of two ranks is `experts.5` of eight."""
    expert = rule.expert
    if expert is None:
        return name
    each, rest = divmod(expert.total, at.size(expert.over))
    found = re.search(r"(?<![^.])\w*experts\.(\d+)(?![^.])", name)
    if found is None or rest or int(found[1]) >= each:
        raise ConfigError(
            f"{name}: rule {rule.match!r} spreads {expert.total} experts over "
            f"{at.size(expert.over)} ranks, and the name has no `experts.N` with N below {each}. "
            "Experts in one stacked tensor are `sharded: {dim: 0, over: ep}`"
        )
    number = at.at(expert.over) * each + int(found[1])
    return f"{name[: found.start(1)]}{number}{name[found.end(1) :]}"


def unnumbered(name: str) -> str:
    """A name without the numbers of ranks that `unique` and `averaged` put behind it."""
    return re.sub(r"(\[\w+=\d+\])+$", "", name)


def drifted_copies(name: str, stored: Iterable[str]) -> list[str]:
    """Stored names of the copies whose mean an averaged tensor is, in the order of `stored`."""
    bare = unnumbered(name)
    return [s for s in stored if s.startswith(bare) and unnumbered(s) == bare]


def missing_rule(name: str, shapes: Mapping[int, Sequence[int]]) -> str:
    """Why a tensor cannot be put together without a rule, and the rules that would do.

    `shapes` by the ranks that hold different content under this name.
    """
    ranks = ", ".join(map(str, sorted(shapes)))
    first = min(shapes)
    return (
        f"{name}: ranks {ranks} hold different content under this name, shape "
        f"{list(shapes[first])} on rank {first}; a rule must say how it is put together, one of:\n"
        f'  - {{match: "{name}", sharded: {{dim: 0, over: tp}}}}  # parts of one tensor\n'
        f'  - {{match: "{name}", expert: {{over: ep, total: 64}}}}  # numbered experts\n'
        f'  - {{match: "{name}", averaged: [tp]}}  # copies that drift apart\n'
        f'  - {{match: "{name}", unique: [tp]}}  # a tensor of its own on every rank'
    )
