"""What all tests of nodes share: networks of namespaces."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from autockpt.values.redundancy import Redundancy
from benchmarks.cluster import Cluster, cluster
from benchmarks.namespaces import network
from tests.jobs.kill.zygote import Zygote
from tests.jobs.nodes.network_job import NetworkJob

BITS_PER_S = 1_000_000_000
"""A slow network of today for the tiny states of tests."""

MakeJob = Callable[..., NetworkJob]


@contextmanager
def launched(nodes: int, bits_per_s: int, folder: Path, **more: Any) -> Iterator[Cluster]:
    """A job under `autockpt` on all of its nodes (`cluster`); skips where there are none."""
    with ExitStack() as stack:
        try:
            job = stack.enter_context(cluster(nodes, bits_per_s, folder, **more))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        for node in range(nodes):
            job.launch(node)
        yield job


@pytest.fixture
def new_job(zygote: Zygote, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes jobs on networks of their own; skips where there are no namespaces."""
    with ExitStack() as stack:

        def make(
            nodes: int,
            redundancy: Redundancy,
            *,
            steps: int,
            spare: int = 0,
            devices: bool = False,
            **more: Any,
        ) -> NetworkJob:
            """With `devices`, these have a network of their own."""
            try:
                made = stack.enter_context(network(nodes + spare, BITS_PER_S, devices=devices))
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {error}")
            job = NetworkJob(zygote, made, tmp_path, redundancy, ranks=nodes, steps=steps, **more)
            stack.callback(job.end)
            return job

        yield make
