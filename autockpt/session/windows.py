"""Snapshots in the idle windows of an iteration: their gate, and their reports.

A profile of the same schedule gives the gate its windows before it has seen any.
"""

import time
from collections.abc import Callable, Iterable

from autockpt.executors.snapshot.device import DeviceCopier
from autockpt.executors.throttle.idle_windows import (
    UNKNOWN_BYTES_PER_S,
    IdleWindowThrottle,
    Move,
    WindowUse,
)
from autockpt.profiling.measure.window_hooks import StageGate
from autockpt.values import telemetry as t
from autockpt.values.plan import Schedule, Staging
from autockpt.values.profile import Profile

DRAWN_EVERY = 50
"""Every so many snapshots the windows and chunks of the iteration are sent to the report."""
DRAWN_CHUNKS = 200


class IdleWindows:
    """The gate that opens in this rank's windows; used on the training thread."""

    def __init__(self, rank: int, profile: Profile | None, say: Callable[[str], None]) -> None:
        self._rank, self._profile, self._say = rank, profile, say
        self._stages: StageGate | None = None
        self._snapshots = 0
        self._refusal_said = False

    def gate(
        self, schedule: Schedule, staging: Staging, device: DeviceCopier | None = None
    ) -> IdleWindowThrottle | None:
        """The gate of a snapshot under `schedule`, None where that does not ask for windows.

        It goes on listening as long as `staging` may ask for them; `device`: that copies the state.
        """
        if "windows" not in (staging.schedule, *staging.compare):
            self.close()
            return None
        if self._stages is None:
            self._open(staging, device)
        return self._gate if schedule == "windows" else None

    @property
    def _gate(self) -> IdleWindowThrottle | None:
        return None if self._stages is None else self._stages.gate

    def step_began(self) -> None:
        """An optimizer's step begins."""
        if self._stages is not None:
            self._stages.step_began()

    def boundary(self) -> None:
        """An optimizer's step ended."""
        if self._stages is not None:
            self._stages.boundary()

    def describe_use(self, use: WindowUse, generation: str, step: int) -> t.IdleWindowsUsed:
        """The event of a snapshot whose bytes have all passed."""
        gate = self._gate
        if gate is not None and gate.refused and not self._refusal_said:
            self._refusal_said = True
            self._say(gate.refused)
        drawn = self._snapshots % DRAWN_EVERY == 0 and not use.reason
        self._snapshots += not use.reason
        began_s, windows = (0.0, []) if gate is None else gate.iteration()
        return t.IdleWindowsUsed(
            at_s=time.monotonic(), rank=self._rank, generation=generation, step=step,
            window_bytes=use.passed["window"], overlap_bytes=use.passed["overlap"],
            fence_bytes=use.passed["fence"], chunk_bytes=use.chunk_bytes, held_s=use.blocked_s,
            reason=use.reason, refused=gate.refused if gate is not None else "",
            windows_s=_flat(windows, began_s) if drawn else "",
            moved_s=_flat(_spans(use, inside=True), began_s) if drawn else "",
            beside_s=_flat(_spans(use, inside=False), began_s) if drawn else "",
        )  # fmt: skip

    def close(self) -> None:
        """Takes the hooks off; everything passes."""
        if self._stages is not None:
            self._stages.close()
        self._stages = None

    def _open(self, staging: Staging, device: DeviceCopier | None) -> None:
        profile = self._profile
        name = "host_copy" if device is None else "device_to_host_pinned"
        link = None if profile is None else profile.link(name)
        self._stages = StageGate(
            bytes_per_s=UNKNOWN_BYTES_PER_S if link is None else link.bytes_per_s,
            margin=staging.window_margin, device=device,
        )  # fmt: skip
        if profile is not None:
            self._stages.hand_in(self._rank, profile.traces, profile.bubbles)


def _spans(use: WindowUse, *, inside: bool) -> list[tuple[float, float]]:
    moves: list[Move] = [m for m in use.moves if (m.how == "window") == inside]
    return [(move.began_s, move.ended_s) for move in moves[:DRAWN_CHUNKS]]


def _flat(spans: Iterable[tuple[float, float]], began_s: float) -> str:
    return " ".join(f"{max(0.0, at_s - began_s):.6f}" for span in spans for at_s in span)
