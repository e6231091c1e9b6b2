"""Whether the idle windows of an iteration take a checkpoint: bytes against gaps.

        usable_j = max(0, g_j - alpha)          of window j, its 10th percentile g_j
        room     = B * gamma * free * sum usable_j     bytes of one iteration
        k        = ceil(S / room)               iterations that one checkpoint of S bytes needs

gamma = 1 / (1 + margin), free = 1 - what training itself sends over a GPU's bus, where counted (1
else).  The rank with the least room decides: the slowest checkpoint counts.
Source: Gemini (SOSP'23) for the partition model and k; BAFT (2025) for the windows of a pipeline.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autockpt.values.profile import LinkMeasure, Profile
from autockpt.values.units import format_bytes, format_duration

WORTH = 0.1
"""Windows that take less than this fraction of a checkpoint in one iteration are not used."""
MARGINS = (0.1, 0.5)
"""Least and greatest margin; between them twice the scatter of the copy."""
UNSTEADY = 0.5
"""Windows whose p10 is below this fraction of their median are reported as unsteady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFit:
    """Bytes that the windows of the worst rank take."""

    rank: int
    windows: int
    idle_s: float
    """Of an iteration, in windows: the sum of their 10th percentiles."""
    room_bytes: int
    share: float
    """Fraction of a checkpoint that one iteration's windows take, 0..1."""
    iterations: int
    """That a whole checkpoint needs at this rate; 0: no number of them would do."""
    margin: float
    sentence: str

    @property
    def numbers(self) -> dict[str, float]:
        """For the decision."""
        return {
            "window_idle_s": self.idle_s,
            "window_room_bytes": float(self.room_bytes),
            "window_share": self.share,
            "window_iterations": float(self.iterations),
            "window_margin": self.margin,
        }


def fit_windows(profile: Profile, link: LinkMeasure | None) -> WindowFit | None:
    """How a checkpoint over `link` fits the gaps between chunks.

    None where none were measured.
    """
    ranks = sorted({trace.rank for trace in profile.traces if trace.schedule})
    if not ranks or link is None:
        return None
    margin = min(max(MARGINS[0], 2 * link.relative_spread), MARGINS[1])
    fits = [_fit(profile, rank, link, margin) for rank in ranks]
    return min(fits, key=lambda fit: fit.room_bytes)


def room_bytes(
    gaps_s: Iterable[float], bytes_per_s: float, *, alpha_s: float = 0.0, margin: float = MARGINS[0]
) -> int:
    """Bytes that a copy moves in the gaps of one iteration, `alpha_s` of each lost to its start."""
    return int(bytes_per_s * sum(max(0.0, gap - alpha_s) for gap in gaps_s) / (1 + margin))


def iterations_needed(state_bytes: int, room: int) -> int:
    """That a checkpoint takes with so much room in each; 0: no number of them would do."""
    return math.ceil(state_bytes / room) if room else 0


def _fit(profile: Profile, rank: int, link: LinkMeasure, margin: float) -> WindowFit:
    gaps = [b for b in profile.bubbles if b.rank == rank and b.what == "device"]
    lengths_s = [gap.length_s.p10 for gap in gaps]
    taken = (profile.used("pcie") or 0.0) if profile.fingerprint.gpus else 0.0
    free = link.bytes_per_s * (1 - taken)
    room = room_bytes(lengths_s, free, alpha_s=link.alpha_s, margin=margin)
    state = profile.state.total_bytes
    share = min(1.0, room / state) if state else 1.0
    needed, idle_s = iterations_needed(state, room), sum(lengths_s)
    moving = sum(gap.stability < UNSTEADY for gap in gaps)
    return WindowFit(
        rank=rank,
        windows=len(gaps),
        idle_s=idle_s,
        room_bytes=room,
        share=share,
        iterations=needed,
        margin=margin,
        sentence=(
            f"the {len(gaps)} windows of rank {rank} ({format_duration(idle_s)} of an iteration of "
            f"{format_duration(profile.iteration_s.p50)}) take {format_bytes(room)} of "
            f"{format_bytes(state)} with a margin of {margin:.0%}"
            + (f" and {taken:.0%} of the bus in use: " if taken else ": ") + _verdict(share, needed)
            + (f"; {moving} of them move by more than half" if moving else "")
        ),
    )  # fmt: skip


def _verdict(share: float, needed: int) -> str:
    if not needed:
        return "none, it is copied beside the compute"
    if needed == 1:
        return "a whole checkpoint in every iteration"
    if share < WORTH:
        return f"too little, it would take {needed} iterations"
    return f"the rest is copied beside the compute, or it takes {needed} iterations"
