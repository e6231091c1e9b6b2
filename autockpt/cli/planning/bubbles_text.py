"""The request of `autockpt bubbles`, the list scheduler's result, and the table."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from autockpt.cli.shared.plan_choice import read_profile
from autockpt.cli.shared.quantities import Options, duration, flag, positive
from autockpt.policies.cost_model.costs import copy_link
from autockpt.policies.staging.idle_windows import iterations_needed, room_bytes
from autockpt.profiles.pipeline import ChunkTimes, SteadyGap, steady_iteration
from autockpt.profiles.windows import SHORTEST_S, chunk_times
from autockpt.values.errors import ConfigError, OptionError
from autockpt.values.pipeline import Order
from autockpt.values.profile import Profile
from autockpt.values.record import to_data
from autockpt.values.units import (
    format_bytes,
    format_duration,
    format_fraction,
    format_rate,
    parse_duration_s,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)

SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip
MEASURED = ("forward", "backward", "state", "copy")
"""Options that say what a profile has measured."""
KINDS = "FBIW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A pipeline and a checkpoint of one of its ranks."""

    schedules: tuple[str, ...]
    """That were asked for; none: all that these numbers allow."""
    ranks: int
    microbatches: int
    stages_per_rank: int
    stages: tuple[ChunkTimes, ...]
    """As known; another number of them shares their work evenly."""
    transfer_s: float
    step_s: float
    state_bytes: int
    bytes_per_s: float
    alpha_s: float

    def times(self, stages: int) -> tuple[ChunkTimes, ...]:
        """Of a pipeline of so many stages."""
        if stages == len(self.stages):
            return self.stages
        return (_shared(self.stages, stages),) * stages


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """Room that one schedule leaves for checkpoints."""

    schedule: str
    iteration_s: float
    rank: int
    """The one with the least room; the figures below are its."""
    idle_s: float
    """Of an iteration, in all gaps."""
    windows: tuple[SteadyGap, ...]
    """Gaps that are long enough to be used."""
    room_bytes: int
    iterations: int
    """That a whole checkpoint needs; 0: no number of them would do."""


def asked(options: Options) -> Asked:
    """The options, read.  Raises ConfigError for wrong or contradictory options."""
    if options["profile"] is not None:
        return _of_profile(options, read_profile(options["profile"]))
    ranks = options["ranks"] or 4
    forward_s = positive(options, "forward", parse_duration_s, 10e-3)
    backward_s = positive(options, "backward", parse_duration_s, 2 * forward_s)
    own = ChunkTimes(
        forward_s=forward_s, backward_s=backward_s, inputs_s=backward_s / 2,
        weights_s=backward_s / 2,
    )  # fmt: skip
    return Asked(
        stages=(own,) * ranks,
        state_bytes=int(positive(options, "state", parse_size_bytes, 3e9)),
        bytes_per_s=positive(options, "copy", parse_rate_bytes_per_s, 20e9),
        alpha_s=0.0,
        **_shape(options, ranks, 2 * ranks, 2),
    )


def compared(asked: Asked) -> tuple[list[ScheduleRow], list[str]]:
    """Each schedule laid out, and why others were left out.

    Raises ConfigError when one was asked for by name and these numbers do not allow it.
    """
    from autockpt.profiles.probes.windows.pipeline_orders import planned_orders

    rows, refused = [], []
    for name in asked.schedules or SCHEDULES:
        try:
            orders = planned_orders(
                name, asked.ranks, asked.microbatches, stages_per_rank=asked.stages_per_rank
            )
        except ConfigError as error:
            if asked.schedules:
                raise OptionError(f"--schedule {name}: {error}") from None
            refused.append(str(error))
            continue
        rows.append(_row(asked, name, orders))
    return rows, refused


def as_object(asked: Asked, rows: Sequence[ScheduleRow], refused: Sequence[str]) -> dict[str, Any]:
    """The same for --json."""
    return {"asked": to_data(asked), "schedules": to_data(list(rows)), "left_out": list(refused)}


