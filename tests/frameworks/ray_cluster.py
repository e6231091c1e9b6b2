"""A Ray cluster on this machine for several drivers; ends when its standard input is closed.

    python ray_cluster.py CPUS ...      a node for each number; prints the address

A line `kill` ends the raylet of the newest node, as a node that fails; `add CPUS` is another node.
`drain` announces that the newest node will be preempted.  Each is answered by `done`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ray._private import services
from ray.cluster_utils import Cluster

STORE_BYTES = 100 * 2**20
START_WITHIN_S = 300.0
"""Of a node."""


def be_patient() -> None:
    """Ray gives a node 30 s to register; on a busy machine its agents alone take that to import."""
    get_node = services.get_node

    def patiently(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    services.get_node = patiently


class Nodes:
    """Of one cluster, in the order of their start."""

    def __init__(self, cpus: list[int]) -> None:
        head = {"num_cpus": cpus[0], "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[Any] = []
        for count in cpus[1:]:
            self.add(count)

    def add(self, cpus: int) -> None:
        """One more."""
        node = self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)
        self._nodes.append(node)

    def kill(self) -> None:
        """The newest: SIGKILL to its raylet; its workers end with it."""
        node = self._nodes.pop()
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self) -> None:
        """The newest, as a cloud does that takes a machine back."""
        ray = Path(sys.executable).with_name("ray")
        subprocess.run(
            [str(ray), "drain-node", "--address", self.cluster.address, "--node-id",
             self._nodes[-1].node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
             "--reason-message", "taken back", "--deadline-remaining-seconds", "600"],
            check=True, stdout=sys.stderr,
        )  # fmt: skip


def main() -> None:
    """Until the end of its standard input."""
    be_patient()
    nodes = Nodes([int(each) for each in sys.argv[1:]])
    print("address", nodes.cluster.address, flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        getattr(nodes, word)(*map(int, numbers))
        print("done", flush=True)
    nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
