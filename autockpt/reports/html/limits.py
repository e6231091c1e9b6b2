"""How much of a model a page may carry.

Texts come from users and may be of any length; samples and marks grow with the run.  The page is
rendered at the first level that fits; a cut text says that it was cut.  JSON and CSV are whole.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from autockpt.reports.model import ReportModel

PAGE_BYTES = 480_000
"""A page larger than this is made again at the next level; mail and chat take 500 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Characters and counts that are kept."""

    file_chars: int
    """Of the plan and the difference to the policy."""
    text_chars: int
    """Of every other text."""
    samples: int
    """Raw samples of one quantity; a longer list is left out, as part of it would mislead."""
    items: int
    """Entries of any other list, e.g. marks and warnings."""


LEVELS = (
    Level(file_chars=20_000, text_chars=2_000, samples=5_000, items=2_000),
    Level(file_chars=10_000, text_chars=200, samples=1_000, items=500),
    Level(file_chars=2_000, text_chars=60, samples=0, items=60),
)

_FILES = frozenset({"plan_yaml", "policy_diff"})


def bounded(model: ReportModel, level: Level) -> ReportModel:
    """The model with nothing longer than `level` permits."""
    return cast(ReportModel, _walk(model, level, level.text_chars))


def _walk(value: Any, level: Level, chars: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= chars else f"{value[:chars]} ... (cut)"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            longest = level.file_chars if field.name in _FILES else level.text_chars
            new = _samples(old, level) if field.name == "samples" else _walk(old, level, longest)
            if new is not old:
                changed[field.name] = new
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        kept = list(value.items())[: level.items]
        return {_walk(k, level, chars): _walk(v, level, chars) for k, v in kept}
    if isinstance(value, tuple) and value and not isinstance(value[0], float):
        return tuple(_walk(item, level, chars) for item in value[: level.items])
    return value


def _samples(samples: Mapping[str, tuple[float, ...]], level: Level) -> dict[str, Any]:
    return {name: values for name, values in samples.items() if len(values) <= level.samples}
