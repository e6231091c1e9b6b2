"""A quiet little cluster for worked examples: no dice, messages arrive at once, in order."""

from collections import deque
from typing import Any, TypeVar

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention

T = TypeVar("T")

LAUNCH = m.Incarnation(launch_id="launch", restart_round=0)


def gen(term: int, step: int) -> Generation:
    """Short for tests."""
    return Generation(term=term, step=step)


class Cluster:
    """`nodes_of[rank]` is the node of each rank; the runtime answers only when a test does."""

    def __init__(self, nodes_of: tuple[int, ...] = (0, 1), *, slots: int = 2) -> None:
        self.nodes_of, self.slots = nodes_of, slots
        self.nodes = {node: NodeProtocol(node=node) for node in sorted(set(nodes_of))}
        self.coordinator = CoordinatorProtocol(retention=Retention(keep_last=1))
        self.done: list[Any] = []
        """Instructions for the runtime since the last `take`, in order."""
        self.cut: set[int] = set()
        """Nodes whose messages are lost, both ways."""
        self.now_s = 0.0

    # ------------------------------------------------------------------ driving

    def tell_node(self, node: int, event: Any) -> None:
        """An event at a keeper, and everything that follows."""
        self._carry(node, self.nodes[node].handle(event))

    def tell(self, event: Any) -> None:
        """An event at the coordinator, and everything that follows."""
        self._carry(min(self.nodes), self.coordinator.handle(event))

    def _carry(self, node: int, instructions: list[Any]) -> None:
        queue = deque((node, instruction) for instruction in instructions)
        while queue:
            origin, instruction = queue.popleft()
            if not isinstance(instruction, m.Send):
                self.done.append(instruction)
                continue
            if instruction.to_node in self.cut or origin in self.cut:
                continue
            event = m.MessageReceived(from_node=origin, message=instruction.message)
            machine: Any = self.nodes[instruction.to_node]
            if isinstance(instruction.message, m.TO_COORDINATOR):
                machine = self.coordinator
            queue.extend((instruction.to_node, more) for more in machine.handle(event))

    def tick(self, seconds: float) -> None:
        """Time passes for everybody."""
        self.now_s += seconds
        for node in self.nodes:
            self.tell_node(node, m.TimePassed(now_s=self.now_s))
        self.tell(m.TimePassed(now_s=self.now_s))

    def take(self, kind: type[T]) -> list[T]:
        """The instructions of one kind since the last call; all others are forgotten as well."""
        found = [instruction for instruction in self.done if isinstance(instruction, kind)]
        self.done = []
        return found

    # ------------------------------------------------------------------ what trainers do

    def replace(self, node: int) -> None:
        """Another machine with nothing in its memory takes the place of a node."""
        self.nodes[node] = NodeProtocol(node=node)

    def attach(self, rank: int, incarnation: m.Incarnation = LAUNCH, **more: Any) -> None:
        """One trainer attaches."""
        event = m.TrainerAttached(
            rank=rank,
            incarnation=incarnation,
            world_size=len(self.nodes_of),
            nodes=self.nodes_of,
            slots=self.slots,
            **more,
        )
        self.tell_node(self.nodes_of[rank], event)

    def attach_all(self, incarnation: m.Incarnation = LAUNCH, **more: Any) -> None:
        """All trainers of an incarnation attach."""
        for rank in range(len(self.nodes_of)):
            self.attach(rank, incarnation, **more)

    def start(self, term: int = 1, incarnation: m.Incarnation = LAUNCH, **claimed: Any) -> None:
        """Everybody attaches, the claim succeeds, the decision is written."""
        self.attach_all(incarnation)
        self.claim(term, incarnation, **claimed)
        self.tell(m.DecisionWritten(term=term, attempt=1))

    def claim(self, term: int, incarnation: m.Incarnation = LAUNCH, **claimed: Any) -> None:
        """The directory is ours."""
        event = {"committed": (), **claimed}
        self.tell(m.TermClaimed(incarnation=incarnation, term=term, **event))

    def verify_all(self, term: int, attempt: int = 1) -> None:
        """Every rank restored its shard."""
        for rank, node in enumerate(self.nodes_of):
            self.tell_node(node, m.ShardVerified(rank=rank, term=term, attempt=attempt))

    def request(self, rank: int, generation: Generation, *, disk: bool = False) -> None:
        """One trainer wants to save."""
        event = m.SaveRequested(rank=rank, generation=generation, step=generation.step, disk=disk)
        self.tell_node(self.nodes_of[rank], event)

    def seal(self, rank: int, generation: Generation, **more: Any) -> None:
        """One trainer's snapshot is complete."""
        event = m.ShardSealed(rank=rank, generation=generation, root=f"{generation}:{rank}", **more)
        self.tell_node(self.nodes_of[rank], event)

    def persisted(self, rank: int, generation: Generation, attempt: int = 1) -> None:
        """One shard file is complete."""
        record = {"file": f"{generation}-{rank}-{attempt}", "root": f"{generation}:{rank}"}
        event = m.ShardPersisted(rank=rank, generation=generation, attempt=attempt, record=record)
        self.tell_node(self.nodes_of[rank], event)

    def save(self, generation: Generation, *, disk: bool = False, **more: Any) -> None:
        """All ranks save, and with `disk` commit; `more`: of their seals."""
        ranks = range(len(self.nodes_of))
        for rank in ranks:
            self.request(rank, generation, disk=disk)
        for rank in ranks:
            self.seal(rank, generation, **more)
        if disk:
            for rank in ranks:
                self.persisted(rank, generation)
            self.tell(m.CommitWritten(generation=generation))

    def held(self, rank: int) -> list[str]:
        """Generations sealed in the slots of a rank."""
        local = self.nodes[self.nodes_of[rank]].state.ranks[rank]
        return sorted(str(shard.generation) for shard in local.slots.restorable_shards())
