"""TensorBoard's charts after a rewind: no step twice, none missing."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from autockpt.integrations.trackers import TensorBoard

pytest.importorskip("tensorboard", reason="TensorBoard is not installed: make test-frameworks")


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
