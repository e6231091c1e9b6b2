"""Find the rank that hangs and its wait, from stacks and the states of processes.

Pure: texts come in.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autockpt.executors.keeper.hangs.activity import Activity
from autockpt.executors.keeper.hangs.pace import Stillness

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_WAITS = (
    "distributed_c10d.py", "torch/distributed/", "torch/nn/parallel/", "_engine_run_backward",
)  # fmt: skip
"""Frames of a rank that waits for others; gloo and NCCL are entered from there."""
SHOWN = 3
"""Places that the sentence names where every rank waits."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/autockpt/", "<frozen", "/lib/python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of Python."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """As a person would say it."""
        return f"{self.name} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank as it was found."""

    rank: int
    pid: int
    step: int
    marks: int
    doing: str
    still_s: float
    """Since its newest mark."""
    process: str
    """State of the process as the kernel says it: S (sleeping), T (stopped), D, R."""
    stacks: str
    activity: Activity = ""
    """The work of its processes, while it marks no progress."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Of the main thread, innermost first; it is the last that faulthandler writes."""
        found: list[Frame] = []
        for line in self.stacks.splitlines():
            if _THREAD.match(line):
                found = []
            frame = _FRAME.match(line)
            if frame is not None:
                found.append(Frame(file=frame["file"], line=int(frame["line"]), name=frame["name"]))
        return tuple(found)

    @property
    def is_stopped(self) -> bool:
        """By a signal or a debugger."""
        return self.process.startswith(("T", "t"))

    @property
    def waits_for_others(self) -> bool:
        """It stands in a collective, or in a backward that holds one."""
        return is_collective(self.frames)

    @property
    def place(self) -> str:
        """Where it stands, for a person."""
        if self.is_stopped:
            return "stopped by a signal"
        frames = self.frames
        own = next((f for f in frames if not any(part in f.file for part in _LIBRARIES)), None)
        if not frames:
            return "it does not answer"
        if own is None or own == frames[0]:
            return f"in {frames[0]}"
        return f"in {own}, within {frames[0].name}"


def is_collective(frames: Sequence[Frame]) -> bool:
    """Whether a thread with these frames, innermost first, stands in a collective."""
    return any(mark in f"{frame.file} {frame.name}" for frame in frames[:3] for mark in _WAITS)


def culprit(ranks: Mapping[int, RankState], *, alone: bool) -> int | None:
    """The rank that the others wait for; None: it is not among these, or unknown.

    `alone`: these are all ranks of the job.
    """
    stopped = [rank for rank, one in ranks.items() if one.is_stopped]
    if stopped:
        return min(stopped)
    elsewhere = [rank for rank, one in ranks.items() if not one.waits_for_others]
    if elsewhere and (len(elsewhere) < len(ranks) or alone):
        return min(elsewhere, key=lambda rank: (ranks[rank].step, ranks[rank].marks, rank))
    if not alone:
        return None
    fewest = min((one.step, one.marks) for one in ranks.values())
    behind = [rank for rank, one in ranks.items() if (one.step, one.marks) == fewest]
    return behind[0] if len(behind) < len(ranks) or len(ranks) == 1 else None


def sentence(
    ranks: Mapping[int, RankState], named: int | None, now_s: float, still: Stillness, where: str
) -> str:
    """One line for the terminal."""
    after = (
        f"no progress for {now_s - still.since_s:.0f} s "
        f"(a gap of {still.allowed_s:.0f} s was allowed)"
    )
    if named is None:
        first: dict[str, int] = {}
        for rank in sorted(ranks):
            first.setdefault(ranks[rank].place, rank)
        places = "; ".join(f"rank {rank} {place}" for place, rank in list(first.items())[:SHOWN])
        return f"{after}: every rank waits; {places}; evidence in {where}"
    one, others = ranks[named], len(ranks) - 1
    rest = f"; {others} other ranks wait for it" if others > 1 else ""
    rest = "; the other rank waits for it" if others == 1 else rest
    what = "late" if still.is_late else "stuck"
    computes = "it computes; " if one.activity == "computes" else ""
    return (
        f"rank {named} is {what} at step {one.step}: {one.place}; {computes}{after}{rest}; "
        f"evidence in {where}"
    )
