"""`make bench-tuner-search`: does the measured search of `autockpt tune` find the best write?

A grid of writes (chunk x writers x O_DIRECT or page cache x codec) is measured exhaustively in this
checkout's file system, in rounds of random order.  The mean of each way's times is taken as the
truth, and the way whose plan loses least time by it as the optimum.  Then the search runs:

    live        it writes itself, with at most 25 measurements and another seed each time
    resampled   each of its measurements is a sample of that way drawn from the grid's

Both start from a storage grid and codecs probed as `autockpt profile` does, apart from the truth.
`no grid` knows nothing of the storage; `wrong grid` was told rates that are off by a quarter each
(standard deviation of their logarithms), so that the default that must be beaten is a poor one.
Resampled noise is independent, where that of neighbouring real writes is shared in part.

Regret is over the lost time that writes cause (waste beyond that of a plan whose writes take no
time): that is what the search minimises; that of the durable time stands beside it.  A flip: a
repeat whose winner is another one than that of most repeats; `beyond ties`: and the two are more
than 5 % apart by the truth.
"""

import argparse
import functools
import math
import os
import random
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autockpt.executors.storage.shard_file import read_image, write_image
from autockpt.policies.decide import decide
from autockpt.profiles.estimators import storage_measures
from autockpt.profiles.probes.storage import StorageProbe, write_grid
from autockpt.profiling.measure.sample_data import Content, content
from autockpt.profiling.measure.timed_write import Write, measure
from autockpt.profiling.tuning import with_codecs
from autockpt.tuner.search.judge import Verdict
from autockpt.tuner.search.model import Model
from autockpt.tuner.search.outcome import space_of
from autockpt.tuner.search.proposals import OptunaProposer
from autockpt.tuner.search.search import Search, seeds_of
from autockpt.tuner.search.space import MIB, Candidate
from autockpt.tuner.simulation.job import Job, known_failures, profile_of
from autockpt.values.goal import Goal
from autockpt.values.profile import Profile, StateClass, StateInventory, StorageMeasure
from benchmarks.harness import Row, parse, publish, row

CHUNKS_BYTES = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB)
WRITERS = (1, 2, 4)
BUDGET = 25
TARGET = 0.05
WRONG = 0.25
"""Error of a wrong grid."""
JOB = Job(
    iteration_s=0.5, state_bytes=1e9, copy_bytes_per_s=8e9, disk_bytes_per_s=1e9,
    slowdown=0.1, detect_s=5.0, restart_s=30.0,
)  # fmt: skip
"""Beside the storage, which is measured: a small job on one node."""
MTBF_S = 8 * 3600.0

