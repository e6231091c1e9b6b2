"""Maintenance of a checkpoint directory that no run holds: deep check, quarantine, cleaning.

Nothing that holds a COMMIT is ever deleted here.  A damaged generation is *set aside*: renamed into
`quarantine/`, with a line that says why, for a person to look at.  Leftovers of dead runs are
removed: unfinished generations, temporary files, trash, spare files, folders of dead keepers.
Only names that we make count.  Their owner must be proven dead: by the lease for a directory, by
the lock for a keeper.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autockpt import new_files
from autockpt.executors.storage.catalogue import VerifyResult
from autockpt.executors.storage.directory.claims import TermFile
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import (
    FORMAT,
    RunFile,
    is_ours,
    is_temporary,
    publish,
    read_commit,
    read_small,
)
from autockpt.executors.storage.directory.removal import is_trash
from autockpt.executors.storage.file_reuse import is_spare
from autockpt.executors.storage.lineage import read_decision
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.unfinished_uploads import (
    UnfinishedUpload,
    end_upload,
    unfinished_uploads,
)
from autockpt.executors.storage.rewriting.commits import remove_unnamed, replaced_shards
from autockpt.executors.storage.runtime_paths import is_ours_alone, keepers_directory
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.record import from_json, to_json

QUARANTINE = "quarantine"
KEEPER_AGE_S = 600.0
"""A keeper's folder that is younger may be of one that is about to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A record that is not what it should be."""

    path: str
    reason: str
    readable: bool = True
    """False: the storage did not give it, which says nothing about its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A leftover that no run needs any more."""

    path: str
    kind: str
    """trash, spare, temporary, unfinished, replaced, upload or keeper."""
    bytes: int
    """0 for an upload, of which a listing says no size."""
    upload: UnfinishedUpload | None = None
    """The request to a store that was cut off, for one of that kind."""


# --- looking --------------------------------------------------------------------------------------


def damaged_records(directory: str) -> list[Damage]:
    """Records beside the generations that cannot be believed: RUN, claims, decisions."""
    found = []
    for path, term in _records(directory):
        try:
            text = read_small(path)
            if os.path.basename(path) == "RUN":
                from_json(RunFile, text, where=path)
            elif os.path.basename(os.path.dirname(path)) == "terms":
                if from_json(TermFile, text, where=path).term != term:
                    raise CorruptCheckpointError(f"{path}: names another term")
            else:
                read_decision(text, term=term, where=path)
        except FileNotFoundError:
            continue  # a live run removes old ones
        except OSError as error:
            reason = f"{path}: cannot be read: {error.strerror}"
            found.append(Damage(path=path, reason=reason, readable=False))
        except (ConfigError, CorruptCheckpointError) as error:
            found.append(Damage(path=path, reason=str(error)))
    return found


def _records(directory: str) -> Iterator[tuple[str, int]]:
    """(path, term), 0 for RUN."""
    if "RUN" in _listed(directory):
        yield os.path.join(directory, "RUN"), 0
    for folder in ("terms", "decisions"):
        for name in sorted(_listed(os.path.join(directory, folder))):
            if name.startswith("t-") and name[2:].isdecimal():
                yield os.path.join(directory, folder, name), int(name[2:])


# --- mending --------------------------------------------------------------------------------------


def repair(directory: str, results: list[VerifyResult]) -> list[str]:
    """Mends what can be proven right and sets aside what is wrong; a sentence for each.

    The caller has made sure that no run holds the directory.
    """
    done = []
    for result in results:
        generation = Generation.from_name(result.name)
        if result.damaged:
            done.append(set_aside(directory, result.name, "; ".join(result.problems[:5])))
        elif result.ok:
            done += _marked_right(CheckpointDirectory(directory), generation, result)
    for damage in damaged_records(directory):
        name = os.path.relpath(damage.path, directory)
        if name.startswith("terms/") or not damage.readable:
            continue  # its number counts, and must not be given out again
        done.append(set_aside(directory, name, damage.reason))
        if name == "RUN":
            done.append(_rebuild_run(directory))
    return done


