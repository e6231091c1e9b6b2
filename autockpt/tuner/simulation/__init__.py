"""Weeks of this job, simulated under a strategy.  Seeded, discrete-event, pure.

    history (failures on a clock) + strategy (levels and when they save)  ->  replay  ->  outcome

A history is drawn once and replayed under every strategy: common random numbers, so differences
between strategies are differences of strategies.  Nothing is stepped through iteration by
iteration: from one failure to the next the checkpoints in between are a closed form.
"""
