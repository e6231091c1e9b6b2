"""A job of `autockpt run` on nodes that are network namespaces, one rank a node.

The rendezvous store runs at the switch, as it would on a login node; whoever uses this is the
scheduler and launches a lost node anew.  Everything that is started carries a mark in its
environment and is ended in the end.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from benchmarks.namespaces import INTERFACE, Network, Node, network

E = TypeVar("E", bound=t.Event)
R = TypeVar("R")

ROOT = Path(__file__).resolve().parents[1]
PORT = 29400
STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print("listening", flush=True)
sys.stdin.read()
"""


class ClusterError(Exception):
    """Something did not happen: what, and where to look."""


class Cluster:
    """Launchers on nodes, and what they write; made by `cluster`."""

    def __init__(
        self,
        net: Network,
        folder: Path,
        *,
        private: Path,
        settings: Sequence[str],
        script: Sequence[str],
        environment: Mapping[str, str],
        mode: str,
        nodes: str,
        profiled: bool,
    ) -> None:
        """`settings` and `script`: of `autockpt` run or profile.  `private`: the nodes' own.

        `nodes`: as `--nnodes` has it.  `profiled`: the run directory has a profile.
        """
        self.net, self.folder, self._private = net, folder, private
        self.files = RunDirectory(folder / "run")
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._settings, self._script, self._environment = settings, script, environment
        self._mode, self._nodes, self._profiled = mode, nodes, profiled

    @contextmanager
    def rendezvous(self) -> Iterator[None]:
        """A store that outlives every node.  Raises ClusterError."""
        outside = self.net.outside
        with self._spawn(
            outside, ("-c", STORE, outside.host, str(PORT)), self._private,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        ) as store:  # fmt: skip
            assert store.stdout is not None
            if store.stdout.readline() != b"listening\n":
                raise ClusterError(f"no rendezvous store on {outside.host}:{PORT}")
            yield

    def end(self) -> None:
        """Nothing runs on any node."""
        for node in self.net.nodes:
            node.kill()
        for launcher in self.launchers.values():
            launcher.wait()

    def launch(self, node: int) -> list[str]:
        """`autockpt` on one node, which has nothing of its own yet; the command."""
        at = self.net.nodes[node]
        wanted = [word for setting in self._settings for word in ("--set", setting)]
        where: tuple[str, ...] = ("--out",) if self._mode == "profile" else ("--run-dir",)
        if self._mode != "profile" and not self._profiled:
            where = ("--no-profile", *where)
        argv = [
            "-m", "autockpt", self._mode, "--nnodes", self._nodes,
            *(("--rdzv-conf", "last_call_timeout=3") if ":" in self._nodes else ()),
            "--rdzv-id", "job", "--rdzv-endpoint", f"{self.net.outside.host}:{PORT}",
            "--local-addr", at.host, *where, str(self.files.path), *wanted, *self._script,
        ]  # fmt: skip
        runtime = self._private / f"node-{node}"
        shutil.rmtree(runtime, ignore_errors=True)
        runtime.mkdir()
        with open(self.log(node), "ab") as log:
            self.launchers[node] = self._spawn(at, argv, runtime, stdout=log, stderr=log)
        return argv

    def lose(self, node: int) -> float:
        """SIGKILL for everything on a node; when, CLOCK_MONOTONIC."""
        at_s = time.monotonic()
        self.net.nodes[node].kill()
        self.launchers.pop(node).wait()
        return at_s

    def _spawn(
        self, node: Node, argv: Sequence[str], runtime: Path, **streams: Any
    ) -> "subprocess.Popen[bytes]":
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(runtime),
            "GLOO_SOCKET_IFNAME": INTERFACE, "AUTOCKPT_CONTROL_INTERFACE": INTERFACE,
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **self._environment,
        }  # fmt: skip
        command = [*node.prefix, sys.executable, *argv]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, **streams
        )

    def log(self, node: int) -> Path:
        """What the launcher and rank of a node said."""
        return self.folder / f"node-{node}.log"

    def events(self, kind: type[E], *, since_s: float = 0.0) -> list[E]:
        """Events of one kind, oldest first."""
        events = self.files.events() if self.files.telemetry.is_dir() else []
        return [e for e in events if isinstance(e, kind) and e.at_s >= since_s]

    def wait_for(self, what: str, look: Callable[[], R | None], within_s: float) -> R:
        """What `look` returns, as soon as it returns something.  Raises ClusterError."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            ended = [n for n, launcher in self.launchers.items() if launcher.poll() is not None]
            began = time.monotonic()
            found = look()
            if found is not None:
                return found
            if ended:
                raise ClusterError(f"node {ended[0]} ended before {what}: {self.tail(ended[0])}")
            # Telemetry grows: looking takes a fifth of a core of the job's at most.
            time.sleep(max(0.1, 4 * (time.monotonic() - began)))
        raise ClusterError(f"{what} was not seen within {within_s:.0f} s; see {self.folder}")

    def finish(self, within_s: float) -> list[str]:
        """All that was printed, once all nodes have ended well.  Raises ClusterError."""
        deadline = time.monotonic() + within_s
        for node, launcher in self.launchers.items():
            try:
                code = launcher.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise ClusterError(f"node {node} did not end; see {self.log(node)}") from None
            if code != 0:
                raise ClusterError(f"node {node} ended with {code}: {self.tail(node)}")
        logs = [self.log(node) for node in range(len(self.net.nodes))]
        return [line for log in logs if log.exists() for line in log.read_text().splitlines()]

    def tail(self, node: int) -> str:
        """The end of what a node said."""
        return "\n".join(self.log(node).read_text().splitlines()[-8:])


@contextmanager
def cluster(
    nodes: int,
    bits_per_s: int,
    folder: Path,
    *,
    settings: Sequence[str],
    script: Sequence[str],
    environment: Mapping[str, str] | None = None,
    mode: str = "run",
    profiled: bool = False,
    spare: int = 0,
    least: int | None = None,
    devices: bool = False,
) -> Iterator[Cluster]:
    """A job on `nodes` of them, `spare` more, and the rendezvous store; nothing is launched yet.

    `least`: it goes on with so many nodes; None: with all only.  `profiled`: the run directory has
    a profile, which counts.  `devices`: the nodes have a second network, for emulated devices.

    Raises OSError or CalledProcessError where namespaces are not to be had, ClusterError.
    """
    with ExitStack() as stack:
        # Names of sockets are short, and what is a node's own is gone with it.
        private = stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-"))
        made = Cluster(
            stack.enter_context(network(nodes + spare, bits_per_s, devices=devices)),
            folder, private=Path(private),
            settings=settings, script=script, environment=environment or {}, mode=mode,
            nodes=str(nodes) if least is None else f"{least}:{nodes}", profiled=profiled,
        )  # fmt: skip
        stack.callback(made.end)
        stack.enter_context(made.rendezvous())
        yield made
