"""Five kills through the real launcher: `autockpt run` on two ranks of the example job.

torchelastic notices, restarts both ranks, they restore; the digest at the end is that of a run that
nobody disturbed and that knows nothing of autockpt.
"""

import os
import random
import time
from pathlib import Path

import pytest

from tests.jobs.kill.launched import STEPS, Launch, bare_digest

SEED = int(os.environ.get("KILL_SEED", "5"))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_five_kills_under_the_launcher_end_in_the_digest_of_a_bare_run(tmp_path: Path) -> None:
    """Replay: KILL_SEED=N pytest tests/jobs/kill/test_launcher.py"""
    rng = random.Random(SEED)
    victims = ["trainer", "keeper", "both", "trainer", rng.choice(["keeper", "both"])]
    rng.shuffle(victims)
    targets = sorted(rng.sample(range(8, STEPS - 8), len(victims)))
    plan = [
        (target, victim, rng.randrange(2)) for target, victim in zip(targets, victims, strict=True)
    ]
    print(f"replay: KILL_SEED={SEED} pytest tests/jobs/kill/test_launcher.py  {plan}")
    launch = Launch(tmp_path)
    try:
        for target, victim, rank in plan:
            launch.wait(lambda t=target: launch.step() >= t, f"step {target}")  # type: ignore[misc]
            instant = time.monotonic() + rng.uniform(0, 0.03)
            launch.wait(lambda t=instant: time.monotonic() >= t, "instant")  # type: ignore[misc]
            launch.kill(victim, rank)
        digest = launch.finish()
    finally:
        launch.end()
    assert digest == bare_digest(tmp_path)
