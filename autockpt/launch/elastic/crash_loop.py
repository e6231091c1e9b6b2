"""Whether a failed job is worth another start: pure, decided from the last attempt.

A machine that dies comes back; a bug comes back too.  The exception of the script tells them apart
(`values.script_errors`), and progress: a newer step or a newer committed generation than at the
failure before.
"""

import signal
from dataclasses import dataclass

from autockpt.values.generation import Generation

MAX_RESTARTS = 100
"""Starts after failures, unless the user says otherwise: many enough for weeks of preemptions."""
EXITS_WITHOUT_PROGRESS = 3
"""Failures in a row in which the script ended itself (an exception, an exit code)."""
KILLS_WITHOUT_PROGRESS = 10
"""Failures in a row by a signal: they come from outside, may hit between two checkpoints, and say
less about the next attempt."""
OWN_SIGNALS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
)
"""A process raises these in itself, as it does an exception; other processes do not send them."""
SAME_STEP_S = 300.0
"""Failures of the machine at one step go on over this time, or they end no job that commits newer
checkpoints.  A fault of minutes goes away."""
STARTUP_S = 300.0
"""A script that has not attached after this time will not: a restart would begin from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How one attempt ended."""

    signal: int
    """The signal that ended the rank that failed first; 0: it exited by itself."""
    final: bool
    """The script made a mistake, or decided to exit before it attached or behind its training: it
    would do so again."""
    attached: bool
    """Some attempt of this run has called autockpt.attach."""
    lasted_s: float
    step: int | None
    """Newest step known."""
    generation: Generation | None
    """Newest committed generation known."""
    over: bool = False
    """All training is over; it ended behind that."""
    error: str = ""
    """The exception that ended the rank that failed first, where it is one of the script and not of
    its surroundings; "": another, or none."""
    error_step: int | None = None
    """Newest step of that rank; None: it had not attached."""
    replaced: bool = False
    """A newer launch of this run took the directory over."""
    refused: bool = False
    """Another live run owns the directory; newer steps are then steps of its ranks."""


class CrashLoop:
    """Counts failures without progress."""

    def __init__(
        self,
        *,
        step: int | None = None,
        generation: Generation | None = None,
        insist: bool = False,
    ) -> None:
        self._step = step
        self._generation = generation
        self._insist = insist
        self._exits = 0
        self._kills = 0
        self._before: Attempt | None = None
        self._same_step_s = 0.0
        """Seconds that the starts since the first of the failures at one step have lasted."""
        self._is_nearer = False
        """One of them has committed a newer checkpoint."""
        self.stuck = False
        """The newest verdict ends a job that comes no further: its scheduler should know."""

    def verdict(self, attempt: Attempt) -> str | None:
        """None: start again.  Else why not, as a sentence."""
        self.stuck = False
        if attempt.replaced:
            return "a newer launch of this run has taken over"
        if attempt.refused:
            return "another live run owns the directory, and every other start is refused too"
        before, self._before = self._before, attempt
        reached = self._step
        progress = further = self._progress(attempt)
        if before is not None and _at_same_step(before, attempt):
            # A restart brings the checkpoints nearer to the step that the job does not pass.
            further = reached is None or (self._step is not None and self._step > reached)
            self._same_step_s += attempt.lasted_s
            self._is_nearer |= progress and not further
        else:
            self._same_step_s, self._is_nearer = 0.0, False
        if attempt.final and not (further and self._insist):
            end = "the training was over" if attempt.over else "the script would do so again"
            return f"{end}, so it is not started again"
        if before is not None and _same(before, attempt):
            self.stuck = True
            return "the same exception at the same step a second time"
        if further:
            self._exits = self._kills = 0
            return None
        if attempt.signal and attempt.signal not in OWN_SIGNALS:
            self._kills += 1
        else:
            self._exits += 1
        if not attempt.attached and not self._insist and attempt.lasted_s > STARTUP_S:
            return (
                "the script never called autockpt.attach, so a restart would begin from scratch; "
                "--max-restarts N restarts it all the same"
            )
        lasts = bool(attempt.error) or not self._is_nearer or self._same_step_s >= SAME_STEP_S
        exits = self._exits >= EXITS_WITHOUT_PROGRESS and lasts
        self.stuck = exits or self._kills >= KILLS_WITHOUT_PROGRESS
        if exits:
            step = attempt.step if attempt.error_step is None else attempt.error_step
            place = "the same place" if step is None else f"step {step}"
            return f"{self._exits} failures in a row at {place}, without any new step"
        if self._kills >= KILLS_WITHOUT_PROGRESS:
            return f"killed {self._kills} times in a row without any new step or checkpoint"
        return None

    def _progress(self, attempt: Attempt) -> bool:
        """Whether the attempt got further than any before it."""
        step, generation = attempt.step, attempt.generation
        further = step is not None and (self._step is None or step > self._step)
        newer = generation is not None and (
            self._generation is None or generation > self._generation
        )
        self._step = step if further else self._step
        self._generation = generation if newer else self._generation
        return further or newer


def _at_same_step(before: Attempt, now: Attempt) -> bool:
    """Whether a rank ended itself at one step twice, by an exception of any origin."""
    ends = [one.error_step for one in (before, now) if not one.signal]
    return len(ends) == 2 and ends[0] is not None and ends[0] == ends[1]


def _same(before: Attempt, now: Attempt) -> bool:
    """Whether an exception of the script came again where it came before."""
    told = before.error, before.error_step
    return bool(now.error) and told == (now.error, now.error_step)
