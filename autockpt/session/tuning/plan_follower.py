"""The plan in force: proposed on rank 0 by the tuner, agreed on by all ranks, applied."""

import time

from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.protocol import messages as p
from autockpt.session.base import RankState
from autockpt.session.saving import Saver
from autockpt.session.tuning.autotuner import AutoTuner
from autockpt.session.tuning.plan_switch import PlanSwitch
from autockpt.tuner.online.proposals import apart, digest_of, intervals_of
from autockpt.values import telemetry as t
from autockpt.values.plan import CheckpointPlan
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.record import to_data
from autockpt.values.units import format_duration

FELT = 2.0
"""Only a change of an interval by this factor has a line of its own; events have every change."""


class PlanFollower:
    """Follows the plan on which all ranks agree."""

    def __init__(self, rank: RankState, saver: Saver) -> None:
        self._rank, self._saver = rank, saver
        self._job, self._client = rank.job, rank.client
        self.switch = PlanSwitch(rank.job.rank, rank.client.send, rank.client.wait_until)
        self.tuner: AutoTuner | None = None
        """On rank 0."""
        self._told = (0, 0)
        """The intervals on the terminal, at first from the plan of the launcher."""

    def begin(self) -> None:
        """The training begins under the plan of the job."""
        self._saver.follow_traffic()
        if self._job.rank != 0:
            return
        self.tuner = AutoTuner(self._job, self._rank.live, self)
        self._rank.telemetry.listener = self.tuner.observe
        decided = self._job.decision
        self._told = intervals_of(decided.plan if decided is not None else self._rank.plan)
        if self.tuner.started_with is not None:
            self.report_plan(self._rank.step, self.tuner.started_with.reason)

    def close(self) -> None:
        """No plan changes any more."""
        if self.tuner is not None:
            self.tuner.close()

    def disown(self) -> None:
        """In a forked child: the tuner is the parent's."""
        if self.tuner is not None:
            self.tuner.disown()

    # ------------------------------------------------------------------ for the tuner

    @property
    def layout(self) -> Layout | None:
        """Of the newest checkpoint; None: there is none."""
        snapshotter = self._rank.snapshotter
        return None if snapshotter is None else snapshotter.layout

    @property
    def slots_made(self) -> tuple[int, int]:
        """(slots of this rank, bytes of one); none while an image streams."""
        slots = [] if self._client.window_bytes else self._client.slots
        return len(slots), slots[0].nbytes if slots else 0

    def report_degraded(self, what: str, reason: str) -> None:
        """As of `RankState`."""
        self._rank.report_degraded(what, reason)

    def emit(self, event: t.Event) -> None:
        """As of `RankState`."""
        self._rank.emit(event)

    def propose(self, plan: CheckpointPlan) -> None:
        """To all ranks."""
        self._client.send(p.PlanProposed(version=plan.version, payload=to_data(plan)))

    def apply_due(self, step: int) -> None:
        """At a boundary: the plan that begins there, if one does."""
        plan = self.switch.plan_from(step)
        if plan is None:
            return
        self._rank.plan = plan
        self._client.want_rate(plan.redundancy)
        self._saver.follow_traffic()
        reason = self.tuner.reason(self._rank.plan) if self.tuner else "by rank 0"
        self.report_plan(step, reason)
        if self.tuner is not None:
            self.tuner.applied(self._rank.plan)

    def report_plan(self, step: int, reason: str) -> None:
        """The plan in force is another one from `step` on."""
        memory, disk = intervals_of(self._rank.plan)
        self._rank.emit(
            t.PlanChanged(
                at_s=time.monotonic(), rank=self._job.rank, plan_version=self._rank.plan.version,
                step=step, memory_interval_steps=memory, disk_interval_steps=disk, reason=reason,
                plan_digest=digest_of(self._rank.plan),
            )
        )  # fmt: skip
        if apart(self._told, (memory, disk)) >= FELT:
            self._told = (memory, disk)
            place = "in the store" if is_store_url(self._job.checkpoints) else "on disk"
            told = f"{self._often(memory)} in memory and {place}"
            if memory != disk:
                told = f"{self._often(disk)} {place}"
                told = f"{self._often(memory)} in memory, {told}" if memory else told
            self._rank.say(f"from step {step}: checkpoints {told}")

    def _often(self, steps: int) -> str:
        """An interval in steps, and in time by the newest iteration."""
        iteration_s = self._rank.clock.newest_s
        about = f" (about {format_duration(steps * iteration_s)})" if iteration_s else ""
        return f"every {steps} steps{about}" if steps > 1 else "every step"