def _marked_right(
    directory: CheckpointDirectory, generation: Generation, result: VerifyResult
) -> list[str]:
    """Correct the marks of a generation that reads back whole."""
    folder = directory.generation_path(generation)
    done = []
    if os.path.exists(os.path.join(folder, "CORRUPT")):
        os.unlink(os.path.join(folder, "CORRUPT"))
        done.append(f"{generation.name}: reads back whole; its mark CORRUPT is gone")
    if result.sick and not os.path.exists(os.path.join(folder, "SUSPECT")):
        if not directory.mark(generation, "SUSPECT"):
            return [*done, f"{generation.name}: {result.sick}, and SUSPECT cannot be written"]
        done.append(f"{generation.name}: {result.sick}; marked SUSPECT")
    directory.mark(generation, "VERIFIED")
    return done


def set_aside(directory: str, name: str, reason: str) -> str:
    """Rename `name` into the quarantine, with the reason beside it; return a sentence about it."""
    folder = os.path.join(directory, QUARANTINE)
    target = os.path.join(folder, f"{name.replace('/', '-')}-{secrets.token_hex(4)}")
    new_files.make_directory(folder)
    publish(f"{target}.why", f"{name}: {reason}\n".encode(), replace=False)
    os.rename(os.path.join(directory, name), target)
    return f"{name}: set aside as {os.path.relpath(target, directory)}"


def _rebuild_run(directory: str) -> str:
    """RUN again, from what all COMMITs agree on.  Raises CorruptCheckpointError if they do not."""
    ids = set()
    for name in _listed(directory):
        with contextlib.suppress(AutockptError, OSError):
            Generation.from_name(name)
            ids.add(read_commit(os.path.join(directory, name, "COMMIT")).run_id)
    path = os.path.join(directory, "RUN")
    if len(ids) != 1:
        raise CorruptCheckpointError(
            f"{path}: was damaged, and the COMMITs name {len(ids)} runs; it cannot be rebuilt"
        )
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run = RunFile(run_id=ids.pop(), format=FORMAT, created=created)
    publish(path, to_json(run).encode(), replace=False)
    return "RUN: rebuilt from the COMMITs"


# --- cleaning -------------------------------------------------------------------------------------


def leftovers(
    directory: str,
    *,
    newest_term: int | None = None,
    warn: Callable[[str], object] = lambda sentence: None,
) -> list[Leftover]:
    """Return a dead run's leftovers in a checkpoint directory, without foreign files.

    `newest_term`: nothing of a later start, which may live.  The directory may be in an object
    store.  Of copies, whose run may live and copy the next one, only generations before the newest
    whole one are cleaned.  `warn` hears why uploads are not among them.  Raises StorageError where
    the store does not answer.
    """
    found = []
    for kind, is_own in (("trash", is_trash), ("spare", is_spare)):
        folder = os.path.join(directory, kind)
        listed = _listed(folder).items()
        found += [_leftover(folder, name, kind, size) for name, size in listed if is_own(name)]
    for folder in (directory, *(os.path.join(directory, n) for n in ("terms", "decisions"))):
        for name, size in _listed(folder).items():
            if is_temporary(name):
                found.append(_leftover(folder, name, "temporary", size))
    for name in _listed(directory):
        found += _of_generation(directory, name, newest_term)
    try:
        uploads = unfinished_uploads(directory)
    except StorageError as error:
        warn(str(error))
        uploads = []
    for upload in uploads:
        if newest_term is None or upload.term <= newest_term:
            path = f"s3://{upload.bucket}/{upload.key}"
            found.append(Leftover(path=path, kind="upload", bytes=0, upload=upload))
    if not holds_copies(directory):
        return found
    whole = [name for name in _listed(directory) if "COMMIT" in _listed(f"{directory}/{name}")]
    newest = max(filter(None, map(_generation, whole)), default=None)
    own = [(_generation(os.path.basename(os.path.dirname(one.path))), one) for one in found]
    return [one for generation, one in own if generation and newest and generation < newest]


