"""A real training that is killed on a schedule: the parts of `benchmarks/accelerated.py`."""
