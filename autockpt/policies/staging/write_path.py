"""Parameters of a write: chunk, writers, O_DIRECT and path, from measurements.

Storage figures come from the profile's grid: the fewest writers, then O_DIRECT, then the smallest
chunk within 5 % of the best.  A peak among noisy cells is not worth more threads.
"""

from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import link_time_s, ranks_per_node, write_time_s
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import CHUNK_BYTES, WRITERS, Choice, WriteWay, is_chunk
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


def choose_write(profile: Profile, goal: Goal, *, encoding: bool = False) -> WriteChoice:
    """Writers, chunk and O_DIRECT: the cheapest cell within 5 % of the fastest that pins allow.

    A store was measured in one way: it has no cells, and pinned writers and chunks keep its
    figures.

    `encoding`: of at least two writers where there are such cells, so that one encodes while
    another writes.
    """
    pins = goal.pins
    count = profile.state.total_bytes * ranks_per_node(profile)
    grid = [m for m in profile.storage if m.operation == "write" and _usable(m)]
    allowed = [m for m in grid if goal.is_in_store or _pinned(m, pins)]
    named = {"disk.writers": pins.writers, "disk.chunk": pins.chunk_bytes}
    binding = " and ".join(
        name for name, pin in {**named, "disk.direct": pins.direct_io}.items() if pin is not None
    )
    if not allowed:
        return _unmeasured(goal, binding, measured_others=bool(grid))
    seconds = {id(m): write_time_s(m, count) for m in allowed}
    best_s = min(seconds.values())
    near = [m for m in allowed if seconds[id(m)] <= best_s * NEAR_BEST]
    several = [m for m in near if m.writers >= WRITERS] if encoding else []
    chosen = min(several or near, key=lambda m: (m.writers, not m.direct, m.chunk_bytes))
    rest = [m for m in allowed if m is not chosen]
    runner_up = min(rest, key=lambda m: seconds[id(m)], default=None)
    took = seconds[id(chosen)]
    return WriteChoice(
        writers=pins.writers or chosen.writers,
        chunk_bytes=pins.chunk_bytes or chosen.chunk_bytes,
        direct_io=chosen.direct and not goal.is_in_store,
        measure=chosen,
        reason=_of_store(profile, chosen, count)
        if goal.is_in_store
        else (
            f"{_cell(chosen)} writes {format_bytes(count)} in {format_duration(took)}, "
            f"{format_fraction(took / best_s - 1)} behind the fastest of {len(allowed)} "
            "measured configurations and with the fewest writers within 5 % of it"
            f"{' that encode and write in turn' if several else ''}"
        ),
        numbers={"write_s": took, "fastest_write_s": best_s, "bytes": float(count)},
        runner_up=f"{_cell(runner_up)} {format_duration(seconds[id(runner_up)])}"
        if runner_up
        else "",
        binding=binding,
    )


def of_this_store(profile: Profile, goal: Goal) -> tuple[Profile, str]:
    """(the profile, a warning) of a job whose checkpoints go to an object store.

    Figures of a disk, or of another bucket, say nothing about it and are left out.
    """
    measured, path = profile.fingerprint.storage, goal.storage_path or ""
    bucket = "/".join(path.split("/")[:3])
    if not goal.is_in_store or measured == bucket or not profile.storage:
        return profile, ""
    others = tuple(m for m in profile.interference if m.work not in ("persist", "storage_write"))
    return replace(profile, storage=(), persist_s=None, interference=others), (
        f"the profile measured the storage {measured}, and disk.path is in {bucket}: its storage "
        f"figures are left out; run `autockpt profile --set disk.path={path} SCRIPT`"
    )


KINDS = 3
"""Ways of writing that a run may compare, the chosen one beside them."""


def best_ways(profile: Profile, pins: Pins) -> tuple[WriteWay, ...]:
    """The fastest cell of each kind that pins allow, from fast to slow, for a run to compare.

    A kind is a number of writers with O_DIRECT, or without it.
    """
    count = profile.state.total_bytes * ranks_per_node(profile)
    grid = [m for m in profile.storage if m.operation == "write" and _usable(m)]
    allowed = [m for m in grid if _pinned(m, pins) and is_chunk(m.chunk_bytes)]
    best: dict[tuple[int, bool], WriteWay] = {}
    for cell in sorted(allowed, key=lambda m: write_time_s(m, count)):
        way = WriteWay(writers=cell.writers, chunk_bytes=cell.chunk_bytes, direct_io=cell.direct)
        best.setdefault((cell.writers, cell.direct), way)
    return tuple(best.values())[:KINDS]


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


def _unmeasured(goal: Goal, binding: str, *, measured_others: bool) -> WriteChoice:
    pins = goal.pins
    direct = not goal.is_in_store if pins.direct_io is None else pins.direct_io
    why = (
        "the pinned configuration was not among those measured"
        if measured_others
        else "the storage was not measured"
    )
    return WriteChoice(
        writers=pins.writers or WRITERS,
        chunk_bytes=pins.chunk_bytes or CHUNK_BYTES,
        direct_io=direct,
        measure=None,
        reason=f"{why}; the rest are defaults: {WRITERS} writers, {CHUNK_BYTES // 2**20} MiB",
        numbers={},
        binding=binding,
    )


def _of_store(profile: Profile, write: StorageMeasure, count: int) -> str:
    """The measured figures of a store, which is asked in one way."""
    read = next((m for m in profile.storage if m.operation == "read"), None)
    back = "" if read is None else f", and gives {format_rate(read.bytes_per_s.mean)}"
    return (
        f"the store {profile.fingerprint.storage} was measured: it takes a page in "
        f"{format_duration(write.alpha_s)} and {format_rate(write.bytes_per_s.mean)}{back}; so "
        f"{format_bytes(count)} are written in {format_duration(write_time_s(write, count))}"
    )


def _cell(measure: StorageMeasure) -> str:
    writers = "1 writer" if measure.writers == 1 else f"{measure.writers} writers"
    return (
        f"{writers} x {measure.chunk_bytes / 2**20:g} MiB "
        f"{'direct' if measure.direct else 'buffered'}"
    )


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
