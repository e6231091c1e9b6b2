"""A node without room for the shards of others: said, tried again, and never in the way."""

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from autockpt.values.redundancy import Redundancy
from tests.conftest import keeper_pids
from tests.nodes.conftest import MakeJob

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 256 * 2**20
"""Less than what is never taken from a training."""


@contextmanager
def memory_group(pid: int) -> Iterator[Path]:
    """A control group of this process with a limit.  Raises OSError where there are none."""
    group = GROUPS / f"autockpt-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            (GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def own_slots(pid: int) -> int:
    """Slots of its own rank that a keeper has."""
    links = []
    with contextlib.suppress(OSError):
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return len({found[0] for link in links if (found := re.search(r"autockpt-r\d+-s\d+", link))})


@pytest.mark.root
@pytest.mark.timeout(120)
def test_a_node_too_full_for_guests_trains_and_saves_on_and_is_protected_once_there_is_room(
    new_job: MakeJob,
) -> None:
    """Its keeper is in a group with a limit from the moment it has the slots of its own rank."""
    job = new_job(2, Redundancy(scheme="replicas", copies=2), steps=120)
    job.start(2)
    job.wait(lambda: [own_slots(pid) for pid in keeper_pids(job.run_dir, 1)] == [3], "slots")
    (pid,) = keeper_pids(job.run_dir, 1)
    with ExitStack() as stack:
        try:
            limited = stack.enter_context(memory_group(pid))
        except OSError as error:
            pytest.skip(f"no memory control groups here: {error}")
        job.limit.set(60)
        job.wait(lambda: bool(job.events("ProtectionLost", [1])), "a reason")
        job.wait(lambda: job.newest("PersistCommitted") >= 40, "durable ones all the same")
        assert not job.events("GenerationProtected"), job.tale()
        (lost, *others) = job.events("ProtectionLost", [1])
        assert "copy of rank 0" in lost["reason"]
        assert limited.name in lost["reason"], lost
        assert not others, "once, and not after every checkpoint"
        (limited / "memory.limit_in_bytes").write_text("-1")
        job.limit.set(120)
        job.wait(lambda: job.newest("GenerationProtected") > 60, "protection")
    assert job.finish() == job.undisturbed(), job.tale()
