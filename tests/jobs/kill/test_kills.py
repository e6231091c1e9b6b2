"""SIGKILL at random instants over trainer, keeper and both: nothing promised is ever lost.

Every case is a training that is killed several times and started again on its run directory until
it ends; its last digest must be that of a run nobody disturbed, to the bit.
"""

import os
import random
from pathlib import Path

import pytest

from tests.jobs.kill.ordeal import PLANS, SPECS, Kill, Ordeal, draw
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

SEED = int(os.environ.get("KILL_SEED", "20260"))
"""First seed; a failure prints the line that replays its case."""

KILLS_PER_CASE = 6
CASES = [pytest.param(case, marks=[] if case < 5 else pytest.mark.slow) for case in range(10)]
"""The campaign of random kills plays 200 more."""


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digest of every spec, trained without autockpt."""
    digests = []
    for i, spec in enumerate(SPECS):
        out = tmp_path_factory.mktemp(f"bare-{i}")
        pid = zygote.start(trainings.spec_data(spec), "", out, attach=False)
        assert zygote.status(pid, wait_s=60) == 0, (out / "log").read_text()
        digests.append(trainings.said(out)[-1]["digest"])
    return digests


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed-{SEED + case}")
def test_every_recovery_ends_bit_exactly_where_an_undisturbed_run_does(
    case: int, zygote: Zygote, undisturbed: list[str], tmp_path: Path
) -> None:
    """60 kills over the cases; each is checked against what had been promised.

    A training that ends before all kills of its case have struck is followed by another one.
    """
    rng = random.Random(SEED + case)
    which = case % len(SPECS)
    struck: list[Kill] = []
    ordeals: list[Ordeal] = []

    def next_kill() -> Kill | None:
        spent = len(struck) + len(ordeals[-1].done)
        return draw(rng, SPECS[which].steps) if spent < KILLS_PER_CASE else None

    try:
        while len(struck) < KILLS_PER_CASE:
            out = tmp_path / str(len(ordeals))
            out.mkdir()
            run_dir = trainings.prepare(out / "run", PLANS[which % len(PLANS)])
            ordeals.append(Ordeal(zygote, SPECS[which], run_dir, out))
            digest = ordeals[-1].go(next_kill)
            assert digest == undisturbed[which], ordeals[-1].tale()
            struck += ordeals[-1].done
            ordeals[-1].done = []
    except BaseException:
        first = SEED if "KILL_SEED" in os.environ else 20260
        print(
            f"replay: KILL_SEED={first} pytest tests/jobs/kill/test_kills.py -k seed-{SEED + case}"
        )
        raise
    finally:
        for ordeal in ordeals:
            ordeal.end()
