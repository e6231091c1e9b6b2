"""Check that encoding helps a run: no checkpoint may become durable later because of it.

        tried    raw bytes, because encoded ones take longer than the profile promised for raw ones
        undone   raw bytes take longer still, so the storage itself is slower

A run tries once and goes back at most once.  The intervals answer later changes of the storage.
"""

from dataclasses import dataclass

from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.staging.quota import storage_matters
from autockpt.tuner.online.estimates import WINDOW, Window
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, TierPlan
from autockpt.values.units import format_duration

LATE = 1.03
"""Encoded checkpoints may be durable this much later than others were promised to be."""
SIGMAS = 3.0
"""Standard errors that a difference must have beyond that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTrial:
    """Bytes as they are instead of the codec of the plan."""

    encoded: TierPlan
    """The disk tier before, with its codec."""
    durable_s: float
    """Of encoded checkpoints, mean and its standard error."""
    error_s: float
    over: bool = False
    """The codec came back."""


def late(plan: CheckpointPlan, goal: Goal, durable: Window, prior: Costs | None) -> str:
    """Why bytes as they are should be tried; "" if not, or if the codec is not ours to change.

    `prior`: costs by the profile, without any codec.
    """
    codec = plan.tier("disk").codec
    if not codec or goal.pins.codec is not None or storage_matters(goal) or prior is None:
        return ""
    if not _known(durable) or durable.mean - SIGMAS * durable.error <= LATE * prior.persist_s:
        return ""
    return (
        f"with {_named(codec)} checkpoints are durable after {format_duration(durable.mean)} (mean "
        f"of {durable.n}) where the profile promised {format_duration(prior.persist_s)} without: "
        "bytes are written as they are"
    )


def undone(trial: CodecTrial, durable: Window) -> str:
    """Why the codec should come back; "" if not, or not yet."""
    error_s = max(trial.error_s, durable.error)
    if trial.over or not _known(durable) or durable.mean - SIGMAS * error_s <= trial.durable_s:
        return ""
    return (
        f"without {_named(trial.encoded.codec)} checkpoints are durable after "
        f"{format_duration(durable.mean)} (mean of {durable.n}), and with it they were after "
        f"{format_duration(trial.durable_s)}: encoded again"
    )


def _known(durable: Window) -> bool:
    return durable.n >= WINDOW and not durable.doubtful


def _named(codec: dict[str, str]) -> str:
    return ", ".join(dict.fromkeys(codec.values()))
