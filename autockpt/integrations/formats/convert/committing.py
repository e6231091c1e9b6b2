"""Generations written by a tool, with the lease, the fence and the COMMIT of a keeper."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.integrations.places import good_generations
from autockpt.values.errors import NoCheckpointError
from autockpt.values.generation import Generation


class GenerationsOf:
    """Writes generations to a checkpoint directory of which it holds the lease.

    Everything that another run relies on happens as with a keeper.  The term is claimed, its parent
    is written down, and a newer term fences it.
    """

    def __init__(self, path: str) -> None:
        """Raises DirectoryBusyError while a live run has it, StorageError."""
        self._directory = CheckpointDirectory(path)
        self.path, self.run_id = self._directory.path, self._directory.open()
        launch = f"writer-{os.getpid()}-{os.urandom(4).hex()}"
        self._term = self._directory.claim(self.run_id, launch, 0, force=False)
        self._parent: Generation | None = None
        with contextlib.suppress(NoCheckpointError):
            self._parent = Generation.from_name(good_generations(path)[-1])
        self._directory.write_decision(self._term, 1, self._parent, "written by a tool")
        self._open: Generation | None = None

    def begin(self, step: int) -> Generation:
        """A new generation, the folder of which is there; an unfinished one is dropped."""
        if self._open is not None:
            self._directory.trash(self._open)
        self._open = Generation(term=self._term, step=step)
        self._directory.create_generation(self._open)
        return self._open

    def commit(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """The open generation counts from now on.

        Raises GuardError when another run took the directory over, StorageError.
        """
        if self._open is None:
            raise AssertionError("no generation was begun")
        self._directory.write_commit(
            self.run_id, self._open, step=step, world_size=len(records), parent=self._parent,
            records=tuple(dict(record) for record in records), health="good",
        )  # fmt: skip
        self._directory.mark_ever_committed()
        self._open = None

    def close(self) -> None:
        """Give the lease back; uncommitted generations are dropped."""
        if self._open is not None:
            self._directory.trash(self._open)
            self._open = None
        self._directory.release(self._term)
