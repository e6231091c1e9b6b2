"""Snapshots in the idle windows of an iteration: stage hooks -> gate -> copy thread -> telemetry.

Hooks on torch's pipeline stages and the optimizer's step tell the gate where the iteration is; a
profile of the same schedule gives it the windows before it has seen any.
"""

import time
from collections.abc import Callable, Iterable

from autockpt.executors.window_gate import (
    UNKNOWN_BYTES_PER_S,
    Move,
    WindowGate,
    WindowUse,
)
from autockpt.profiles.probes.stages import StageHooks
from autockpt.values import telemetry as t
from autockpt.values.plan import Staging
from autockpt.values.profile import Profile

LONGEST_WAIT_S = 5.0
"""Of one chunk: longer than most iterations; the fence ends a wait anyway."""
DRAWN_EVERY = 50
"""Every so many snapshots the windows and chunks of the iteration are told, for the report."""
DRAWN_CHUNKS = 200


class IdleWindows:
    """The gate that opens in this rank's windows; used on the training thread."""

    def __init__(self, rank: int, profile: Profile | None, say: Callable[[str], None]) -> None:
        self._rank, self._profile, self._say = rank, profile, say
        self._gate: WindowGate | None = None
        self._hooks: StageHooks | None = None
        self._snapshots = 0
        self._refusal_said = False

    def gate(self, staging: Staging) -> WindowGate | None:
        """The gate of a snapshot under `staging`, None where it does not ask for windows."""
        if staging.schedule != "windows":
            self.close()
            return None
        if self._gate is None:
            self._open(staging)
        return self._gate

    def step_began(self) -> None:
        """An optimizer's step begins."""
        if self._gate is not None:
            self._gate.step_began()

    def boundary(self) -> None:
        """An optimizer's step ended."""
        if self._gate is not None:
            self._gate.boundary()
            if self._hooks is not None:
                self._hooks.attach()  # once the script has imported torch's pipelining

    def told(self, use: WindowUse, generation: str, step: int) -> t.WindowsUsed:
        """The event of a snapshot whose bytes have all passed."""
        gate = self._gate
        if gate is not None and gate.refused and not self._refusal_said:
            self._refusal_said = True
            self._say(gate.refused)
        drawn = self._snapshots % DRAWN_EVERY == 0 and not use.reason
        self._snapshots += not use.reason
        began_s, windows = (0.0, []) if gate is None else gate.lap()
        return t.WindowsUsed(
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
        if self._hooks is not None:
            self._hooks.detach()
        if self._gate is not None:
            self._gate.hurry()
        self._hooks = self._gate = None

    def _open(self, staging: Staging) -> None:
        profile = self._profile
        link = None if profile is None else profile.link("host_copy")
        self._gate = WindowGate(
            bytes_per_s=UNKNOWN_BYTES_PER_S if link is None else link.bytes_per_s,
            margin=staging.window_margin, longest_wait_s=LONGEST_WAIT_S,
        )  # fmt: skip
        self._hooks = StageHooks(self._gate)
        self._hooks.attach()
        laps = [] if profile is None else [x for x in profile.laps if x.rank == self._rank]
        if profile is not None and laps and laps[0].schedule:
            lengths_s = {
                b.after: b.length_s.p10
                for b in profile.bubbles
                if b.rank == self._rank and b.after >= 0
            }
            self._gate.hand_in(lengths_s, laps[0].fingerprint)


def _spans(use: WindowUse, *, inside: bool) -> list[tuple[float, float]]:
    moves: list[Move] = [m for m in use.moves if (m.how == "window") == inside]
    return [(move.began_s, move.ended_s) for move in moves[:DRAWN_CHUNKS]]


def _flat(spans: Iterable[tuple[float, float]], began_s: float) -> str:
    return " ".join(f"{max(0.0, at_s - began_s):.6f}" for span in spans for at_s in span)
