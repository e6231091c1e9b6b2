"""The keeper of this node, as far as the launcher goes; the training never fails for it."""

import contextlib
import time

from autockpt.console import Console
from autockpt.launch.elastic.signals import Interrupted
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError
from autockpt.values.generation import Generation

WAIT_S = 60.0
SEAL_S = 6.0
LOOK_S = 0.01
QUICK_S = 0.2
"""For the connection, and again for the answer."""
SHORT_S = 0.2
"""The keeper gets the message in any case; the launcher waits this long.  A keeper with nothing
left to do is gone by then."""


class KeeperBeside:
    """Starts it before the ranks, lets it go after them."""

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self._run = run
        self._console = console
        self._node: int | None = None

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._node is not None

    @property
    def node(self) -> int | None:
        """Number of the node, None before `start`."""
        return self._node

    def seats(self) -> tuple[int, ...]:
        """Nodes of this run whose keepers live on this machine, left by a launcher that died."""
        try:
            from autockpt.executors.keeper.launch import keepers_here

            return keepers_here(str(self._run.path))
        except Exception as error:
            self._console.warn(f"keepers of an earlier launcher were not looked for: {error}")
            return ()

    def start(self, node: int) -> None:
        """Make sure a keeper runs."""
        self._node = node
        try:
            from autockpt.executors.keeper.launch import ensure_keeper

            checkpoints = self._run.checkpoints()
            ensure_keeper(str(self._run.path), node, checkpoints=checkpoints)
        except Exception as error:
            self._console.warn(
                f"the keeper did not start ({error}); attach tries again, and the training goes on "
                "without protection if that fails too"
            )

    def await_seal(self) -> None:
        """A rank has died: the others live until their last boundary is sealed, or cannot be."""
        if self._node is None:
            return
        from autockpt.executors.keeper.launch import keeper_status

        deadline = time.monotonic() + SEAL_S
        with contextlib.suppress(AutockptError, OSError):  # as where there is no keeper
            while time.monotonic() < deadline:
                status = keeper_status(str(self._run.path), self._node)
                if status is None or not status.sealing:
                    return
                time.sleep(LOOK_S)

    def lost_nodes(self) -> tuple[int, ...]:
        """Nodes to which the keeper of this one has lost the connection; none where it is silent.

        Raises nothing, and takes half a second at most: launchers wait for each other meanwhile.
        """
        if self._node is None:
            return ()
        from autockpt.executors.keeper.launch import keeper_status

        with contextlib.suppress(AutockptError, OSError):
            status = keeper_status(str(self._run.path), self._node, answer_s=QUICK_S)
            return () if status is None else status.lost_peers
        return ()

    def _held(self) -> str:
        """The checkpoint that only a keeper's memory has; "": none, or it is not known."""
        from autockpt.executors.keeper.launch import keeper_status

        status = None
        if self._node is not None:
            status = keeper_status(str(self._run.path), self._node, answer_s=QUICK_S)
        if status is None or not status.memory_committed:
            return ""
        held = Generation.from_text(status.memory_committed)
        if status.durable and Generation.from_text(status.durable) >= held:
            return ""
        return f"; its memory alone has the newest checkpoint, {held}"

    def release(self, by_s: float | None = None) -> None:
        """Tell it to leave when everything is on disk, and wait for that.

        `by_s`: at most until then, CLOCK_MONOTONIC; it goes on by itself.
        """
        if self._node is None:
            return
        try:
            from autockpt.executors.keeper.launch import release_keeper

            wait_s = WAIT_S if by_s is None else min(WAIT_S, by_s - time.monotonic())
            if not release_keeper(str(self._run.path), self._node, wait_s=max(SHORT_S, wait_s)):
                log = self._run.logs / f"keeper-{self._node:03d}.log"
                self._console.warn(
                    "the keeper is still at work; it leaves by itself when everything is written, "
                    f"its log is {log}{self._held()}"
                )
        except Interrupted as interrupted:
            self._console.warn(f"{interrupted}: not waiting for the keeper; it finishes by itself")
        except Exception as error:
            self._console.warn(f"the keeper did not get the order to leave: {error}")
