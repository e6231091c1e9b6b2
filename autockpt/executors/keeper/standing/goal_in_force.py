"""The parts of the goal and of the decision that a keeper obeys, read from the run directory."""

import contextlib
import os
from typing import TypeVar

from autockpt.values.errors import AutockptError
from autockpt.values.goal import Goal, Retention
from autockpt.values.plan import Decision
from autockpt.values.record import from_json

_Record = TypeVar("_Record")


def retention_in_force(run_directory: str) -> Retention:
    """Return the goal's retention; fewer if the plan in force says that its quota holds no more."""
    goal = _read(run_directory, "goal.json", Goal) or Goal()
    if goal.limits.disk_bytes is None:
        return goal.retention
    decision = None
    with contextlib.suppress(AutockptError):  # of another version: its plan is not in force
        decision = _read(run_directory, "decision.json", Decision)
    return goal.retention if decision is None else decision.plan.retention.at_most(goal.retention)


def ends_stuck_ranks(run_directory: str) -> bool:
    """Whether the policy in force wants a stuck rank ended."""
    goal = _read(run_directory, "goal.json", Goal) or Goal()
    return goal.restart.stuck == "restart"


def _read(run_directory: str, name: str, kind: type[_Record]) -> _Record | None:
    path = os.path.join(run_directory, name)
    try:
        with open(path, "rb") as file:
            return from_json(kind, file.read(), where=path)
    except OSError:
        return None
