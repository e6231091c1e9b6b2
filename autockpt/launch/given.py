"""A launch as a framework names it that starts the ranks by itself: Ray Train does.

An adapter says it once in a worker process, in front of `attach`.  Launchers count
their restarts in variables.  A worker of such a framework has a parent that lives on.  Its restarts
would look like second ranks of one start.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OF_A_LAUNCHER = (
    "GROUP_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "AUTOCKPT_LAUNCH_ID", "AUTOCKPT_LAUNCHER_PID", "AUTOCKPT_NODE",
)  # fmt: skip
"""Variables of the launcher above, which started the driver and not these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLaunch:
    """The name of a start, equal on all ranks."""

    launch_id: str
    """Kept over the restarts of one job; how many there were is written down by rank 0."""
    job: str = ""
    """Name of the training: a start with another name is another job; "": script and arguments say
    it, as docs/howto/launch/jobs.md tells."""
    run_dir: str = ""
    """The directory of the run, where `attach` names none; "": it has the name of the script."""
    node: int | None = None
    """Number of this node, which stays when other nodes are lost; None: nodes are counted."""


_given: GivenLaunch | None = None


def give_launch(launch: GivenLaunch) -> None:
    """Every attach of this process is one of that launch."""
    global _given
    _given = launch
    for name in _OF_A_LAUNCHER:
        os.environ.pop(name, None)


def given_launch() -> GivenLaunch | None:
    """None: the environment says what this process is a start of."""
    return _given


def numbered(alive: Sequence[str], known: Mapping[str, int]) -> dict[str, int]:
    """A number for each node: its own of before, else the smallest that is free."""
    kept = {node: known[node] for node in alive if node in known}
    taken = set(kept.values())
    free = (number for number in range(len(alive) + len(taken)) if number not in taken)
    return kept | {node: next(free) for node in alive if node not in kept}
