"""Power cuts: a file system of its own that stops dead at some operation, and is mounted again.

The shutdown ioctl of ext4 drops everything that is not on the device, as a power cut does; then the
journal is replayed by the next mount.  In most cases the kernel has written back what was dirty at
an earlier moment, and the device forgets a part of what it was given since its last flush.  Needs
root and a loop device.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autockpt.values.errors import AutockptError
from tests.campaigns.faults import Call, Layer
from tests.campaigns.framework import Skipped, require
from tests.campaigns.job import ACTS, DURABLE, SHAPES, Scene, life, no_leak, require_recovery
from tests.campaigns.kill_ops import changing

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN, which XFS has under the same number."""
FLUSH, LOSE = 1, 2
"""The journal reaches the device first, or not."""
DRAWN = 5
"""Cuts at every operation for which the moment of write-back, and what survives, are drawn."""
DEVICE_BYTES = 8 * 2**20
BLOCK = 1024
"""Of so small a file system; a device writes no part of one."""
RELEASE_S = 30.0
EVERYTHING = {**ACTS, "life": life}
_open, _close = os.open, os.close  # not those that a layer counts


@dataclass(frozen=True, slots=True)
class Cut:
    """The power goes before operation number `at`; what follows fails as on a dead device."""

    at: int
    flag: int
    mount: Path

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
        if call.number == self.at:
            cut(self.mount, self.flag)
        return real(*args, **more)


@dataclass(slots=True)
class Fade:
    """Before operation `written` everything dirty is written back, before `at` the power goes.

    What the device was given since the last flush stays there in part.
    """

    at: int
    written: int
    mount: Path
    device: Path
    flushed: bytes = field(init=False)
    """The device as it surely is."""
    gone: bool = False
    _one: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        write_back(self.mount)
        self.flushed = self.device.read_bytes()

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
        with self._one:  # several writers
            if call.number == self.at:
                cut(self.mount, LOSE)
                self.gone = True
            elif call.number == self.written and not self.gone:
                self.__post_init__()
        result = real(*args, **more)
        if call.name == "fsync":
            self.flushed = self.device.read_bytes()
        return result

    def forget(self, rng: random.Random) -> None:
        """The device, which nobody uses any more, loses about half of what was not flushed."""
        found = bytearray(self.device.read_bytes())
        for start in range(0, len(found), BLOCK):
            block = slice(start, start + BLOCK)
            if found[block] != self.flushed[block] and rng.random() < 0.5:
                found[block] = self.flushed[block]
        self.device.write_bytes(found)


class PowerCuts:
    """Every (shape, act, operation that changes something, how the power goes)."""

    claim = "whatever was reported durable survives a power cut at any operation"

    def __init__(self, scratch: Path) -> None:
        self._mount, self._device = scratch / "mount", scratch / "device"
        self._mount.mkdir()
        if os.geteuid() != 0:
            raise Skipped("mounting needs root")
        with self._device.open("wb") as file:
            file.truncate(DEVICE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._device))
        scenes = [Scene(scratch, shape, stage=self._mount) for shape in SHAPES]
        with self._mounted():
            self._plan = [
                (scene, act, operation, how)
                for scene in scenes
                for act in EVERYTHING
                for operation in changing(scene, EVERYTHING[act])
                for how in (LOSE, FLUSH, *[None] * DRAWN)
            ]
        self.distinct: int | None = len(self._plan)
        random.Random(0).shuffle(self._plan)

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan."""
        scene, act, operation, how = self._plan[number % len(self._plan)]
        promised = [DURABLE]
        with no_leak():
            with self._mounted():
                job = scene.fresh()
                job.promise = promised.append
                write_back(self._mount)
                rule = self._cut(operation, how, rng)
                with contextlib.suppress(AutockptError, OSError), Layer(rule).armed():
                    EVERYTHING[act](job)
                with contextlib.suppress(OSError):
                    cut(self._mount, how or LOSE)
            if isinstance(rule, Fade):
                rule.forget(rng)
            with self._mounted():
                require_recovery(job, max(promised))
                scene.require_foreign_untouched()
        return act

    def _cut(self, at: int, how: int | None, rng: random.Random) -> Cut | Fade:
        if how is not None:
            return Cut(at, how, self._mount)
        return Fade(at, rng.randrange(at + 1), self._mount, self._device)

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        _run("mount", "-o", "loop", str(self._device), str(self._mount))
        try:
            yield
        finally:
            _run("umount", str(self._mount))
            _await_release(self._device)

    def close(self) -> None:
        """Nothing stays mounted: every case unmounts."""


def _await_release(device: Path) -> None:
    """A process that began with mounts of its own meanwhile holds ours, and the device would come
    back as it stood still."""
    deadline = time.monotonic() + RELEASE_S
    while any(_backing(loop) == str(device) for loop in Path("/sys/block").glob("loop*")):
        if time.monotonic() > deadline:
            raise Skipped(f"{device}: another mount namespace holds it")
        time.sleep(0.01)


def _backing(loop: Path) -> str:
    try:
        return (loop / "loop" / "backing_file").read_text().strip()
    except OSError:
        return ""


def cut(mount: Path, flag: int) -> None:
    """The power goes now."""
    fd = _open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flag))
    finally:
        _close(fd)


def write_back(mount: Path) -> None:
    """As the kernel does it every few seconds, for one file system."""
    fd = _open(mount, os.O_RDONLY)
    try:
        require(not ctypes.CDLL(None).syncfs(fd), "syncfs failed")
    finally:
        _close(fd)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        raise Skipped(f"{command[0]}: {told.strip()[:200]}") from None