Ask = Callable[[Candidate], Write]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the exhaustive measurement says of every way."""

    model: Model
    samples: Mapping[Candidate, Sequence[Write]]

    def seconds(self, candidate: Candidate) -> float:
        """Mean of its writes."""
        return statistics.fmean(write.seconds for write in self.samples[candidate])

    def cost(self, candidate: Candidate) -> float:
        """Lost time that its writes cause."""
        default = self.model.space.default
        base_s = self.seconds(default)
        extra_cpu = (self._cpu_s(candidate) - self._cpu_s(default)) / base_s
        free = self.model.rate(candidate, 0.0).waste
        rating = self.model.rate(candidate, self.seconds(candidate) / base_s, extra_cpu=extra_cpu)
        return rating.waste - free

    def _cpu_s(self, candidate: Candidate) -> float:
        return statistics.fmean(write.cpu_s for write in self.samples[candidate])


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=64, help="of one write")
    parser.add_argument("--rounds", type=int, default=8, help="of the exhaustive measurement")
    parser.add_argument("--repeats", type=int, default=10, help="of the live search")
    parser.add_argument("--resamples", type=int, default=100)
    parser.add_argument("--probe-s", type=float, default=8.0, help="writes of the storage grid")
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser, rounds=2, repeats=1, resamples=1, probe_s=0.5)
    folder = tempfile.mkdtemp(prefix="bench-tuner-search-", dir=os.getcwd())
    try:
        rows = run(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {**vars(args), "budget": BUDGET, "mtbf_s": MTBF_S}
    publish("tuner_search", rows, settings=settings, smoke=args.smoke)


def run(args: argparse.Namespace, folder: str) -> list[Row]:
    """All rows."""
    nbytes = args.megabytes * MIB
    bytes_of = content(folder, _state(nbytes), nbytes=nbytes)
    image = bytes_of.images(1, nbytes)
    profile = probed(bytes_of, image[0], folder, probe_s=args.probe_s, seed=args.seed)
    model = model_of(profile, nbytes)
    print(f"default: {model.space.default}; {len(model.space.allowed())} ways", flush=True)
    samples = exhaust(model, lambda c: measure(folder, image, c), args.rounds, seed=args.seed)
    truth = Truth(model=model, samples=samples)
    live = [
        search(model, lambda c: measure(folder, image, c), seed=args.seed + n)
        for n in range(args.repeats)
    ]
    resample = functools.partial(resampled, samples, random.Random(args.seed))
    blind = model_of(replace(profile, storage=()), nbytes)
    wrong = [model_of(distorted(profile, seed=n), nbytes) for n in range(args.resamples)]
    seeds = range(args.resamples)
    return [
        *rows_of("live", live, truth, target=TARGET),
        *rows_of("resampled", [search(model, resample, seed=n) for n in seeds], truth),
        *rows_of("no grid", [search(blind, resample, seed=n) for n in seeds], truth),
        *rows_of("wrong grid", [search(wrong[n], resample, seed=n) for n in seeds], truth),
        *defaults("default", [model], truth),
        *defaults("default, no grid", [blind], truth),
        *defaults("default, wrong grid", wrong, truth),
        *noise(truth),
    ]


def resampled(
    samples: Mapping[Candidate, Sequence[Write]], draw: random.Random, candidate: Candidate
) -> Write:
    """One of a way's exhaustive writes."""
    return draw.choice(samples[candidate])


def distorted(profile: Profile, *, seed: int) -> Profile:
    """The same with a storage grid whose every cell is off."""
    draw = random.Random(seed)

    def off(measure: StorageMeasure) -> StorageMeasure:
        rate = measure.bytes_per_s.mean * math.exp(draw.gauss(0.0, WRONG))
        return replace(measure, bytes_per_s=replace(measure.bytes_per_s, mean=rate))

    return replace(profile, storage=tuple(off(measure) for measure in profile.storage))


def probed(
    bytes_of: Content, image: memoryview, folder: str, *, probe_s: float, seed: int
) -> Profile:
    """The profile of a small job with this machine's storage and codecs."""
    probe = StorageProbe(folder, image, write=write_image, read=read_image, seed=seed)
    cells = [way for way in write_grid() if way.chunk_bytes in CHUNKS_BYTES]
    storage = storage_measures(probe.run(write_s=probe_s, read_s=probe_s / 8, writes=cells))
    failures = known_failures(mtbf_s=MTBF_S, process_share=0.4, nodes=1)
    job = profile_of(JOB, failures=failures)
    cores = os.cpu_count() or 1
    profile = replace(
        job,
        state=_state(round(JOB.state_bytes)),
        storage=storage,
        fingerprint=replace(job.fingerprint, cores=cores),
    )
    return with_codecs(profile, bytes_of)


def _state(total: int) -> StateInventory:
    parameters = total // 3
    classes = (
        StateClass(name="parameters", tensors=1, bytes=parameters, dtypes={"float32": parameters}),
        StateClass(name="moments", tensors=2, bytes=total - parameters, dtypes={}),
    )
    return StateInventory(
        total_bytes=total, layout_digest="", lazy_bytes=total, boundary_bytes=0, classes=classes
    )


