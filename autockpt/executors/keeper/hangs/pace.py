"""When has a rank of this node stood still for too long?

Pure: marks and times come in, a verdict goes out.  A rank marks every call of its model, every step
of an optimizer and every boundary, with its activity.  The gaps between its marks are learned for
each activity.  The job is stuck when no rank of the node has marked anything for longer than its
own kind of gap allows.  A rank that evaluates or saves while others wait for it is progress.

A rank that computes or moves data without marks has more time.  One that computes while others wait
is late after a minute: no look from outside tells a long computation from a loop that polls.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from autockpt.executors.keeper.hangs.activity import Activity

Doing = Literal["begins", "trains", "evaluates", "saves", "over"]
DOINGS: tuple[Doing, ...] = ("begins", "trains", "evaluates", "saves", "over")
"""By the number that stands on the board."""

FACTOR = 5.0
"""So many times the 99th percentile of its gaps a rank may stand still."""
LEAST_S = 7.0
BUSY_S = 300.0
"""The least patience while a process of the rank computes or moves data."""
LATE_S = 60.0
"""A rank that computes is late after so long, at least, where another one waits."""
UNKNOWN_S: Mapping[str, float] = {"begins": 1800.0, "trains": 60.0, "evaluates": 600.0}
"""Until `KNOWN_GAPS` gaps of the kind were seen: compilation and first batches take long."""
KNOWN_GAPS = 8
KEPT_GAPS = 512
BLINK_S = 3.0
"""A look this late means that the keeper itself stood still; it then ignores the time before."""

Marks = dict[int, tuple[int, int]]
"""Process and count of marks by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A rank's progress in the shared page."""

    pid: int
    count: int
    """Marks until now."""
    at_s: float
    """Time of the newest mark, CLOCK_MONOTONIC."""
    doing: Doing


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness:
    """The ranks of a node stand still."""

    since_s: float
    """Newest mark of any rank, CLOCK_MONOTONIC."""
    allowed_s: float
    """How long a gap may be, of the rank that stood still first."""
    learned: bool
    """From this training's own gaps."""
    is_late: bool = False
    """A rank computes while others wait for it: it may end by itself."""


@dataclass(slots=True)
class _Rank:
    mark: Mark
    gaps: dict[Doing, deque[float]] = field(default_factory=dict)
    longest_s: dict[Doing, float] = field(default_factory=dict)

    def heard(self, mark: Mark, blind_until_s: float) -> None:
        """A newer look at its marks; a gap without looks in it teaches nothing."""
        before = self.mark
        if mark.count != before.count and before.at_s >= blind_until_s:
            gap_s = mark.at_s - before.at_s
            allowed_s, learned = self.allowed_s(busy=False)
            if not learned or gap_s <= allowed_s:  # a hang that has ended is no usual gap
                self.gaps.setdefault(before.doing, deque(maxlen=KEPT_GAPS)).append(gap_s)
            self.longest_s[before.doing] = max(gap_s, self.longest_s.get(before.doing, 0.0))
        self.mark = mark

    def allowed_s(self, *, busy: bool) -> tuple[float, bool]:
        """(how long it may stand still now, whether that was learned)."""
        doing = self.mark.doing
        if doing in ("saves", "over"):
            return float("inf"), False
        gaps = self.gaps.get(doing, ())
        if len(gaps) < KNOWN_GAPS:
            return max(UNKNOWN_S[doing], BUSY_S if busy else 0.0), False
        usual_s = sorted(gaps)[max(0, -(-99 * len(gaps) // 100) - 1)]
        allowed_s = max(LEAST_S, FACTOR * usual_s, 2.0 * self.longest_s[doing])
        return max(allowed_s, BUSY_S if busy else 0.0), True


class Pace:
    """The gaps of the ranks of one node."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._looked_s: float | None = None
        self._since_s = 0.0
        """Nothing is known of before."""
        self._blind_until_s = 0.0
        """The end of the newest time without looks."""
        self._told: tuple[Marks, bool] | None = None
        """Marks at the newest answer of `look`, and whether a rank was only late."""

    def look(
        self, now_s: float, marks: Mapping[int, Mark], activities: Mapping[int, Activity]
    ) -> Stillness | None:
        """The ranks stand still: once, when that becomes so.  `activities`: by rank."""
        if self._looked_s is None or now_s - self._looked_s > BLINK_S:
            self._since_s = self._blind_until_s = now_s
        self._looked_s = now_s
        for rank in self._ranks.keys() - marks.keys():
            del self._ranks[rank]
        for rank, mark in marks.items():
            known = self._ranks.get(rank)
            if known is None or known.mark.pid != mark.pid:
                self._ranks[rank] = _Rank(mark)
                self._since_s = now_s  # a start: every rank waits for the others
            else:
                known.heard(mark, self._blind_until_s)
        still = self._still(now_s, activities)
        counts = {rank: (mark.pid, mark.count) for rank, mark in marks.items()}
        if still is None or self._told in ((counts, still.is_late), (counts, False)):
            return None
        self._told = counts, still.is_late
        return still

    def _still(self, now_s: float, activities: Mapping[int, Activity]) -> Stillness | None:
        """Whether the ranks stand still now, also after the first answer."""
        stuck: list[Stillness] = []
        late: list[Stillness] = []
        for rank, one in self._ranks.items():
            if one.mark.doing == "over":
                continue
            activity = activities.get(rank, "")
            since_s = max(one.mark.at_s, self._since_s)
            allowed_s, learned = one.allowed_s(busy=bool(activity))
            late_s = max(LATE_S, one.allowed_s(busy=False)[0])
            still = Stillness(since_s=since_s, allowed_s=allowed_s, learned=learned)
            if now_s - since_s > allowed_s:
                stuck.append(still)
            elif activity == "computes" and now_s - since_s > late_s:
                late.append(replace(still, allowed_s=late_s, is_late=True))
            else:
                return None
        found = late if late and stuck else stuck if not late else []
        return min(found, key=lambda still: still.since_s, default=None)
