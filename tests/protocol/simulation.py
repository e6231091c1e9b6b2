"""A seeded simulator of the whole protocol: the real machines in a hostile world.

One seed is one run: a random topology, random weights for every kind of action (so that some
seeds are nothing but zombies, others nothing but lost nodes), chaos, then peace, in which the run
must come back.  A failing seed prints the command that replays it:

    python -m tests.protocol.simulation --seed N [--mutant NAME] [--trace]
"""

import argparse
import sys
import time
from collections import deque
from random import Random
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator import CoordinatorProtocol
from autockpt.executors.protocol.node import NodeProtocol
from autockpt.values.generation import Generation
from tests.protocol.world import (
    DEADLINES,
    Commit,
    Content,
    Disk,
    Keeper,
    Node,
    Oracle,
    Rules,
    Trainer,
    Violation,
    retention,
)

SCENES = (3, 8)
"""Chaos is a number of scenes: a few calm rounds, in which training goes on, then a burst of
single actions, faults among them."""
BURSTS = (1, 1, 3, 8)
"""Messages of one connection that arrive together."""
_UPWARD = frozenset(m.TO_COORDINATOR)
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
)


class Simulation:
    """One seed."""

    def __init__(self, seed: int, rules: Rules | None = None, *, trace: bool = False) -> None:
        self.rng = rng = Random(seed)
        self.rules = rules or Rules()
        self.runtime = self.rules.runtime()
        self.trace = trace
        self.now_s = 0.0
        count = rng.choice((1, 2, 2, 3))
        self.world = rng.choice((2, 2, 3, 3, 4, 5, 6))
        self.world = max(self.world, count)
        self.nodes_of = tuple(rank * count // self.world for rank in range(self.world))
        self.nodes = [Node(index=i) for i in range(count)]
        self.slots = rng.choice((2, 2, 2, 2, 3, 3, 3, 1))
        self.interval = rng.choice((1, 2, 3))
        self.disk_every = rng.choice((1, 2, 3))
        self.retention = retention(rng)
        self.disk = Disk()
        self.oracle = Oracle()
        self.trainers: list[Trainer] = []
        self.channels: dict[tuple[int, int], deque[m.WireMessage]] = {}
        self.blocked: set[tuple[int, int]] = set()
        self.launch = ("L0", -1)
        self.launches = 0
        self.plan = 0
        self.losses = 0
        self.peace = False
        self.flaky = rng.choice((0.0, 0.0, 0.03, 0.1))
        self.torn = rng.choice((0.0, 0.02, 0.1))
        self.sick = rng.choice((0.0, 0.0, 0.0, 0.1))
        self.zombies = rng.choice((0.0, 0.3, 0.8))
        self.actions, self.weights = self._swarm()

    def _swarm(self) -> tuple[list[Any], list[float]]:
        rng = self.rng
        table = [
            (self.deliver, 6.0),
            (self.train, 4.0 * rng.choice((0.5, 1, 2))),
            (self.work, 4.0 * rng.choice((0.3, 1, 1))),
            (self.tick, rng.choice((0.1, 0.5, 1.5))),
            (self.launcher, 0.5),
            (self.propose_plan, rng.choice((0.0, 0.3, 1.0))),
        ]
        rate = rng.choice((0.2, 0.6, 1.5))
        for name in FAULTS:
            table.append((getattr(self, name), rate * rng.choice((0.0, 0.1, 0.4, 1.0))))
        total, sums = 0.0, []
        for _, weight in table:
            total += weight
            sums.append(total)
        return [action for action, _ in table], sums

    def say(self, *words: object) -> None:
        """One line of the trace."""
        if self.trace:
            print(f"{self.now_s:7.1f}", *words)

    # ------------------------------------------------------------------ running

    def run(self) -> None:
        """Chaos, then peace."""
        rng = self.rng
        self.start_launch()
        for _ in range(rng.randint(*SCENES)):
            for _ in range(rng.choice((2, 5, 8, 11))):
                self.calm_round()
            for action in rng.choices(self.actions, cum_weights=self.weights, k=rng.randint(2, 14)):
                action()
            if rng.random() < 0.7:
                rng.choice((self.kill_trainer, self.spontaneous_launch, self.kill_keeper))()
        self.settle()

    def calm_round(self) -> None:
        """Most things make progress; some messages stay in flight."""
        rng = self.rng
        self.launcher()
        for trainer in list(self.trainers):
            self.step_trainer(trainer)
        for keeper in self.keepers():
            for job in list(keeper.jobs):
                for _ in range(rng.choice((1, 4, 4, 4))):
                    self.step_job(keeper, job)
        for _ in range(rng.choice((4, 12, 99))):
            if not self.deliver():
                break
        if rng.random() < 0.3:
            self.tick()

    def settle(self) -> None:
        """Faults stop: an attach must resume, and a save must become durable."""
        self.say("---- peace")
        self.peace = True
        self.interval = 4  # a policy never asks for saves faster than they can be sealed
        self.blocked.clear()
        for trainer in list(self.trainers):
            self.end_trainer(trainer)
        self.relaunch_in_peace(fresh=False)
        if all(t.final for t in self.trainers):
            self.check_refusal()
            self.relaunch_in_peace(fresh=True)
        if not all(t.running for t in self.trainers):
            states = [(k.machine.phase, k.coordinator.phase) for k in self.keepers()]
            self.oracle.fail(f"liveness: trainers did not resume; keepers are {states}")
        if self.slots > 1:
            before = self.oracle.commits
            self.round_until(lambda: self.oracle.commits > before, 150)
            if self.oracle.commits == before:
                self.oracle.fail("liveness: no save became durable in peace")
            self.check_plans()

    def relaunch_in_peace(self, *, fresh: bool) -> None:
        """The launcher tries again, as often as launchers do."""
        for _ in range(3):
            self.start_launch(fresh=fresh, new_id=self.rng.random() < 0.5)
            self.round_until(lambda: all(t.running or t.refused for t in self.trainers), 120)
            if all(t.running or t.final for t in self.trainers):
                return
            states = [(k.machine.phase, k.coordinator.phase) for k in self.keepers()]
            self.say("not running", states)

    def round_until(self, done: Any, rounds: int) -> None:
        """Everything that can happen happens, in random order, until `done`."""
        for _ in range(rounds):
            if done():
                return
            busy = self.drain()
            for keeper in self.keepers():
                for job in list(keeper.jobs):
                    self.step_job(keeper, job)
                    busy = True
            for trainer in list(self.trainers):
                self.step_trainer(trainer)
            if not busy:
                self.tick()
        self.drain()

    def drain(self) -> bool:
        """Deliver every message in flight, and what follows from it; True if there was any."""
        busy = False
        while self.deliver():
            busy = True
        return busy

    def check_refusal(self) -> None:
        """Refusing is right only if nothing can be restored."""
        limits = self.oracle.eligible(self.disk.epoch + 1)
        for generation, commit in self.disk.commits.items():
            files = [self.disk.files.get(r["file"]) for r in commit.entry.records]
            whole = all(f is not None and not f.corrupt for f in files)
            good = commit.entry.health == "good" and not commit.entry.corrupt
            if whole and good and self.oracle.on(generation, limits):
                self.oracle.fail(f"liveness: restore refused although {generation} is on disk")

    def check_plans(self) -> None:
        """All ranks use the same plan once nothing is in flight."""
        newest = {max(t.plans, default=0) for t in self.trainers}
        held = [t.rank for t in self.trainers if t.held]
        if held:
            self.round_until(lambda: not any(t.held for t in self.trainers), 30)
        if len(newest) > 1:
            self.round_until(lambda: False, 10)
            newest = {max(t.plans, default=0) for t in self.trainers}
        if len(newest) > 1 or any(t.held for t in self.trainers):
            self.oracle.fail(f"plans differ or hold in peace: {newest}, held {held}")

    # ------------------------------------------------------------------ feeding the machines

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
        handler = _DOERS.get(kind)
        if handler is not None:
            handler(self, keeper, instruction)

    def _send(self, keeper: Keeper, instruction: m.Send) -> None:
        message, key = instruction.message, (keeper.node, instruction.to_node)
        if type(message) is m.MemoryCommitted:
            self.promise_memory(keeper, message)
        if key in self.blocked or self.nodes[key[1]].keeper is None:
            return
        self.channels.setdefault(key, deque()).append(message)

    def promise_memory(self, keeper: Keeper, message: m.MemoryCommitted) -> None:
        """A coordinator says all ranks hold it: from now on that must be true."""
        generation = message.generation
        if generation in self.oracle.announced:
            return
        self.oracle.announced.add(generation)
        self.oracle.ever = True
        whole = all(self.in_memory(rank, generation) for rank in range(self.world))
        current = generation.epoch == self.disk.epoch and not self.losses
        newest = not any(g > generation for g in self.oracle.memory)
        if not whole and current and newest:
            self.oracle.fail(f"{generation} was called memory-committed, but is not")
        if whole and message.health == "good":
            self.oracle.memory.add(generation)

    def in_memory(self, rank: int, generation: Generation) -> bool:
        """That shard is whole in the memory of its node."""
        slots = self.nodes[self.nodes_of[rank]].slots
        for slot in range(self.slots):
            content = slots.get((rank, slot))
            if content is not None and content.generation == generation and content.sealed:
                return not content.corrupt
        return False

    def deliver(self) -> bool:
        """A few messages of one connection, or what trainers of one node said."""
        full: list[Any] = [key for key, queue in self.channels.items() if queue]
        full += [node.keeper for node in self.nodes if node.keeper and node.keeper.inbox]
        if not full:
            return False
        key = full[int(self.rng.random() * len(full))]
        if isinstance(key, Keeper):
            self.to_node(key, key.inbox.popleft())
            return True
        queue = self.channels[key]
        for _ in range(BURSTS[int(self.rng.random() * len(BURSTS))]):
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
        if type(message) in _UPWARD:
            self.to_coordinator(keeper, event)
        else:
            self.to_node(keeper, event)

    def tick(self) -> None:
        """Time passes, for most keepers."""
        self.now_s += self.rng.choice((1, 2, 5, 5)) if not self.peace else 5
        event = m.TimePassed(now_s=self.now_s)
        for keeper in self.keepers():
            if self.peace or self.rng.random() < 0.9:
                self.to_node(keeper, event)
                self.to_coordinator(keeper, event)

    # ------------------------------------------------------------------ trainers

    def find(self, keeper: Keeper, rank: int, *, epoch: int | None = None) -> Trainer | None:
        """The trainer an instruction means: by epoch, or of the keeper's incarnation."""
        for trainer in self.trainers:
            if trainer.rank == rank and trainer.node == keeper.node:
                if epoch is not None and trainer.epoch == epoch:
                    return trainer
                if epoch is None and trainer.incarnation == keeper.machine.incarnation:
                    return trainer
        return None

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
        if trainer.writing is not None and self.rng.random() < 0.6:
            self.finish_snapshot(trainer)
            return
        if self.may_advance(trainer):
            self.advance(trainer)

    def may_advance(self, trainer: Trainer) -> bool:
        """Training is synchronous: nobody is more than a step ahead, nobody goes on alone."""
        if trainer.held and trainer.step >= trainer.hold_step:
            return False
        peers = 0
        for other in self.trainers:
            if other.incarnation is trainer.incarnation:
                if not other.running or other.seq < trainer.seq:
                    return False
                peers += 1
        return peers == self.world

    def advance(self, trainer: Trainer) -> None:
        """One iteration, then the boundary."""
        assert trainer.epoch is not None
        self.oracle.passed(trainer)
        trainer.seq += 1
        trainer.step += 1
        trainer.history = hash((trainer.history, trainer.epoch, trainer.seq))
        generation = Generation(epoch=trainer.epoch, seq=trainer.seq)
        self.oracle.trained(generation, trainer.history)
        self.switch_plan(trainer)
        keeper = self.nodes[trainer.node].keeper
        if trainer.seq % self.interval or keeper is None:
            return
        disk = (trainer.seq // self.interval) % self.disk_every == 0
        request = m.SaveRequested(
            rank=trainer.rank, generation=generation, step=trainer.step, disk=disk
        )
        keeper.inbox.append(request)
        self.flush(keeper)

    def switch_plan(self, trainer: Trainer) -> None:
        """At the boundary of its apply step the new plan is in force."""
        for version, step in trainer.decided.items():
            if trainer.step == step and version not in trainer.plans:
                trainer.plans[version] = trainer.step
                self.oracle.plan(trainer, version)

    def finish_snapshot(self, trainer: Trainer) -> None:
        """The copy ends: sealed, or torn."""
        assert trainer.writing is not None
        generation, slot = trainer.writing
        content = self.nodes[trainer.node].slots.get((trainer.rank, slot))
        if content is None or content.writer is not trainer or content.generation != generation:
            self.oracle.fail(f"rank {trainer.rank}: slot {slot} was given away while written")
        assert content is not None
        trainer.writing = None
        content.writer = None
        torn = trainer.told_discard or (not self.peace and self.rng.random() < self.torn)
        if torn:
            content.history = 0
            self.local(
                trainer,
                m.ShardDiscarded(rank=trainer.rank, generation=generation, reason="torn"),
            )
            return
        sick = not self.peace and self.rng.random() < self.sick
        health: m.Health = "suspect" if sick else "good"
        root = f"{content.history}:{trainer.rank}"
        content.sealed = True
        content.shard = m.HeldShard(
            rank=trainer.rank,
            slot=slot,
            generation=generation,
            step=content.step,
            world_size=self.world,
            root=root,
            health=health,
        )
        sealed = m.ShardSealed(rank=trainer.rank, generation=generation, root=root, health=health)
        self.local(trainer, sealed)

    def restore(self, trainer: Trainer, order: m.RestoreShard) -> None:
        """Load and verify one shard."""
        trainer.order = None
        content = self.source(trainer, order)
        flaky = not self.peace and self.rng.random() < self.flaky
        if content is None or content.corrupt or not content.sealed or flaky:
            self.oracle.memory.clear()
            bad = m.ShardBad(
                rank=trainer.rank, epoch=order.epoch, attempt=order.attempt, detail="bad"
            )
            self.local(trainer, bad)
            return
        trainer.loaded, trainer.step = content, order.step
        self.local(
            trainer,
            m.ShardVerified(rank=trainer.rank, epoch=order.epoch, attempt=order.attempt),
        )

    def source(self, trainer: Trainer, order: m.RestoreShard) -> Content | None:
        """The bytes the order points at."""
        if order.source.kind == "memory":
            key = (trainer.rank, order.source.slot or 0)
            content = self.nodes[trainer.node].slots.get(key)
        else:
            content = self.disk.files.get(order.source.records[0]["file"])
            if content is None and order.generation in self.oracle.durable:
                self.oracle.fail(f"a file of durable {order.generation} is gone")
        if content is not None and content.generation != order.generation:
            self.oracle.fail(f"asked for {order.generation}, found {content.generation}")
        return content

    # ------------------------------------------------------------------ what instructions do

    def do_GrantSlot(self, keeper: Keeper, do: m.GrantSlot) -> None:
        trainer = self.find(keeper, do.rank, epoch=do.generation.epoch)
        if trainer is None:
            return
        slots = self.nodes[keeper.node].slots
        old = slots.get((do.rank, do.slot))
        if trainer.writing is not None or (old is not None and old.writer is not None):
            self.oracle.fail(f"slot {do.slot} of rank {do.rank} granted while written")
        slots[do.rank, do.slot] = Content(
            generation=do.generation,
            history=trainer.history,
            rank=do.rank,
            step=trainer.step,
            writer=trainer,
        )
        trainer.writing, trainer.told_discard = (do.generation, do.slot), False

    def do_DiscardSnapshot(self, keeper: Keeper, do: m.DiscardSnapshot) -> None:
        trainer = self.find(keeper, do.rank, epoch=do.generation.epoch)
        if trainer is not None and trainer.writing and trainer.writing[0] == do.generation:
            trainer.told_discard = True

    def do_StartPersist(self, keeper: Keeper, do: m.StartPersist) -> None:
        name = (do.rank, do.generation, do.attempt)
        if name in keeper.names:
            self.oracle.fail(f"shard file name {name} used twice")
        keeper.names.add(name)
        keeper.jobs.append(["persist", 0, do])

    def do_AbortPersist(self, keeper: Keeper, do: m.AbortPersist) -> None:
        keeper.jobs = [
            job
            for job in keeper.jobs
            if job[0] != "persist" or (job[2].rank, job[2].generation) != (do.rank, do.generation)
        ]

    def do_AnnounceDurable(self, keeper: Keeper, do: m.AnnounceDurable) -> None:
        if do.generation not in self.disk.commits and do.generation in self.oracle.durable:
            self.oracle.fail(f"{do.generation} called durable, no COMMIT on disk")

    def do_AttachRefused(self, keeper: Keeper, do: m.AttachRefused) -> None:
        self._refuse(do.rank, do.incarnation)

    def do_RestoreRefused(self, keeper: Keeper, do: m.RestoreRefused) -> None:
        self._refuse(do.rank, do.incarnation, final=not do.retryable)

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
        if self.oracle.decided.get(do.epoch, do) is not None:
            self.oracle.fail(f"epoch {do.epoch} started from scratch without a decision")
        if trainer is not None:
            trainer.running, trainer.epoch = True, do.epoch
            trainer.history = hash((0, do.epoch))

    def do_Resume(self, keeper: Keeper, do: m.Resume) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is None:
            return
        self.oracle.loaded(do.epoch, do.generation, trainer.loaded)
        assert trainer.loaded is not None
        trainer.running, trainer.epoch = True, do.epoch
        trainer.history, trainer.step = trainer.loaded.history, do.step

    def do_PreparePlan(self, keeper: Keeper, do: m.PreparePlan) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is not None:
            trainer.held, trainer.hold_step = do.version, trainer.step + do.margin_steps
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
        self.switch_plan(trainer)

    def do_AbortPlan(self, keeper: Keeper, do: m.AbortPlan) -> None:
        trainer = self.find(keeper, do.rank)
        if trainer is not None and trainer.held == do.version:
            trainer.held = 0

    def do_ClaimEpoch(self, keeper: Keeper, do: m.ClaimEpoch) -> None:
        keeper.jobs.append(["claim", 0, do])

    def do_WriteDecision(self, keeper: Keeper, do: m.WriteDecision) -> None:
        for _, generation, _ in keeper.coordinator.struck:
            self.oracle.durable.discard(generation)
            self.oracle.memory.clear()
        keeper.jobs.append(["decide", 0, do, keeper.coordinator.attaches[0].fresh])

    def do_WriteCommit(self, keeper: Keeper, do: m.WriteCommit) -> None:
        keeper.jobs.append(["commit", 0, do])

    def do_VerifyGeneration(self, keeper: Keeper, do: m.VerifyGeneration) -> None:
        keeper.jobs.append(["verify", 0, do])

    def do_DeleteGenerations(self, keeper: Keeper, do: m.DeleteGenerations) -> None:
        keeper.jobs.append(["delete", 0, do])

    def do_TrashGeneration(self, keeper: Keeper, do: m.TrashGeneration) -> None:
        if do.generation not in self.disk.commits:
            for name in [n for n, c in self.disk.files.items() if c.generation == do.generation]:
                del self.disk.files[name]

    def do_MarkEverCommitted(self, keeper: Keeper, do: m.MarkEverCommitted) -> None:
        self.disk.marked = True

    def do_Report(self, keeper: Keeper, do: m.Report) -> None:
        if do.kind == "violation":
            self.oracle.fail(do.detail)
        if "report no memory" in do.detail:
            self.oracle.memory.clear()

    # ------------------------------------------------------------------ storage work

    def work(self) -> None:
        """Some storage job takes its next small step."""
        keepers = [keeper for keeper in self.keepers() if keeper.jobs]
        if keepers:
            keeper = keepers[int(self.rng.random() * len(keepers))]
            self.step_job(keeper, keeper.jobs[int(self.rng.random() * len(keeper.jobs))])

    def step_job(self, keeper: Keeper, job: list[Any]) -> None:
        """One step; a finished job leaves the list before its answer is handled."""
        if all(job is not other for other in keeper.jobs):
            return
        answer = getattr(self, "job_" + job[0])(keeper, job)
        job[1] += 1
        if answer is not None:
            keeper.jobs.remove(job)
            if answer and job[0] == "persist":
                self.to_node(keeper, answer)
            elif answer:
                self.to_coordinator(keeper, answer)

    def job_persist(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.StartPersist = job[2]
        content = self.nodes[keeper.node].slots.get((do.rank, do.slot))
        if content is None or content.generation != do.generation:
            self.oracle.fail(f"slot of {do.generation} rank {do.rank} overwritten while persisted")
        assert content is not None
        if not content.sealed or (not self.peace and self.rng.random() < 0.4):
            return None
        name = f"{do.generation}-{do.rank}-{do.attempt}"
        if content.corrupt:  # digests of chunks are compared on the way out
            return m.PersistFailed(
                rank=do.rank,
                generation=do.generation,
                attempt=do.attempt,
                reason="digest differs",
                retryable=False,
            )
        failed = not self.peace and self.rng.random() < self.flaky
        if failed or name in self.disk.files:
            return m.PersistFailed(
                rank=do.rank,
                generation=do.generation,
                attempt=do.attempt,
                reason="no space",
                retryable=self.rng.random() < 0.8,
            )
        self.disk.files[name] = Content(
            generation=do.generation,
            history=content.history,
            rank=do.rank,
            sealed=True,
        )
        record = {"file": name, "root": f"{content.history}:{do.rank}"}
        return m.ShardPersisted(
            rank=do.rank, generation=do.generation, attempt=do.attempt, record=record
        )

    def job_commit(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.WriteCommit = job[2]
        epoch = do.generation.epoch
        if job[1] == 0 and self.runtime.fenced_before_commit(self.disk, epoch):
            return m.CommitFailed(generation=do.generation, reason="newer epoch", fenced=True)
        if job[1] == 1:
            return self.link(do)
        if job[1] == 2:
            if not self.peace and self.rng.random() < self.flaky:
                return m.CommitFailed(generation=do.generation, reason="fsync failed")
            self.disk.commits[do.generation].synced = True
        if job[1] == 3:
            if self.runtime.fenced_after_commit(self.disk, epoch):
                return m.CommitFailed(generation=do.generation, reason="newer epoch", fenced=True)
            self.promise_durable(do)
            return m.CommitWritten(generation=do.generation, created_s=self.now_s)
        return None

    def link(self, do: m.WriteCommit) -> Any:
        """COMMIT appears, if its directory is still there."""
        contents = [self.disk.files.get(record["file"]) for record in do.records]
        if do.generation in self.disk.commits or any(c is None for c in contents):
            return m.CommitFailed(generation=do.generation, reason="directory is gone")
        whole = [(c.generation, c.rank) for c in contents if c is not None]
        if whole != [(do.generation, rank) for rank in range(self.world)]:
            self.oracle.fail(f"{do.generation} committed with shards {whole}")
        entry = m.CatalogueEntry(
            generation=do.generation,
            step=do.step,
            world_size=do.world_size,
            parent=do.parent,
            records=do.records,
            layout_digests=do.layout_digests,
            created_s=self.now_s,
            health=do.health,
        )
        self.disk.commits[do.generation] = Commit(entry=entry)
        return None

    def promise_durable(self, do: m.WriteCommit) -> None:
        """From now on it must not be lost."""
        self.oracle.commits += 1
        self.oracle.ever = self.disk.marked = True
        files = [self.disk.files.get(record["file"]) for record in do.records]
        if do.health != "good" or any(f is None or f.corrupt for f in files):
            return  # nobody promised anything about rotten bytes
        limits = self.oracle.lineage(max(self.oracle.decided))
        if not self.oracle.on(do.generation, limits):
            self.oracle.fail(f"{do.generation} called durable after it was abandoned")
        self.oracle.durable.add(do.generation)

    def job_claim(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.ClaimEpoch = job[2]
        if job[1] == 0 and do.epoch is None:
            launches = {t.incarnation.launch_id for t in self.trainers if t.running}
            if launches - {do.incarnation.launch_id} and not do.previous_launcher_dead:
                return m.EpochRefused(incarnation=do.incarnation, reason="held by another launch")
            self.disk.epoch += 1
            job.append(self.disk.epoch)
            return None
        if do.epoch is not None:
            if do.epoch != self.disk.epoch:
                return m.EpochRefused(incarnation=do.incarnation, reason="newer epoch")
            job.append(do.epoch)
        return self.read_catalogue(do, job[3])

    def read_catalogue(self, do: m.ClaimEpoch, epoch: int) -> m.EpochClaimed:
        """What the claimer sees; reading makes it durable."""
        for commit in self.disk.commits.values():
            commit.synced = True
        self.oracle.basis[epoch] = self.oracle.eligible(epoch)
        parents = tuple(
            m.EpochParent(epoch=e, parent=p) for e, p in sorted(self.oracle.decided.items())
        )
        return m.EpochClaimed(
            incarnation=do.incarnation,
            epoch=epoch,
            committed=tuple(commit.entry for commit in self.disk.commits.values()),
            parents=parents,
            ever_committed=self.disk.marked,
        )

    def job_decide(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.WriteDecision = job[2]
        if job[1] == 0:
            if self.disk.epoch != do.epoch:
                return m.DecisionFailed(
                    epoch=do.epoch, attempt=do.attempt, reason="newer epoch", fenced=True
                )
            if not self.peace and self.rng.random() < self.flaky / 4:
                return m.DecisionFailed(epoch=do.epoch, attempt=do.attempt, reason="no space")
            return None
        if self.disk.epoch != do.epoch:
            return m.DecisionFailed(
                epoch=do.epoch, attempt=do.attempt, reason="newer epoch", fenced=True
            )
        self.oracle.decision(do.epoch, do.generation, asked=job[3])
        return m.DecisionWritten(epoch=do.epoch, attempt=do.attempt)

    def job_verify(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.VerifyGeneration = job[2]
        commit = self.disk.commits.get(do.generation)
        if commit is None:
            return False
        files = [self.disk.files.get(record["file"]) for record in commit.entry.records]
        ok = all(f is not None and not f.corrupt for f in files)
        commit.entry = _replace(commit.entry, verified=ok, corrupt=not ok)
        return m.GenerationVerified(generation=do.generation, ok=ok)

    def job_delete(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.DeleteGenerations = job[2]
        if self.disk.epoch != do.epoch:
            return False
        if job[1] == 0:
            return None
        self.oracle.deleted(self.disk, do.generations, self.retention.keep_last)
        for generation in do.generations:
            self.disk.commits.pop(generation, None)
        return False

    # ------------------------------------------------------------------ starting and ending things

    def start_keeper(self, node: Node) -> Keeper:
        """A new keeper: adopts the memory, then its living trainers come back."""
        keeper = Keeper(
            node=node.index,
            machine=self.rules.node(node=node.index, deadlines=DEADLINES),
            coordinator=self.rules.coordinator(retention=self.retention, deadlines=DEADLINES),
        )
        node.keeper = keeper
        for trainer in self.trainers:
            if trainer.node == node.index:
                trainer.writing = trainer.order = None
        for content in node.slots.values():
            if content is not None:
                content.writer = None
        for rank in sorted({rank for rank, _ in node.slots}):
            held = [node.slots.get((rank, slot)) for slot in range(self.slots)]
            shards = tuple(c.shard for c in held if c is not None and c.sealed and c.shard)
            keeper.inbox.append(m.SlotsAdopted(rank=rank, slots=self.slots, held=shards))
        back = [t for t in self.trainers if t.node == node.index and not t.refused]
        self.rng.shuffle(back)
        for trainer in back:
            self.attach(trainer)
        return keeper

    def attach(self, trainer: Trainer, *, dead: bool = False) -> None:
        """The trainer connects to its keeper."""
        event = m.TrainerAttached(
            rank=trainer.rank,
            incarnation=trainer.incarnation,
            world_size=self.world,
            nodes=self.nodes_of,
            slots=self.slots,
            epoch=trainer.epoch,
            previous_launcher_dead=dead,
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
        self.say("launch", self.launch)
        self.start_trainers(self.launch, dead=False)

    def start_trainers(self, launch: tuple[str, int], *, dead: bool) -> None:
        """All ranks of one incarnation attach."""
        incarnation = m.Incarnation(launch_id=launch[0], restart_round=launch[1])
        for node in self.nodes:
            if node.keeper is None:
                self.start_keeper(node)
        for rank in range(self.world):
            trainer = Trainer(rank=rank, node=self.nodes_of[rank], incarnation=incarnation)
            self.trainers.append(trainer)
            self.attach(trainer, dead=dead)

    def end_trainer(self, trainer: Trainer) -> None:
        """A process dies; its keeper notices."""
        if trainer not in self.trainers:
            return
        self.trainers.remove(trainer)
        for content in self.nodes[trainer.node].slots.values():
            if content is not None and content.writer is trainer:
                content.writer = None
        self.local(trainer, m.TrainerLost(rank=trainer.rank, incarnation=trainer.incarnation))
        self.lose_memory(self.nodes[trainer.node])

    def end_keeper(self, node: Node) -> None:
        """A keeper dies with its connections and its work."""
        if node.keeper is None:
            return
        node.keeper = None
        for key in list(self.channels):
            if node.index in key:
                self.channels[key].clear()
        self.lose_memory(node)

    def lose_memory(self, node: Node) -> None:
        """Slots are gone when nobody holds them any more."""
        if node.keeper is None and not any(t.node == node.index for t in self.trainers):
            if node.slots:
                self.losses += 1
                self.oracle.memory.clear()
            node.slots.clear()

    # ------------------------------------------------------------------ faults

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
        """Somebody starts the same run again while it is running."""
        dead = self.rng.random() < 0.5
        self.launches += 1
        launch = (f"L{self.launches}", 0)
        self.say("foreign launch", launch, "previous dead:", dead)
        self.start_trainers(launch, dead=dead)
        if dead:
            self.launch = launch

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
            self.rng.choice(contents).corrupt = True
            self.oracle.memory.clear()
            self.losses += 1
        elif self.disk.commits and self.rng.random() < 0.3:
            generation = self.rng.choice(list(self.disk.commits))
            name = self.disk.commits[generation].entry.records[0]["file"]
            self.disk.files[name].corrupt = True
            self.oracle.durable.discard(generation)
            if self.slots == 1:  # a single slot relies on the disk for what it overwrites
                self.oracle.memory.clear()

    def sigterm(self) -> None:
        """A preemption notice at one node."""
        for keeper in self.keepers()[:1]:
            self.to_node(keeper, m.BreakpointRequested(reason="SIGTERM"))

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


_DOERS = {
    getattr(m, name[3:]): method
    for name, method in vars(Simulation).items()
    if name.startswith("do_")
}


def _replace(entry: m.CatalogueEntry, **changes: Any) -> m.CatalogueEntry:
    from dataclasses import replace

    return replace(entry, **changes)


def run_seed(seed: int, rules: Rules | None = None, *, trace: bool = False) -> str | None:
    """None if every oracle held, else what broke."""
    try:
        Simulation(seed, rules, trace=trace).run()
    except Violation as violation:
        return str(violation)
    return None


def replay_line(seed: int, mutant: str | None = None) -> str:
    """The command that shows this seed again."""
    tail = f" --mutant {mutant}" if mutant else ""
    return f"python -m tests.protocol.simulation --seed {seed}{tail} --trace"


def main(argv: list[str] | None = None) -> int:
    """Replay one seed, or run many."""
    from tests.protocol.mutants import MUTANTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --first")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args(argv)
    rules = MUTANTS[options.mutant].rules() if options.mutant else None
    seeds = (
        [options.seed]
        if options.seed is not None
        else range(options.first, options.first + options.seeds)
    )
    began, failed = time.perf_counter(), 0
    for seed in seeds:
        broken = run_seed(seed, rules, trace=options.trace)
        if broken is not None:
            failed += 1
            print(f"seed {seed}: {broken}\n  {replay_line(seed, options.mutant)}")
    wall = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {failed} failed, {len(seeds) / wall:.0f} seeds/s")
    return 1 if failed else 0


__all__ = ["CoordinatorProtocol", "NodeProtocol", "Simulation", "main", "replay_line", "run_seed"]

if __name__ == "__main__":
    sys.exit(main())
