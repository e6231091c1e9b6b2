"""The simulated world and its network: carries instructions out and events in.

Deterministic: no clock, no thread; one `random.Random` decides.  Events are small on purpose: the
last vote, the check of the term, the link, the fsync and the second check are separate moments,
because the bugs live between them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.state import ParityRanks
from autockpt.values.generation import Generation
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from tests.simulation.actors import Disk, Keeper, Node, Rules, Trainer, retention
from tests.simulation.oracle import Oracle, Promise

BURSTS = (1, 2, 4, 9)
"""Messages of one connection that arrive together."""
_UPWARD = frozenset(m.TO_COORDINATOR)


class World:
    """Topology and dice of one seed; nodes, network, oracle."""

    doers: ClassVar[dict[type, Callable[..., None]]] = {}
    """What a runtime does, by kind of instruction; filled from the `do_...` methods."""

    def __init_subclass__(cls) -> None:
        """Collect the `do_...` methods once."""
        cls.doers = dict(cls.doers)
        for name, method in vars(cls).items():
            if name.startswith("do_"):
                cls.doers[getattr(m, name[3:])] = method

    def __init__(
        self, seed: int, rules: Rules | None = None, *, trace: bool = False, slots: int = 0
    ) -> None:
        """`slots`: of every rank; 0: as the seed says."""
        self.rng = rng = Random(seed)
        self.rules = rules or Rules()
        self.runtime = self.rules.runtime()
        self.trace = trace
        self.now_s = 0.0
        count = rng.choice((1, 2, 2, 3, 3, 4))
        self.world = rng.choice((2, 2, 3, 3, 4, 5, 6))
        self.world = max(self.world, count)
        self.nodes_of = tuple(rank * count // self.world for rank in range(self.world))
        self.nodes = [Node(index=i) for i in range(count)]
        copies = min(count, rng.choice((1, 1, 2, 2, 2, 3)))
        self.redundancy = NO_REDUNDANCY
        if copies > 1:
            arrangement = rng.choice(("mixed", "ring"))
            self.redundancy = Redundancy(scheme="replicas", copies=copies, placement=arrangement)
        self.schemes = Random(f"schemes {seed}")
        """Dice of plans that change the scheme of copies."""
        self.changes_scheme = count > 1 and seed % 5 == 4
        self.slots = rng.choice((2, 2, 2, 2, 3, 3, 3, 1))
        self.interval = rng.choice((1, 2, 3))
        self.disk_every = rng.choice((1, 2, 3))
        self._maybe_parity(Random(f"parity {seed}"))
        self.slots = slots or self.slots
        late = Random(f"late {seed}")
        self.late = late.choice((0.0, 0.0, 0.0, 0.03, 0.1))
        """Chance of a shard that holds NaN which its seal does not see."""
        self.unmarked = late.choice((0.0, 0.5))
        """Chance that the directory does not keep what a scrub found."""
        self.differences = late.choice((0.0, 0.0, 0.5, 0.9))
        """Chance of a shard file that is stored as a difference to an older one."""
        self.elastic = late.choice((0.0, 0.0, 0.5))
        """Chance of a launch with another number of ranks."""
        self.across_nodes = count > 1 and Random(f"shares {seed}").random() < 0.25
        """Ranks of all nodes divide what they hold alike."""
        self.away = Random(f"away {seed}")
        """Dice of a store that does not answer a rank."""
        self.silent = self.away.choice((0.0, 0.1, 0.4))
        """Chance of it; nothing is wrong with the checkpoint then."""
        self.wiping = Random(f"wiping {seed}")
        """Dice of keepers that die with the directory."""
        self.unread: set[tuple[int, int, Generation]] = set()
        """(term, rank, generation) of each such answer that a coordinator has heard in time."""
        slow_to_verify = late.random() < 0.2
        self.in_flight = Random(f"in flight {seed}").choice((0, 0, 0, 1))
        """Generations that trainers have on their way to storage at once; 0: any number."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Node of every rank, by term."""
        self.retention = retention(rng)
        dropping = Random(f"dropping {seed}")
        if dropping.random() < 0.3:
            every = dropping.choice((1, 2))
            self.retention = replace(self.retention, keep_every_steps=every, weights_only=True)
        self.disk = Disk()
        self.oracle = Oracle()
        self.trainers: list[Trainer] = []
        self.started: list[Keeper] = []
        """Keepers that ever were."""
        self.placements: dict[
            Generation, tuple[dict[int, tuple[int, ...]], tuple[ParityRanks, ...]]
        ] = {}
        """(replicated ranks by node, parity sets) of the round of each generation: a plan may have
        changed the scheme when its end is told."""
        self.promised: dict[Generation, Any] = {}
        self.unkept: set[int] = set()
        """Terms that began from a checkpoint which no node keeps as a protected one."""
        """Those by which each was called protected last: a new scheme frees what it replaces."""
        self.channels: dict[tuple[int, int], deque[m.WireMessage]] = {}
        self.blocked: set[tuple[int, int]] = set()
        self.launch = ("L0", -1)
        self.launches = 0
        self.plan = 0
        self.losses = self.replica_losses = 0
        self.peace = False
        self.flaky = rng.choice((0.0, 0.0, 0.03, 0.1))
        self.hangs = Random(f"hangs {seed}").choice((0.0, 0.0, 0.1, 0.5))
        """Chance that the storage takes nothing of a shard when it should."""
        self.stuck = Random(f"stuck {seed}")
        self.stalls = self.stuck.random() < 0.4
        """The storage answers nobody now and then."""
        self.hung = False
        """It does so now."""
        self.regained = 0
        """Restarts that did without it."""
        self.torn = rng.choice((0.0, 0.02, 0.1))
        self.sick = rng.choice((0.0, 0.0, 0.0, 0.1))
        self.slow = rng.choice(("", "", "commit", "commit", "persist", "delete"))
        """Kind of storage work that lags behind everything else."""
        self.slow = "verify" if slow_to_verify else self.slow
        self.zombies = rng.choice((0.0, 0.3, 0.8))

    def _maybe_parity(self, rng: Random) -> None:
        """Most seeds without copies protect their memory by parity, if they have nodes."""
        count = len(self.nodes)
        if self.redundancy.scheme != "none" or count < 2 or rng.random() < 0.2:
            return
        losses = rng.choice((1, 1, 2)) if count > 2 else 1
        self.redundancy = Redundancy(
            scheme="xor" if losses == 1 else "rs",
            set_size=rng.randint(losses + 1, 4),
            parity=losses,
        )
        self.disk_every *= rng.choice((1, 5))
        self.slots = rng.choice((2, 3, 3))  # with two a failed round lets go what was protected
        if rng.random() < 0.9:  # else some nodes may have too many ranks for a set
            self.world = count * rng.choice((1, 1, 2))
            self.nodes_of = tuple(rank * count // self.world for rank in range(self.world))

    def other_scheme(self) -> Redundancy:
        """Of copies or parities, as a plan may want them; it need not fit these nodes."""
        rng, count = self.schemes, len(self.nodes)
        kind = rng.choice(("none", "replicas", "replicas", "parity", "parity"))
        if kind == "replicas":
            placement = rng.choice(("mixed", "ring"))
            copies = rng.randint(2, max(2, count))
            return Redundancy(scheme="replicas", copies=copies, placement=placement)
        if kind == "parity":
            losses = rng.choice((1, 1, 2))
            return Redundancy(
                scheme="xor" if losses == 1 else "rs",
                set_size=rng.randint(losses + 1, 4),
                parity=losses,
            )
        return NO_REDUNDANCY

    def homes(self, generation: Generation) -> tuple[int, ...]:
        """Node of every rank that wrote it."""
        return self.shapes.get(generation.term, self.nodes_of)

    def say(self, *words: object) -> None:
        """One line of the trace."""
        if self.trace:
            print(f"{self.now_s:7.1f}", *words)

    def keepers(self) -> list[Keeper]:
        """All living keepers."""
        return [node.keeper for node in self.nodes if node.keeper is not None]

    def to_node(self, keeper: Keeper, event: Any) -> None:
        """Event in, instructions out, carried out in order."""
        if self.trace:
            self.say(f"node {keeper.node} <-", event)
        for instruction in keeper.machine.handle(event):
            self.execute(keeper, instruction)

    def to_coordinator(self, keeper: Keeper, event: Any) -> None:
        """The same for the coordinator of that keeper."""
        if self.trace:
            self.say(f"coordinator {keeper.node} <-", event)
        for instruction in keeper.coordinator.handle(event):
            self.execute(keeper, instruction)

    def local(self, trainer: Trainer, event: Any) -> None:
        """An event from a trainer to its keeper, in order."""
        keeper = self.nodes[trainer.node].keeper
        if keeper is not None:
            keeper.inbox.append(event)

    def flush(self, keeper: Keeper) -> None:
        """Handle what local trainers said."""
        while keeper.inbox:
            self.to_node(keeper, keeper.inbox.popleft())

    def execute(self, keeper: Keeper, instruction: Any) -> None:
        """What a runtime does."""
        kind = type(instruction)
        if kind is m.Send:
            self._send(keeper, instruction)
            return
        if self.trace:
            self.say(f"   {keeper.node} ->", instruction)
        handler = self.doers.get(kind)
        if handler is not None:
            handler(self, keeper, instruction)

    def _send(self, keeper: Keeper, instruction: m.Send) -> None:
        message, key = instruction.message, (keeper.node, instruction.to_node)
        if type(message) is m.MemoryCommitted:
            self.promise_memory(keeper, message)
        elif type(message) is m.RestoreOrdered:
            self.check_part(keeper)
        elif type(message) is m.TermOpened:
            self.note_part(keeper)
            if message.parent is not None and message.protected is None:
                self.unkept.add(message.term)
        elif type(message) is m.CopiesWanted:
            self.oracle.wanted.setdefault(message.generation, self.lost_so_far())
            coordinator = keeper.coordinator.state
            if coordinator.term >= self.disk.term:  # else nobody listens any more
                self.placements[message.generation] = coordinator.replicated, coordinator.sets
        elif type(message) is m.CopiesEnded:
            self.promise_protected(keeper, message)
        if key in self.blocked or self.nodes[key[1]].keeper is None:
            return
        self.channels.setdefault(key, deque()).append(message)

    def note_part(self, keeper: Keeper) -> None:
        """A coordinator lets trainers begin anew within the term that it runs.

        One that ordered restores and gave up has named nothing: no trainer went on.
        """
        coordinator = keeper.coordinator.state
        if coordinator.is_in_same_term:
            part = coordinator.parts[0]
            self.oracle.begin_part(part, newest=part.term == self.disk.term)

    def check_part(self, keeper: Keeper) -> None:
        """A coordinator orders restores for that.  What it learns later, it could not heed."""
        coordinator = keeper.coordinator.state
        if not coordinator.is_in_same_term:
            return
        part = coordinator.parts[0]
        if part.parent in keeper.nan | self.oracle.seen_nan:
            self.oracle.fail(f"term {part.term} goes on from {part.parent}, which is suspect")

    def promise_memory(self, keeper: Keeper, message: m.MemoryCommitted) -> None:
        """A coordinator says all ranks hold it: from now on that must be true."""
        generation = message.generation
        current = keeper.coordinator.state.term == self.disk.term
        as_memory = not keeper.coordinator.state.protects
        if self.oracle.protected and max(self.oracle.protected).term < generation.term:
            # It began without copies, whatever a plan has changed since.
            as_memory |= generation.term in self.unkept
        if message.health == "good" and current and as_memory:
            self.oracle.protected.clear()  # nothing newer will be protected: it goes as memory does
        if generation in self.oracle.announced:
            return
        self.oracle.announced.add(generation)
        nodes = keeper.coordinator.state.nodes
        whole = all(self.in_memory(rank, generation, nodes) for rank in range(len(nodes)))
        current = generation.term == self.disk.term and not self.losses
        newest = not any(g > generation for g in self.oracle.memory)
        if not whole and current and newest:
            self.oracle.fail(f"{generation} was called memory-committed, but is not")
        if not whole or message.health != "good":
            return
        sound = self.oracle.announced - self.oracle.nan
        if any(g.term == generation.term and g > generation for g in sound):
            return  # said again by a new keeper, the older one first: that one is free
        if nodes == self.nodes_of:
            self.oracle.memory.add(generation)
        elif generation.term == self.disk.term:
            # Ranks of another number knock, and are refused: to those nothing is promised yet.
            self.oracle.forget_up_to(generation)

    def promise_protected(self, keeper: Keeper, message: m.CopiesEnded) -> None:
        """A coordinator says every copy is there: losses within tolerance are survived."""
        generation = message.generation
        if not message.protected:
            if self.slots <= 2:
                self.oracle.protected.clear()
            return
        placed = self.placements.get(generation)
        is_known = generation in self.oracle.protections
        if (is_known and self.promised.get(generation) == placed) or self.slots == 1:
            return
        if keeper.coordinator.state.nodes != self.nodes_of:
            return
        self.oracle.protections.add(generation)
        self.promised[generation] = placed
        coordinator = keeper.coordinator.state
        placed_now = coordinator.replicated, coordinator.sets
        replicated, sets = self.placements.get(generation, placed_now)
        homes = keeper.coordinator.state.nodes
        there = {(rank, node) for node, ranks in replicated.items() for rank in ranks}
        originals = [
            (rank, node)
            for rank, node in enumerate(homes)
            if not self.in_memory(rank, generation, homes)
            and not self.has_copy(rank, node, generation)
        ]
        rotten = [place for place in originals if self.is_rotten(*place, generation)]
        absent = [place for place in originals if place not in rotten]
        absent += [place for place in there if not self.has_copy(*place, generation)]
        holders = {rank for each in sets for rank in each.ranks}
        absent += [
            (rank, homes[rank])
            for rank in holders
            if not self.has_parity(rank, generation, homes[rank])
        ]
        missing = [*absent, *rotten]
        began = self.oracle.wanted.get(generation)
        # A keeper that comes back says what it lacks, and has not read what it has.
        known = absent and all(keeper.back.get(n) == self.lost_so_far() for _, n in absent)
        undisturbed = began == self.lost_so_far() or known
        if is_known:
            self.oracle.protected.pop(generation, None)
        if missing and undisturbed and keeper.coordinator.state.term == self.disk.term:
            self.oracle.fail(f"{generation} was called protected; (rank, node) without: {missing}")
        if not missing and generation.term == self.disk.term:
            own = set(enumerate(homes))
            promise = Promise(
                world=len(homes),
                copies=there | own,
                parities={(rank, homes[rank]) for rank in holders},
                sets=tuple((frozenset(each.ranks), each.losses) for each in sets),
            )
            self.oracle.promise_protected(generation, promise)

    def lost_so_far(self) -> int:
        """Memory that was lost with processes or to bit flips."""
        return self.losses + self.replica_losses

    def has_copy(self, rank: int, node: int, generation: Generation) -> bool:
        """A whole copy of that shard is on that node."""
        return any(
            content.generation == generation and content.sealed and not content.corrupt
            for (owner, _), content in self.nodes[node].replicas.items()
            if owner == rank
        )

    def is_rotten(self, rank: int, node: int, generation: Generation) -> bool:
        """That node has the sealed original, with a flipped bit in it."""
        own = (c for (owner, _), c in self.nodes[node].slots.items() if owner == rank and c)
        return any(c.generation == generation and c.sealed and c.corrupt for c in own)

    def has_parity(self, rank: int, generation: Generation, node: int) -> bool:
        """The parity that a rank holds there is whole, and made of that generation only."""
        return any(
            content.generation == generation
            and content.sealed
            and not content.corrupt
            and set(content.sums.values()) == {self.oracle.history[generation]}
            for (holder, _), content in self.nodes[node].parities.items()
            if holder == rank
        )

    def in_memory(
        self, rank: int, generation: Generation, nodes: tuple[int, ...] | None = None
    ) -> bool:
        """That shard is whole in the memory of the node of its rank, or of those `nodes`."""
        slots = self.nodes[(nodes or self.homes(generation))[rank]].slots
        for slot in range(self.slots):
            content = slots.get((rank, slot))
            if content is not None and content.generation == generation and content.sealed:
                return not content.corrupt
        return False

    def deliver(self) -> bool:
        """A few messages of one connection, or what trainers of one node said."""
        full: list[Any] = [key for key, queue in self.channels.items() if queue]
        for node in self.nodes:
            if (keeper := node.keeper) is not None and keeper.inbox:
                full.append(keeper)
        if not full:
            return False
        random = self.rng.random
        key = full[int(random() * len(full))]
        if type(key) is Keeper:
            self.to_node(key, key.inbox.popleft())
            return True
        queue = self.channels[key]
        for _ in range(BURSTS[int(random() * len(BURSTS))]):
            if not queue:
                break
            self.receive(key, queue.popleft())
        return True

    def receive(self, key: tuple[int, int], message: m.WireMessage) -> None:
        """One message arrives."""
        keeper = self.nodes[key[1]].keeper
        if keeper is None:
            return
        event = m.MessageReceived(from_node=key[0], message=message)
        if type(message) is m.ShardBad and message.unread:
            self.note_unread(keeper, message)
        if type(message) in _UPWARD:
            self.to_coordinator(keeper, event)
            running = keeper.coordinator.state.phase == "running"
            if type(message) is m.RankAttached and message.attach.term and running:
                keeper.back[key[0]] = self.lost_so_far()
        else:
            self.to_node(keeper, event)

    def note_unread(self, keeper: Keeper, message: m.ShardBad) -> None:
        """A coordinator hears that a store does not answer: no promise lapses by that."""
        state = keeper.coordinator.state
        if state.choice is not None and (message.term, message.attempt) == (
            state.term, state.attempt,
        ):  # fmt: skip
            self.unread.add((state.term, message.rank, state.choice.generation))

    def tick(self) -> None:
        """Time passes, for most keepers."""
        self.now_s += self.rng.choice((1, 2, 5, 5)) if not self.peace else 5
        event = m.TimePassed(now_s=self.now_s)
        for keeper in self.keepers():
            held = keeper.coordinator.state.phase == "running" and keeper.coordinator.state.term
            if held > self.disk.claim and not any(job[0] == "renew" for job in keeper.jobs):
                keeper.jobs.append(["renew", 0])
            if self.peace or self.rng.random() < 0.9:
                self.to_node(keeper, event)
                self.to_coordinator(keeper, event)

    def find(self, keeper: Keeper, rank: int, *, term: int | None = None) -> Trainer | None:
        """The trainer an instruction means: by term, or of the keeper's incarnation.

        Where a directory was emptied, a replaced trainer may have the number of another term.
        """
        admitted = keeper.machine.state.incarnation
        for trainer in self.trainers:
            if trainer.rank == rank and trainer.node == keeper.node:
                is_other = trainer.emptied and trainer.incarnation != admitted
                if term is not None and trainer.term == term and not is_other:
                    return trainer
                if term is None and trainer.incarnation == admitted:
                    return trainer
        return None
