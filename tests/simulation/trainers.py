"""How trainers behave: synchronous training, snapshots, restore, plans; and what they are told."""

from dataclasses import replace

from autockpt.executors.protocol import messages as m
from autockpt.values.generation import Generation
from autockpt.values.record import from_data
from autockpt.values.redundancy import Redundancy
from tests.simulation.actors import Content, Keeper, Trainer
from tests.simulation.world import World

UNANSWERED = "503"
"""Why a claim fails that a store does not answer."""


class Trainers(World):
    """The trainer processes of a run."""

    def train(self) -> None:
        """Some trainer does something."""
        if self.trainers:
            self.step_trainer(self.trainers[int(self.rng.random() * len(self.trainers))])

    def step_trainer(self, trainer: Trainer) -> None:
        """Restore, write a snapshot, or take the next training step."""
        if not trainer.running:
            if trainer.order is not None and not trainer.refused:
                self.restore(trainer, trainer.order)
            return
        if not trainer.fitted:
            self.fit(trainer)
        if trainer.writing and self.rng.random() < 0.6:
            self.finish_snapshot(trainer)
            return
        if self.may_advance(trainer):
            self.advance(trainer)

    def fit(self, trainer: Trainer) -> None:
        """Shards of another number of ranks have another size: new slots, before the first save.

        Keepers put it off until the term is open, and hear nobody who was replaced.
        """
        keeper = self.nodes[trainer.node].keeper
        if keeper is None:
            return
        self.flush(keeper)
        replaced = keeper.machine.state.incarnation != trainer.incarnation
        if keeper.machine.state.phase != "open" or replaced:
            return
        trainer.fitted = True
        self.to_node(keeper, m.SlotsOutgrown(rank=trainer.rank))
        slots = self.nodes[trainer.node].slots
        for key in [key for key in slots if key[0] == trainer.rank]:
            del slots[key]
        for other in self.trainers:
            if other is not trainer and (other.node, other.rank) == (trainer.node, trainer.rank):
                other.writing.clear()  # a fenced one writes on in memory that nobody else has
        self.to_node(keeper, m.SlotsReplaced(rank=trainer.rank, slots=self.slots))

    def do_KeepOutgrown(self, keeper: Keeper, do: m.KeepOutgrown) -> None:
        node = self.nodes[keeper.node]
        content = node.slots[do.rank, do.slot]
        assert content is not None
        node.replicas[do.rank, do.replica_slot] = content

    def do_FreeSlots(self, keeper: Keeper, do: m.FreeSlots) -> None:
        slots = self.nodes[keeper.node].slots
        for key in [key for key in slots if key[0] == do.rank]:
            if (content := slots.pop(key)) is not None and content.writer is not None:
                self.oracle.fail(f"slot {key[1]} of rank {do.rank} given back while written")

    def do_ServeShards(self, keeper: Keeper, do: m.ServeShards) -> None:
        keeper.placed = do

    def may_advance(self, trainer: Trainer) -> bool:
        """Training is synchronous: nobody is more than a step ahead, nobody goes on alone."""
        if trainer.held and trainer.step >= trainer.hold_step:
            return False
        peers = 0
        for other in self.trainers:
            if other.incarnation is trainer.incarnation:
                if not other.running or other.step < trainer.step:
                    return False
                peers += 1
        return peers == len(trainer.nodes)

    def advance(self, trainer: Trainer) -> None:
        """One iteration, then the boundary."""
        assert trainer.term is not None
        self.oracle.passed(trainer)
        trainer.step += 1
        trainer.step += 1
        trainer.history = hash((trainer.history, trainer.term, trainer.attempt, trainer.step))
        generation = Generation(term=trainer.term, attempt=trainer.attempt, step=trainer.step)
        self.oracle.trained(generation, trainer.history)
        self.switch_plan(trainer)
        keeper = self.nodes[trainer.node].keeper
        if trainer.step % self.interval or keeper is None:
            return
        if trainer.emptied and trainer.incarnation != keeper.machine.state.incarnation:
            return  # a keeper hears its live trainers alone; else its term tells
        disk = (trainer.step // self.interval) % self.disk_every == 0
        if self.in_flight and len(trainer.persisting - {generation}) >= self.in_flight:
            disk = False
        request = m.SaveRequested(
            rank=trainer.rank, generation=generation, step=trainer.step, disk=disk
        )
        if disk and self.rng.random() < 0.2:  # asked for memory ahead, for disk at the boundary
            keeper.inbox.append(replace(request, disk=False))
        keeper.inbox.append(request)
        self.flush(keeper)

    def switch_plan(self, trainer: Trainer) -> None:
        """At the boundary of its apply step the new plan is in force."""
        for version, step in trainer.decided.items():
            if trainer.step == step and version not in trainer.plans:
                trainer.plans[version] = trainer.step
                self.oracle.plan(trainer, version)

    def finish_snapshot(self, trainer: Trainer) -> None:
        """A copy ends: sealed, or torn.  In any order, although trainers copy in turn."""
        generation, slot = trainer.writing.pop(self.rng.randrange(len(trainer.writing)))
        content = self.nodes[trainer.node].slots.get((trainer.rank, slot))
        if content is None or content.writer is not trainer or content.generation != generation:
            self.oracle.fail(f"rank {trainer.rank}: slot {slot} was given away while written")
        assert content is not None
        content.writer = None
        torn = generation in trainer.told_discard or (
            not self.peace and self.rng.random() < self.torn
        )
        if torn:
            content.history = 0
            self.local(
                trainer,
                m.ShardDiscarded(rank=trainer.rank, generation=generation, reason="torn"),
            )
            return
        sick = not self.peace and self.rng.random() < self.sick
        content.nan = sick or (bool(self.late) and self.rng.random() < self.late)
        self.oracle.sealed(generation, nan=content.nan, seen=sick)
        health: m.Health = "suspect" if sick else "good"
        root = f"{content.history}:{trainer.rank}"
        content.sealed = True
        content.shard = m.HeldShard(
            rank=trainer.rank,
            slot=slot,
            generation=generation,
            step=content.step,
            world_size=len(trainer.nodes),
            root=root,
            health=health,
            across_nodes=self.across_nodes,
        )
        sealed = m.ShardSealed(
            rank=trainer.rank, generation=generation, root=root, health=health,
            across_nodes=self.across_nodes,
        )  # fmt: skip
        self.local(trainer, sealed)

    def restore(self, trainer: Trainer, order: m.RestoreShard) -> None:
        """Load and verify one shard."""
        lost: int | None = None
        if order.source.kind == "gather":
            pieces = self.gathered(trainer, order)
            if pieces is None:
                return  # something is still being rebuilt
            whole = [piece for piece in pieces if piece is not None and not piece.corrupt]
            world = len(trainer.nodes)
            content = replace(whole[0], world=world) if len(whole) == len(pieces) else None
            corrupt = [rank for rank, piece in enumerate(pieces) if piece and piece.corrupt]
            lost = corrupt[0] if corrupt else None
        else:
            content = self.source(trainer, order)
        trainer.order = None
        stored = order.source.kind in ("disk", "reshard")
        if stored and not self.peace and self.away.random() < self.silent:
            self.local(trainer, self.bad(trainer, order, unread=True))
            return
        flaky = not self.peace and self.rng.random() < self.flaky
        if content is None or content.corrupt or not content.sealed or flaky:
            self.oracle.forget_memory()
            self.local(trainer, self.bad(trainer, order, lost=lost))
            return
        trainer.loaded, trainer.step = content, order.step
        self.local(
            trainer,
            m.ShardVerified(rank=trainer.rank, term=order.term, attempt=order.attempt),
        )

    @staticmethod
    def bad(
        trainer: Trainer, order: m.RestoreShard, *, unread: bool = False, lost: int | None = None
    ) -> m.ShardBad:
        """It cannot restore this; `unread`: a store does not answer now."""
        return m.ShardBad(
            rank=trainer.rank, term=order.term, attempt=order.attempt, detail="bad", unread=unread,
            lost=lost,
        )  # fmt: skip

    def gathered(self, trainer: Trainer, order: m.RestoreShard) -> list[Content | None] | None:
        """Every shard, also a damaged one; None for one that is nowhere, or as a whole: not yet."""
        keeper = self.nodes[trainer.node].keeper
        if keeper is None:
            return None
        placed = keeper.placed
        if placed is None:
            self.oracle.fail(f"rank {trainer.rank} is to gather, nobody knows from where")
        assert placed is not None
        found: list[Content | None] = []
        for rank in range(len(self.homes(order.generation))):
            here = [self.at_place(trainer.node, p) for p in placed.places if p.shard.rank == rank]
            here.append(self.in_files(rank, order.generation))
            whole = [c for c in here if c is not None and not c.corrupt]
            if not whole and rank in placed.rebuilt and self.rng.random() < 0.9:
                return None
            known = [c for c in (*whole, *here) if c is not None]
            found.append(known[0] if known else None)
        if len({c.history for c in found if c is not None and not c.corrupt}) > 1:
            self.oracle.fail(f"rank {trainer.rank} gathers shards of several pasts: {found}")
        return found

    def at_place(self, asking: int, place: m.ShardCopy) -> Content | None:
        """A shard that another node was said to have, if it can be asked."""
        there = self.nodes[place.node]
        if there.keeper is None or (asking, place.node) in self.blocked:
            return None
        for content in (*there.slots.values(), *there.replicas.values()):
            if content is not None and content.sealed and content.shard is not None:
                said = content.shard
                if (said.rank, said.root) == (place.shard.rank, place.shard.root):
                    return content
        return None

    def in_files(self, rank: int, generation: Generation) -> Content | None:
        """The shard of a rank as its files have it."""
        commit = self.disk.commits.get(generation)
        if commit is None or commit.entry.corrupt:
            return None
        files = self.files_for(rank, (commit.entry.records[rank],))
        whole = [file for file in files if file is not None]
        if len(whole) < len(files):
            return None
        return replace(whole[0], corrupt=any(file.corrupt for file in whole))

    def source(self, trainer: Trainer, order: m.RestoreShard) -> Content | None:
        """The bytes the order points at."""
        if order.source.kind == "memory":
            key = (trainer.rank, order.source.slot or 0)
            node = self.nodes[trainer.node]
            content = node.replicas.get(key) if order.source.copied else node.slots.get(key)
        else:
            content = self.on_disk(trainer, order)
            if content is None and order.generation in self.oracle.durable:
                self.oracle.fail(f"a file of durable {order.generation} is gone")
        if content is not None and content.generation != order.generation:
            self.oracle.fail(f"asked for {order.generation}, found {content.generation}")
        return content

    def on_disk(self, trainer: Trainer, order: m.RestoreShard) -> Content | None:
        """What the files of one shard hold, or for another number of ranks those of all."""
        files = self.files_for(trainer.rank, order.source.records)
        if order.source.kind == "reshard":
            commit = self.disk.commits.get(order.generation)
            files = [None] if commit is None else self.files_of(commit.entry.records)
        if not files or any(file is None for file in files):
            return None
        whole = [file for file in files if file is not None]
        corrupt = any(file.corrupt for file in whole)
        world = len(trainer.nodes) if order.source.kind == "reshard" else whole[0].world
        return replace(whole[0], corrupt=corrupt, world=world)

    def files_of(self, records: tuple[m.Record, ...]) -> list[Content | None]:
        """Everything that reading all shards of a commit needs."""
        found: list[Content | None] = []
        for rank, record in enumerate(records):
            found += self.files_for(rank, (record,))
        return found

    def files_for(self, rank: int, records: tuple[m.Record, ...]) -> list[Content | None]:
        """Shard files of one rank, each with those that it is a difference to; None: gone."""
        found: list[Content | None] = []
        for record in records:
            found.append(self.disk.files.get(record["file"]))
            if "base" in record:
                base = self.disk.commits.get(Generation.from_name(record["base"]))
                earlier = () if base is None else (base.entry.records[rank],)
                found += self.files_for(rank, earlier) if earlier else [None]
        return found

    def do_GrantSlot(self, keeper: Keeper, do: m.GrantSlot) -> None:
        trainer = self.find(keeper, do.rank, term=do.generation.term)
        if trainer is None:
            return
        slots = self.nodes[keeper.node].slots
        old = slots.get((do.rank, do.slot))
        if old is not None and old.writer is not None:
            self.oracle.fail(f"slot {do.slot} of rank {do.rank} granted while written")
        # A torn one is nothing, though an emptied directory may have given its name again.
        whole = old is not None and old.sealed and self.slots > 1
        if old is not None and whole and trainer.term == self.disk.term:
            own = (slots.get((do.rank, slot)) for slot in range(self.slots))
            held = {content.generation for content in own if content is not None and content.sealed}
            self.oracle.overwritten(old.generation, trainer.term, held)
        elif old is not None and self.slots == 1:  # which promises nothing beyond what it holds
            self.oracle.forget_up_to(old.generation)
        slots[do.rank, do.slot] = Content(
            generation=do.generation,
            history=trainer.history,
            rank=do.rank,
            world=len(trainer.nodes),
            step=trainer.step,
            writer=trainer,
        )
        trainer.writing.append((do.generation, do.slot))

    def do_DiscardSnapshot(self, keeper: Keeper, do: m.DiscardSnapshot) -> None:
        trainer = self.find(keeper, do.rank, term=do.generation.term)
        if trainer is not None:
            trainer.told_discard.add(do.generation)

    def do_AttachRefused(self, keeper: Keeper, do: m.AttachRefused) -> None:
        self._refuse(do.rank, do.incarnation)

    def do_FenceTrainer(self, keeper: Keeper, do: m.FenceTrainer) -> None:
        now = keeper.machine.state.incarnation
        for trainer in self.trainers:
            if (trainer.rank, trainer.incarnation) == (do.rank, do.incarnation):
                same = now is not None and now.launch_id == do.incarnation.launch_id
                older = now is not None and now.restart_round < do.incarnation.restart_round
                early = older if same else now is not None and not trainer.refused
                if early and trainer.running and trainer.term == self.disk.term:
                    self.oracle.fail(f"{do.incarnation} runs and was fenced by {now}")
                if do.reason == UNANSWERED and trainer.running:
                    self.oracle.fail(f"{do.incarnation} was fenced by a store that did not answer")

    def do_RestoreRefused(self, keeper: Keeper, do: m.RestoreRefused) -> None:
        final = not do.retryable and do.reason != "newer term"  # the next launch is the newest
        self._refuse(do.rank, do.incarnation, final=final)

    def _refuse(self, rank: int, incarnation: m.Incarnation, *, final: bool = False) -> None:
        for trainer in self.trainers:
            if (trainer.rank, trainer.incarnation) == (rank, incarnation):
                trainer.refused, trainer.final = True, final

    def do_RestoreShard(self, keeper: Keeper, do: m.RestoreShard) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is not None:
            trainer.order = do

    def do_StartFresh(self, keeper: Keeper, do: m.StartFresh) -> None:
        trainer = self.find(keeper, do.rank)
        if self.oracle.decided.get(do.term, do) is not None:
            self.oracle.fail(f"term {do.term} started from scratch without a decision")
        if trainer is not None and (trainer.order is not None or trainer.loaded is not None):
            trainer.refused = True  # its tensors are no more as the script built them
        elif trainer is not None:
            trainer.running, trainer.term = True, do.term
            trainer.history = hash((0, do.term))
            trainer.lineage = do.lineage

    def do_Resume(self, keeper: Keeper, do: m.Resume) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is None:
            return
        self.oracle.loaded(do.term, do.generation, trainer.loaded)
        assert trainer.loaded is not None
        if trainer.loaded.world != len(trainer.nodes):
            self.oracle.fail(f"rank {do.rank} holds a shard of another number of ranks")
        trainer.running, trainer.term, trainer.attempt = True, do.term, do.attempt
        trainer.lineage = do.lineage
        # What is trained again is not what was trained before.
        again = (trainer.loaded.history, do.term, trainer.incarnation.restart_round)
        trainer.history, trainer.step = hash(again), do.step

    def do_PreparePlan(self, keeper: Keeper, do: m.PreparePlan) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is not None:
            trainer.held, trainer.hold_step = do.version, trainer.step + do.margin_steps
            trainer.wanted = do.version, do.payload.get("redundancy")
            prepared = m.PlanPrepared(rank=do.rank, version=do.version, step=trainer.step)
            self.local(trainer, prepared)

    def do_ApplyPlan(self, keeper: Keeper, do: m.ApplyPlan) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is None:
            return
        if trainer.held == do.version:
            trainer.held = 0
        if do.version in trainer.plans:
            return
        if trainer.step > do.apply_step:
            self.local(trainer, m.PlanLate(rank=do.rank, version=do.version, step=trainer.step))
            return
        trainer.decided[do.version] = do.apply_step
        version, wanted = trainer.wanted
        if version == do.version and wanted is not None and wanted["scheme"] != "none":
            trainer.redundancy = from_data(Redundancy, wanted)
        self.switch_plan(trainer)

    def do_AbortPlan(self, keeper: Keeper, do: m.AbortPlan) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is not None and trainer.held == do.version:
            trainer.held = 0
