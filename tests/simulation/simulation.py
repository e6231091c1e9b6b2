"""A seeded simulator of the whole protocol: the real machines in a hostile world.

One seed is one run: a random topology, random weights for every kind of action (so that some
seeds are nothing but zombies, others nothing but lost nodes), chaos, then for every second seed
peace, in which the run must come back.  A failing seed prints the command that replays it:

    python -m tests.simulation.simulation --seed N [--mutant NAME] [--slots N] [--trace]
"""

import argparse
import sys
import time
from typing import Any

from autockpt.executors.protocol.coordinator.choosing import HOPELESS_STARTS
from autockpt.values.generation import Generation
from tests.simulation.actors import Rules
from tests.simulation.faults import FAULTS, Faults
from tests.simulation.oracle import Violation

SCENES = (2, 7)
"""Chaos is a number of scenes: a few calm rounds, in which training goes on, then a burst of
single actions, faults among them."""


class Simulation(Faults):
    """One seed."""

    def __init__(
        self, seed: int, rules: Rules | None = None, *, trace: bool = False, slots: int = 0
    ) -> None:
        super().__init__(seed, rules, trace=trace, slots=slots)
        self.ends_in_peace = seed % 2 == 0
        self.actions, self.weights = self._swarm()

    def _swarm(self) -> tuple[list[Any], list[float]]:
        rng = self.rng
        table = [
            (self.deliver, 6.0),
            (self.train, 4.0 * rng.choice((0.5, 1, 2))),
            (self.work, 4.0 * rng.choice((0.3, 1, 1))),
            (self.tick, rng.choice((0.1, 0.5, 1.5))),
            (self.launcher, 0.5),
            (self.propose_plan, rng.choice((0.0, 0.5, 2.0))),
        ]
        rate = rng.choice((0.2, 0.6, 1.5))
        for name in FAULTS:
            table.append((getattr(self, name), rate * rng.choice((0.0, 0.1, 0.4, 1.0))))
        total, sums = 0.0, []
        for _, weight in table:
            total += weight
            sums.append(total)
        return [action for action, _ in table], sums

    def run(self) -> None:
        """Chaos, then peace."""
        rng = self.rng
        self.start_launch()
        for _ in range(rng.randint(*SCENES)):
            for _ in range(rng.choice((2, 5, 8, 11))):
                self.hang_or_not()
                self.calm_round()
                if self.changes_scheme and self.schemes.random() < 0.8:
                    self.propose_scheme(self.other_scheme())
            for action in rng.choices(self.actions, cum_weights=self.weights, k=rng.randint(2, 14)):
                action()
            if rng.random() < 0.7:
                losses = [self.kill_trainer, self.spontaneous_launch, self.kill_keeper]
                losses += [self.kill_node] * (2 if self.redundancy.tolerates else 0)
                rng.choice(losses)()
        if self.ends_in_peace:
            self.settle()

    def hang_or_not(self) -> None:
        """The storage begins to hang, with deaths beside it, or answers again."""
        if not self.stalls or self.stuck.random() >= (0.08 if self.hung else 0.15):
            return
        self.hung = not self.hung
        self.say("the storage hangs:", self.hung)
        if not self.hung or not self.trainers:
            return
        if self.stuck.random() < 0.4:
            self.end_trainer(self.trainers[int(self.stuck.random() * len(self.trainers))])
            return
        for trainer in list(self.trainers):
            self.end_trainer(trainer)
        for _ in range(self.stuck.randint(3, 12)):
            self.calm_round(passing=False)
            self.tick()

    def end(self) -> None:
        """Takes it apart: machines hold tables of their own methods, and such circles are found by
        a collector that looks through everything, again and again."""
        for keeper in self.started:
            vars(keeper.machine).clear()
            vars(keeper.coordinator).clear()
        vars(self).clear()

    def calm_round(self, *, passing: bool = True) -> None:
        """Most things make progress; some messages stay in flight.  Not `passing`: no time does."""
        rng = self.rng
        self.launcher()
        for trainer in list(self.trainers):
            self.step_trainer(trainer)
        for keeper in self.keepers():
            for job in list(keeper.jobs):
                for _ in range(rng.choice((1, 4, 4, 4) if job[0] != self.slow else (0, 0, 0, 1))):
                    self.step_job(keeper, job)
        for _ in range(rng.choice((4, 12, 99))):
            if not self.deliver():
                break
        if passing and rng.random() < 0.3:
            self.tick()

    def settle(self) -> None:
        """Faults stop: an attach must resume, and a save must become durable."""
        self.say("---- peace")
        self.peace, self.hung = True, False
        # A policy never asks for saves faster than they can be sealed.
        self.interval, self.disk_every = 4, 1
        self.blocked.clear()
        for trainer in list(self.trainers):
            self.end_trainer(trainer)
        self.relaunch_in_peace(fresh=False)
        if all(t.final for t in self.trainers):
            self.check_refusal()
            self.relaunch_in_peace(fresh=True)
        if not all(t.running for t in self.trainers):
            states = [(k.machine.state.phase, k.coordinator.state.phase) for k in self.keepers()]
            self.oracle.fail(f"liveness: trainers did not resume; keepers are {states}")
        # With a limit ranks begin to differ when they hear that the first one is durable.
        self.check_saving(3 if self.in_flight else 1)
        self.check_plans()
        if self.slots > 1:
            self.check_protection()
            self.check_scheme()
            if self.stalls:
                self.check_hang()
        self.check_end()

    def check_saving(self, count: int) -> None:
        """So many more saves become durable."""
        wanted = self.oracle.commits + count
        self.round_until(lambda: self.oracle.commits >= wanted, 150)
        if self.oracle.commits < wanted:
            self.oracle.fail("liveness: no save became durable in peace")

    def check_protection(self) -> None:
        """With copies wanted and enough nodes, something becomes protected."""
        current = [
            k.coordinator.state
            for k in self.keepers()
            if k.coordinator.state.term == self.disk.term
        ]
        if not any(one.protects for one in current):
            return
        before = len(self.oracle.protections)
        self.round_until(lambda: len(self.oracle.protections) > before, 150)
        if len(self.oracle.protections) == before:
            self.oracle.fail("liveness: nothing became protected in peace")

    def check_scheme(self) -> None:
        """A plan changes the scheme in peace: newer checkpoints are protected under it."""
        if not self.changes_scheme:
            return
        for _ in range(2):
            wanted = self.other_scheme()
            self.propose_scheme(wanted)
            self.round_until(lambda: all(self.plan in t.plans for t in self.trainers), 60)
            self.check_protection()

    def check_hang(self) -> None:
        """The storage hangs, all trainers die: what their memory has brings them back, and on."""
        self.hung, self.elastic = True, 0.0
        for trainer in list(self.trainers):
            self.end_trainer(trainer)
        self.drain()
        if not self.has_all():
            self.hung = False
            self.relaunch_in_peace(fresh=False)
            return
        self.start_launch()
        self.round_until(lambda: all(t.running or t.refused for t in self.trainers), 60)
        if not all(t.running for t in self.trainers):
            states = [(k.machine.state.phase, k.coordinator.state.phase) for k in self.keepers()]
            self.oracle.fail(f"liveness: memory had all, and waits for the storage: {states}")
        self.regained += 1
        before = len(self.oracle.announced)
        self.round_until(lambda: len(self.oracle.announced) > before, 60)
        if len(self.oracle.announced) == before:
            self.oracle.fail("liveness: nothing was saved in memory while the storage hangs")
        self.hung = False
        self.check_saving(3 if self.in_flight else 1)

    def has_all(self) -> bool:
        """The newest that every rank has sealed is sound, and of the term that ran."""
        held: dict[Generation, set[int]] = {}
        corrupt: set[Generation] = set()
        for node in self.nodes:
            contents = (c for c in node.slots.values() if c is not None and c.sealed)
            for content in contents:
                held.setdefault(content.generation, set()).add(content.rank)
                corrupt |= {content.generation} if content.corrupt else set()
        whole = [g for g, ranks in held.items() if len(ranks) == self.world]
        newest = max(whole, default=None)
        bad = corrupt | self.oracle.nan
        return newest is not None and newest.term == self.disk.term and newest not in bad

    def check_end(self) -> None:
        """Keepers connect anew while training goes on, which ends: nobody waits for ever.

        Not of those that were left out: they may keep what they have until they are needed.
        """
        for _ in range(self.rng.choice((0, 12, 24))):
            self.calm_round(passing=False)
            for channel in self.channels.values():
                if self.rng.random() < 0.1:
                    channel.clear()
        for trainer in list(self.trainers):
            self.end_trainer(trainer)
        members = [k for k in self.keepers() if k.machine.state.term == self.disk.term]

        def settled() -> bool:
            return all(
                k.machine.state.settled and k.coordinator.settled_for(k.machine.state.incarnation)
                for k in members
            )

        self.round_until(settled, 20)
        if not settled():
            machines = [k.machine.state for k in members]
            tables = [(m.node, [*m.unsettled], [*m.votes], [*m.persists]) for m in machines]
            saves = [
                s for k in members for s in k.coordinator.state.saves.values() if not s.finished
            ]
            self.oracle.fail(f"liveness: keepers wait for ever: {tables}, {saves}")

    def relaunch_in_peace(self, *, fresh: bool) -> None:
        """The launcher tries again; a launch that was replaced is started anew by its user.

        A coordinator gives up what is bad in memory after `HOPELESS_STARTS` starts, and counts for
        itself.  Launches of other sizes may have another coordinator, so two of them may count.
        """
        for attempt in range(2 + 2 * HOPELESS_STARTS):
            self.start_launch(fresh=fresh, new_id=attempt > 0 or self.rng.random() < 0.5)
            self.round_until(lambda: all(t.running or t.refused for t in self.trainers), 120)
            if all(t.running or t.final for t in self.trainers):
                return
            states = [(k.machine.state.phase, k.coordinator.state.phase) for k in self.keepers()]
            self.say("not running", states)

    def round_until(self, done: Any, rounds: int) -> None:
        """Everything that can happen happens, in random order, until `done`.

        Time passes also where trainers never rest: a lost answer is asked for again.
        """
        for number in range(1, rounds + 1):
            if done():
                return
            busy = self.drain()
            for keeper in self.keepers():
                for job in list(keeper.jobs):
                    self.step_job(keeper, job)
                    busy |= not self.hung
            for trainer in list(self.trainers):
                self.step_trainer(trainer)
            if not busy or number % 10 == 0:
                self.tick()
        self.drain()

    def drain(self) -> bool:
        """Deliver every message in flight, and what follows from it; True if there was any."""
        busy = False
        while self.deliver():
            busy = True
        return busy

    def check_refusal(self) -> None:
        """Refusing is right only if nothing can be restored; weights alone cannot."""
        limits = self.oracle.eligible(self.disk.term + 1)
        for generation, commit in self.disk.commits.items():
            files = self.files_of(commit.entry.records)
            whole = all(f is not None and not f.corrupt for f in files)
            good = generation not in self.oracle.nan and not commit.entry.corrupt
            good = good and not commit.entry.weights_only
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


