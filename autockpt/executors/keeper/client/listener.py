"""The trainer's side of the keeper's news: one method per kind, which the client calls."""

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.values.generation import Generation


class KeeperListener:
    """Hears the news of a keeper, on the listening thread; this one ignores all of them."""

    def get_plan_held(self) -> int:
        """Version of a plan that is prepared and undecided, for a new keeper; 0: none."""
        return 0

    def on_keeper_lost(self, reason: str) -> None:
        """The keeper is gone; the client starts another one, or says that none takes it."""

    def on_memory_committed(self, generation: Generation) -> None:
        """All ranks have sealed a checkpoint in memory."""

    def on_dispute(self, generation: Generation, dispute: p.Dispute) -> None:
        """Ranks that hold the same state disagree on it."""

    def on_durable(self, save: SaveHandle) -> None:
        """A save that began here is durable.  Called once."""

    def on_copies_arrived(self, save: SaveHandle, message: wire.CopiesArrived) -> None:
        """Other nodes hold copies of a save that began here."""

    def on_discarded(self, save: SaveHandle | None, reason: str) -> None:
        """A checkpoint will not be durable; `save`: where it began here and that is news."""

    def on_plan_message(self, message: p.PreparePlan | p.ApplyPlan | p.AbortPlan) -> None:
        """A change of the plan, or a stop, in two phases."""

    def on_storage_stands(self, message: wire.StorageStands) -> None:
        """The storage hangs, or answers again."""

    def on_state_suspect(self, reason: str) -> None:
        """A checkpoint holds NaN."""

    def send_shard(self, order: wire.SendShard) -> None:
        """This rank's device sends an image to another node."""

    def receive_shard(self, order: wire.ReceiveShard, memory: Arena) -> None:
        """This rank's device receives an image into `memory`, which the listener closes."""
        memory.close()

    def seal_boundary(self, order: wire.SealBoundary, slots: list[Arena]) -> None:
        """Other ranks died; `slots` are theirs, and the listener closes them."""
        for slot in slots:
            slot.close()

    def abandon_transfer(self, order: wire.AbandonExchange) -> None:
        """A transfer between devices is not needed any more."""
