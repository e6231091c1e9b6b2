"""Does a survivor go on in its own process, or in a new one?  Pure; the launcher asks and acts.

Every survivor is judged alone.  A survivor that cannot go on has a new process, and all ranks meet
in the same rendezvous.
"""

from dataclasses import dataclass

NEW_PROCESS = "AUTOCKPT_NEW_PROCESS"
"""Variable in which a rank that has survived reads why it has a new process."""
MOST_RESTARTS = 10
"""Restarts within one process.  A library may leak memory with each; a new process has none."""
UNWIND_S = 10.0
"""Seconds that a survivor has to leave its function and to release what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A rank of this node that lives while another one has died."""

    rank: int
    """Local rank."""
    is_restartable: bool
    """A function of `autockpt.restartable` is under way in it."""
    restarts: int = 0
    """Restarts within its process so far."""
    unfit: str = ""
    """The exception by which a call that was not the first in its process has failed, on any rank
    of this launch."""
    answer: str | None = None
    """"": it has left its function and holds nothing; else the reason why it cannot; None: it has
    not answered."""
    place: str = ""
    """Where its function stands, if it has not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The process in which a survivor goes on."""

    in_process: bool
    """It is the same process."""
    reason: str
    """Why it is another one; "": it is not, or the script has not asked for it."""


def obstacle(survivor: Survivor) -> str | None:
    """The reason not even to ask it; "" where the script asks for no such restart; None: ask."""
    if not survivor.is_restartable:
        return ""
    if survivor.unfit:
        return f"a call in the same process has failed ({survivor.unfit})"
    if survivor.restarts >= MOST_RESTARTS:
        return f"its process was restarted {survivor.restarts} times"
    return None


def judge(survivor: Survivor) -> Verdict:
    """What becomes of a survivor, after its answer or the time for it."""
    reason = obstacle(survivor)
    if reason is None:
        place = f": {survivor.place}" if survivor.place else ""
        late = f"its function did not end within {UNWIND_S:.0f} s{place}"
        reason = late if survivor.answer is None else survivor.answer
        return Verdict(in_process=not reason, reason=reason)
    return Verdict(in_process=False, reason=reason)
