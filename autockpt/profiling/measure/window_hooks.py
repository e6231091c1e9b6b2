"""The gate of this rank's idle windows, and the hooks that tell it where the iteration is.

The hooks are on torch's pipeline stages and the optimizer's step.  On a device the gate gets the
time at which the device arrives there.  The session and the profile hold back their copies by the
same one.
"""

from collections.abc import Sequence

from autockpt.executors.snapshot.device import DeviceCopier
from autockpt.executors.snapshot.device_marks import DeviceMarks
from autockpt.executors.throttle.idle_windows import (
    CHUNKS,
    DEVICE_CHUNKS,
    MARGIN,
    UNKNOWN_BYTES_PER_S,
    IdleWindowThrottle,
)
from autockpt.profiles.probes.windows.pipeline_hooks import StageHooks
from autockpt.values.profile import Bubble, IterationTrace

LONGEST_WAIT_S = 5.0
"""Of one chunk: longer than most iterations; the fence ends a wait anyway."""


class StageGate:
    """A gate that receives stages and steps; used on the training thread."""

    def __init__(
        self,
        *,
        bytes_per_s: float = UNKNOWN_BYTES_PER_S,
        margin: float = MARGIN,
        device: DeviceCopier | None = None,
    ) -> None:
        """`bytes_per_s`: of the copy alone; `device`: that copies the state."""
        self._gate = IdleWindowThrottle(
            bytes_per_s=bytes_per_s, margin=margin, longest_wait_s=LONGEST_WAIT_S,
            chunks=CHUNKS if device is None else DEVICE_CHUNKS,
        )  # fmt: skip
        self._marks = self._gate if device is None else DeviceMarks(self._gate, device)
        self._hooks = StageHooks(self._marks)
        self._hooks.attach()

    @property
    def gate(self) -> IdleWindowThrottle | None:
        """The gate for the copy; None once the position of the device is not known any more."""
        lost = isinstance(self._marks, DeviceMarks) and self._marks.error is not None
        return None if lost else self._gate

    def hand_in(
        self, rank: int, traces: Sequence[IterationTrace], bubbles: Sequence[Bubble]
    ) -> None:
        """Hand in the profiled windows of `rank`, without the windows of collectives."""
        own = next((trace for trace in traces if trace.rank == rank and trace.schedule), None)
        if own is not None:
            gaps = [b for b in bubbles if b.rank == rank and b.after >= 0]
            self._gate.hand_in({b.after: b.length_s.p10 for b in gaps}, own.fingerprint)

    def step_began(self) -> None:
        """An optimizer's step begins."""
        self._marks.step_began()

    def boundary(self) -> None:
        """It ended."""
        self._marks.boundary()
        self._hooks.attach()  # once the script has imported torch's pipelining

    def close(self) -> None:
        """Takes the hooks off; everything passes."""
        self._hooks.detach()
        self._gate.hurry()
        if isinstance(self._marks, DeviceMarks):
            self._marks.close()
