"""What each mechanism gains by itself; `benchmarks/ablations.py` runs and publishes it."""
