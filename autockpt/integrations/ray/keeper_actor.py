"""The keeper of a node in a detached actor of Ray, which outlives workers, attempts and drivers.

Ray starts the actor on the node and lists it: `ray list actors`.  The keeper is its child.  As a
setting Ray kills all processes that a worker leaves behind; a child of a living actor is none of
them.  The actor holds the runtime environment of the job as well, whose files the keeper needs.

The actor ends when the keeper does: after the training, or 10 minutes without a worker.  `ray.kill`
on it ends both, and so does the end of the node.  Nothing here loads torch: an actor stays small.
"""

import hashlib
import os
import subprocess
import sys
import threading
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autockpt import new_files
from autockpt.executors.keeper.launch import KeeperStart

NAMESPACE = "autockpt"
NODE_LETTERS = 10
"""Of Ray's id of a node: so many tell the nodes of a cluster apart."""
START_S = 120.0
"""Ray starts a process for the actor; on a busy machine its imports alone take half a minute."""
TRIES = 3
"""An actor that is found may be about to end, with the keeper of a training that is over."""

_told: set[int] = set()
"""Keepers that have been announced."""


class KeeperActor:
    """Starts the keeper as its child, and ends with it."""

    def __init__(self, command: list[str], environment: dict[str, str], log_path: str) -> None:
        with open(log_path, "ab", opener=new_files.private) as log:
            self._keeper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=environment, cwd="/",
            )  # fmt: skip
        own = ray.get_runtime_context().current_actor
        threading.Thread(target=self._follow, args=(own,), daemon=True).start()

    def _follow(self, own: Any) -> None:
        self._keeper.wait()
        ray.kill(own)

    def pid(self) -> int:
        """Of the keeper."""
        return self._keeper.pid


def start_in_actor(start: KeeperStart) -> bool:
    """A starter of keepers: `launch.start_keepers_by`.  False: Ray could not; says which it was."""
    name = actor_name(start)
    for left in reversed(range(TRIES)):
        try:
            pid = _started(name, start)
        except Exception as error:
            if isinstance(error, ActorDiedError) and left:
                continue
            _say(
                f"the keeper of node {start.node} starts as a process beside Ray: its actor {name} "
                f"did not start ({type(error).__name__}: {error!s:.300})"
            )
            return False
        if pid not in _told:  # it is asked for again until it answers
            _told.add(pid)
            where = f"process {pid}, in Ray's detached actor {name}"
            _say(f"the keeper of node {start.node} is {where}")
        return True
    return False


def actor_name(start: KeeperStart) -> str:
    """Of the keeper's actor, in its namespace; another run or node of Ray's has another one."""
    node = ray.get_runtime_context().get_node_id()[:NODE_LETTERS]
    return f"keeper-{start.node:03d}-{_run_name(start.run_directory)}-{node}"


def keepers_of(run_directory: str) -> dict[str, int]:
    """The numbers of nodes with an actor for that run, by the first letters of Ray's ids."""
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        before, run, node = actor["name"].partition(f"-{_run_name(run_directory)}-")
        if actor["namespace"] == NAMESPACE and run:
            found[node] = int(before.removeprefix("keeper-"))
    return found


def _run_name(run_directory: str) -> str:
    experiment = os.path.basename(os.path.dirname(run_directory))
    return f"{experiment}-{hashlib.sha256(run_directory.encode()).hexdigest()[:8]}"


def _started(name: str, start: KeeperStart) -> int:
    """The keeper's process.  Raises what Ray raises."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = (
        ray.remote(KeeperActor)
        .options(
            name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            scheduling_strategy=here,
        )
        .remote([*start.command, "--child"], start.environment, start.log_path)
    )  # fmt: skip
    return int(ray.get(actor.pid.remote(), timeout=START_S))


def _say(text: str) -> None:
    print(f"autockpt: {text}", file=sys.stderr, flush=True)
