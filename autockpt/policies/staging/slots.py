"""How many images of the state the host keeps: for failures of processes and for writes under way.

An image keeps its slot until all ranks hold a newer one and it is durable.  So every checkpoint in
flight takes a slot beside the one that is being filled.
"""

from dataclasses import dataclass

from autockpt.policies.cost_model.costs import ranks_per_node
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import Choice
from autockpt.values.profile import Profile
from autockpt.values.units import format_bytes

HEADROOM = 0.8
"""Part of the available host memory for slots; the rest is page cache and data loading."""


LEAST_BYTES = 2**19
"""Of host memory that a rank's image streams through where none fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChoice:
    """Images of the state in host memory, and whether the memory tier fits."""

    slots: int
    memory_on: bool
    choice: Choice


def choose_slots(profile: Profile, goal: Goal) -> SlotChoice:
    """Three slots for memory and disk, two where only they fit, one and disk alone after that.

    Three: the last sealed image, the one being persisted and the one being filled; several in
    flight take one each.  With two, a snapshot waits for the persist before it.  With one there is
    no sealed image while the next is copied, so the memory tier is off and failures are served from
    disk.  Where not one fits, images stream to storage through less memory, one at a time.
    Raises ConfigError if pins ask for more than fits, or not even that does.
    """
    ranks = ranks_per_node(profile)
    each = slot_bytes(profile) * ranks
    room, room_name = host_room_bytes(profile, goal)
    fit = room // each
    wanted = goal.pins.slots or slots_for(goal.pins)
    slots = max(1, min(wanted, fit))
    if goal.pins.slots is not None and fit < wanted:
        raise ConfigError(_too_little(wanted, each, room, room_name))
    if room < min(each, ranks * LEAST_BYTES):
        raise ConfigError(
            f"a checkpoint needs {ranks * LEAST_BYTES} bytes of host memory on a node to stream "
            f"through, and {room_name} leaves {room}; give it {ranks * LEAST_BYTES - room} more"
        )
    _check_in_flight(goal.pins, slots, each, room, room_name)
    memory_on = slots >= 2 and goal.pins.memory_enabled is not False
    pinned = goal.pins.memory_interval_steps or goal.pins.memory_interval_s
    asked = "memory.interval" if pinned else "memory.enabled: true"
    if (pinned or goal.pins.memory_enabled) and not memory_on:
        raise ConfigError(_too_little(2, each, room, room_name, what=asked))
    numbers = {"slot_bytes_per_node": float(each), "room_bytes": float(room)}
    return SlotChoice(
        slots=slots,
        memory_on=memory_on,
        choice=Choice(
            name="slots",
            chosen=str(slots) + ("" if memory_on else ", memory tier off"),
            reason=_slot_reason(slots, fit, each, room, room_name, memory_on=memory_on),
            numbers=numbers,
            runner_up=str(slots - 1) if slots > 1 else "2",
            binding=_slot_binding(goal, slots, wanted, room_name),
        ),
    )


def slots_for(pins: Pins) -> int:
    """One image per checkpoint in flight, one being filled, and the sealed one of the memory tier.

    With the memory tier off and nothing said about checkpoints in flight, one image has to do.
    """
    if pins.memory_enabled is False:
        return (pins.in_flight or 0) + 1
    return (pins.in_flight or 1) + 2


def slot_bytes(profile: Profile) -> int:
    """Bytes of one slot of one rank: the state, 4 KiB alignment per tensor, 1 MiB of header."""
    tensors = sum(group.tensors for group in profile.state.classes)
    return profile.state.total_bytes + 4096 * tensors + 2**20


def host_room_bytes(profile: Profile, goal: Goal) -> tuple[int, str]:
    """Host memory of the node that slots may take, and what limits it."""
    memory = profile.memory
    rooms = [(int(memory.host_available_bytes * HEADROOM), "available host memory")]
    if memory.cgroup_available_bytes is not None:
        rooms.append((int(memory.cgroup_available_bytes * HEADROOM), "the cgroup's limit"))
    if goal.limits.host_memory_bytes is not None:
        rooms.append((goal.limits.host_memory_bytes, "limits.host_memory"))
    return min(rooms)


# --- parts ----------------------------------------------------------------------------------------


def _too_little(slots: int, each: int, room: int, room_name: str, *, what: str = "") -> str:
    return (
        f"{what or f'{slots} slot(s)'} needs {slots} images of {format_bytes(each)} each = "
        f"{slots * each} bytes on a node, and {room_name} leaves {room} bytes; "
        f"nearest: {max(0, room // each)} slot(s), or limits.host_memory "
        f"{-(-slots * each // 2**20)} MiB with that much available"
    )


def _slot_reason(
    slots: int, fit: int, each: int, room: int, room_name: str, *, memory_on: bool
) -> str:
    if fit < 1:
        return (
            f"not one image of {format_bytes(each)} fits the {format_bytes(room)} that {room_name} "
            "leaves: it streams to storage through less memory, and the training waits for storage"
        )
    if slots == 1:
        uses = "one image, overwritten only after it is durable or given up"
    elif not memory_on:
        uses = f"{_count(slots - 1)} being persisted, one being filled"
    elif slots == 2:
        uses = "two images: a snapshot waits until the one before it is durable"
    else:
        uses = f"one sealed, {_count(slots - 2)} being persisted, one being filled"
    space = f"{format_bytes(slots * each)} of the {format_bytes(room)} that {room_name} leaves"
    if slots == 1 and fit < 2:
        uses += ", so no failure can be served from memory"
    return f"{slots} slot(s) take {space}: {uses}"


def _count(number: int) -> str:
    return "one" if number == 1 else str(number)


def _check_in_flight(pins: Pins, slots: int, each: int, room: int, room_name: str) -> None:
    """A checkpoint keeps its slot until it is durable.  Raises ConfigError if they do not go."""
    asked = pins.in_flight or 0
    if asked <= slots:
        return
    if pins.slots is not None:
        raise ConfigError(
            f"staging.in_flight {asked} needs {asked} slots, and memory.slots is {pins.slots}; "
            f"nearest: memory.slots {asked} or staging.in_flight {pins.slots}"
        )
    raise ConfigError(_too_little(asked, each, room, room_name, what=f"staging.in_flight {asked}"))


def _slot_binding(goal: Goal, slots: int, wanted: int, room_name: str) -> str:
    if goal.pins.slots is not None:
        return "memory.slots"
    if slots < wanted:
        return room_name
    if goal.pins.in_flight is not None:
        return "staging.in_flight"
    return "memory.enabled" if goal.pins.memory_enabled is False else ""
