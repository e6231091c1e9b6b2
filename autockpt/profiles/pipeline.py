"""Where a pipeline idles, by a list scheduler: orders of chunks and their times -> gaps.

Each rank runs its chunks in its order, each as soon as its inputs are there:

        forward(stage s)   needs forward(s - 1), one transfer later if that is another rank
        backward(stage s)  needs backward(s + 1) likewise; on the last stage its own forward
        weights(stage s)   needs inputs(s)

Between two chunks a rank's host sends, receives and goes on, which takes time of its own and
overlaps with waiting.  The optimizer's step ends the iteration of a rank, and the next begins at
once: no rank waits for another between iterations.  So the gap at the end of one iteration
continues at the beginning of the next.  A steady iteration is read off after the first ones.

Times of a stage (`constant_work`) are the same in every iteration.  Measured ones are not.  A rank
that waits for the later of two waits longer than for the later of two medians.  So `replayed` takes
the measured times of every chunk of every iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.profiles.samples import TraceSample
from autockpt.values.errors import ConfigError
from autockpt.values.pipeline import Action, Order

Span = tuple[float, float]
"""(begin, end), seconds."""
_Done = dict[tuple[int, str, int, int], float]
"""(stage, kind, micro-batch, iteration) -> when it ended."""
STEADY_AFTER = 2
"""Iterations until the pipeline repeats itself: the first fills it, the second follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """Seconds of one stage's chunks."""

    forward_s: float
    backward_s: float
    inputs_s: float = 0.0
    """Backward for the inputs alone, where a schedule splits it."""
    weights_s: float = 0.0

    def of(self, action: Action) -> float:
        """Of one action."""
        return {
            "F": self.forward_s, "B": self.backward_s, "I": self.inputs_s, "W": self.weights_s
        }[action.kind]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Work of a rank in an iteration, without its waits; seconds."""

    chunks_s: tuple[float, ...]
    """Of each chunk, in its order."""
    between_s: tuple[float, ...]
    """Of its host before each chunk and before the optimizer's step; [chunks + 1]."""
    step_s: float
    """The optimizer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyGap:
    """A gap of one rank's repeating iteration."""

    after: int
    """Chunks of the iteration that ended before it; 0: it follows the optimizer's step."""
    offset_s: float
    """From the end of the optimizer's step."""
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyIteration:
    """An iteration that repeats itself."""

    iteration_s: float
    """From the end of one optimizer's step to that of the next."""
    gaps: tuple[tuple[SteadyGap, ...], ...]
    """Of each rank."""


def constant_work(
    orders: Sequence[Order], times: Sequence[ChunkTimes], *, step_s: float = 0.0
) -> list[RankWork]:
    """Every rank's work in an iteration, where chunks of a stage and kind always take the same.

    Raises ConfigError when an order names a stage without times.
    """
    named = {action.stage for order in orders for action in order}
    if not named or max(named) >= len(times):
        raise ConfigError(f"pipeline: {len(times)} stages with times, orders name {sorted(named)}")
    return [
        RankWork(
            chunks_s=tuple(times[action.stage].of(action) for action in order),
            between_s=(0.0,) * (len(order) + 1), step_s=step_s,
        )
        for order in orders
    ]  # fmt: skip


def replayed(
    orders: Sequence[Order], work: Sequence[Sequence[RankWork]], *, transfer_s: float = 0.0
) -> tuple[tuple[TraceSample, ...], ...]:
    """Iterations of `work[iteration][rank]` as each rank's probe would record them; [ranks].

    All ranks begin at once.  Raises ConfigError when an order waits for ever.
    """
    recorded = []
    for rank, (order, spans) in enumerate(
        zip(orders, _spans(orders, work, transfer_s), strict=True)
    ):
        traces, began_s = [], 0.0
        marks = tuple(str(action) for action in order)
        for trace, at in zip(work, range(0, len(spans), len(order)), strict=True):
            own = spans[at : at + len(order)]
            step_s = own[-1][1] + trace[rank].between_s[-1] - began_s
            traces.append(
                TraceSample(
                    marks=marks, spans=tuple((a - began_s, b - began_s) for a, b in own),
                    step_s=step_s, iteration_s=step_s + trace[rank].step_s,
                )
            )  # fmt: skip
            began_s += traces[-1].iteration_s
        recorded.append(tuple(traces))
    return tuple(recorded)


def _spans(
    orders: Sequence[Order], work: Sequence[Sequence[RankWork]], transfer_s: float
) -> list[list[Span]]:
    """When each rank computes, iteration after iteration."""
    owner = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    stages = 1 + max(owner)
    done: _Done = {}
    spans: list[list[Span]] = [[] for _ in orders]
    free_s, place = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order) * len(work):
                iteration, at = divmod(place[rank], len(order))
                ready_s = _ready(order[at], iteration, done, owner, stages, transfer_s)
                if ready_s is None:
                    break
                own = work[iteration][rank]
                begin_s = max(free_s[rank] + own.between_s[at], ready_s)
                end_s = begin_s + own.chunks_s[at]
                spans[rank].append((begin_s, end_s))
                done[order[at].stage, order[at].kind, order[at].microbatch, iteration] = end_s
                free_s[rank] = end_s
                place[rank], moved = place[rank] + 1, True
                if at + 1 == len(order):
                    free_s[rank] += own.between_s[-1] + own.step_s
    stuck = [f"rank {r} at {orders[r][n % len(orders[r])]}" for r, n in enumerate(place)
             if n < len(orders[r]) * len(work)]  # fmt: skip
    if stuck:
        raise ConfigError(f"pipeline: the orders wait for each other: {', '.join(stuck)}")
    return spans


def _ready(
    action: Action,
    iteration: int,
    done: _Done,
    owner: dict[int, int],
    stages: int,
    transfer_s: float,
) -> float | None:
    """When an action's input is there; None: not yet known."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind == "W":
        return done.get((stage, "I", microbatch, iteration))
    ahead = stage - 1 if kind == "F" else stage + 1
    if ahead < 0:
        return 0.0
    if ahead == stages:
        return done.get((stage, "F", microbatch, iteration))
    kinds = "F" if kind == "F" else "BI"
    ends = [done[key] for k in kinds if (key := (ahead, k, microbatch, iteration)) in done]
    if not ends:
        return None
    return ends[0] + (transfer_s if owner[ahead] != owner[stage] else 0.0)


def steady_iteration(
    orders: Sequence[Order],
    times: Sequence[ChunkTimes],
    *,
    transfer_s: float = 0.0,
    step_s: float = 0.0,
) -> SteadyIteration:
    """An iteration of `orders` (one a rank) with `times` (one a stage), once it repeats itself.

    Raises ConfigError as `constant_work` and `replayed` do.
    """
    work = [constant_work(orders, times, step_s=step_s)] * (STEADY_AFTER + 1)
    ranks = [traces[-1] for traces in replayed(orders, work, transfer_s=transfer_s)]
    return SteadyIteration(
        iteration_s=max(trace.iteration_s for trace in ranks),
        gaps=tuple(_gaps(trace) for trace in ranks),
    )


def _gaps(trace: TraceSample) -> tuple[SteadyGap, ...]:
    ends = [0.0, *(end for _, end in trace.spans)]
    gaps = [
        SteadyGap(after=n, offset_s=end, length_s=begin - end)
        for n, (end, (begin, _)) in enumerate(zip(ends, trace.spans, strict=False))
    ]
    return tuple(gap for gap in gaps if gap.length_s > 1e-9 * ends[-1])