def model_of(profile: Profile, nbytes: int) -> Model:
    """The search's model over the grid of this benchmark."""
    decision = decide(profile, Goal())
    space = space_of(profile, Goal(), decision, nbytes)
    space = replace(space, chunks_bytes=CHUNKS_BYTES, writers=WRITERS)
    return Model(space, decision.plan.staging)


def exhaust(model: Model, ask: Ask, rounds: int, *, seed: int) -> dict[Candidate, list[Write]]:
    """Every allowed way, once a round, in an order drawn anew."""
    ways, order = model.space.allowed(), random.Random(seed)
    ask(model.space.default)  # warm-up
    samples: dict[Candidate, list[Write]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in order.sample(ways, len(ways)):
            samples[way].append(ask(way))
        print(f"exhaustive round {number + 1} of {rounds}", flush=True)
    return samples


def search(model: Model, ask: Ask, *, seed: int) -> Verdict:
    """One search with at most 25 measurements."""
    proposer = OptunaProposer(
        model.space.allowed(),
        seed=seed,
        seeds=len(seeds_of(model)),
        fallback=model.predicted_ratio,
    )
    found = Search(model, proposer, BUDGET)
    while (question := found.ask()) is not None:
        write = ask(question.candidate)
        found.tell(question.answered(seconds=write.seconds, cpu_s=write.cpu_s))
    return found.verdict()


def rows_of(
    name: str, verdicts: Sequence[Verdict], truth: Truth, *, target: float | None = None
) -> list[Row]:
    """Regret, flips and how often the default stayed."""
    least_cost, least_s = optimum(truth)
    winners = [verdict.winner for verdict in verdicts]
    usual = Counter(winners).most_common(1)[0][0]
    flips = [float(w != usual) for w in winners]
    costs = {w: truth.cost(w) for w in set(winners)}
    real = [float(abs(math.log(costs[w] / costs[usual])) > math.log(1 + TARGET)) for w in winners]
    regret = [100 * (costs[w] / least_cost - 1) for w in winners]
    durable = [100 * (truth.seconds(w) / least_s - 1) for w in winners]
    at_most = None if target is None else 100 * target
    mean = statistics.fmean
    return [
        row(name, "regret", regret, "%", at_most=at_most),
        row(name, "regret, mean", regret, "%", statistic=mean),
        row(name, "regret, worst", regret, "%", statistic=max),
        row(name, "durable time over least", durable, "%"),
        row(name, "winner flips", [100 * f for f in flips], "%", statistic=mean),
        row(name, "flips beyond ties", [100 * f for f in real], "%", statistic=mean),
        row(name, "default kept", [100.0 * v.kept_default for v in verdicts], "%", statistic=mean),
    ]


def defaults(name: str, models: Sequence[Model], truth: Truth) -> list[Row]:
    """What doing without the search costs."""
    least_cost, least_s = optimum(truth)
    ways = [model.space.default for model in models]
    regret = [100 * (truth.cost(w) / least_cost - 1) for w in ways]
    return [
        row(name, "regret", regret, "%"),
        row(name, "regret, mean", regret, "%", statistic=statistics.fmean),
        row(
            name,
            "durable time over least",
            [100 * (truth.seconds(w) / least_s - 1) for w in ways],
            "%",
        ),
    ]


def noise(truth: Truth) -> list[Row]:
    """How much is at stake, and how noisy one write is."""
    least_cost, _ = optimum(truth)
    spreads = [
        100 * statistics.stdev(w.seconds for w in writes) / truth.seconds(way)
        for way, writes in truth.samples.items()
    ]
    costs = [100 * (truth.cost(way) / least_cost - 1) for way in truth.samples]
    return [
        row("any way", "regret", costs, "%"),
        row("any way", "spread of one write", spreads, "%"),
    ]


def optimum(truth: Truth) -> tuple[float, float]:
    """(least cost, least seconds) of all ways."""
    ways = truth.samples
    return min(map(truth.cost, ways)), min(map(truth.seconds, ways))


if __name__ == "__main__":
    main()
