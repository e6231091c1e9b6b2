"""`make bench-tuner`: how much worse are the chosen intervals than the best of all intervals?

Random jobs on random clusters (`regret/scenarios.py`).  For each, nested pairs of intervals all
over what the bounds allow, and disk alone, are simulated on the same failures: a coarse grid, then
a fine one around its winner.  The regret of a choice is what it wastes more than the best of them,
over the waste of the best that intervals decide.

    known       the failure rates are known, as with `failures.mtbf`
    learned     five failures of this job are on record, nothing else but the priors
    prior       no failure yet
    default     100 iterations, the plan of a job that nobody measured
    habit       a blocking save every 30 minutes
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

from benchmarks.harness import Row, bootstrap_upper, parse, publish, quantile, row
from benchmarks.regret.judge import CAUTIOUS, Verdict, judge

NOTES = {
    "hindsight": "the best plan is judged on the failures that it was chosen on: it had luck, and "
    "the regret is an upper bound",
    "foresight": "the best plan and the chosen one are judged on failures that neither has seen",
}


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--scenarios", type=int, default=600)
    parser.add_argument("--failures", type=int, default=8000, help="of each scenario")
    parser.add_argument("--seed", type=int, default=2026)
    args = parse(parser, scenarios=3, failures=100)
    verdicts = judge(args.scenarios, failures=args.failures, seed=args.seed)
    publish("tuner", rows(verdicts), settings=vars(args), notes=NOTES, smoke=args.smoke)


def rows(verdicts: Sequence[Verdict]) -> list[Row]:
    """All figures."""
    hindsight = [_regret(v, v.known[0], v.hindsight) for v in verdicts]
    known = [_regret(v, v.known[1], v.foresight) for v in verdicts]
    learned = [_regret(v, v.learned, v.foresight) for v in verdicts]
    prior = [_regret(v, v.prior, v.foresight) for v in verdicts]
    return [
        *_rows("known, hindsight", hindsight, mean=1.0, p95=5.0),
        *_rows("known, foresight", known, mean=1.0, p95=5.0),
        *_rows(f"learned from {CAUTIOUS}", learned, mean=10.0),
        *_rows("prior alone", prior),
        *_against("default", verdicts, [v.default for v in verdicts]),
        *_against("habit", verdicts, [v.habit for v in verdicts]),
    ]


def _regret(verdict: Verdict, chosen: float, best: float) -> float:
    """Percent of the tunable waste."""
    return 100.0 * (chosen - best) / verdict.tunable


def _rows(
    name: str, regrets: list[float], *, mean: float | None = None, p95: float | None = None
) -> list[Row]:
    bound = bootstrap_upper(regrets, statistic=statistics.fmean, resamples=1000)
    return [
        row(name, "regret, mean", regrets, "%", at_most=mean, statistic=statistics.fmean,
            note=f"95 % bound of the mean {bound:.3g} %"),
        row(name, "regret, p95", regrets, "%", at_most=p95, statistic=_p95),
    ]  # fmt: skip


def _against(name: str, verdicts: Sequence[Verdict], wastes: Sequence[float]) -> list[Row]:
    """How much more a choice wastes than a plan that nobody decided; percent of that plan's waste.

    With rates that had to be learned the choice may lose to a default that fits by chance.
    """
    known = [100.0 * (v.known[1] - w) / w for v, w in zip(verdicts, wastes, strict=True)]
    learned = [100.0 * (v.learned - w) / w for v, w in zip(verdicts, wastes, strict=True)]
    worse = [100.0 * (excess > 1.0) for excess in learned]
    largest: Callable[[Sequence[float]], float] = max
    return [
        row(f"known over {name}", "waste more, worst", known, "%", at_most=1.0, statistic=largest),
        row(f"known over {name}", "waste more, mean", known, "%", statistic=statistics.fmean),
        row(f"learned over {name}", "waste more, worst", learned, "%", statistic=largest),
        row(f"learned over {name}", "waste more, mean", learned, "%", statistic=statistics.fmean),
        row(f"learned over {name}", "worse by 1 %", worse, "% of scenarios",
            statistic=statistics.fmean),
    ]  # fmt: skip


def _p95(samples: Sequence[float]) -> float:
    return quantile(samples, 0.95)


if __name__ == "__main__":
    main()
