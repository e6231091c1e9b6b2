"""The simulator of all intervals at once is the engine, column by column."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.interval.choose import Rates, tiers_of
from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import Failure, History
from autockpt.tuner.simulation.rules import two_tiers
from benchmarks.regret.sweep import column, columns, waste
from tests.unit.policies.interval.test_choose import costs


@settings(max_examples=40, deadline=None)
@given(
    mtbf_s=st.floats(min_value=60.0, max_value=5000.0),
    share=st.floats(min_value=0.0, max_value=1.0),
    base=st.integers(min_value=1, max_value=40),
    every=st.integers(min_value=1, max_value=12),
    seed=st.integers(min_value=0, max_value=999),
)
def test_every_column_wastes_what_the_engine_says(mtbf_s, share, base, every, seed):
    """Memory and disk, disk alone, two scenarios, failures during recovery included."""
    chance = np.random.default_rng(seed)
    gaps_s = chance.exponential(mtbf_s, (2, 60))
    alive = chance.random((2, 60)) < share
    rates = Rates(memory_per_s=share / mtbf_s, disk_per_s=(1 - share) / mtbf_s)
    both = tiers_of(costs(), rates, memory_on=True)
    alone = tiers_of(costs(persist_s=9.0), rates, memory_on=False)
    plans = [(0, both, base, base * every), (1, both, base, base * every), (1, alone, 0, base)]
    found = waste(columns([column(*plan) for plan in plans]), gaps_s, alive)
    for (scenario, tiers, memory, disk), wasted in zip(plans, found, strict=True):
        at_s = np.cumsum(gaps_s[scenario])
        failures = tuple(
            Failure(at_s=float(at), nodes=() if lives else (0,))
            for at, lives in zip(at_s, alive[scenario], strict=True)
        )
        # The last failure takes back what is lost; nothing is trained after it.
        history = History(length_s=float(at_s[-1]) + 1e-9, nodes=1, failures=failures)
        expected = replay(two_tiers("it", tiers, memory, disk), history)
        assert wasted == pytest.approx(expected.waste, abs=1e-9)
