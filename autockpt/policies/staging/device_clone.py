"""Whether a snapshot is cloned in device memory before it travels to the host.

The clone frees the live state at the speed of the device's own memory, so the optimizer's step need
not wait for the link.  It takes the state's size in device memory, and where forward and backward
hide the whole copy it gains nothing.

Source: CheckFreq (FAST 2021): on the device if m < M_max - M and the copy to the host is exposed.
"""

from dataclasses import dataclass, field
from typing import Literal

from autockpt.policies.cost_model.costs import copy_link, link_time_s
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.profile import Profile
from autockpt.values.units import format_bytes, format_duration

DEVICE_HEADROOM = 0.8
"""Part of the free device memory that a clone may take: the training's own peaks come on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneChoice:
    """The plan's value and the reason; no reason without a device."""

    chosen: Literal["auto", "on", "off"]
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    binding: str = ""


def choose_device_clone(profile: Profile, goal: Goal) -> CloneChoice:
    """On where the clone fits and the copy to the host is not hidden by forward and backward.

    Raises ConfigError if a clone is pinned and does not fit.
    """
    pin, free = goal.pins.device_clone, profile.memory.device_available_bytes
    if pin is not None:
        return _pinned(profile, pin, free)
    if not profile.fingerprint.gpus:
        return CloneChoice(chosen="off")
    if free is None:
        return CloneChoice(
            chosen="auto",
            reason="free device memory was not measured, so each snapshot looks at it for a clone",
        )
    return _measured(profile, free)


def exposed_copy_s(profile: Profile) -> float:
    """Part of the copy to the host that forward and backward do not hide; 0 if not measured."""
    link = copy_link(profile)
    copy_s = link_time_s(link, profile.state.total_bytes) if link is not None else 0.0
    phases = (profile.phases_s.get(name) for name in ("forward", "backward"))
    return max(0.0, copy_s - sum(phase.mean for phase in phases if phase is not None))


def _pinned(profile: Profile, pin: Literal["on", "off"], free: int | None) -> CloneChoice:
    if pin == "on" and profile.fingerprint.gpus and free is not None and not _fits(profile, free):
        raise ConfigError(
            f"staging.device_clone on needs {profile.state.total_bytes} bytes of device memory, "
            f"and {int(free * DEVICE_HEADROOM)} bytes ({DEVICE_HEADROOM:.0%} of free memory) may "
            "be taken; nearest: staging.device_clone: off"
        )
    if not profile.fingerprint.gpus:
        reason = "there is no device, so the pinned clone changes nothing" if pin == "on" else ""
        return CloneChoice(chosen=pin, reason=reason)
    return CloneChoice(
        chosen=pin,
        reason=f"a device clone is pinned {pin} by staging.device_clone",
        binding="staging.device_clone",
    )


def _measured(profile: Profile, free: int) -> CloneChoice:
    fits, exposed_s = _fits(profile, free), exposed_copy_s(profile)
    state = format_bytes(profile.state.total_bytes)
    space = f"a device clone of {state} {'fits' if fits else 'does not fit'} into"
    gain = (
        f"would free the state {format_duration(exposed_s)} before the copy to the host"
        if exposed_s
        else "gains nothing, because forward and backward hide the copy to the host"
    )
    return CloneChoice(
        chosen="on" if fits and exposed_s else "off",
        reason=f"{space} {DEVICE_HEADROOM:.0%} of the free {format_bytes(free)}, and {gain}",
        numbers={"device_free_bytes": float(free), "exposed_copy_s": exposed_s},
    )


def _fits(profile: Profile, free: int) -> bool:
    return profile.state.total_bytes <= free * DEVICE_HEADROOM
