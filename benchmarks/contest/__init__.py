"""How contestants are run and held against each other; see `benchmarks.engine`."""
