"""Unusable profiles: the error, its place, and how to get a right profile."""

import math
from collections.abc import Iterator

from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.profile import Profile


def require_sane(profile: Profile, goal: Goal) -> None:
    """Raises ConfigError with every figure that cannot be: no bandwidth, endless rates, no state.

    Limits that contradict each other are `policies.decide`'s to name.
    """
    problems = [
        f"{name} is {value:g}, must be {wanted}"
        for name, value, wanted in (*_figures(profile), *_rates(profile, goal))
        if not _fits(value, wanted)
    ]
    if problems:
        raise ConfigError(
            "the profile cannot be right: "
            + "; ".join(problems)
            + "; nearest: measure again with `autockpt profile SCRIPT`, or correct these figures"
        )


_ABOVE, _FROM = "above 0 and finite", "at least 0 and finite"


def _fits(value: float, wanted: str) -> bool:
    return math.isfinite(value) and (value > 0 if wanted == _ABOVE else value >= 0)


def _figures(profile: Profile) -> Iterator[tuple[str, float, str]]:
    yield "state.total_bytes", profile.state.total_bytes, _ABOVE
    yield "iteration_s", profile.iteration_s.p50, _ABOVE
    yield "memory.host_available_bytes", profile.memory.host_available_bytes, _ABOVE
    for link in profile.links:
        yield f"bandwidth of link {link.link}", link.bytes_per_s, _ABOVE
    for cell in profile.storage:
        way = f"{cell.writers} x {cell.chunk_bytes} {'direct' if cell.direct else 'buffered'}"
        yield f"storage {cell.operation} {way}, bytes/s", cell.bytes_per_s.mean, _ABOVE
        yield f"storage {cell.operation} {way}, alpha_s", cell.alpha_s, _FROM
        yield f"storage {cell.operation} {way}, chunk_bytes", cell.chunk_bytes, _ABOVE
        yield f"storage {cell.operation} {way}, writers", cell.writers, _ABOVE
    for codec in profile.codecs:
        where = f"{codec.codec} on {codec.tensor_class}"
        yield f"{where}, ratio", codec.ratio, _ABOVE
        yield f"{where}, encode bytes/s", codec.encode_bytes_per_s, _ABOVE
        yield f"{where}, decode bytes/s", codec.decode_bytes_per_s, _ABOVE
    for name in ("stall_s", "snapshot_s", "persist_s"):
        measured = getattr(profile, name)
        if measured is not None:
            yield name, measured.mean, _FROM


def _rates(profile: Profile, goal: Goal) -> Iterator[tuple[str, float, str]]:
    for name in ("per_node", "per_job"):
        posterior = getattr(profile.failures, name)
        rate = math.inf if not posterior.exposure_days else posterior.mean_per_day
        yield f"failures.{name}, a day", rate, _FROM
    if goal.failures.mtbf_s is not None:
        yield "failures.mtbf", goal.failures.mtbf_s, _ABOVE