def run_seed(
    seed: int, rules: Rules | None = None, *, trace: bool = False, slots: int = 0
) -> str | None:
    """None if every oracle held, else what broke."""
    world = Simulation(seed, rules, trace=trace, slots=slots)
    try:
        world.run()
    except Violation as violation:
        return str(violation)
    except Exception as error:  # a machine must not raise, whatever happens
        return f"{type(error).__name__}: {error}"
    finally:
        world.end()
    return None


def replay_line(seed: int, mutant: str | None = None, slots: int = 0) -> str:
    """The command that shows this seed again."""
    tail = (f" --mutant {mutant}" if mutant else "") + (f" --slots {slots}" if slots else "")
    return f"python -m tests.simulation.simulation --seed {seed}{tail} --trace"


def main(argv: list[str] | None = None) -> int:
    """Replay one seed, or run many."""
    from tests.simulation.mutants import MUTANTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --first")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--slots", type=int, default=0, help="of every rank; 0: as the seed says")
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
        broken = run_seed(seed, rules, trace=options.trace, slots=options.slots)
        if broken is not None:
            failed += 1
            print(f"seed {seed}: {broken}\n  {replay_line(seed, options.mutant, options.slots)}")
    wall = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {failed} failed, {len(seeds) / wall:.0f} seeds/s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
