"""`make bench-accelerated`: real trainings that are killed every few seconds, under fixed intervals
and under `builtin:auto`.

One job is profiled; then, for each schedule of kills, every way trains it once, in a shuffled
order, killed with its keeper after the same stretches of training (`kills/launcher.py`).  Goodput
is iterations that counted times the time of one without autockpt (measured before and after each
run, as the machine's pace drifts) over wall time.  The best fixed
interval is chosen on half of the schedules and compared on the other half, because the best of five
noisy ones looks better than it is.  Beside it the curve that the simulator predicts from the
profile, at the pace that the machine had during each run, and the recoveries.

    make bench-accelerated                            # under 20 minutes
    make bench-accelerated BENCH_ARGS=--smoke         # a minute: does it work?
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from autockpt.policies.policy_file import plan_to_yaml
from autockpt.run_directory import RunDirectory
from autockpt.values.profile import Profile
from benchmarks.harness import Row, bootstrap_interval, parse, publish, row
from benchmarks.kills.plans import Way, against_best, exposures_s, predicted, ways

ROOT = Path(__file__).resolve().parents[1]
RUN_S, PROFILE_S = 240.0, 300.0
"""No run and no profile may take longer."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is run."""

    size: str
    tokens: int
    fixed_s: tuple[float, ...]
    """Fixed intervals, in training time."""
    mtbf_s: float
    stretches: int
    """One more than there are kills in a run."""
    schedules: int
    limit_s: float = 840.0
    """No schedule begins after this; one takes about four minutes."""


FULL = Scale(
    size="10m",
    tokens=32,
    fixed_s=(0.2, 0.45, 1.0, 2.2, 5.0),
    mtbf_s=4.0,
    stretches=7,
    schedules=4,
)
SMOKE = Scale(size="1m", tokens=16, fixed_s=(0.2, 5.0), mtbf_s=1.0, stretches=3, schedules=1)


