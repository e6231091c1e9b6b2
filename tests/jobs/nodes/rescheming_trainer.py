"""The example, whose rank 0 proposes parity in the place of copies when it reaches a step."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

from autockpt.session.tuning.plan_follower import PlanFollower
from autockpt.values.redundancy import Redundancy

AT_STEP = 20
PARITY = Redundancy(scheme="xor", set_size=3, parity=1)

_apply_due = PlanFollower.apply_due


def _proposing(self: PlanFollower, step: int) -> None:
    plan = self._rank.plan
    if self.tuner is not None and step == AT_STEP and plan.redundancy.scheme == "replicas":
        self.propose(replace(plan, version=plan.version + 1, redundancy=PARITY))
    _apply_due(self, step)


if __name__ == "__main__":
    PlanFollower.apply_due = _proposing  # type: ignore[method-assign]
    sys.argv[0] = str(Path("examples", "gpt", "train.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")