def holds_copies(directory: str) -> bool:
    """Whether a store has the copies of a run: its claims are here, its holder leaves no sign."""
    if not is_store_url(directory):
        return False
    claims = _listed(f"{directory}/terms")
    signs = "heartbeat" in claims or any(name.endswith(".left") for name in claims)
    return not signs and "JOB" not in _listed(directory)


def _generation(name: str) -> Generation | None:
    with contextlib.suppress(ConfigError):
        return Generation.from_name(name)
    return None


def _of_generation(directory: str, name: str, newest_term: int | None) -> Iterator[Leftover]:
    folder = os.path.join(directory, name)
    generation = _generation(name)
    if generation is None:
        return
    files = _listed(folder)
    if "PINNED" in files or (newest_term is not None and generation.term > newest_term):
        return  # nothing of it goes
    for file, size in files.items():
        if file.startswith("COMMIT.") and file.endswith(".tmp"):
            yield _leftover(folder, file, "temporary", size)
        elif "COMMIT" not in files and is_ours(file):
            yield _leftover(folder, file, "unfinished", size)
    for file in replaced_shards(folder):
        yield _leftover(folder, file, "replaced", files.get(file))


def _leftover(folder: str, name: str, kind: str, listed_bytes: int | None) -> Leftover:
    path = os.path.join(folder, name)
    return Leftover(
        path=path, kind=kind, bytes=_size(path) if listed_bytes is None else listed_bytes
    )


def dead_keepers() -> list[Leftover]:
    """Folders of keepers of this user whose lock is free: their process is gone."""
    parent = keepers_directory()
    found = []
    for name in _listed(parent) if is_ours_alone(parent) else ():
        folder = os.path.join(parent, name)
        with contextlib.suppress(OSError), _locked(os.path.join(folder, "keeper.lock")) as free:
            if free and time.time() - os.stat(folder).st_mtime > KEEPER_AGE_S:
                found.append(_leftover(parent, name, "keeper", None))
    return found


def remove(leftover: Leftover) -> None:
    """Removes one; an unfinished generation goes with its last file.  Raises OSError."""
    if leftover.kind == "keeper":
        with _locked(os.path.join(leftover.path, "keeper.lock")) as free:
            if free:
                shutil.rmtree(leftover.path)
        return
    if leftover.upload is not None:
        if not end_upload(leftover.upload):
            raise OSError(errno.EIO, "the store did not end the upload")
    elif is_store_url(leftover.path):
        folder, _, name = leftover.path.rpartition("/")
        if leftover.kind == "replaced":
            remove_unnamed(folder, [name])
        else:
            place_of(leftover.path).remove(leftover.path)
    if is_store_url(leftover.path):
        return
    if os.path.isdir(leftover.path) and not os.path.islink(leftover.path):
        shutil.rmtree(leftover.path)
    else:
        os.unlink(leftover.path)
    if leftover.kind == "unfinished":
        with contextlib.suppress(OSError):  # something foreign stands in it
            os.rmdir(os.path.dirname(leftover.path))


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Hold a lock file; yield False when another process does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        free = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(fd)


def _listed(path: str) -> dict[str, int | None]:
    """What stands in a folder, by name; bytes where that costs nothing, as in an object store.

    Raises StorageError for a store that does not answer.
    """
    try:
        if is_store_url(path):
            return dict(place_of(path).sizes(path))
        return dict.fromkeys(os.listdir(path))
    except OSError as error:
        if is_store_url(path):
            raise StorageError(f"{path}: cannot list: {error.strerror}") from error
        return {}


def _size(path: str) -> int:
    if not os.path.isdir(path) or os.path.islink(path):
        return os.lstat(path).st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
    )