@dataclass(slots=True)
class Found:
    """What the runs showed, by way and schedule."""

    goodput: dict[str, list[float]] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)
    lost_steps: dict[str, list[int]] = field(default_factory=dict)
    iteration_s: dict[str, list[float]] = field(default_factory=dict)
    """Of the training alone, around each run."""
    exposures_s: list[tuple[float, ...]] = field(default_factory=list)
    fresh_starts: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    """Profile, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, help="of kills")
    given = parse(parser, argv)
    scale = SMOKE if given.smoke else FULL
    scale = replace(scale, schedules=given.schedules or scale.schedules)
    folder = Path(tempfile.mkdtemp(prefix="bench-accelerated-", dir=os.getcwd()))
    try:
        profile = profiled(scale, folder)
        quiet_s = profile.iteration_s.p50
        steps = list(dict.fromkeys(max(1, round(s / quiet_s)) for s in scale.fixed_s))
        chosen = ways(profile, steps, mtbf_s=scale.mtbf_s)
        found = run_all(scale, profile, chosen, folder, seed=given.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(
        "accelerated",
        rows(found, chosen, profile),
        settings={
            "scale": asdict(scale),
            "seed": given.seed,
            "schedules": len(found.exposures_s),
            "recovery_s": fmean(found.recoveries_s),
            "profile_iteration_s": profile.iteration_s.p50,
            "iteration_s": found.iteration_s,
            "goodput": found.goodput,
            "fresh_starts": found.fresh_starts,
        },
        notes={"auto": _steps_said(chosen[0])},
        smoke=given.smoke,
    )


def profiled(scale: Scale, folder: Path) -> Profile:
    """The job, measured as a user does it."""
    run = folder / "profiled"
    script = str(ROOT / "benchmarks" / "kills" / "trainer.py")
    command = ["-m", "autockpt", "profile", "--out", str(run), script]
    _python([*command, "--size", scale.size, "--tokens", str(scale.tokens)], PROFILE_S)
    profile = RunDirectory.open(run).read_profile()
    assert profile is not None, "`autockpt profile` writes one or fails"
    return profile


def run_all(
    scale: Scale, profile: Profile, chosen: Sequence[Way], folder: Path, *, seed: int
) -> Found:
    """Whole schedules, until the last one or until time is up."""
    found, began_s, chance = Found(), time.monotonic(), random.Random(seed)
    for number in range(scale.schedules):
        if number and time.monotonic() - began_s > scale.limit_s:
            print(f"time is up after {number} of {scale.schedules} schedules")
            break
        exposures = exposures_s(scale.mtbf_s, scale.stretches, seed=1000 * seed + number)
        measured = {}
        for way in chance.sample(list(chosen), len(chosen)):
            account = one_run(way, scale, profile, exposures, folder / f"{number}-{way.steps}")
            measured[way.name] = account
            said = f"{account['steps']} steps in {account['wall_s']:.1f} s"
            print(f"schedule {number}  {way.name:<10} {said}, lost {account['lost_steps']}")
        for name, account in measured.items():
            goodput = (account["steps"] - 1) * account["iteration_s"] / account["wall_s"]
            found.goodput.setdefault(name, []).append(goodput)
            found.lost_steps.setdefault(name, []).extend(account["lost_steps"])
            found.recoveries_s += account["recoveries_s"]
            found.fresh_starts += account["fresh_starts"]
            found.iteration_s.setdefault(name, []).append(account["iteration_s"])
        found.exposures_s.append(exposures)
    return found


def one_run(
    way: Way, scale: Scale, profile: Profile, exposures: Sequence[float], folder: Path
) -> dict[str, Any]:
    """The account of one way on one schedule."""
    run = RunDirectory.create(folder)
    run.write_goal(way.goal)
    run.write_profile(profile)
    run.write_decision(way.decision, plan_text=plan_to_yaml(way.decision))
    try:
        return _launched(scale, exposures, str(run.path))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _launched(scale: Scale, exposures: Sequence[float], run_directory: str) -> dict[str, Any]:
    order = {
        "size": scale.size,
        "tokens": scale.tokens,
        "exposures_s": list(exposures),
        "quiet_s": scale.mtbf_s / 2,
        "run_directory": run_directory,
    }
    text = _python(["-m", "benchmarks.kills.launcher", json.dumps(order)], RUN_S)
    account: dict[str, Any] = json.loads(text.splitlines()[-1])
    return account


def _python(arguments: Sequence[str], limit_s: float) -> str:
    """Standard output of a Python of ours; raises with what it said where it fails."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOCKPT_", "TORCHELASTIC_"))}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:3])} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def rows(found: Found, chosen: Sequence[Way], profile: Profile) -> list[Row]:
    """Goodput of each, the prediction, and how auto stands to the best fixed interval."""
    fixed = [way.name for way in chosen if way.name != "auto"]
    recovery_s, result, errors = fmean(found.recoveries_s), [], []
    for way in chosen:
        samples = [100.0 * x for x in found.goodput[way.name]]
        expected = fmean(
            predicted(way, profile, exposures, recovery_s=recovery_s, iteration_s=iteration_s)
            for exposures, iteration_s in zip(
                found.exposures_s, found.iteration_s[way.name], strict=True
            )
        )
        error = 100.0 * abs(expected / fmean(found.goodput[way.name]) - 1.0)
        errors += [error] if way.name != "auto" else []
        result += [
            row(way.name, "goodput", samples, "%", statistic=fmean),
            row(way.name, "predicted", [100.0 * expected], "%"),
            row(way.name, "prediction off by", [error], "%"),
            row(way.name, "lost at a kill", [float(x) for x in found.lost_steps[way.name]],
                "iterations", statistic=fmean),
        ]  # fmt: skip
    whole = list(range(len(found.exposures_s)))
    ratio = 100.0 * against_best(found.goodput, fixed, indices=whole)
    low, high = _interval(found, fixed)
    result.append(
        row("auto", "over the best fixed", [ratio], "%", at_least=98.0,
            note=f"95 % interval {low:.1f} to {high:.1f} %, bootstrap over {len(whole)} schedules")
    )  # fmt: skip
    result.append(row("curve", "prediction off by, worst", [max(errors)], "%", at_most=10.0))
    return result


def _interval(found: Found, fixed: Sequence[str]) -> tuple[float, float]:
    """Over schedules."""

    def ratio(indices: Sequence[int]) -> float:
        return 100.0 * against_best(found.goodput, fixed, indices=indices)

    return bootstrap_interval(range(len(found.exposures_s)), ratio, RESAMPLES)


def _steps_said(auto: Way) -> str:
    plan = auto.decision.plan
    return (
        f"decided on memory every {plan.tier('memory').interval_steps or 'off'} and disk every "
        f"{plan.tier('disk').interval_steps} iterations, and may change its mind"
    )


if __name__ == "__main__":
    main()
