"""The families: messages on the wire, and the events and instructions of each machine."""

from dataclasses import dataclass
from typing import Literal

from autockpt.executors.protocol.messages import (
    coordinator_events,
    coordinator_instructions,
    node_events,
    node_instructions,
    to_coordinator,
    to_node,
)

ToCoordinator = (
    to_coordinator.RankAttached
    | node_events.TrainerLost
    | to_coordinator.InventoryReported
    | to_coordinator.RankBegan
    | to_coordinator.RankSealed
    | to_coordinator.RankPrepared
    | to_coordinator.CopySealed
    | to_coordinator.CopyComing
    | to_coordinator.CopyFailed
    | to_coordinator.RankDropped
    | node_events.ShardVerified
    | node_events.ShardBad
    | to_coordinator.Relayed
)
ToNode = (
    node_instructions.AttachRefused
    | node_instructions.RestoreRefused
    | to_node.InventoryWanted
    | to_node.RestoreOrdered
    | to_node.ShardsPlaced
    | to_node.TermOpened
    | to_node.MemoryCommitted
    | to_node.CopiesWanted
    | to_node.CopiesEnded
    | to_node.DurableCommitted
    | to_node.GenerationDropped
    | to_node.PersistWanted
    | to_node.TermFenced
    | to_node.PlanOffered
    | to_node.PlanDecided
    | to_node.PlanDropped
)
WireMessage = ToCoordinator | ToNode
TO_COORDINATOR: tuple[type, ...] = ToCoordinator.__args__
"""Wire message types that go to the CoordinatorProtocol of the receiving keeper."""
TO_NODE: tuple[type, ...] = ToNode.__args__
"""Wire message types that go to the NodeProtocol of the receiving keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A wire message arrived from the keeper of `from_node` (maybe this very keeper)."""

    from_node: int
    message: "WireMessage"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The keeper of `node` cannot be reached for longer than the runtime's grace time."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """It is `now_s` by this keeper's monotonic clock; sent about once a second."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Bring `message` to the keeper of `to_node`; to this keeper itself by a local queue."""

    to_node: int
    message: "WireMessage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something a person may want to know; telemetry and log, once per text."""

    kind: Literal["stale", "fenced", "refused", "warning", "violation"]
    detail: str


NodeEvent = (
    node_events.TrainerAttached
    | node_events.TrainerLost
    | node_events.SlotsAdopted
    | node_events.SlotsOutgrown
    | node_events.SlotsReplaced
    | node_events.SlotsAdded
    | node_events.SaveRequested
    | node_events.ShardSealed
    | node_events.ShardDiscarded
    | node_events.ShardPersisted
    | node_events.PersistFailed
    | node_events.PersistStalled
    | node_events.ShardFetched
    | node_events.ShardComing
    | node_events.FetchFailed
    | node_events.ShardVerified
    | node_events.ShardBad
    | node_events.BreakpointRequested
    | node_events.PlanPrepared
    | node_events.PlanLate
    | node_events.PlanProposed
    | MessageReceived
    | NodeLost
    | TimePassed
)
CoordinatorEvent = (
    coordinator_events.TermClaimed
    | coordinator_events.TermRefused
    | coordinator_events.ClaimWithdrawn
    | coordinator_events.DirectoryRenewed
    | coordinator_events.DirectoryGone
    | coordinator_events.DecisionWritten
    | coordinator_events.DecisionFailed
    | coordinator_events.CommitWritten
    | coordinator_events.CommitFailed
    | coordinator_events.GenerationVerified
    | coordinator_events.OptimizerStateDropped
    | node_events.PlanProposed
    | MessageReceived
    | NodeLost
    | TimePassed
)
NodeInstruction = (
    Send
    | node_instructions.GrantSlot
    | node_instructions.SkipSave
    | node_instructions.DiscardSnapshot
    | node_instructions.StartPersist
    | node_instructions.AbortPersist
    | node_instructions.FetchShard
    | node_instructions.AbortFetch
    | node_instructions.ServeShards
    | node_instructions.KeepOutgrown
    | node_instructions.FreeSlots
    | node_instructions.FreeReplicas
    | node_instructions.AnnounceProtected
    | node_instructions.AnnounceDispute
    | node_instructions.AnnounceMemoryCommitted
    | node_instructions.AnnounceDurable
    | node_instructions.AnnounceDropped
    | node_instructions.AttachRefused
    | node_instructions.FenceTrainer
    | node_instructions.RestoreShard
    | node_instructions.RestoreRefused
    | node_instructions.StartFresh
    | node_instructions.Resume
    | node_instructions.PreparePlan
    | node_instructions.ApplyPlan
    | node_instructions.AbortPlan
    | Report
)
CoordinatorInstruction = (
    Send
    | coordinator_instructions.ClaimTerm
    | coordinator_instructions.WithdrawClaim
    | coordinator_instructions.WriteDecision
    | coordinator_instructions.WriteCommit
    | coordinator_instructions.TrashGeneration
    | coordinator_instructions.VerifyGeneration
    | coordinator_instructions.DeleteGenerations
    | coordinator_instructions.DropOptimizerState
    | coordinator_instructions.MarkEverCommitted
    | Report
)
Instruction = NodeInstruction | CoordinatorInstruction


def brief(what: object) -> str:
    """Return a short name of an event or message, e.g. `RankSealed rank 3 step 40 (term 2)`."""
    parts = [type(what).__name__ if not isinstance(what, str) else what]
    rank, generation = getattr(what, "rank", None), getattr(what, "generation", None)
    parts += [f"rank {rank}"] if rank is not None else []
    parts += [str(generation)] if generation is not None else []
    return " ".join(parts)
