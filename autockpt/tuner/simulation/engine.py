"""Replays a history under a strategy: from failure to failure, everything in between closed form.

Exact here and first-order in `policies.waste`: several failures in one interval, failures during
recovery, partial intervals, checkpoints that were under way when the failure came.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autockpt.tuner.simulation.history import Failure, History
from autockpt.tuner.simulation.outcome import Outcome
from autockpt.tuner.simulation.strategy import Level, Strategy


def replay(strategy: Strategy, history: History) -> Outcome:
    """Return the outcome of `history.length_s` seconds under this strategy."""
    return _Replay(strategy, history).run()


@dataclass(slots=True)
class _Replay:
    strategy: Strategy
    history: History
    first: int = 0
    """Iteration that the job resumed from."""
    taken: int = 0
    """Checkpoints that it had begun before."""
    held: dict[str, int] = field(default_factory=dict)
    """Newest iteration that each place can restore, 0 being the beginning."""
    kept: int = 0
    """Iterations that count, without the rolled back ones."""
    partial_s: float = 0.0
    """Work of the iterations after the last checkpoint, at the end."""
    spent: dict[str, float] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    zero: int = 0
    """Number of the checkpoint that it resumed from."""
    before: tuple[tuple[Level, int], ...] = ()
    """Each level, and how many of the checkpoints up to then went there."""
    keeps_all: bool = False
    """A failure that takes no node takes no checkpoint."""

    def run(self) -> Outcome:
        self.spent = dict.fromkeys(("stall", "slow", "lost", "restart", "restore", "wait"), 0.0)
        self.came = {level.place: 0 for level in self.strategy.levels}
        self.came["start"] = 0
        self.keeps_all = len(self.strategy.serves(())) == len(self.strategy.levels)
        self._resume(0, 0)
        now_s, end_s = self._wait(0.0), self.history.length_s
        failures, i = self.history.failures, 0
        while now_s < end_s:
            if i == len(failures):
                self._train_on(end_s - now_s)
                break
            failure = failures[i]
            self._train(failure.at_s - now_s, failure)
            i, now_s = self._recover(i)
        return self._outcome()

    # --- training

    def _resume(self, first: int, taken: int) -> None:
        self.first, self.taken = first, taken
        self.zero = zero = self.strategy.calendar.number(first, 0)
        self.before = tuple((level, zero // level.every) for level in self.strategy.levels)

    def _begin_s(self, j: int) -> float:
        """Seconds from the resumption until checkpoint j begins."""
        steps = self.strategy.calendar.step(self.first, self.taken, j) - self.first
        last, cost_s = self.zero + (j - 1 if j else 0), 0.0
        for level, before in self.before:
            cost_s += (last // level.every - before) * level.exposed_s
        return steps * self.strategy.iteration_s + cost_s

    def _counts(self, j: int) -> list[tuple[int, Level]]:
        """How many of the checkpoints 1 .. j after the resumption go to each level."""
        last = self.zero + max(0, j)
        return [(last // level.every - before, level) for level, before in self.before]

    @property
    def _iteration_s(self) -> float:
        return self.strategy.iteration_s

    def _last(self, elapsed_s: float) -> int:
        """The newest checkpoint that has begun by then; 0: none.

        They come at nearly even times, so a few looks near the expected one find it.
        """
        high = self.strategy.calendar.guess(self.taken, elapsed_s / self._iteration_s) + 2
        low, ends_s, reach = 0, self._begin_s(high), 1
        middle = min(high - 1, int(high * elapsed_s / ends_s)) if ends_s > 0 else high - 1
        while high - low > 1:
            middle = min(max(middle, low + 1), high - 1)
            if self._begin_s(middle) <= elapsed_s:
                low, middle = middle, middle + reach
            else:
                high, middle = middle, middle - reach
            reach *= 2
        return low

    def _newest(self, level: Level, last: int, elapsed_s: float) -> int:
        """The newest checkpoint that can be restored from this level by then; 0: none."""
        j = last - (self.zero + last) % level.every
        while j > 0 and self._begin_s(j) + level.latency_s > elapsed_s:
            j -= level.every
        return max(0, j)

    def _train(self, elapsed_s: float, failure: Failure) -> None:
        """Train until a failure, then fall back to the newest that a living level can restore."""
        last = self._last(elapsed_s)
        calendar = self.strategy.calendar
        for level in self.strategy.levels:
            newest = self._newest(level, last, elapsed_s)
            if newest:
                self.held[level.place] = calendar.step(self.first, self.taken, newest)
        self._lose(failure)
        back, source = self._best()
        taken = self._index_of(back, last)
        used_s = self._begin_s(taken) if taken else 0.0
        self._book(max(0, taken - 1))
        # Work before `first` that has to be done again as well makes `kept` negative.
        kept = back - self.first
        self.kept += kept
        self.spent["lost"] += elapsed_s - (used_s if kept >= 0 else kept * self._iteration_s)
        self._resume(back, self.taken + last)
        self._drain(source, back)

    def _lose(self, failure: Failure) -> None:
        """Remove the checkpoints of the dead levels."""
        held, nodes = self.held, failure.nodes
        if nodes:
            held.pop("memory", None)
        if "peer" in held and (nodes or not self.keeps_all) and not self._peers_keep(nodes):
            del held["peer"]

    def _peers_keep(self, nodes: Sequence[int]) -> bool:
        return any(level.place == "peer" for level in self.strategy.serves(nodes))

    def _best(self) -> tuple[int, Level | None]:
        """The newest iteration that can be restored, and from where; (0, None): from the start."""
        best, source = 0, None
        for level in self.strategy.levels:
            step = self.held.get(level.place, 0)
            if step > best:
                best, source = step, level
        return best, source

    def _index_of(self, step: int, last: int) -> int:
        """Which checkpoint after the resumption stands at this iteration; 0: an older one."""
        calendar = self.strategy.calendar
        if step <= self.first:
            return 0
        j = min(last, calendar.guess(self.taken, step - self.first))
        while calendar.step(self.first, self.taken, j) > step:
            j -= 1
        while calendar.step(self.first, self.taken, j) < step:
            j += 1
        return j

    def _drain(self, level: Level | None, back: int) -> None:
        """A living memory goes on writing: what came back from it reaches the slower places."""
        calendar = self.strategy.calendar
        if level is None or level.place == "disk":
            return
        number = calendar.number(back, 0)
        for slower in self.strategy.levels[self.strategy.levels.index(level) + 1 :]:
            newest = back - (number % slower.every) * (back // number if number else 0)
            self.held[slower.place] = max(self.held.get(slower.place, 0), newest)

    def _book(self, j: int) -> None:
        """The cost of the checkpoints 1 .. j."""
        for count, level in self._counts(j):
            self.spent["stall"] += count * level.stall_s
            self.spent["slow"] += count * level.slowdown_s

    def _train_on(self, elapsed_s: float) -> None:
        """Train until the end; completed iterations count, saved or not."""
        last = self._last(elapsed_s)
        rest_s = elapsed_s - (self._begin_s(last) if last else 0.0)
        self._book(max(0, last - 1))
        if last:
            costs = [
                (count - before, level)
                for (count, level), (before, _) in zip(
                    self._counts(last), self._counts(last - 1), strict=True
                )
            ]
            for count, level in costs:
                stall_s = min(rest_s, count * level.stall_s)
                slow_s = min(rest_s - stall_s, count * level.slowdown_s)
                self.spent["stall"] += stall_s
                self.spent["slow"] += slow_s
                rest_s -= stall_s + slow_s
        self.kept += self.strategy.calendar.step(self.first, self.taken, last) - self.first
        self.partial_s = rest_s

    # --- recovery

    def _wait(self, now_s: float) -> float:
        """When there are enough nodes again."""
        for start_s, end_s in self.history.outages:
            if start_s <= now_s < end_s:
                until_s = min(end_s, self.history.length_s)
                self.spent["wait"] += until_s - now_s
                return until_s
        return now_s

    def _recover(self, i: int) -> tuple[int, float]:
        """Wait for nodes, detect, restart, restore; a failure meanwhile starts all of it again.

        Returns the next failure and the time at which training goes on.
        """
        failures, end_s = self.history.failures, self.history.length_s
        while True:
            now_s = self._wait(failures[i].at_s)
            i = self._lose_until(i, now_s)
            back, level = self._best()
            if back < self.first:  # a further failure took what the first had left
                self.kept -= self.first - back
                self.spent["lost"] += (self.first - back) * self._iteration_s
                self._resume(back, self.taken)
            ready_s = now_s + (level or self.strategy.levels[-1]).restart_s
            done_s = ready_s + (level.restore_s if level is not None else 0.0)
            hit_s = failures[i].at_s if i < len(failures) else math.inf
            stop_s = min(hit_s, end_s, done_s)
            self.spent["restart"] += min(stop_s, ready_s) - now_s
            self.spent["restore"] += max(0.0, stop_s - ready_s)
            if hit_s >= min(end_s, done_s):
                self.came[level.place if level is not None else "start"] += 1
                return i, stop_s
            self.repeated += 1

    def _lose_until(self, i: int, now_s: float) -> int:
        """Failure i and those while the job waits take their levels; the next failure."""
        failures = self.history.failures
        self._lose(failures[i])
        i += 1
        while i < len(failures) and failures[i].at_s < now_s:
            self._lose(failures[i])
            i += 1
        return i

    def _outcome(self) -> Outcome:
        spent = self.spent
        return Outcome(
            wall_s=self.history.length_s,
            productive_s=self.kept * self._iteration_s + self.partial_s,
            stall_s=spent["stall"],
            slowdown_s=spent["slow"],
            lost_s=spent["lost"],
            restart_s=spent["restart"],
            restore_s=spent["restore"],
            waiting_s=spent["wait"],
            failures=len(self.history.failures),
            repeated=self.repeated,
            recoveries=self.came,
        )
