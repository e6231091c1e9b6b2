"""Nonsense in: the error names the figure or the limits that bind, and what would do."""

from dataclasses import replace
from typing import Any

import pytest

from autockpt.tuner.search.outcome import model_of
from autockpt.values.errors import ConfigError
from autockpt.values.goal import FailureDeclaration, Goal, Limits, Pins
from autockpt.values.profile import Profile
from tests.support.profiles import example_codecs, example_failures, example_storage
from tests.unit.tuner.search.machines import SAMPLE_BYTES, job


def slow_cell(bytes_per_s: float) -> Profile:
    first, *rest = example_storage()
    slow = replace(first, bytes_per_s=replace(first.bytes_per_s, mean=bytes_per_s))
    return job(storage=(slow, *rest))


def endless_rate() -> Profile:
    rates = example_failures()
    return job(failures=replace(rates, per_job=replace(rates.per_job, exposure_days=0.0)))


def dead_link() -> Profile:
    (link,) = job().links
    return job(links=(replace(link, bytes_per_s=0.0),))


def free_codec() -> Profile:
    first, *rest = example_codecs()
    return job(codecs=(replace(first, encode_bytes_per_s=float("inf")), *rest))


@pytest.mark.parametrize(
    ("profile", "named"),
    [
        (slow_cell(0.0), r"storage write 1 x 1048576 direct, bytes/s is 0, must be above 0"),
        (slow_cell(float("nan")), r"bytes/s is nan"),
        (dead_link(), r"bandwidth of link host_copy is 0"),
        (endless_rate(), r"failures\.per_job, a day is inf, must be at least 0 and finite"),
        (free_codec(), r"zstd on parameters, encode bytes/s is inf"),
        (job(iteration_s=0.0), r"iteration_s is 0"),
    ],
)
def test_a_figure_that_cannot_be_is_named(profile: Profile, named: str) -> None:
    """With what it must be, and the command that measures it."""
    with pytest.raises(ConfigError, match=rf"cannot be right: .*{named}.*autockpt profile SCRIPT"):
        model_of(profile, Goal(), sample_bytes=SAMPLE_BYTES)


def test_all_wrong_figures_are_named_at_once() -> None:
    """One run shows everything there is to mend."""
    profile = replace(dead_link(), storage=slow_cell(0.0).storage)
    with pytest.raises(ConfigError, match=r"link host_copy is 0.*; storage write .* is 0"):
        model_of(profile, Goal(), sample_bytes=SAMPLE_BYTES)


@pytest.mark.parametrize(
    ("goal", "binding", "nearest"),
    [
        (
            {"limits": Limits(overhead=1e-5, lost_time_s=60.0)},
            "limits.overhead",
            "limits.lost_time",
        ),
        ({"limits": Limits(lost_time_s=0.2)}, "limits.lost_time", "limits.lost_time"),
        ({"limits": Limits(stall_s=1e-4)}, "limits.stall", "limits.stall 6.06 ms"),
        (
            {"limits": Limits(host_memory_bytes=2 * 10**9), "pins": Pins(slots=3)},
            "limits.host_memory",
            r"2 slot\(s\)",
        ),
        (
            {"limits": Limits(lost_time_s=10.0), "pins": Pins(disk_interval_s=600.0)},
            "limits.lost_time",
            "limits.lost_time",
        ),
        ({"failures": FailureDeclaration(mtbf_s=float("inf"))}, "failures.mtbf", "correct these"),
    ],
)  # fmt: skip
def test_limits_that_leave_no_plan_are_named_with_the_nearest(
    goal: dict[str, Any], binding: str, nearest: str
) -> None:
    """Before anything is measured."""
    with pytest.raises(ConfigError, match=rf"{binding}(.|\n)*nearest: (.|\n)*{nearest}"):
        model_of(job(), Goal(**goal), sample_bytes=SAMPLE_BYTES)


def test_a_limit_of_memory_below_one_slot_is_streamed_through() -> None:
    """Below a window of 512 KiB a rank nothing can be, and the error says how much is missing."""
    needed = 512 * 2**10
    enough = Goal(limits=Limits(host_memory_bytes=needed))
    assert model_of(job(), enough, sample_bytes=SAMPLE_BYTES)
    short = Goal(limits=Limits(host_memory_bytes=needed - 9))
    with pytest.raises(ConfigError, match=r"limits\.host_memory leaves 524279; give it 9 more"):
        model_of(job(), short, sample_bytes=SAMPLE_BYTES)
