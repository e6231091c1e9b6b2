"""What is compared, on what failures, and what the simulator says of it beforehand."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from autockpt.policies.decide import decide
from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import Failure, History
from autockpt.tuner.simulation.rules import of_plan
from autockpt.values.goal import FailureDeclaration, Goal, Pins, Retention
from autockpt.values.plan import Decision
from autockpt.values.profile import Distribution, Estimate, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to checkpoint the job."""

    name: str
    goal: Goal
    decision: Decision

    @property
    def steps(self) -> int:
        """Iterations between durable checkpoints, at the beginning."""
        return self.decision.plan.tier("disk").interval_steps


def ways(profile: Profile, fixed_steps: Sequence[int], *, mtbf_s: float) -> list[Way]:
    """`builtin:auto`, told the MTBF and that no failure leaves memory alive, and fixed intervals.

    All write alike and hold the same slots: the interval is the only difference.
    """
    failures = FailureDeclaration(mtbf_s=mtbf_s, process_share=0.0)
    auto = Goal(failures=failures, retention=Retention(keep_last=2))
    found = [Way(name="auto", goal=auto, decision=decide(profile, auto))]
    for steps in fixed_steps:
        pins = Pins(memory_interval_steps=steps, disk_interval_steps=steps, retune=False)
        goal = replace(auto, pins=pins)
        found.append(Way(name=f"every {steps}", goal=goal, decision=decide(profile, goal)))
    return found


def exposures_s(mtbf_s: float, count: int, *, seed: int) -> tuple[float, ...]:
    """`count` exponential stretches of mean `mtbf_s`, one from each of as many equal shares.

    Stratified, so that a schedule of a few failures has about the mean that it is meant to have.
    """
    chance = random.Random(seed)
    drawn = [-mtbf_s * math.log(1.0 - (i + chance.random()) / count) for i in range(count)]
    chance.shuffle(drawn)
    return tuple(max(0.2, x) for x in drawn)


def predicted(
    way: Way,
    profile: Profile,
    exposures: Sequence[float],
    *,
    recovery_s: float,
    iteration_s: float | None = None,
) -> float:
    """Goodput that the simulator gives this way on a schedule; recoveries take `recovery_s`.

    `iteration_s`: of the training alone at that time, where it is not the profile's.
    """
    at_s, failures = 0.0, []
    for exposure_s in exposures[:-1]:
        at_s += exposure_s
        failures.append(Failure(at_s=at_s, nodes=(0,)))
        at_s += recovery_s
    history = History(length_s=at_s + exposures[-1], nodes=1, failures=tuple(failures))
    quick = replace(
        profile.recovery,
        detect=_exactly(0.0),
        restart=_exactly(recovery_s),
        restore_disk=_exactly(0.0),
    )
    pace = _scaled(profile.iteration_s, iteration_s or profile.iteration_s.p50)
    job = replace(profile, recovery=quick, iteration_s=pace)
    return replay(of_plan(way.name, job, way.goal, way.decision.plan), history).goodput


def _scaled(times_s: Distribution, p50_s: float) -> Distribution:
    """The same shape around another median."""
    factor = p50_s / times_s.p50
    scaled = {name: factor * value for name, value in asdict(times_s).items() if name != "n"}
    return Distribution(n=times_s.n, **scaled)


def _exactly(seconds: float) -> Estimate:
    return Estimate(value_s=seconds, source="measured")


def against_best(
    measured: Mapping[str, Sequence[float]], fixed: Sequence[str], *, indices: Sequence[int]
) -> float:
    """Goodput of auto over that of the best fixed way, chosen on one half of the schedules and
    compared on the other, and the other way round.

    `measured`: goodput by way and schedule; `indices`: which schedules, in order (a bootstrap
    repeats some).  With one schedule there is nothing to hold out.
    """
    halves = (indices[::2], indices[1::2])
    pairs = [halves, halves[::-1]] if halves[1] else [(halves[0], halves[0])]
    ratios = []
    for chosen_on, judged_on in pairs:
        best = max(fixed, key=lambda name: fmean(measured[name][i] for i in chosen_on))
        auto = fmean(measured["auto"][i] for i in judged_on)
        ratios.append(auto / fmean(measured[best][i] for i in judged_on))
    return fmean(ratios)
