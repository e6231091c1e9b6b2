"""The keeper's news, as the parts of a session take them; called on the listening thread."""

import os

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.device_transfers import Exchanges
from autockpt.executors.keeper.client.listener import KeeperListener
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.device_path import emulated_links
from autockpt.executors.protocol import messages as p
from autockpt.launch import environment
from autockpt.session.base import RankState
from autockpt.session.boundaries.last_boundary import BoundaryHolder
from autockpt.session.endings.stopping import Stopper
from autockpt.session.saving import Saver
from autockpt.session.tuning.plan_follower import PlanFollower
from autockpt.values.generation import Generation


class KeeperNews(KeeperListener):
    """Hands each piece of news to the part that it concerns."""

    def __init__(
        self,
        rank: RankState,
        saver: Saver,
        plans: PlanFollower,
        stopper: Stopper,
        holder: BoundaryHolder,
    ) -> None:
        self._rank, self._saver, self._plans, self._stopper = rank, saver, plans, stopper
        self._holder = holder
        self._exchanges = Exchanges(
            rank.job.rank, host=rank.job.control_host, links=emulated_links(),
            slots=lambda: rank.client.slots, send=rank.client.send,
            degraded=lambda reason: rank.report_degraded("path of copies", reason),
        )  # fmt: skip

    def get_plan_held(self) -> int:
        """As of `KeeperListener`."""
        return self._plans.switch.undecided_version

    def on_keeper_lost(self, reason: str) -> None:
        """Says it; the training goes on."""
        self._rank.report_degraded("keeper", reason)

    def on_memory_committed(self, generation: Generation) -> None:
        """With a snapshot at every iteration: the next slot is free from now on."""
        self._rank.rollback.committed(generation.step)
        asked = self._rank.client.saves.asked
        if asked is not None and asked.generation == generation:
            self._saver.ask_if_due(self._rank.step + 1)

    def on_dispute(self, generation: Generation, dispute: p.Dispute) -> None:
        """Said at the first one, and for others than before; the policy may want to go back."""
        place = self._saver.names_of(dispute)
        where = f", in {place}" if place else ""
        reason = f"checkpoint {generation}: replicas disagree: {dispute.who}{where}"
        key = f"replicas {dispute.ranks}"
        if key not in self._rank.warned:
            self._rank.warned.add(key)
            self._rank.say(f"{reason}; it is kept, and not restored by itself")
        if self._rank.job.goal.restart.replicas == "restore" and self._rank.job.rank == 0:
            self._rank.rollback.disagree(reason)

    def on_durable(self, save: SaveHandle) -> None:
        """The tuner learns how long it took."""
        self._rank.rollback.committed(save.step)
        if self._plans.tuner is not None:
            self._plans.tuner.note_durable(save)

    def on_copies_arrived(self, save: SaveHandle, message: wire.CopiesArrived) -> None:
        """The tuner learns what the exchange costs."""
        if self._plans.tuner is not None:
            self._plans.tuner.note_replicated(save, message.bytes, message.moving_s)

    def on_discarded(self, save: SaveHandle | None, reason: str) -> None:
        """The tuner waits for it no more."""
        if reason.startswith(p.REPLICAS_DIFFER):
            self._saver.stop_sharing(reason)
        if self._plans.tuner is not None and save is not None:
            self._plans.tuner.note_discarded(save, reason)

    def on_plan_message(self, message: p.PreparePlan | p.ApplyPlan | p.AbortPlan) -> None:
        """A change of the plan, or a stop, in two phases."""
        # Behind an optimizer's step it may be too late for the boundary at hand.
        late = message.version >= p.STOP_VERSION and not self._rank.owns_boundary
        applied = self._plans.switch.take(message, self._rank.step + late)
        self._stopper.hear(message)
        if applied is not None:
            version, step, plan = applied
            client = self._rank.client
            client.running_as(self._rank.term, version, step, attempt=self._rank.attempt)
            if plan is not None:
                client.agreed_on(plan.redundancy)

    def on_storage_stands(self, message: wire.StorageStands) -> None:
        """Said here, unless the launcher says it."""
        if not (message.launcher_tells and environment.LAUNCHER_PID in os.environ):
            self._rank.say(message.text, always=True)

    def on_state_suspect(self, reason: str) -> None:
        """Said once; the policy may want the training to go back."""
        self._rank.rollback.suspect(reason)
        if "health" not in self._rank.warned:
            self._rank.warned.add("health")
            self._rank.say(f"degraded: health: {reason} (training goes on)", always=True)

    def send_shard(self, order: wire.SendShard) -> None:
        """Through the devices."""
        self._exchanges.send(order)

    def receive_shard(self, order: wire.ReceiveShard, memory: Arena) -> None:
        """Through the devices."""
        self._exchanges.receive(order, memory)

    def seal_boundary(self, order: wire.SealBoundary, slots: list[Arena]) -> None:
        """By a thread of its own."""
        self._holder.seal(order, slots)

    def abandon_transfer(self, order: wire.AbandonExchange) -> None:
        """It is not needed any more."""
        self._exchanges.abandon(order)
