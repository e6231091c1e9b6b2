"""A training process's side of autockpt: attach(), the loop, and one class per concern.

session           the Session: the public face, which composes the parts below
base              RankState: the state that all parts share, and their voice
boundaries        finds iteration boundaries, and calls the parts there in their order
saving            one save: due, begun, fenced
slots             slots for checkpoints: asked for, and asked for again
windows, traffic  idle windows of the training, for snapshots and for the network
place             where loop and data stand: stored, put back, checked at a resume
endings           the last checkpoint, announced stops, letting go
tuning            the plan in force, and on rank 0 the tuner that changes it
keeper_news       the keeper's news, handed to the part that it concerns
attaches          the sessions of this process: which run each is of, and a forked child's
job               this process's place in the job, read once from its environment
sharding_rules    the rules and the mesh by which this rank's state is a part of the whole
room              whether checkpoints have room in memory and on disk
"""

from autockpt.session.session import Session, attached

__all__ = ["Session", "attached"]
