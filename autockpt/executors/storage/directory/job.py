"""JOB: the job that the checkpoints of an object store belong to."""

import contextlib
import os

from autockpt.executors.storage.directory.lease import Lease
from autockpt.executors.storage.directory.records import storage_error
from autockpt.executors.storage.places.place import Place
from autockpt.values.errors import ConfigError
from autockpt.values.record import from_json, to_json
from autockpt.values.same_job import Job, differences


class JobRecord:
    """The record of the job, where no run directory may be left."""

    def __init__(self, path: str, place: Place, lease: Lease) -> None:
        self.path = path
        self._place = place
        self._lease = lease

    def claim(self, text: bytes, *, replace: bool) -> bool:
        """Leaves the record of the job whose checkpoints are here; False where there is one.

        Raises StorageError.
        """
        path = os.path.join(self.path, "JOB")
        with storage_error("write", path):
            return self._place.publish(path, text, replace=replace)

    def take(self, job: Job, *, own_launches: frozenset[str] = frozenset()) -> None:
        """Leaves the record of a job that may go on with the checkpoints of another one.

        Raises DirectoryBusyError while a live run of the other job has them, unless its launch is
        one of `own_launches`; StorageError.
        """
        if self.differences(job):
            holder = self._lease.highest_term()
            if holder is not None and holder.launch_id not in own_launches:
                self._lease.require_dead(holder)
        self.claim(to_json(job).encode(), replace=True)

    def read(self) -> bytes:
        """That record; nothing where there is none.  Raises StorageError."""
        path = os.path.join(self.path, "JOB")
        with storage_error("read", path), contextlib.suppress(FileNotFoundError):
            return self._place.read(path)
        return b""

    def differences(self, job: Job) -> list[str]:
        """What makes `job` another one than the store's; [] where it is the same, or unknown.

        Raises StorageError.
        """
        try:
            there = from_json(Job, self.read() or to_json(job).encode(), where=f"{self.path}/JOB")
        except ConfigError:
            return []  # written by a later version
        same = os.path.basename(there.script) == os.path.basename(job.script)
        return differences(there, job, same_script=same)
