"""The file system that checkpoints would go to: type, room, direct writes and their alignment."""

import contextlib
import errno
import mmap
import os
import tempfile

from autockpt.cli.doctor.finding import Finding
from autockpt.executors.linux.direct_io import objection, stated_alignment
from autockpt.executors.linux.memory import PAGE_BYTES
from autockpt.profiles.probes.host import mount_of
from autockpt.values.units import format_bytes

VOLATILE = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre", "gpfs"})
LITTLE_BYTES = 20 * 10**9
"""Less room than this deserves a warning: a few checkpoints of a small model."""


def check(directory: str) -> list[Finding]:
    """All findings about `directory`; a file in it is written and removed."""
    kind = mount_of(directory).kind
    findings = [_kind(directory, kind)]
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".autockpt-doctor-") as file:
            findings += [_room(directory), _direct(file.fileno(), directory, kind)]
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        findings.append(
            Finding(
                id="storage.write",
                status="broken",
                what=f"{directory}: cannot be written: {error.strerror}",
                fix="free some space" if full else "name a directory this user may write",
            )
        )
    return findings


def _kind(directory: str, kind: str) -> Finding:
    if kind in VOLATILE:
        return Finding(
            id="storage.kind",
            status="warning",
            what=f"{directory} is {kind}: it lives in memory and is gone after a reboot",
            fix="name a directory on a disk or a network file system",
        )
    if kind in NETWORK or kind.startswith("fuse"):
        return Finding(
            id="storage.kind",
            status="note",
            what=f"{directory} is {kind}: it survives the node; `autockpt profile` measures it",
        )
    if kind == "overlay":
        return Finding(
            id="storage.kind",
            status="warning",
            what=f"{directory} is the container's own layer (overlay): gone with the container",
            fix="mount a volume and name it with --run-dir or disk.path in a policy",
        )
    return Finding(
        id="storage.kind",
        status="ok",
        what=f"{directory} is {kind}; it survives processes and reboots, not the loss of the node",
    )


def _room(directory: str) -> Finding:
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    what = f"{format_bytes(free)} free in {directory}"
    if free < LITTLE_BYTES:
        return Finding(
            id="storage.room",
            status="warning",
            what=what,
            fix="a checkpoint of Adam in fp32 takes 12 bytes a parameter, and 3 are kept: compare",
        )
    return Finding(id="storage.room", status="ok", what=what)


def _direct(descriptor: int, directory: str, kind: str) -> Finding:
    stated = stated_alignment(descriptor)
    found = _smallest_direct_write(directory)
    if found is None:
        return Finding(
            id="storage.direct_io",
            status="note",
            what=f"direct writes (O_DIRECT) do not work on this {kind}: checkpoints go through the "
            "page cache, which costs a copy and memory",
        )
    why = objection(descriptor)
    if not why and found > PAGE_BYTES:
        why = f"direct writes need {found} B, images have {PAGE_BYTES} B"
    if why:
        return Finding(
            id="storage.direct_io",
            status="warning",
            what=f"checkpoints go through the page cache: {why}",
            fix="nothing to do; a file system on 4 KiB blocks is faster",
        )
    said = ""
    if stated is not None:
        said = f"the file system states {stated[0]} B for memory, {stated[1]} B for offsets; "
    return Finding(
        id="storage.direct_io",
        status="ok",
        what=f"direct writes (O_DIRECT) work; {said}the smallest that succeeded: {found} B",
    )


def _smallest_direct_write(directory: str) -> int | None:
    """Smallest block that O_DIRECT takes; opening alone says nothing (tmpfs opens, too)."""
    path = os.path.join(directory, f".autockpt-doctor-{os.getpid()}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    try:
        os.unlink(path)
        with mmap.mmap(-1, 65536) as memory:
            for size in (512, 4096, 65536):
                try:
                    if os.pwrite(descriptor, memoryview(memory)[:size], 0) == size:
                        return size
                except OSError:
                    continue
                except BufferError:
                    continue
        return None
    finally:
        os.close(descriptor)
