"""The trackers: each takes values of a step, and imports its package when the first one comes."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

PREFIX = "autockpt/"
"""In front of every name in a chart."""


class Sink(Protocol):
    """Called on the thread that follows, in the order of the events.

    A tracker that cannot replace a point has the attribute `appends = True`.  It gets each value of
    a step once, from the process that trained the step first.
    """

    def begin(self, step: int, run_id: str) -> None:
        """The training goes on at `step`; a chart's points of later steps are not true any more."""

    def send(self, step: int, values: Mapping[str, float], wall_s: float) -> None:
        """Values by name, measured at a step; `wall_s`: seconds since 1970."""

    def end(self) -> None:
        """Nothing more comes."""


class TensorBoard:
    """Event files in a directory; retrained steps replace their former points after a rewind."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._writer: Any = None

    def begin(self, step: int, run_id: str) -> None:
        """As of `Sink`."""
        from torch.utils.tensorboard import SummaryWriter

        # Of steps that come again TensorBoard drops the former points, at step 0 of all.
        self._writer = SummaryWriter(self._log_dir, purge_step=step + 1)

    def send(self, step: int, values: Mapping[str, float], wall_s: float) -> None:
        """As of `Sink`."""
        for name, value in values.items():
            self._writer.add_scalar(PREFIX + name, value, step, walltime=wall_s)
        self._writer.flush()

    def end(self) -> None:
        """As of `Sink`."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run of Weights & Biases that keeps its id over restarts; the script's, if it has one.

    `options` go to `wandb.init` (project, mode="offline", ...).
    """

    appends = True

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None
        self._own = False

    def begin(self, step: int, run_id: str) -> None:
        """As of `Sink`."""
        import wandb

        self._own = wandb.run is None
        self._run = wandb.run or wandb.init(**{"id": run_id, "resume": "allow", **self._options})
        # W&B drops values of a step that goes back, so the step is a value of its own.
        self._run.define_metric(f"{PREFIX}step")
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def send(self, step: int, values: Mapping[str, float], wall_s: float) -> None:
        """As of `Sink`."""
        named = {PREFIX + name: value for name, value in values.items()}
        self._run.log({**named, f"{PREFIX}step": step})

    def end(self) -> None:
        """As of `Sink`."""
        if self._run is not None and self._own:
            self._run.finish()


class MLflow:
    """A run of MLflow that is found again after a restart; without `tracking_uri` its default."""

    appends = True

    def __init__(self, tracking_uri: str | None = None, *, experiment: str = "Default") -> None:
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run = ""

    def begin(self, step: int, run_id: str) -> None:
        """As of `Sink`."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        place = found.experiment_id if found else self._client.create_experiment(self._experiment)
        runs = self._client.search_runs([place], f"tags.`autockpt.run_id` = '{run_id}'")
        run = runs[0] if runs else self._client.create_run(place, tags={"autockpt.run_id": run_id})
        self._run = run.info.run_id
        if runs:  # its former process may have ended it
            self._client.update_run(self._run, status="RUNNING")

    def send(self, step: int, values: Mapping[str, float], wall_s: float) -> None:
        """As of `Sink`."""
        from mlflow.entities import Metric

        at = int(wall_s * 1000)
        points = [Metric(PREFIX + name, value, at, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=points)

    def end(self) -> None:
        """As of `Sink`."""
        if self._client is not None:
            self._client.set_terminated(self._run)


class OpenTelemetry:
    """Gauges of a meter; without `meter` that of the global provider, which the script sets up."""

    def __init__(self, meter: Any = None) -> None:
        self._meter = meter
        self._gauges: dict[str, Any] = {}
        self._attributes: dict[str, str] = {}

    def begin(self, step: int, run_id: str) -> None:
        """As of `Sink`."""
        if self._meter is None:
            from opentelemetry import metrics

            self._meter = metrics.get_meter("autockpt")
        self._attributes = {"autockpt.run_id": run_id}

    def send(self, step: int, values: Mapping[str, float], wall_s: float) -> None:
        """As of `Sink`; a gauge has no step, so that is a gauge too."""
        for name, value in {**values, "step": float(step)}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"autockpt.{name}")
            self._gauges[name].set(value, self._attributes)

    def end(self) -> None:
        """As of `Sink`."""


def wall_s(at_s: float) -> float:
    """Seconds since 1970 of a CLOCK_MONOTONIC time of this machine, now at the latest."""
    return time.time() - max(0.0, time.monotonic() - at_s)
