"""The result of `autockpt tune` as values: every write in its order, the ways, the importance."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedWrite:
    """One measured write."""

    number: int
    """From 0."""
    stage: Literal["seed", "search", "final"]
    way: str
    seconds: float | None
    """None: it failed."""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedWay:
    """One way to write, with its prediction and its measurement."""

    way: str
    predicted_s: float
    measured_s: float | None
    waste: float | None
    """Lost time of the best plan that writes so, 0..1; None: not measured, or forbidden."""
    writes: int
    note: str = ""
    """chosen, default, tied; or why it has no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHistory:
    """One search."""

    created: str
    directory: str
    """Where was written."""
    content: str
    """The written bytes, in words."""
    sample_bytes: int
    budget: int
    seed: int
    proposer: str
    default: str
    winner: str
    kept_default: bool
    reason: str
    writes: tuple[SearchedWrite, ...]
    ways: tuple[SearchedWay, ...]
    """Best measured first."""
    space: int
    """Ways in all, refused ones among them."""
    refused: dict[str, int] = field(default_factory=dict)
    """Why some were not tried, and how many."""
    importances: dict[str, float] = field(default_factory=dict)
    """Share of the spread of times by knob, most important first."""
    explained: float = 0.0
    """Fraction of the spread that the knobs explain together."""
    others: int = 0
    """Older searches of the same profile."""
