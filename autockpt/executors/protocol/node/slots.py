"""The slots of one rank, and the rule that says which of them may be overwritten.

Per-rank double buffering is not enough.  A rank that overwrites its copy of g because it holds a
newer g' destroys g for all ranks.  The others may never complete g'.  So a slot is free only when
something newer is known to be held by *all* ranks.
"""

from dataclasses import dataclass, field

from autockpt.executors.protocol.messages import HeldShard, Incarnation
from autockpt.executors.protocol.transitions import SlotState, moved
from autockpt.values.generation import Generation


@dataclass(slots=True)
class Slot:
    """One buffer of one rank."""

    index: int
    state: SlotState = "empty"
    generation: Generation | None = None
    """The generation in the slot, or being written to it; None when empty."""
    step: int = 0
    writer: Incarnation | None = None
    """Whose trainer may still write here, while `writing`."""
    doomed: bool = False
    """The generation was dropped while being written: empty as soon as the writer stops."""
    worthless: bool = False
    """Sealed, but bad at restore or never to be chosen: may be overwritten."""
    renewed: bool = False
    """A parity of other ranks than an older one of its generation, which protects until the round
    for this one ends well."""
    passed: bool = False
    """Sealed, and its file alone holds it: it streamed through."""
    shard: HeldShard | None = None

    def begin(self, generation: Generation, step: int, writer: Incarnation) -> None:
        """Grant it to a writer."""
        moved("slot", self.state, "writing")
        self._set("writing", generation, step)
        self.writer = writer

    def seal(self, shard: HeldShard) -> None:
        """The writer finished."""
        moved("slot", self.state, "sealed")
        self.state, self.writer, self.shard = "sealed", None, shard

    def clear(self) -> None:
        """Nothing of value is in it and no process writes it any more."""
        moved("slot", self.state, "empty")
        self._set("empty", None, 0)

    def adopt(self, shard: HeldShard) -> None:
        """A new keeper finds it sealed."""
        self._set("sealed", shard.generation, shard.step)
        self.shard = shard

    def _set(self, state: SlotState, generation: Generation | None, step: int) -> None:
        self.state, self.generation, self.step = state, generation, step
        self.writer, self.shard = None, None
        self.doomed = self.worthless = self.renewed = self.passed = False


@dataclass(slots=True)
class Slots:
    """All buffers of one rank on this node."""

    slots: list[Slot] = field(default_factory=list)
    usable: int = 0
    """How many of them the current trainer has mapped; grants stay below this."""

    def resize(self, count: int) -> None:
        """The trainer says how many slots it has; contents are never thrown away."""
        self.usable = count
        self.slots += [Slot(index=i) for i in range(len(self.slots), count)]

    def sealed(self, generation: Generation) -> Slot | None:
        """The slot that holds `generation` complete."""
        return self._find(generation, "sealed")

    def writing(self, generation: Generation) -> Slot | None:
        """The slot that is being filled with `generation`."""
        return self._find(generation, "writing")

    def restorable_shards(self) -> tuple[HeldShard, ...]:
        """The shards in these slots that a restore may use."""
        useless = (s.worthless or s.passed for s in self.slots)
        return tuple(
            s.shard
            for s, no in zip(self.slots, useless, strict=True)
            if s.shard is not None and not no
        )

    def _find(self, generation: Generation, state: SlotState) -> Slot | None:
        """One of some worth before one without."""
        found = None
        for slot in self.slots:
            if slot.state == state and slot.generation == generation:
                if not slot.worthless:
                    return slot
                found = found or slot
        return found
