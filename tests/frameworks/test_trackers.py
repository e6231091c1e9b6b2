"""Charts of real trackers after a rewind: a killed job goes on in the same run of each."""

import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autockpt.integrations.trackers import OpenTelemetry, TensorBoard

ROOT = Path(__file__).resolve().parents[2]
for package in ("tensorboard", "wandb", "mlflow", "opentelemetry.sdk"):
    pytest.importorskip(package, reason=f"{package} is not installed: make test-frameworks")

JOB = """
import glob, os, signal, sys, time
import torch
import autockpt
from autockpt.integrations import trackers

trackers.following.LAST_S = 300.0  # a busy machine takes longer than training would wait

class Seen:
    steps = []
    def begin(self, step, run_id): open("begun", "a").write(f"{step} {run_id}\\n")
    def send(self, step, values, wall_s): self.steps.append(step)
    def end(self): pass

def wait(what, condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)

def in_wandb():
    return any(open(f, "rb").read().count(b"snapshot_bytes") > 4
               for f in glob.glob("wandb/offline-run-*/*.wandb"))

def keepers():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{name}/cmdline", "rb").read().split(b"\\0")
        except OSError:
            continue
        if b"autockpt.executors.keeper" in words and os.fsencode(os.path.abspath("run")) in words:
            yield int(name)

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), 4)
ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)
is_first = ckpt.restored is None
trackers.follow(
    ckpt, Seen(), trackers.TensorBoard("charts"), trackers.MLflow("sqlite:///runs.db"),
    trackers.WandB(project="job", mode="offline"),
)
for step, (batch,) in ckpt.batches(20):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt._client.wait_until(lambda: ckpt.ready or ckpt._rank.is_closed, 20)
    if is_first and step == 11:
        wait("a durable checkpoint", lambda: glob.glob("run/checkpoints/*/COMMIT*"))
        wait("points", lambda: Seen.steps and max(Seen.steps) >= 9 and in_wandb())
        for pid in [*keepers(), os.getpid()]:  # memory is lost: the disk has step 4 or 8
            os.kill(pid, signal.SIGKILL)
"""


def test_a_rewind_replaces_the_points_of_before(tmp_path: Path) -> None:
    """The second process trains steps 4 to 6 anew."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for process, (first, steps) in enumerate(((0, range(1, 7)), (3, range(4, 9)))):
        sink = TensorBoard(str(tmp_path))
        sink.begin(first, "run")
        for step in steps:
            values: Mapping[str, float] = {"iteration_s": 10.0 * process + step}
            sink.send(step, values, wall_s=1000.0 * process + step)
        sink.end()
    charts = EventAccumulator(str(tmp_path))
    charts.Reload()
    points = {point.step: point.value for point in charts.Scalars("autockpt/iteration_s")}
    steps = [point.step for point in charts.Scalars("autockpt/iteration_s")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert points[3] == 3.0
    assert points[4] == 14.0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of the trackers' own packages
def test_a_killed_job_goes_on_in_its_runs(tmp_path: Path) -> None:
    """Memory is lost, so steps are trained again, of which the charts had points.

    No chart has a step twice, and none lacks one.
    """
    (tmp_path / "job.py").write_text(JOB)
    plan = ("memory.interval=1 steps", "disk.interval=4 steps", "retune=false")
    settings = [word for one in plan for word in ("--set", one)]
    command = ["-m", "autockpt", "run", "--no-profile", "--run-dir", "run", *settings, "job.py"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOCKPT_", "WANDB_"))}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, text=True, timeout=800, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "tracker" not in done.stdout, done.stdout
    (zero, first), (resumed, again) = (
        line.split() for line in (tmp_path / "begun").read_text().splitlines()
    )
    assert (zero, first) == ("0", again)
    assert 0 < int(resumed) <= 8, done.stdout
    former, newer = _measured(tmp_path / "run" / "telemetry")
    assert set(former) & set(newer), "steps were trained twice"
    kept = {step: value for step, value in former.items() if step <= int(resumed)}
    trained = kept | newer
    assert _in_tensorboard(tmp_path / "charts") == sorted(trained.items())
    # The others cannot replace a point: they keep that of the first time, if they had it.
    for name, points in (
        ("MLflow", _in_mlflow(f"sqlite:///{tmp_path}/runs.db", first)),
        ("W&B", list(itertools.chain(*_in_wandb(tmp_path / "wandb", first)))),
    ):
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), (name, steps)
        assert set(trained) <= set(steps), (name, steps)
        for step, value in points:
            assert value in (former.get(step), newer.get(step)), (name, step)
            assert step not in kept or value == kept[step], (name, step)


def _measured(telemetry: Path) -> list[dict[int, float]]:
    """By process and step the seconds of a copy."""
    found: list[dict[int, float]] = []
    for line in (telemetry / "rank-00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "RunStarted":
            found.append({})
        elif event["event"] == "SnapshotSealed":
            found[-1][event["step"]] = event["copy_s"]
    return found


def _in_tensorboard(folder: Path) -> list[tuple[int, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    charts = EventAccumulator(str(folder))
    charts.Reload()
    points = charts.Scalars("autockpt/snapshot_copy_s")
    return [(point.step, pytest.approx(point.value, rel=1e-6)) for point in points]


def _in_mlflow(uri: str, run_id: str) -> list[tuple[int, Any]]:
    """Of the one run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs(["0"])
    assert run.data.tags["autockpt.run_id"] == run_id
    assert run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "autockpt/snapshot_copy_s")
    return [(point.step, point.value) for point in points]


def _in_wandb(folder: Path, run_id: str) -> list[list[tuple[int, Any]]]:
    """Of each process: a directory offline, with one id."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        assert path.name == f"run-{run_id}.wandb"
        points, axes = [], set()
        for data in _wandb_records(path.read_bytes()):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            axes.add((record.metric.glob_name, record.metric.step_metric))
            values = {one.key or one.nested_key[0]: one.value_json for one in record.history.item}
            if "autockpt/snapshot_copy_s" in values:
                step, value = (values[f"autockpt/{name}"] for name in ("step", "snapshot_copy_s"))
                points.append((int(step), float(value)))
        assert ("autockpt/*", "autockpt/step") in axes
        found.append(points)
    return found


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Of LevelDB's log format, behind a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_a_meter_has_gauges_of_the_run() -> None:
    """With the step as a gauge of its own; a later value stands for an earlier one."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sink = OpenTelemetry(MeterProvider([reader]).get_meter("job"))
    for first, steps in ((0, range(1, 7)), (3, range(4, 6))):
        sink.begin(first, "a1")
        for step in steps:
            sink.send(step, {"iteration_s": step / 10}, 0.0)
        sink.end()
    data: Any = reader.get_metrics_data()
    gauges = {
        metric.name: [(point.attributes, point.value) for point in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    run = {"autockpt.run_id": "a1"}
    assert gauges == {"autockpt.iteration_s": [(run, 0.5)], "autockpt.step": [(run, 5.0)]}
