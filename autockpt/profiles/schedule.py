"""How many iterations a profile takes and what runs beside each.  Pure: numbers in, a list out.

All ranks compute the same list from the same numbers (agreed once, after the warm-up).  So all stop
at the same step without waiting for each other.

    warm-up | quiet ... | blocking probes | settle | round 1 | round 2 | ...
                                                     \\ quiet, copy, write, persist in random order
"""

import math
import random
from dataclasses import dataclass

from autockpt.values.errors import ConfigError

WORKS = ("snapshot_copy", "storage_write", "persist")
"""Background work whose cost is measured, beside "quiet"."""
SCHEDULE_WORKS = ("snapshot_windows", "snapshot_blocking")
"""The same where a rank has idle windows: the other ways to take what "snapshot_copy" takes."""
PEER_WORK = "peer_host"
"""The same where there is another node: its memory is fetched."""
DEVICE_WORK = "peer_device"
"""The same through the devices."""
ENCODE_WORK = "encode"
"""The same where a codec was measured: as many threads encode as a save has writers."""
QUIET_LIMIT = 60
"""More quiet iterations teach nothing, and a short script may not have them."""
SNAPSHOTS_PER_UNIT = 20
"""A snapshot in each iteration of a short-stepping job: enough to average, each costs a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """How long a profile may take.  All times are beyond the warm-up."""

    warmup_steps: int = 3
    """Iterations before anything counts: allocators, compilers, lazy optimizer state; >= 2."""
    quiet_steps: int = 8
    """Least number of quiet iterations, unless they would take more than `quiet_limit_s`."""
    quiet_s: float = 5.0
    """Quiet iterations go on for about this long."""
    quiet_limit_s: float = 15.0
    probes_s: float = 22.0
    """All blocking probes together."""
    interference_s: float = 18.0
    """All rounds together."""
    rounds_min: int = 6
    rounds_max: int = 10
    unit_s: float = 0.1
    """Units of short iterations are stretched to this: a timer tick must not look like work."""
    seed: int = 0
    """Of every random order in a profile."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 2:
            raise ConfigError(
                f"warm-up of {self.warmup_steps} steps: must be at least 2, the optimizer's state "
                "exists only after the first step"
            )
        if not 1 <= self.rounds_min <= self.rounds_max:
            raise ConfigError("rounds: need 1 <= rounds_min <= rounds_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Iterations in a row with the same background work."""

    work: str
    """One of `WORKS`, `SCHEDULE_WORKS`, `PEER_WORK`, `DEVICE_WORK`, `ENCODE_WORK` or "quiet"."""
    round: int
    iterations: int


def quiet_iterations(
    iteration_s: float, settings: ProfileSettings, *, steps_left: int | None = None
) -> int:
    """Iterations of the quiet stage: about `quiet_s` long, at least `quiet_steps`, never endless.

    At most a quarter of `steps_left`, the iterations that the script has left, if that is known.
    Raises ConfigError if `iteration_s` is not positive.
    """
    if iteration_s <= 0:
        raise ConfigError(f"an iteration of {iteration_s} s cannot be planned for")
    wanted = max(settings.quiet_steps, math.ceil(settings.quiet_s / iteration_s))
    affordable = max(3, math.floor(settings.quiet_limit_s / iteration_s))
    if steps_left is not None:
        affordable = min(affordable, max(3, steps_left // 4))
    return min(wanted, affordable, QUIET_LIMIT)


def interference_units(
    iteration_s: float,
    *,
    persist_s: float,
    works: tuple[str, ...],
    settings: ProfileSettings,
    steps_left: int | None = None,
) -> tuple[Unit, ...]:
    """Rounds of one quiet unit and one of each work, shuffled within the round.

    `persist_s` is the expected time of one copy and write: its unit is long enough to hold it.
    Fewer than `rounds_min` rounds happen only when even they exceed twice the budget, or the
    script's `steps_left`; units of one iteration come before fewer rounds.
    """
    if not works:
        return ()
    short = max(1, math.ceil(settings.unit_s / iteration_s))
    lengths = _unit_lengths(short, iteration_s, persist_s, works)
    room = math.inf if steps_left is None else steps_left
    while short > 1 and sum(lengths.values()) * settings.rounds_max > room:
        short //= 2
        lengths = _unit_lengths(short, iteration_s, persist_s, works)
    round_s = sum(lengths.values()) * iteration_s
    rounds = math.floor(settings.interference_s / round_s)
    rounds = max(settings.rounds_min, min(settings.rounds_max, rounds))
    if rounds * round_s > 2 * settings.interference_s:
        rounds = max(2, math.floor(2 * settings.interference_s / round_s))
    if steps_left is not None:
        rounds = min(rounds, max(2, steps_left // sum(lengths.values())))
    order = random.Random(settings.seed)
    units: list[Unit] = []
    for number in range(rounds):
        works_now = list(lengths)
        order.shuffle(works_now)
        units += [Unit(work=w, round=number, iterations=lengths[w]) for w in works_now]
    return tuple(units)


def _unit_lengths(
    short: int, iteration_s: float, persist_s: float, works: tuple[str, ...]
) -> dict[str, int]:
    """Iterations of each kind of unit; only a persist may need more than `short`."""
    own = {
        **dict.fromkeys(("snapshot_copy", *SCHEDULE_WORKS), min(short, SNAPSHOTS_PER_UNIT)),
        "persist": max(short, math.ceil(1.3 * persist_s / iteration_s)),
    }
    return {"quiet": short, **{work: own.get(work, short) for work in works}}


def persist_fits(iteration_s: float, persist_s: float, settings: ProfileSettings) -> bool:
    """Whether two persists of the whole state fit the budget of the interference rounds."""
    return 2 * max(persist_s, iteration_s) <= settings.interference_s
