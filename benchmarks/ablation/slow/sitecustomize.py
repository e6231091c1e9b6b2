"""Python imports this at its start where the folder is on PYTHONPATH: a keeper on a slow store."""

from benchmarks.ablation.store import install_from_environment

install_from_environment()
