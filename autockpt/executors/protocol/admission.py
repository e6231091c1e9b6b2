"""Admission of an incarnation: the same rule at every keeper and at the coordinator.

The same launch with a higher rendezvous round replaces the lower one at once: its launcher has
killed the old trainers, or is about to.  Another launch must wait until no rank of the holder is
alive.  A replaced incarnation never comes back.
"""

from collections.abc import Sequence

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.messages import Incarnation, TrainerAttached


class Admission:
    """Remembers who held the run."""

    def __init__(self) -> None:
        self.current: Incarnation | None = None
        """Whose trainers are admitted now."""
        self.holder: Incarnation | None = None
        """The last one that began to restore; differs from `current` until that one does."""
        self.rounds: dict[str, int] = {}
        """Highest round admitted per launch."""
        self.term = 0
        """Newest term known to have been claimed."""
        self.replaced: set[str] = set()

    def refusal(self, attach: TrainerAttached, alive: Sequence[int]) -> str | None:
        """Rule 9: why `attach` is not admitted; None: it is.  `alive`: ranks of `current`."""
        asked = attach.incarnation
        if not 0 <= attach.rank < attach.world_size == len(attach.nodes):
            return f"rank {attach.rank} of {attach.world_size} on nodes {list(attach.nodes)}"
        if self.current is None or self.current == asked:
            return None
        if asked.launch_id in self.replaced:
            return f"launch {asked.launch_id} was replaced; {self.current} holds the run"
        if asked.restart_round < self.rounds.get(asked.launch_id, 0):
            newest = self.rounds[asked.launch_id]
            return f"{asked} was replaced by round {newest}; {self.current} holds the run"
        if attach.term is not None:
            return self._running_refusal(attach.term)
        same = asked.launch_id == self.current.launch_id
        if not same and alive:
            return f"{self.current} holds the run: its ranks {sorted(alive)} are alive"
        return None

    def _running_refusal(self, term: int) -> str | None:
        """After a keeper's death zombies come back as well: the newest term is the real one."""
        if term > self.term:
            return None
        return f"term {term} is over; {self.current} holds the run"

    def admit(self, attach: TrainerAttached) -> None:
        """The incarnation of `attach` is the current one now."""
        self.current = attach.incarnation
        self.rounds[attach.incarnation.launch_id] = attach.incarnation.restart_round
        self.term = max(self.term, attach.term or 0)

    def hold(self, term: int) -> None:
        """The current one has claimed `term`: the launch before it is out for good."""
        self.term = max(self.term, term)
        if self.current is None:
            return
        if self.holder is not None and self.holder.launch_id != self.current.launch_id:
            self.replaced.add(self.holder.launch_id)
        self.holder = self.current


def may_send(
    node: int, message: m.WireMessage, ranks: tuple[int, ...], nodes: tuple[int, ...]
) -> bool:
    """Whether a message may come from `node`; `ranks`: node of every rank, at the coordinator."""
    if not isinstance(message, m.TO_COORDINATOR):
        return bool(nodes) and node == min(nodes)
    if isinstance(message, m.RankAttached):
        rank, ranks = message.attach.rank, message.attach.nodes
    elif isinstance(message, m.CopySealed | m.CopyFailed):
        return True  # about shards of others; the coordinator knows whose it asked for
    elif isinstance(message, m.RankSealed):
        rank = message.shard.rank
    elif isinstance(message, m.Relayed) and isinstance(message.event, m.PlanPrepared | m.PlanLate):
        rank = message.event.rank
    elif hasattr(message, "rank"):
        rank = message.rank
    else:
        return True
    return not ranks or (0 <= rank < len(ranks) and ranks[rank] == node)
