"""What a training script holds: attach(), the loop, and the wires between the rooms.

training      the Session: the loop's face, boundaries, plan changes
rank          what a session knows of its rank, and how it tells
accumulation  which boundaries are whole where gradients are accumulated over iterations
loop_ahead    whether the script will still enter a loop of ours
position      whether loop and data are where a resumed state is
rounds        what an iteration is where nobody says it and several optimizers step
forwards      sees calls of the models, compiled ones too
saving        one save: asked for, begun, fenced
ending        the last checkpoint, letting go
stopping      signals and other announced ends: agreed boundary, grace
plan_switch   a change of the plan, prepared on the listening thread and applied at one step
windows       snapshots in the idle windows of an iteration
traffic       tells the keeper when the training's own network traffic runs
clock         times iterations in blocks, stalls apart
attaches      the sessions of this process: which run each is of, and what a child does not own
job           this process's place in the job, read once from its environment
division      the rules and the mesh by which this rank's state is a part of the whole
mind          rank 0's planner: profile of the first iterations, decision, online control
"""

from autockpt.session.session import Session, attached

__all__ = ["Session", "attached"]
