"""Whether this process is in a Slurm step that takes its keepers along when it ends.

With proctrack/cgroup all processes of a step are in one group, and end with it.  With the others a
keeper stays: it has left the tree of the step's processes.

Slurm ends a step with the first of its nodes.  A dead rank of srun's ends the step, too: the other
ranks fail without it, and nothing within the step starts it again.

Source: slurm.conf(5), "ProctrackType"; slurmctld 22.05.8 with four slurmd on one host.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from autockpt.launch.rank_env import under_srun
from autockpt.values.profile import MemoryEnd

STEP = re.compile(r"/job_(\d+)/step_[^/]+")
TRACKERS = ("freezer", "")
"""Control groups by which proctrack/cgroup finds a step's processes: version 1, version 2."""


def memory_end_here() -> MemoryEnd:
    """Of a job that this process belongs to."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        groups = ""
    return memory_end(os.environ, groups)


def memory_end(environ: Mapping[str, str], groups: str) -> MemoryEnd:
    """The same from a process's environment and its /proc/self/cgroup."""
    if not ends_with_step(environ, groups):
        return "node"
    return "rank" if under_srun(environ) else "step"


def ends_with_step(environ: Mapping[str, str], groups: str) -> bool:
    """Whether all processes that this one starts end with its step."""
    lines = (line.split(":", 2) for line in groups.splitlines() if line.count(":") >= 2)
    paths = [path for _, names, path in lines if set(names.split(",")) & set(TRACKERS)]
    found = {step[1] for path in paths if (step := STEP.search(path))}
    return environ.get("SLURM_JOB_ID", "") in found
