"""Measurements of autockpt in the charts of TensorBoard, W&B, MLflow or OpenTelemetry.

    from autockpt.integrations import trackers

    ckpt = autockpt.attach(...)
    trackers.follow(ckpt, trackers.TensorBoard("tensorboard"))

Nothing is sent without that line.  Rank 0 alone follows, on a thread that reads the run's telemetry
files; each tracker's package is imported when its first value is sent.
"""

from autockpt.integrations.trackers.following import Following as Following
from autockpt.integrations.trackers.following import follow as follow
from autockpt.integrations.trackers.following import run_id as run_id
from autockpt.integrations.trackers.sinks import MLflow as MLflow
from autockpt.integrations.trackers.sinks import OpenTelemetry as OpenTelemetry
from autockpt.integrations.trackers.sinks import Sink as Sink
from autockpt.integrations.trackers.sinks import TensorBoard as TensorBoard
from autockpt.integrations.trackers.sinks import WandB as WandB
