"""What the campaigns of the simulation change to be fast must not change what is explored."""

import subprocess
import sys

from tests.campaigns.framework import ROOT, environment

TRACED = """
import hashlib
from tests.campaigns.simulated import thaw
from tests.protocol.simulation import Simulation
from tests.protocol.world import World

digest = hashlib.sha256()
World.say = lambda self, *words: digest.update(f"{self.now_s} {words}".encode())
if THAWED:
    thaw()
for seed in range(40):
    simulation = Simulation(seed, trace=True)
    simulation.run()
    digest.update(repr((simulation.oracle.history, simulation.rng.getstate())).encode())
print(digest.hexdigest())
"""


def traced(*, thawed: bool) -> str:
    """Digest of everything that happens in some seeds, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", TRACED.replace("THAWED", str(thawed))], cwd=ROOT,
        env={**environment(), "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_thawed_messages_play_the_same_runs() -> None:
    """Every event and instruction, every number drawn."""
    assert traced(thawed=True) == traced(thawed=False)
