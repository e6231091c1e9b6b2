"""Hooks on torch's own pipeline stages, and the traces and windows made of what they hear."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from autockpt.profiles.probes.windows.iteration_trace import TraceRecorder
from autockpt.profiles.probes.windows.pipeline_hooks import StageHooks
from autockpt.profiles.probes.windows.pipeline_orders import (
    orders_of,
    planned_orders,
    schedule_name,
)
from autockpt.profiles.samples import TraceSample
from autockpt.profiles.windows import (
    chunk_times,
    device_bubbles,
    network_bubbles,
    trace,
    wait_bubble,
)
from autockpt.values.errors import ConfigError
from autockpt.values.profile import Profile
from autockpt.values.record import from_json, to_json
from tests.support.profiles import distribution, example_profile, example_windows

MICROBATCHES = 4


class Listener:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def began(self, what: str) -> None:
        """A chunk begins."""
        self.heard.append(f"+{what}")

    def ended(self, what: str) -> None:
        """It ended."""
        self.heard.append(f"-{what}")


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return ((output - target) ** 2).mean()


def schedule_of(kind: str) -> schedules.PipelineScheduleSingle:
    """A pipeline of one stage."""
    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    made = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[kind]
    return made(stage, MICROBATCHES, loss_fn=squared)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["1F1B", "GPipe"])
def test_hooks_hear_every_chunk_in_the_order_that_torch_runs(kind: str) -> None:
    """What is heard is the order that the scheduler is given; after that, silence."""
    listener = Listener()
    hooks, schedule, batch = StageHooks(listener), schedule_of(kind), torch.ones(8, 4)
    assert hooks.attach()
    try:
        schedule.step(batch, target=batch)
        assert hooks.schedule is schedule
    finally:
        hooks.detach()
    ended = [what[1:] for what in listener.heard if what[0] == "-"]
    assert ended == [str(action) for action in orders_of(schedule)[0]]
    assert [w for pair in zip(ended, ended, strict=True) for w in pair] == [
        what[1:] for what in listener.heard
    ]
    assert schedule_name(schedule) == kind
    assert orders_of(schedule) == planned_orders(kind, 1, MICROBATCHES)
    count = len(listener.heard)
    schedule.step(batch, target=batch)
    assert len(listener.heard) == count


@pytest.mark.usefixtures("alone")
def test_a_chunk_that_raises_still_ends() -> None:
    """Otherwise the gate would think that it computes for ever."""

    def fails(*_: object) -> None:
        raise ValueError("no more memory")

    listener, schedule, batch = Listener(), schedule_of("GPipe"), torch.ones(8, 4)
    hooks = StageHooks(listener)
    schedule.step(batch, target=batch)
    schedule._stage.submod.register_forward_pre_hook(fails)
    hooks.attach()
    try:
        with pytest.raises(RuntimeError, match="failed to run forward"):
            schedule.step(batch, target=batch)
    finally:
        hooks.detach()
    assert listener.heard == ["+0F0", "-0F0"]


@pytest.mark.usefixtures("alone")
def test_the_recorder_makes_whole_iterations_of_marks() -> None:
    """Times of chunks lie in order between boundary and step."""
    recorder = TraceRecorder()
    hooks, schedule, batch = StageHooks(recorder), schedule_of("1F1B"), torch.ones(8, 4)
    hooks.attach()
    try:
        for _ in range(4):
            schedule.step(batch, target=batch)
            recorder.step_began()
            recorder.boundary()
    finally:
        hooks.detach()
    assert len(recorder.samples) == 3
    for sample in recorder.samples:
        moments = [moment for span in sample.spans for moment in span]
        assert moments == sorted(moments)
        assert moments[0] >= 0
        assert moments[-1] <= sample.step_s <= sample.iteration_s
        assert 0 < sample.probe_s < sample.iteration_s


class LateTicker:
    """Marks that may be read only after the next boundary, as events of a device."""

    late = True

    def __init__(self) -> None:
        self.now = 0
        self.readable = 0

    def mark(self) -> int:
        """A number."""
        self.now += 1
        return self.now

    def between(self, began: int, ended: int) -> float:
        """Refuses what the device has not passed."""
        assert ended <= self.readable, "read too early: that would wait for the device"
        return float(ended - began)


def test_marks_of_a_device_are_read_one_iteration_late() -> None:
    """So that nobody waits for it."""
    ticker = LateTicker()
    recorder = TraceRecorder(ticker)
    for _ in range(3):
        recorder.began("0F0")
        recorder.ended("0F0")
        recorder.step_began()
        recorder.boundary()
        ticker.readable = ticker.now
    assert len(recorder.samples) == 1
    recorder.flush()
    assert len(recorder.samples) == 2


def sample(
    *spans: tuple[float, float], names: tuple[str, ...] = (), step: float = 1.0
) -> TraceSample:
    """An iteration with chunks at these times."""
    marks = names or tuple(f"0F{n}" for n in range(len(spans)))
    return TraceSample(marks=marks, spans=spans, step_s=step, iteration_s=step + 0.1, probe_s=0.001)


def test_gaps_lie_between_chunks_and_before_the_step() -> None:
    """Numbered by the chunks that ended before them."""
    traces = [sample((0.2, 0.3), (0.3, 0.5)), sample((0.25, 0.35), (0.35, 0.5))]
    found = device_bubbles(traces, rank=3)
    assert [(b.after, b.rank, b.what) for b in found] == [(0, 3, "device"), (2, 3, "device")]
    assert found[0].length_s.p50 == pytest.approx(0.225)
    assert found[1].offset_s.p50 == pytest.approx(0.5)
    assert 0 < found[0].stability < 1


def test_iterations_of_another_order_are_left_out_and_counted() -> None:
    """An evaluation between two iterations has forwards only."""
    traces = [sample((0.2, 0.3), (0.4, 0.5))] * 3 + [sample((0.0, 0.9), names=("0F9",))]
    taken = trace(traces, rank=0, schedule="1F1B")
    assert taken.odd == 1
    assert list(taken.chunk_s) == ["0F"]
    assert taken.chunk_s["0F"].p50 == pytest.approx(0.1)
    assert taken.overhead == pytest.approx(0.001 / 1.1)
    assert chunk_times([taken]) == {"0F": pytest.approx(0.1)}
    other = trace([sample((0.0, 0.9), names=("0F9",))], rank=0)
    assert other.fingerprint != taken.fingerprint


def test_network_windows_lie_outside_overlapping_collectives() -> None:
    """Two all-reduces of DDP overlap; the rest of the iteration is one window on either side."""
    traces = [sample((0.3, 0.6), (0.5, 0.8), names=("all_reduce", "all_reduce"))] * 2
    found = network_bubbles(traces, rank=0)
    assert [round(b.offset_s.p50, 6) for b in found] == [0.0, 0.8]
    assert [round(b.length_s.p50, 6) for b in found] == [0.3, 0.3]
    assert {b.what for b in found} == {"network"}
    assert {b.after for b in found} == {-1}


def test_short_waits_are_no_windows() -> None:
    """A gap of a few microseconds takes no chunk."""
    assert wait_bubble(None, rank=0) == ()
    assert wait_bubble(distribution(1e-5), rank=0) == ()
    (found,) = wait_bubble(distribution(0.01), rank=1)
    assert (found.what, found.rank) == ("data_wait", 1)


def test_nothing_recorded_is_an_error_that_says_what_to_do() -> None:
    """A script of one iteration."""
    with pytest.raises(ConfigError, match="give the script more steps"):
        trace([], rank=0)


def test_profiles_without_windows_still_load() -> None:
    """Written before there were any."""
    text = to_json(example_profile(**example_windows()))
    assert from_json(Profile, text).traces[0].schedule == "1F1B"
    old = to_json(example_profile())
    assert '"traces"' in old
    assert (
        from_json(Profile, old.replace('"traces":[],', "").replace('"traces": [],', "")).traces
        == ()
    )
