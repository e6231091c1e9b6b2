"""How bytes move: schedule, chunk, writers, O_DIRECT and path, from what was measured.

Storage figures come from the profile's grid: the fewest writers, then O_DIRECT, then the smallest
chunk within 5 % of the best, because a peak found among noisy cells is not worth more threads.
"""

from dataclasses import dataclass, replace

from autockpt.policies.costs import (
    Costs,
    copy_link,
    link_time_s,
    profile_costs,
    ranks_per_node,
    write_time_s,
)
from autockpt.policies.windows import WORTH, fit_windows
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import CHUNK_BYTES, WRITERS, Choice, Staging
from autockpt.values.profile import LinkMeasure, Profile, StorageMeasure
from autockpt.values.units import format_bytes, format_duration, format_fraction, format_rate

NEAR_BEST = 1.05
"""A configuration within 5 % of the fastest counts as equally fast."""
ADVANTAGE = 0.97
"""A path must be 3 % faster than the default, else the default stays."""
DIRECT_LINK = "device_to_storage"
"""Name of the link measure of the direct path (GPUDirect storage)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteChoice:
    """One cell of the storage grid, or the defaults."""

    writers: int
    chunk_bytes: int
    direct_io: bool
    measure: StorageMeasure | None
    reason: str
    numbers: dict[str, float]
    runner_up: str = ""
    binding: str = ""


def choose_write(profile: Profile, pins: Pins) -> WriteChoice:
    """Writers, chunk and O_DIRECT: the cheapest cell within 5 % of the fastest that pins allow."""
    count = profile.state.total_bytes * ranks_per_node(profile)
    grid = [m for m in profile.storage if m.operation == "write" and _usable(m)]
    allowed = [m for m in grid if _pinned(m, pins)]
    named = {"disk.writers": pins.writers, "disk.chunk": pins.chunk_bytes}
    binding = " and ".join(
        name for name, pin in {**named, "disk.direct": pins.direct_io}.items() if pin is not None
    )
    if not allowed:
        return _unmeasured(pins, binding, measured_others=bool(grid))
    seconds = {id(m): write_time_s(m, count) for m in allowed}
    best_s = min(seconds.values())
    near = [m for m in allowed if seconds[id(m)] <= best_s * NEAR_BEST]
    chosen = min(near, key=lambda m: (m.writers, not m.direct, m.chunk_bytes))
    rest = [m for m in allowed if m is not chosen]
    runner_up = min(rest, key=lambda m: seconds[id(m)], default=None)
    took = seconds[id(chosen)]
    return WriteChoice(
        writers=chosen.writers,
        chunk_bytes=chosen.chunk_bytes,
        direct_io=chosen.direct,
        measure=chosen,
        reason=(
            f"{_cell(chosen)} writes {format_bytes(count)} in {format_duration(took)}, "
            f"{format_fraction(took / best_s - 1)} behind the fastest of {len(allowed)} "
            f"measured configurations and with the fewest writers within 5 % of it"
        ),
        numbers={"write_s": took, "fastest_write_s": best_s, "bytes": float(count)},
        runner_up=f"{_cell(runner_up)} {format_duration(seconds[id(runner_up)])}"
        if runner_up
        else "",
        binding=binding,
    )


def choose_schedule(
    profile: Profile, goal: Goal, base: Staging, write: StorageMeasure | None
) -> tuple[Staging, Costs, Choice]:
    """Lazy copying, unless its interference costs more than blocking for the whole copy, or idle
    windows take enough of it out of the way."""
    fit = fit_windows(profile, copy_link(profile))
    ways = [replace(base, schedule="lazy"), replace(base, schedule="blocking")]
    if fit is not None:
        ways.append(replace(base, schedule="windows", window_margin=fit.margin))
    elif goal.pins.schedule == "windows":
        ways.append(replace(base, schedule="windows"))
    found: dict[str, tuple[Staging, Costs]] = {}
    for staging in ways:
        costs = profile_costs(profile, staging, write=write)
        found[staging.schedule] = (staging, costs)
    cost = {name: costs.stall_s + costs.copy_slowdown_s for name, (_, costs) in found.items()}
    pinned = goal.pins.schedule
    blocking_wins = cost["blocking"] < ADVANTAGE * cost["lazy"] and goal.objective != "stall"
    if profile.state.lazy_bytes == 0:
        blocking_wins = True
    chosen = pinned or ("blocking" if blocking_wins else "lazy")
    worth = fit is not None and fit.share >= WORTH and profile.state.lazy_bytes > 0
    if worth and not pinned and cost["windows"] < ADVANTAGE * cost[chosen]:
        chosen = "windows"
    other = min((name for name in cost if name != chosen), key=lambda name: cost[name])
    why = "pinned by staging.schedule" if pinned else _schedule_reason(profile, cost, chosen)
    windows = fit.sentence if fit is not None else _no_windows(profile, goal)
    staging, costs = found[chosen]
    extras = _staging_words(staging)
    return (
        staging,
        costs,
        Choice(
            name="staging",
            chosen=f"{chosen}, {extras}",
            reason=f"{chosen} costs {format_duration(cost[chosen])} of training per snapshot, "
            f"{other} {format_duration(cost[other])}; {why}{windows and '; ' + windows}",
            numbers={
                **{f"{name}_cost_s": seconds for name, seconds in cost.items()},
                **(fit.numbers if fit is not None else {}),
            },
            runner_up=other,
            binding="staging.schedule" if pinned else "",
        ),
    )


def choose_path(profile: Profile, goal: Goal, write: StorageMeasure | None) -> Choice:
    """Through the pinned host slot, or straight from the device where that was measured faster."""
    direct = profile.link(DIRECT_LINK)
    if goal.pins.path == "direct" and direct is None:
        raise ConfigError(
            "staging.path direct: the direct path was not measured on this machine; "
            "run `autockpt profile` where it exists, or write staging.path: auto"
        )
    if goal.pins.path is not None:
        return Choice(
            name="path",
            chosen=goal.pins.path,
            reason=f"{goal.pins.path} is pinned by staging.path",
            runner_up="host" if goal.pins.path == "direct" else "direct",
            binding="staging.path",
        )
    if direct is None or write is None:
        return Choice(
            name="path",
            chosen="host",
            reason="the pinned host slot serves memory and disk; a direct path was not measured",
        )
    return _measured_path(profile, direct, write)


# --- parts ----------------------------------------------------------------------------------------


def _usable(measure: StorageMeasure) -> bool:
    chunk = measure.chunk_bytes
    return chunk >= 2**16 and chunk & (chunk - 1) == 0 and measure.bytes_per_s.mean > 0


def _pinned(measure: StorageMeasure, pins: Pins) -> bool:
    wanted = (
        (pins.writers, measure.writers),
        (pins.chunk_bytes, measure.chunk_bytes),
        (pins.direct_io, measure.direct),
    )
    return all(pin is None or pin == value for pin, value in wanted)


def _unmeasured(pins: Pins, binding: str, *, measured_others: bool) -> WriteChoice:
    why = (
        "the pinned configuration was not among those measured"
        if measured_others
        else "the storage was not measured"
    )
    return WriteChoice(
        writers=pins.writers or WRITERS,
        chunk_bytes=pins.chunk_bytes or CHUNK_BYTES,
        direct_io=True if pins.direct_io is None else pins.direct_io,
        measure=None,
        reason=f"{why}; the rest are defaults: {WRITERS} writers, {CHUNK_BYTES // 2**20} MiB",
        numbers={},
        binding=binding,
    )


def _cell(measure: StorageMeasure) -> str:
    writers = "1 writer" if measure.writers == 1 else f"{measure.writers} writers"
    return (
        f"{writers} x {measure.chunk_bytes / 2**20:g} MiB "
        f"{'direct' if measure.direct else 'buffered'}"
    )


def _no_windows(profile: Profile, goal: Goal) -> str:
    """Why nothing is said of windows, where they were asked for."""
    if goal.pins.schedule != "windows":
        return ""
    if profile.fingerprint.gpus:
        return "a device is given its copies at the boundary: only host copies move in windows"
    return "no windows were measured: the run learns them in its first iterations"


def _schedule_reason(profile: Profile, cost: dict[str, float], chosen: str) -> str:
    if chosen == "windows":
        return "the copy moves while the training idles"
    if profile.state.lazy_bytes == 0:
        return "no tensor was proven unchanged until the optimizer step, so nothing can be lazy"
    if chosen == "blocking":
        return "the interference of copying under compute costs more than waiting"
    if cost["blocking"] < cost["lazy"]:
        return "blocking is not 3 % better, or stalls are what the objective avoids"
    return "the copy hides under forward and backward"


def _staging_words(staging: Staging) -> str:
    words = [
        staging.persist,
        "streaming" if staging.streaming else "write after seal",
        "preallocated" if staging.preallocate else "allocated at every save",
    ]
    if staging.in_flight:
        words.append(f"{staging.in_flight} in flight")
    if staging.device_clone == "on":
        words.append("cloned on the device")
    return ", ".join(words)


def _measured_path(profile: Profile, direct: LinkMeasure, write: StorageMeasure) -> Choice:
    count = profile.state.total_bytes
    host_s = write_time_s(write, count * ranks_per_node(profile))
    direct_s = link_time_s(direct, count)
    chosen = "direct" if direct_s < ADVANTAGE * host_s else "host"
    return Choice(
        name="path",
        chosen=chosen,
        reason=(
            f"host writes {format_bytes(count)} per rank in {format_duration(host_s)}, direct in "
            f"{format_duration(direct_s)} at {format_rate(direct.bytes_per_s)}; "
            "direct must be 3 % faster"
        ),
        numbers={"host_s": host_s, "direct_s": direct_s},
        runner_up="host" if chosen == "direct" else "direct",
    )
