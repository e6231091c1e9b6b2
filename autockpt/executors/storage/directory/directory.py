"""The checkpoint directory: lease, shards, commits, retention.

* `RUN`: run id and format, created with the directory.
* `JOB`: the job that it belongs to; in an object store only, where no run directory may be left.
* `terms/t-000007`: one file per incarnation, which is never replaced: the fence.
* `ckpt-t0007-step-00000042/`: shard-00003-a1.safetensors, idx-00003-a1.json, ..., COMMIT.
* `decisions/t-000007`: the generation that an incarnation resumed from: the lineage.
* `trash/`: everything is renamed into it before it is removed.
* `spare/`: shard files of retired generations, kept for their blocks.

Truth is the listing of valid COMMITs, each written last.  An operation either happened or did not;
nothing is repaired by guessing.  The directory stands on a file system, or in an object store under
a URL: `places` has what the two offer.  Used from one thread at a time.  Each part of the work is a
module beside this one.
"""

import contextlib
import os
import secrets

from autockpt.executors.storage.directory.commits import Commits
from autockpt.executors.storage.directory.identity import RunIdentity
from autockpt.executors.storage.directory.job import JobRecord
from autockpt.executors.storage.directory.lease import Lease
from autockpt.executors.storage.directory.marks import Marks
from autockpt.executors.storage.directory.removal import Removal
from autockpt.executors.storage.places.choose import absolute, place_of
from autockpt.values.errors import StorageError


class CheckpointDirectory:
    """All file operations of the protocol on one directory: each is that of one part."""

    def __init__(self, path: str) -> None:
        self.path = absolute(path)
        self._place = place_of(path)
        identity = self._identity = RunIdentity(self.path, self._place)
        lease = self._lease = Lease(self.path, self._place, identity)
        job = JobRecord(self.path, self._place, lease)
        commits = Commits(self.path, self._place, lease)
        marks = Marks(self.path, self._place)
        removal = Removal(self.path, self._place, commits)

        self.open = identity.open
        self.claim_job, self.take_job = job.claim, job.take
        self.job, self.differences = job.read, job.differences

        self.highest_term, self.holds = lease.highest_term, lease.holds
        self.claim, self.go_on, self.renew = lease.claim, lease.go_on, lease.renew
        self.release, self.heartbeat = lease.release, lease.heartbeat
        self.require_unheld = lease.require_unheld
        self.is_held_elsewhere = lease.is_held_elsewhere

        self.generation_path = commits.generation_path
        self.create_generation = commits.create_generation
        self.write_index, self.write_commit = commits.write_index, commits.write_commit
        self.write_decision, self.parents = commits.write_decision, commits.parents
        self.catalogue = commits.catalogue

        self.mark, self.is_suspect = marks.mark, marks.is_suspect
        self.pin, self.unpin, self.pins = marks.pin, marks.unpin, marks.pins
        self.mark_ever_committed = marks.mark_ever_committed
        self.ever_committed = marks.ever_committed

        self.trash, self.trash_unfinished = removal.trash, removal.trash_unfinished
        self.delete, self.empty_trash = removal.delete, removal.empty_trash
        self.take_warning, self.spares = removal.take_warning, removal.spares

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self._lease.heartbeat_s

    @property
    def claimed_term(self) -> int:
        """Of the claim that this process made last, or went on with; 0: of none."""
        return self._lease.claimed_term

    def require_writable(self) -> None:
        """Opens the directory and writes a page into it.  Raises StorageError when it cannot."""
        self.open()
        path = os.path.join(self.path, "terms", f"probe.{secrets.token_hex(6)}.tmp")
        try:
            self._place.write(path, bytes(4096))
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written: {error.strerror}; free space or make it "
                "writable, or name another directory with disk.path in the policy; older "
                "checkpoints are untouched"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                self._place.remove(path)
