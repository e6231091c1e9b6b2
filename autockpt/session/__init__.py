"""A training process's side of autockpt: attach(), the loop, and one class per concern.

* `session`: the public Session, which composes the parts below
* `base`: RankState: the state and the reports that all parts share
* `boundaries`: finds iteration boundaries, and calls the parts there in their order
* `saving`: one save, from due to fenced
* `slots`: requests for slots
* `windows`, `traffic`: idle windows of the training, for snapshots and for the network
* `place`: the position of loop and data: stored, put back, checked at a resume
* `endings`: the last checkpoint, announced stops, the close
* `tuning`: the plan in force, and on rank 0 the tuner that changes it
* `keeper_news`: hands the keeper's news to the parts
* `attaches`: the sessions of this process: their runs, and forked children
* `job`: this process's place in the job, read once from its environment
* `sharding_rules`: the rules and the mesh that make this rank's state a part of the whole
* `room`: whether checkpoints have room in memory and on disk
"""

from autockpt.session.session import Session, attached

__all__ = ["Session", "attached"]
