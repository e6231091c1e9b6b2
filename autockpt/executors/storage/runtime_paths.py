"""Directories of keepers on this machine: of a user, of a node of a run, and the notes of them.

A keeper's socket and lock stand there.  No message does: those are in `keeper/wire.py`.
"""

import contextlib
import hashlib
import os
import stat

from autockpt import new_files
from autockpt.executors.storage.directory.claims import boot_id
from autockpt.executors.storage.directory.records import RunFile, read_small
from autockpt.values.errors import AutockptError, ProtocolError
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.record import from_json

_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
"""Where nothing else is named.  A container with a read-only root has the last one."""


def keepers_directory() -> str:
    """Where this user's keepers have their directories; it may be missing.

    In XDG_RUNTIME_DIR, unless that is of another machine or user: `sudo` and batch systems hand
    it on.  A relative path is passed over: it would be another directory for every process that
    works elsewhere, and the keeper works in /.
    """
    names = ("XDG_RUNTIME_DIR", "TMPDIR", "TEMP", "TMP")
    named = [os.environ.get(name, "") for name in names]
    for base in [path for path in named if os.path.isabs(path)] + list(_TEMPORARY):
        if os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):
            break
    else:
        base = _TEMPORARY[0]  # not writable: the socket is in the run directory
    return os.path.join(base, f"autockpt-{os.getuid()}")


def keeper_directory(run_directory: str, node: int) -> str:
    """The 0700 directory of a keeper's socket and lock; created if missing.

    In `keepers_directory()`: a run directory may be on a network file system.  Any user may take
    that name in /tmp first, or nothing is writable.  Then the directory is in the run directory.
    It stays there as long as it exists, so that all processes find the same one.  A keeper has
    noted its directory in the run's: the next start may have another TMPDIR.  Raises ProtocolError
    when there is neither.
    """
    beside = os.path.join(os.path.realpath(run_directory), f"keeper-{_boot()}-{node:03d}")
    if is_ours_alone(beside):
        return beside
    noted = _noted_directory(run_directory, node)
    if noted is not None:
        return noted
    parent = keepers_directory()
    try:
        if _own_directory(parent):
            return _made(os.path.join(parent, f"{_key(run_directory)}-{node:03d}"))
        new_files.make_directory(os.path.dirname(beside))
        return _made(beside)
    except OSError as error:
        raise ProtocolError(
            f"no directory for the keeper's socket: {parent} is not ours with mode 700, and "
            f"{error.filename}: {error.strerror}; set XDG_RUNTIME_DIR to a directory of your own"
        ) from error


def note_directory(run_directory: str, node: int) -> None:
    """Notes the directory of this process, which is the keeper; where it cannot, the environment
    alone tells the way."""
    path = _note_of(run_directory, node)
    with contextlib.suppress(OSError, ProtocolError):
        directory = keeper_directory(run_directory, node)
        with open(f"{path}.new", "w", encoding="utf-8", opener=new_files.private) as file:
            file.write(directory)
        os.replace(f"{path}.new", path)


def _note_of(run_directory: str, node: int) -> str:
    return os.path.join(os.path.realpath(run_directory), "logs", f"{_noted()}-{node:03d}.at")


def _noted() -> str:
    """Of this boot and network namespace: containers on one machine may be nodes of one job."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"keeper-{hashlib.sha256(f'{boot_id()} {namespace}'.encode()).hexdigest()[:8]}"


def _noted_directory(run_directory: str, node: int) -> str | None:
    """None: none is noted, or it is gone, another's, or of the run that this one is a copy of."""
    try:
        with open(_note_of(run_directory, node), "rb") as file:
            path = os.fsdecode(file.read(4096))
    except OSError:
        return None
    own = os.path.basename(path) == f"{_key(run_directory)}-{node:03d}" and os.path.isabs(path)
    return path if own and is_ours_alone(path) and is_ours_alone(os.path.dirname(path)) else None


def keeper_directories(run_directory: str) -> dict[int, str]:
    """Directories of the keepers of a run on this machine, by node, ascending; some are dead."""
    places = (
        (keepers_directory(), f"{_key(run_directory)}-"),
        (os.path.realpath(run_directory), f"keeper-{_boot()}-"),
    )
    found = {}
    for place, prefix in places:
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                node = name.removeprefix(prefix)
                path = os.path.join(place, name)
                if node != name and node.isdigit() and is_ours_alone(path):
                    found[int(node)] = path
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.dirname(_note_of(run_directory, 0))):
            node = name.removeprefix(f"{_noted()}-").removesuffix(".at")
            noted = _noted_directory(run_directory, int(node)) if node.isdigit() else None
            if noted is not None:
                found[int(node)] = noted
    return dict(sorted(found.items()))


def is_removed(
    run_directory: str, node: int, *, checkpoints: str, run_id: str, inode: tuple[int, int]
) -> bool:
    """Whether the directories of a keeper's run are gone, or others stand at their paths.

    `inode`: device and inode of its run directory.  A run whose RUN is at its place is not removed:
    its run directory alone may be lost.  Neither is one of which only the checkpoints are gone, as
    after `umount`.  Raises OSError where the storage does not say.
    """
    if is_store_url(checkpoints):
        return False
    path = os.path.join(checkpoints, "RUN")
    try:
        if from_json(RunFile, read_small(path), where=path).run_id == run_id:
            return False
    except (FileNotFoundError, NotADirectoryError):
        pass
    except AutockptError:
        return False  # damaged: it does not say whose it is
    try:
        found = os.stat(run_directory)
        os.stat(_note_of(run_directory, node))  # of this keeper: the directory was not emptied
    except (FileNotFoundError, NotADirectoryError):
        return True
    return (found.st_dev, found.st_ino) != inode


def is_ours_alone(path: str) -> bool:
    """Whether a directory, no link to one, is this user's and closed to everybody else."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return mine and not status.st_mode & 0o077


def _own_directory(path: str) -> bool:
    """Whether it is ours alone now; made if missing."""
    with contextlib.suppress(OSError):
        os.mkdir(path, new_files.PRIVATE_DIRECTORY)
    return is_ours_alone(path)


def _made(path: str) -> str:
    """Raises OSError."""
    if not _own_directory(path):
        os.mkdir(path, new_files.PRIVATE_DIRECTORY)
    return path


def _key(run_directory: str) -> str:
    return hashlib.sha256(os.path.realpath(run_directory).encode()).hexdigest()[:16]


def _boot() -> str:
    """Of this boot: a run directory is seen by several machines, a socket only serves one."""
    return hashlib.sha256(boot_id().encode()).hexdigest()[:8]