def columns(rows: Sequence[ScheduleRow]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells."""
    headers = ["schedule", "iteration", "idle", "windows", "in them", "longest", "takes",
               "a checkpoint"]  # fmt: skip
    return headers, [_cells(row) for row in rows]


def legend(asked: Asked) -> list[str]:
    """Describe the simulated layout, in lines."""
    work = _shared(asked.stages, asked.ranks)
    return [
        "",
        f"{asked.ranks} ranks, {asked.microbatches} micro-batches; of a rank and a micro-batch: "
        f"forward {format_duration(work.forward_s)}, backward {format_duration(work.backward_s)}; "
        f"message {format_duration(asked.transfer_s)}, step {format_duration(asked.step_s)}",
        f"a checkpoint: {format_bytes(asked.state_bytes)} of a rank at "
        f"{format_rate(asked.bytes_per_s)}; windows are gaps of {format_duration(SHORTEST_S)} and "
        "more on the rank with the least room",
    ]


def _of_profile(options: Options, profile: Profile) -> Asked:
    for name in MEASURED:
        if options[name] is not None:
            raise OptionError(f"--profile and {flag(name)} contradict each other; drop one")
    traces = [trace for trace in profile.traces if trace.schedule]
    link = copy_link(profile)
    if not traces or link is None:
        raise ConfigError(
            f"{options['profile']}: this job ran no pipeline of torch.distributed.pipelining, so "
            "it has no chunks to lay out; say --forward, --state and --copy instead"
        )
    chunks = chunk_times(traces)
    count = 1 + max(int(name[:-1]) for name in chunks)
    own = max(1, len({name[:-1] for name in traces[0].chunk_s}))
    forward = next(d for name, d in traces[0].chunk_s.items() if name.endswith("F"))
    return Asked(
        stages=tuple(_stage(chunks, stage) for stage in range(count)),
        state_bytes=profile.state.total_bytes,
        bytes_per_s=link.bytes_per_s,
        alpha_s=link.alpha_s,
        **_shape(options, count // own, max(1, forward.n // traces[0].iteration_s.n), max(2, own)),
    )


def _shape(options: Options, ranks: int, microbatches: int, stages_per_rank: int) -> dict[str, Any]:
    ranks = options["ranks"] or ranks
    return {
        "schedules": tuple(dict.fromkeys(options["schedules"])),
        "ranks": ranks,
        "microbatches": options["microbatches"] or microbatches,
        "stages_per_rank": options["stages_per_rank"] or stages_per_rank,
        "transfer_s": duration(options, "transfer", 0.0),
        "step_s": duration(options, "step", 0.0),
    }


def _stage(chunks: dict[str, float], stage: int) -> ChunkTimes:
    """A backward that was measured whole is split in halves, and the other way round."""
    forward, backward, inputs, weights = (chunks.get(f"{stage}{kind}", 0.0) for kind in KINDS)
    backward = backward or inputs + weights
    split = inputs and weights
    return ChunkTimes(
        forward_s=forward,
        backward_s=backward,
        inputs_s=inputs if split else backward / 2,
        weights_s=weights if split else backward / 2,
    )


def _shared(stages: Sequence[ChunkTimes], parts: int) -> ChunkTimes:
    """The work of all stages, divided evenly."""
    return ChunkTimes(
        **{
            field.name: sum(getattr(stage, field.name) for stage in stages) / parts
            for field in fields(ChunkTimes)
        }
    )


def _row(asked: Asked, name: str, orders: Sequence[Order]) -> ScheduleRow:
    stages = 1 + max(action.stage for order in orders for action in order)
    steady = steady_iteration(
        orders, asked.times(stages), transfer_s=asked.transfer_s, step_s=asked.step_s
    )
    used = [tuple(gap for gap in own if gap.length_s >= SHORTEST_S) for own in steady.gaps]
    rooms = [
        room_bytes((gap.length_s for gap in own), asked.bytes_per_s, alpha_s=asked.alpha_s)
        for own in used
    ]
    rank = rooms.index(min(rooms))
    return ScheduleRow(
        schedule=name,
        iteration_s=steady.iteration_s,
        rank=rank,
        idle_s=sum(gap.length_s for gap in steady.gaps[rank]),
        windows=used[rank],
        room_bytes=rooms[rank],
        iterations=iterations_needed(asked.state_bytes, rooms[rank]),
    )


def _cells(row: ScheduleRow) -> list[str]:
    lengths_s = [gap.length_s for gap in row.windows]
    needed = f"{row.iterations} iteration{'s' if row.iterations > 1 else ''}"
    return [
        row.schedule,
        format_duration(row.iteration_s),
        format_fraction(row.idle_s / row.iteration_s),
        str(len(row.windows)),
        format_duration(sum(lengths_s)),
        format_duration(max(lengths_s, default=0.0)),
        format_bytes(row.room_bytes),
        needed if row.iterations else "beside the compute",
    ]
