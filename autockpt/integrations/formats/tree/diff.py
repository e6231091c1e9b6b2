"""Differences of two checkpoints: tensor by tensor, so that memory holds two of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, Path, Tree, in_memory, leaves

BLOCK = 2**20
"""Elements compared at a time: their differences take 8 or 16 bytes each."""
_TEXT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One name at which two checkpoints differ."""

    name: str
    group: str
    """First part of the name: model, optimizer, scheduler, ..."""
    kind: str
    """only-a, only-b, dtype, shape, values (tensors) or value (anything else)."""
    a: str = ""
    b: str = ""
    """The contents of each, in words; of tensors with other values the dtype and shape."""
    elements: int = 0
    """Elements that are not the same bits."""
    max_abs: float | None = None
    """Largest absolute difference; None where it has no meaning, inf where one is not finite."""
    max_relative: float | None = None
    """Largest |a - b| / max(|a|, |b|)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sums of one class."""

    name: str
    equal: int
    changed: int
    """Other values of the same form."""
    other: int
    """Only in one of the two, or of another form."""
    max_abs: float | None
    max_relative: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that `autockpt diff` says."""

    equal: bool
    groups: tuple[Group, ...]
    differences: tuple[Difference, ...]


def compare(a: Tree, b: Tree, *, tell: Callable[[int], None] = lambda nbytes: None) -> Comparison:
    """Compares by name; `tell` gets the bytes of each pair of tensors read."""
    left, right = ({p: _comparable(v) for p, v in leaves(tree)} for tree in (a, b))
    differences, equal = [], dict.fromkeys((_group(path) for path in (*left, *right)), 0)
    for path in dict.fromkeys((*left, *right)):
        if path not in left or path not in right:
            found: Difference | None = _one_sided(path, left, right)
        else:
            found = _pair(path, left[path], right[path], tell)
        if found is None:
            equal[_group(path)] += 1
        else:
            differences.append(found)
    groups = tuple(_summed(name, count, differences) for name, count in equal.items())
    return Comparison(equal=not differences, groups=groups, differences=tuple(differences))


def _one_sided(path: Path, left: dict[Path, Any], right: dict[Path, Any]) -> Difference:
    side, leaf = ("only-a", left[path]) if path in left else ("only-b", right[path])
    text = _words(leaf)
    return Difference(
        name=_name(path), group=_group(path), kind=side,
        a=text if side == "only-a" else "", b=text if side == "only-b" else "",
    )  # fmt: skip


def _pair(path: Path, a: Any, b: Any, tell: Callable[[int], None]) -> Difference | None:
    name, group = _name(path), _group(path)
    words: dict[str, Any] = {"name": name, "group": group, "a": _words(a), "b": _words(b)}
    if not (isinstance(a, LazyTensor) and isinstance(b, LazyTensor)):
        return None if same_value(a, b) else Difference(kind="value", **words)
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(kind="shape" if a.shape != b.shape else "dtype", **words)
    elements, max_abs, max_relative = distance(a.read(), b.read())
    tell(a.nbytes)
    if not elements:
        return None
    return Difference(
        kind="values", elements=elements, max_abs=max_abs, max_relative=max_relative, **words
    )


def same_value(a: Any, b: Any) -> bool:
    """Equal and of one type; NaN is NaN."""
    if type(a) is not type(b) or isinstance(a, LazyTensor):
        return False
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _comparable(leaf: Any) -> Any:
    """Formats differ in what they make of numpy's scalars, arrays and small tensors."""
    if isinstance(leaf, np.ndarray):
        return in_memory(torch.from_numpy(leaf))
    if isinstance(leaf, np.generic):
        return leaf.item()
    if isinstance(leaf, frozenset):
        return set(leaf)
    return in_memory(leaf) if isinstance(leaf, torch.Tensor) else leaf


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float | None, float | None]:
    """(elements with other bits, largest absolute and relative difference) of one form.

    The two are None for dtypes that torch cannot compute with.
    """
    left, right = a.reshape(-1), b.reshape(-1)
    count, max_abs, max_relative = 0, 0.0, 0.0
    computable = True
    for start in range(0, left.numel(), BLOCK):
        x, y = left[start : start + BLOCK], right[start : start + BLOCK]
        if torch.equal(_bits(x), _bits(y)):
            continue
        other = _bits(x).ne(_bits(y)).any(dim=1)
        count += int(other.sum())
        try:
            block = _distances(_wide(x)[other], _wide(y)[other])
        except (RuntimeError, NotImplementedError):
            computable = False
            continue
        max_abs, max_relative = max(max_abs, block[0]), max(max_relative, block[1])
    return (count, max_abs, max_relative) if computable else (count, None, None)


def _bits(block: torch.Tensor) -> torch.Tensor:
    """Bytes as [elements, bytes of one]."""
    return block.contiguous().view(torch.uint8).reshape(block.numel(), -1)


def _wide(block: torch.Tensor) -> torch.Tensor:
    return block.to(torch.complex128 if block.is_complex() else torch.float64)


def _distances(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Of wide elements whose bits differ; inf where exactly one is NaN, or an infinity."""
    gap, size = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    both_nan = x.isnan() & y.isnan()
    same = (x == y) | both_nan  # 0.0 and -0.0, two kinds of NaN
    gap = torch.where(same, 0.0, gap.nan_to_num(nan=math.inf, posinf=math.inf))
    relative = torch.where(same, 0.0, (gap / size).nan_to_num(nan=math.inf, posinf=math.inf))
    return float(gap.max()), float(relative.max())


def _summed(name: str, equal: int, differences: list[Difference]) -> Group:
    mine = [found for found in differences if found.group == name]
    changed = [found for found in mine if found.kind in ("values", "value")]
    return Group(
        name=name,
        equal=equal,
        changed=len(changed),
        other=len(mine) - len(changed),
        max_abs=max((d.max_abs for d in changed if d.max_abs is not None), default=None),
        max_relative=max(
            (d.max_relative for d in changed if d.max_relative is not None), default=None
        ),
    )


def _words(leaf: Any) -> str:
    if isinstance(leaf, LazyTensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _group(path: Path) -> str:
    return str(path[0]) if path else ""
