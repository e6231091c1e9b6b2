"""Placeholder to be replaced by the wiring of the online controller."""

from collections.abc import Callable
from typing import Any

from autockpt.executors.state import LiveState
from autockpt.job import Job
from autockpt.values.plan import CheckpointPlan
from autockpt.values.telemetry import Event


class Mind:
    def __init__(self, job: Job, state: LiveState, propose: Callable[[CheckpointPlan], None]):
        pass

    def observe(self, event: Event) -> None:
        pass

    def committed(self, message: Any) -> None:
        pass

    def applied(self, plan: CheckpointPlan) -> None:
        pass

    def reason(self, version: int) -> str:
        return ""

    def close(self) -> None:
        pass
