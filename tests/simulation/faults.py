"""What starts, what ends and what goes wrong."""

from collections import deque

from autockpt.executors.protocol import messages as m
from autockpt.values.record import to_data
from autockpt.values.redundancy import Redundancy
from tests.simulation.actors import DEADLINES, Content, Disk, Keeper, Node, Trainer
from tests.simulation.storage import Storage

FAULTS = (
    "kill_trainer",
    "kill_keeper",
    "kill_node",
    "power_cut",
    "partition",
    "notice_loss",
    "spontaneous_launch",
    "foreign_launch",
    "rot",
    "sigterm",
    "wipe",
)
"""Names of the methods below that a seed weighs at random."""


class Faults(Storage):
    """Launchers, deaths, losses."""

    def start_keeper(self, node: Node) -> Keeper:
        """A new keeper: adopts the memory, then its living trainers come back."""
        keeper = Keeper(
            node=node.index,
            machine=self.rules.node(node=node.index, deadlines=DEADLINES),
            coordinator=self.rules.coordinator(retention=self.retention, deadlines=DEADLINES),
        )
        node.keeper = keeper
        self.started.append(keeper)
        for trainer in self.trainers:
            if trainer.node == node.index:
                trainer.writing, trainer.order = [], None
                trainer.persisting.clear()
        for content in node.slots.values():
            if content is not None:
                content.writer = None
        back = [t for t in self.trainers if t.node == node.index and not t.refused]
        self.rng.shuffle(back)
        for rank in sorted({rank for rank, _ in node.slots} - {t.rank for t in back}):
            self.adopt(keeper, node, rank)
        for trainer in back:
            self.adopt(keeper, node, trainer.rank)
            self.attach(trainer)
        return keeper

    def adopt(self, keeper: Keeper, node: Node, rank: int) -> None:
        """The memory of one rank comes with its trainer, or from the launcher."""
        held = [node.slots.get((rank, slot)) for slot in range(self.slots)]
        shards = tuple(c.shard for c in held if c is not None and c.sealed and c.shard)
        keeper.inbox.append(m.SlotsAdopted(rank=rank, slots=self.slots, held=shards))

    def attach(self, trainer: Trainer) -> None:
        """The trainer connects to its keeper."""
        trainer.unseen = False
        event = m.TrainerAttached(
            rank=trainer.rank,
            incarnation=trainer.incarnation,
            world_size=len(trainer.nodes),
            nodes=trainer.nodes,
            slots=self.slots,
            term=trainer.term,
            attempt=trainer.attempt,
            lineage=trainer.lineage,
            redundancy=trainer.redundancy or self.redundancy,
            fresh=self.fresh,
            plan_version=(newest := max(trainer.decided, default=0)),
            plan_apply_step=trainer.decided.get(newest, 0),
            plan_held=trainer.held,
        )
        self.local(trainer, event)

    fresh = False

    def start_launch(
        self, *, fresh: bool = False, new_id: bool = False, zombies: float = 0.0
    ) -> None:
        """A launcher starts all ranks; old ones are killed, or forgotten (zombies)."""
        for trainer in list(self.trainers):
            if self.rng.random() >= zombies or trainer.refused or not trainer.running:
                self.end_trainer(trainer)
        if new_id:
            self.launches += 1
            self.launch = (f"L{self.launches}", 0)
        else:
            self.launch = (self.launch[0], self.launch[1] + 1)
        self.fresh = fresh
        if self.elastic and self.rng.random() < self.elastic:
            self.resize()
        self.say("launch", self.launch)
        self.start_trainers(self.launch)

    def resize(self) -> None:
        """Another number of ranks, which gather what is in memory.

        The first node may be left out, with what it has: its keeper goes on to coordinate what was
        replaced.
        """
        first = self.rng.choice((0, 0, 1)) if len(self.nodes) > 1 else 0
        count = len(self.nodes) - first
        self.world = self.rng.choice([n for n in range(max(2, count), 7) if n != self.world])
        self.nodes_of = tuple(first + rank * count // self.world for rank in range(self.world))
        if first or self.slots == 1:  # a single slot relies on the disk for what it overwrites
            self.oracle.forget_memory()

    def fits(self, rank: int) -> bool:
        """What is in the slots of a rank was written by as many ranks as there are."""
        slots = self.nodes[self.nodes_of[rank]].slots
        contents = (content for (owner, _), content in slots.items() if owner == rank)
        return all(content is None or content.world == self.world for content in contents)

    def start_trainers(self, launch: tuple[str, int]) -> None:
        """All ranks of one incarnation attach."""
        incarnation = m.Incarnation(launch_id=launch[0], restart_round=launch[1])
        for node in self.nodes:
            if node.keeper is None:
                self.start_keeper(node)
        for rank in range(self.world):
            trainer = Trainer(
                rank=rank,
                nodes=self.nodes_of,
                incarnation=incarnation,
                fitted=self.fits(rank),
            )
            self.trainers.append(trainer)
            self.attach(trainer)

    def end_trainer(self, trainer: Trainer) -> None:
        """A process dies; its keeper notices."""
        if trainer not in self.trainers:
            return
        self.trainers.remove(trainer)
        self.release(trainer)
        self.lose_memory(self.nodes[trainer.node])

    def lose_sight(self, trainer: Trainer) -> None:
        """Its connection ends while it stands still; it comes back to the next keeper."""
        trainer.unseen = True
        trainer.writing, trainer.order = [], None
        trainer.persisting.clear()
        self.release(trainer)

    def release(self, trainer: Trainer) -> None:
        """It writes nothing more, and its keeper notices."""
        for content in self.nodes[trainer.node].slots.values():
            if content is not None and content.writer is trainer:
                content.writer = None
        self.local(trainer, m.TrainerLost(rank=trainer.rank, incarnation=trainer.incarnation))

    def end_keeper(self, node: Node) -> None:
        """A keeper dies with its connections and its work."""
        if node.keeper is None:
            return
        node.keeper = None
        self.replica_losses += bool(node.replicas or node.parities)
        for replica in node.replicas.values():
            if not self.is_in_slots(replica):
                self.oracle.forget_up_to(replica.generation)
        node.replicas.clear()
        node.parities.clear()
        own = (c for c in node.slots.values() if c is not None and c.sealed)
        self.oracle.lost_replicas(node.index, {(c.rank, c.generation) for c in own})
        for key in list(self.channels):
            if node.index in key:
                self.channels[key].clear()
        self.forget_left_behind(node)
        self.lose_memory(node)

    def forget_left_behind(self, node: Node) -> None:
        """Ranks that do not live here any more bring their memory too late, or not at all.

        Only trainers that were replaced still hold it, and the next keeper waits for none of them.
        """
        here = {rank for rank, home in enumerate(self.nodes_of) if home == node.index}
        left = {t.rank for t in self.trainers if t.node == node.index} - here
        for (rank, _), content in node.slots.items():
            if rank in left and content is not None and content.sealed:
                self.oracle.forget_up_to(content.generation)
        if left:
            self.oracle.lost(node.index, left)

    def is_in_slots(self, content: Content) -> bool:
        """Some node has the same shard in a slot that outlives its keeper."""
        contents = (c for node in self.nodes for c in node.slots.values() if c is not None)
        same = ((c.rank, c.generation) for c in contents if c.sealed)
        return (content.rank, content.generation) in same

    def lose_memory(self, node: Node) -> None:
        """Slots are gone when nobody holds them any more."""
        if node.keeper is None and not any(t.node == node.index for t in self.trainers):
            if node.slots:
                self.losses += 1
                self.oracle.memory.clear()
            node.slots.clear()
            self.oracle.lost(node.index)

    def launcher(self) -> None:
        """Torchelastic: if any rank is gone or refused, everybody is restarted."""
        mine = [t for t in self.trainers if t.incarnation.launch_id == self.launch[0]]
        mine = [t for t in mine if t.incarnation.restart_round == self.launch[1]]
        if len(mine) < self.world or any(t.refused for t in mine):
            self.start_launch(zombies=self.zombies, new_id=self.rng.random() < 0.1)
        elif any(node.keeper is None for node in self.nodes):
            for node in self.nodes:
                if node.keeper is None and any(t.node == node.index for t in self.trainers):
                    self.start_keeper(node)

    def spontaneous_launch(self) -> None:
        """A restart nobody asked for; old trainers may live on."""
        self.start_launch(zombies=self.zombies)

    def foreign_launch(self) -> None:
        """Somebody starts the same run again while it is running, or where it seems to be dead."""
        dead = self.rng.random() < 0.5
        self.launches += 1
        launch = (f"L{self.launches}", 0)
        self.say("foreign launch", launch, "previous dead:", dead)
        if dead:
            self.launch = launch
            for trainer in list(self.trainers):
                if self.rng.random() >= self.zombies or trainer.refused or not trainer.running:
                    self.end_trainer(trainer)
                else:
                    self.lose_sight(trainer)
        self.start_trainers(launch)

    def kill_trainer(self) -> None:
        """SIGKILL."""
        if self.trainers:
            self.end_trainer(self.rng.choice(self.trainers))

    def kill_keeper(self) -> None:
        """The keeper dies; sometimes it is back at once."""
        node = self.rng.choice(self.nodes)
        self.say("kill keeper", node.index)
        self.end_keeper(node)
        if self.rng.random() < 0.5 and any(t.node == node.index for t in self.trainers):
            self.start_keeper(node)

    def kill_node(self) -> None:
        """A machine is gone, memory and all."""
        node = self.rng.choice(self.nodes)
        self.say("kill node", node.index)
        for trainer in [t for t in self.trainers if t.node == node.index]:
            self.end_trainer(trainer)
        self.end_keeper(node)

    def power_cut(self) -> None:
        """All machines at once; what was not fsynced may be gone."""
        if self.rng.random() < 0.7:
            return
        self.say("power cut")
        for node in self.nodes:
            for trainer in [t for t in self.trainers if t.node == node.index]:
                self.end_trainer(trainer)
            self.end_keeper(node)
        for generation, commit in list(self.disk.commits.items()):
            if not commit.synced and self.rng.random() < 0.5:
                del self.disk.commits[generation]

    def wipe(self) -> None:
        """Somebody empties the directory; who holds it makes it again.

        Not where nodes may be left out: what those remember nobody is told.
        """
        if self.rng.random() < 0.6 or self.elastic:
            return
        self.say("wipe")
        self.disk = Disk(term=self.disk.term)
        for trainer in self.trainers:
            trainer.emptied = True
        self.oracle.durable.clear()
        self.oracle.ever = False
        if self.slots == 1:  # a single slot relies on the disk for what it overwrites
            self.oracle.forget_memory()
        if self.wiping.random() < 0.3:  # running trainers alone know now where they began
            for node in self.nodes:
                self.end_keeper(node)

    def partition(self) -> None:
        """A pair of nodes loses its connection, or all are healed."""
        if self.blocked and self.rng.random() < 0.6:
            self.blocked.clear()
            return
        a, b = (self.rng.randrange(len(self.nodes)) for _ in range(2))
        if a == b:
            return
        for key in ((a, b), (b, a)):
            self.blocked.add(key)
            self.channels.get(key, deque()).clear()
        self.say("partition", a, b)

    def notice_loss(self) -> None:
        """Somebody notices that a neighbour cannot be reached."""
        for keeper in self.keepers():
            for node in self.nodes:
                gone = node.keeper is None or (keeper.node, node.index) in self.blocked
                if gone and node.index != keeper.node and self.rng.random() < 0.5:
                    event = m.NodeLost(node=node.index)
                    self.to_node(keeper, event)
                    self.to_coordinator(keeper, event)

    def rot(self) -> None:
        """A bit flips in memory or on disk; promises about that copy lapse."""
        node = self.rng.choice(self.nodes)
        contents = [c for c in node.slots.values() if c is not None and c.sealed]
        if contents and self.rng.random() < 0.3:
            rotten = self.rng.choice(contents)
            rotten.corrupt = True
            self.oracle.decayed.add(rotten.generation)
            self.oracle.memory.clear()
            self.oracle.lost(node.index, {rotten.rank})
            self.losses += 1
        elif node.replicas and self.rng.random() < 0.3:
            replica = self.rng.choice(list(node.replicas.values()))
            replica.corrupt = True
            self.oracle.lost(node.index, {replica.rank})
            self.losses += 1
        elif node.parities and self.rng.random() < 0.3:
            parity = self.rng.choice(list(node.parities.values()))
            parity.corrupt = True
            self.oracle.lost_parity(node.index, parity.rank)
            self.losses += 1
        elif self.disk.commits and self.rng.random() < 0.3:
            generation = self.rng.choice(list(self.disk.commits))
            name = self.disk.commits[generation].entry.records[0]["file"]
            decayed = self.disk.files.get(name)
            if decayed is not None:
                decayed.corrupt = True
            for other, commit in self.disk.commits.items():  # it, and what is a difference to it
                if any(file is decayed for file in self.files_of(commit.entry.records)):
                    self.oracle.durable.discard(other)
            if self.slots == 1:  # a single slot relies on the disk for what it overwrites
                self.oracle.forget_memory()

    def sigterm(self) -> None:
        """A preemption notice at one node."""
        for keeper in self.keepers()[:1]:
            self.to_node(keeper, m.BreakpointRequested(reason="SIGTERM"))

    def propose_scheme(self, redundancy: Redundancy) -> None:
        """A plan with another scheme of copies."""
        self.plan += 1
        payload = {"n": self.plan, "redundancy": to_data(redundancy)}
        for keeper in self.keepers():
            self.to_coordinator(keeper, m.PlanProposed(version=self.plan, payload=payload))

    def propose_plan(self) -> None:
        """The tuner has a better idea."""
        keepers = self.keepers()
        if keepers:
            self.plan += 1
            event = m.PlanProposed(version=self.plan, payload={"n": self.plan})
            keeper = self.rng.choice(keepers)
            if self.rng.random() < 0.5:
                self.to_coordinator(keeper, event)
            else:
                self.to_node(keeper, event)
