"""RUN: the run that a checkpoint directory belongs to."""

import contextlib
import os
import secrets
import time
from functools import partial

from autockpt.executors.linux.mounts import is_mounted
from autockpt.executors.storage.directory.records import (
    FORMAT,
    RunFile,
    generations_in,
    is_there,
    publish,
    read_commit,
    read_small,
    require_format,
    storage_error,
)
from autockpt.executors.storage.places.place import Place
from autockpt.executors.storage.places.store import read_patiently
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
)
from autockpt.values.record import from_json, to_json


class RunIdentity:
    """Opens the directory of a run, and makes it again where it was emptied."""

    def __init__(self, path: str, place: Place) -> None:
        self.path = path
        self._place = place
        self.run: RunFile | None = None
        """The run file, as it was opened."""
        self._mount = ""
        """Where the file system is mounted that it was opened on; "" where that is not known."""

    def open(self, run_id: str = "") -> str:
        """Creates the directory if needed; the run id.  Raises StorageError.

        `run_id`: of a run that lives.  A directory that has none takes it, and that of another run
        raises StorageError.
        """
        path = self.path
        require_format(path)
        try:
            for name in ("", "terms", "decisions", "trash"):
                path = os.path.join(self.path, name)
                self._place.make_folder(path)
            path = os.path.join(self.path, "RUN")
            if not is_there(path):
                former = self._former_run() if self._place.is_store else ""
                run = RunFile(
                    run_id=former or run_id or secrets.token_hex(16),
                    format=FORMAT,
                    created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                )
                publish(path, to_json(run).encode(), replace=False)
            run = from_json(RunFile, read_small(path), where=path)
            self._mount = self._place.mount_of(self.path)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be used for checkpoints: {path}: {error.strerror}; name "
                "another directory with disk.path in the policy"
            ) from error
        if run_id and run.run_id != run_id:
            raise self._of_another(run.run_id, run_id)
        self.run = run
        return run.run_id

    def _of_another(self, found: str, expected: str) -> StorageError:
        return StorageError(
            f"{self.path}: belongs to run {found} now, expected {expected}; give that run another "
            "--run-dir"
        )

    def _former_run(self) -> str:
        """The run whose RUN is gone from a store, as its COMMITs say; "": there is none yet.

        Raises NoCheckpointError where they do not agree, ConfigError for a store that cannot be
        trusted with a run, StorageError, OSError.
        """
        found: set[str] = set()
        generations = generations_in(self.path)
        for generation in generations:
            path = os.path.join(self.path, generation.name, "COMMIT")
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                found.add(read_patiently(path, partial(read_commit, path)).run_id)
        if generations and len(found) != 1:
            raise NoCheckpointError(
                f"{self.path}: holds {len(generations)} checkpoints and no RUN, and their COMMITs "
                f"name {len(found)} runs, expected 1. A rule of the bucket may have deleted them. "
                "Put RUN back from an older version of the object, or name another place with "
                "disk.path"
            )
        if not generations:
            self._require_conditions()
        return "".join(found)

    def _require_conditions(self) -> None:
        """Puts an object twice: a store that takes both cannot fence a run.

        Raises ConfigError, OSError.
        """
        path = os.path.join(self.path, f"probe.{secrets.token_hex(6)}.tmp")
        try:
            self._place.publish(path, b"first", replace=False)
            if self._place.publish(path, b"second", replace=False):
                raise ConfigError(
                    f"{self.path}: the store ignores the condition of a put (If-None-Match: *): it "
                    "replaced an object. Two starts could both hold this run. Use a store that "
                    "honours conditional puts"
                )
        finally:
            with contextlib.suppress(OSError):
                self._place.remove(path)

    def make_again(self) -> None:
        """Folders and RUN as they were; not on a mount point, and not in the directory of another
        run.  Raises StorageError."""
        assert self.run is not None
        with storage_error("look for the mount point of", self.path):
            if not is_mounted(self._mount):
                raise StorageError(
                    f"{self.path}: nothing is mounted at {self._mount}; mount it again"
                )
        for name in ("", "terms", "decisions", "trash"):
            path = os.path.join(self.path, name)
            with storage_error("make again", path):
                self._place.make_folder(path, parents=False)
        path = os.path.join(self.path, "RUN")
        with storage_error("make again", path):
            publish(path, to_json(self.run).encode(), replace=False)
            found = from_json(RunFile, read_small(path), where=path)
        if found.run_id != self.run.run_id:
            raise self._of_another(found.run_id, self.run.run_id)
