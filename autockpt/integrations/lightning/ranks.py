"""Ranks that Lightning has started by itself, of which no launcher has told.

`Trainer(devices=2)` and `Fabric(devices=2)` start the script again for each further rank, with few
variables: RANK is not among them.  All ranks would take themselves for the first.
"""

import os
from typing import Any

from autockpt.executors.storage.directory.claims import pid_start
from autockpt.launch.given import GivenLaunch, give_launch
from autockpt.launch.rank_env import under_srun


def tell_ranks(owner: Any) -> None:
    """Says who this process is, where neither launcher nor scheduler has done it.

    `owner`: the Trainer, or Fabric, behind the setup of its process group.  Called on all ranks.
    """
    if owner.world_size == 1 or "RANK" in os.environ or under_srun(os.environ):
        return
    pid = os.getpid()
    launch_id = owner.strategy.broadcast(f"lightning-{pid}-{pid_start(pid)}", 0)
    give_launch(GivenLaunch(launch_id=launch_id))
    os.environ |= {
        "RANK": str(owner.global_rank), "WORLD_SIZE": str(owner.world_size),
        "LOCAL_WORLD_SIZE": str(getattr(owner.strategy, "num_processes", owner.world_size)),
    }  # fmt: skip
