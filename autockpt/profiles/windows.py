"""Recorded iterations -> the windows in which a rank idles, and their place in the iteration."""

from collections import Counter
from collections.abc import Sequence

from autockpt.profiles.estimators import distribution
from autockpt.profiles.samples import TraceSample
from autockpt.values.errors import ConfigError
from autockpt.values.pipeline import order_digest
from autockpt.values.profile import Bubble, Distribution, IterationTrace, Profile

SHORTEST_S = 200e-6
"""A gap below this (p50) takes no chunk worth its start."""
STRAGGLER = 1.5
"""Factor over the other chunks' time from which the chunks of a stage are reported as slow."""
OVERHEAD_LIMIT = 0.01
"""Beyond this fraction of an iteration the probe disturbs what it measures."""


def usual(samples: Sequence[TraceSample]) -> list[TraceSample]:
    """The iterations with the most frequent order."""
    if not samples:
        raise ConfigError("windows: no whole iteration was recorded; give the script more steps")
    marks, _ = Counter(sample.marks for sample in samples).most_common(1)[0]
    return [sample for sample in samples if sample.marks == marks]


def trace(samples: Sequence[TraceSample], *, rank: int, schedule: str = "") -> IterationTrace:
    """Return the common parts of the iterations.  Raises ConfigError without samples."""
    kept = usual(samples)
    chunks: dict[str, list[float]] = {}
    for sample in kept:
        for what, (begin_s, end_s) in zip(sample.marks, sample.spans, strict=True):
            chunks.setdefault(_kind(what), []).append(end_s - begin_s)
    total_s = sum(sample.iteration_s for sample in kept)
    return IterationTrace(
        rank=rank,
        schedule=schedule,
        fingerprint=order_digest(kept[0].marks),
        iteration_s=distribution(sample.iteration_s for sample in kept),
        chunk_s={kind: distribution(values) for kind, values in sorted(chunks.items())},
        odd=len(samples) - len(kept),
        overhead=sum(s.probe_s for s in kept) / total_s if total_s > 0 else 0.0,
    )


def device_bubbles(samples: Sequence[TraceSample], *, rank: int) -> tuple[Bubble, ...]:
    """Gaps between the chunks of a pipeline, from the boundary to the optimizer's step."""
    kept = [s for s in usual(samples) if s.marks]
    if not kept:
        return ()
    gaps = []
    for after in range(len(kept[0].marks) + 1):
        begins = [s.spans[after - 1][1] if after else 0.0 for s in kept]
        ends = [s.spans[after][0] if after < len(s.spans) else s.step_s for s in kept]
        length = distribution(max(0.0, e - b) for b, e in zip(begins, ends, strict=True))
        if length.p50 >= SHORTEST_S:
            gaps.append(
                Bubble(rank=rank, offset_s=distribution(begins), length_s=length, after=after)
            )
    return tuple(gaps)


def network_bubbles(samples: Sequence[TraceSample], *, rank: int) -> tuple[Bubble, ...]:
    """Stretches of an iteration between collectives, which may overlap each other."""
    kept = [s for s in usual(samples) if s.marks]
    found: dict[int, list[tuple[float, float]]] = {}
    for sample in kept:
        busy_until_s, after = 0.0, 0
        ends = [*sorted(sample.spans), (sample.iteration_s, sample.iteration_s)]
        for number, (begin_s, end_s) in enumerate(ends):
            if begin_s - busy_until_s > 0.0:
                found.setdefault(after, []).append((busy_until_s, begin_s - busy_until_s))
            if end_s >= busy_until_s:
                busy_until_s, after = end_s, number + 1
    windows = []
    for gaps in found.values():
        length = distribution([g[1] for g in gaps] + [0.0] * (len(kept) - len(gaps)))
        if length.p50 >= SHORTEST_S:
            offset = distribution(g[0] for g in gaps)
            windows.append(Bubble(rank=rank, offset_s=offset, length_s=length, what="network"))
    return tuple(sorted(windows, key=lambda bubble: bubble.offset_s.p50))


def wait_bubble(wait_s: Distribution | None, *, rank: int) -> tuple[Bubble, ...]:
    """The wait for data, at the begin of an iteration: device and network idle."""
    if wait_s is None or wait_s.p50 < SHORTEST_S:
        return ()
    nothing = distribution([0.0])
    return (Bubble(rank=rank, offset_s=nothing, length_s=wait_s, what="data_wait"),)


def window_warnings(profile: Profile) -> list[str]:
    """A sentence for each rank whose windows should be trusted less."""
    said = [
        f"windows of rank {trace.rank}: the probe took {trace.overhead:.1%} of an iteration, more "
        f"than {OVERHEAD_LIMIT:.0%}: gaps may be its own"
        for trace in profile.traces
        if trace.overhead > OVERHEAD_LIMIT
    ]
    return said + stragglers(profile.traces)


def stragglers(traces: Sequence[IterationTrace]) -> list[str]:
    """Return stages whose chunks take longer than the others': gaps elsewhere wait for them."""
    said = []
    chunks = chunk_times([trace for trace in traces if trace.schedule])
    for kind in "FBIW":
        times = {name: s for name, s in chunks.items() if name.endswith(kind) and s > 0}
        usual_s = sorted(times.values())[len(times) // 2] if times else 0.0
        said += [
            f"stage {name[:-1]}: its {kind} chunks take {s / usual_s:.1f} times the usual time; "
            "the gaps of other ranks wait for it, and follow it when it is balanced"
            for name, s in times.items()
            if len(times) > 2 and s > STRAGGLER * usual_s
        ]
    return said


def chunk_times(traces: Sequence[IterationTrace]) -> dict[str, float]:
    """Median seconds of each stage's chunks (0F, 0B, ...) over all ranks."""
    return {kind: d.p50 for trace in traces for kind, d in trace.chunk_s.items()}


def _kind(what: str) -> str:
    """0F3 -> 0F: chunks of one stage and kind take the same time; other names stay."""
    bare = what.rstrip("0123456789")
    return bare if bare and bare[:-1].isdigit() else what
