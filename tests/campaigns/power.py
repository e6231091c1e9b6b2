"""Power cuts: a file system of its own that stops dead at some operation, and is mounted again.

The shutdown ioctl of ext4 drops everything that is not on the device, as a power cut does; then the
journal is replayed by the next mount.  Needs root and a loop device.
"""

import contextlib
import fcntl
import os
import random
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.values.errors import AutockptError
from tests.campaigns.faults import Call, Layer
from tests.campaigns.framework import Skipped
from tests.campaigns.job import ACTS, DURABLE, SHAPES, Scene, life, no_leak, require_recovery
from tests.campaigns.kill_ops import changing

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN, which XFS has under the same number."""
FLUSH, LOSE = 1, 2
"""The journal reaches the device first, or not."""
DEVICE_BYTES = 24 * 2**20
EVERYTHING = {**ACTS, "life": life}


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


class PowerCuts:
    """Every (shape, act, operation that changes something, journal flushed or not)."""

    claim = "whatever was reported durable survives a power cut at any operation"

    def __init__(self, scratch: Path) -> None:
        self._mount, self._device = scratch / "mount", scratch / "device"
        self._mount.mkdir()
        if os.geteuid() != 0:
            raise Skipped("mounting needs root")
        with self._device.open("wb") as file:
            file.truncate(DEVICE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._device))
        scenes = [Scene(scratch, shape, stage=self._mount) for shape in SHAPES[:3]]
        with self._mounted():
            self._plan = [
                (scene, act, operation, flag)
                for scene in scenes
                for act in EVERYTHING
                for operation in changing(scene, EVERYTHING[act])
                for flag in (LOSE, FLUSH)
            ]
        self.distinct: int | None = len(self._plan)
        random.Random(0).shuffle(self._plan)

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan."""
        scene, act, operation, flag = self._plan[number % len(self._plan)]
        promised = [DURABLE]
        with no_leak():
            with self._mounted():
                job = scene.fresh()
                job.promise = promised.append
                os.sync()
                with (
                    contextlib.suppress(AutockptError, OSError),
                    Layer(Cut(operation, flag, self._mount)).armed(),
                ):
                    EVERYTHING[act](job)
                with contextlib.suppress(OSError):
                    cut(self._mount, flag)
            with self._mounted():
                require_recovery(job, max(promised))
                scene.require_foreign_untouched()
        return act

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        _run("mount", "-o", "loop", str(self._device), str(self._mount))
        try:
            yield
        finally:
            _run("umount", str(self._mount))

    def close(self) -> None:
        """Nothing stays mounted: every case unmounts."""


def cut(mount: Path, flag: int) -> None:
    """The power goes now."""
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flag))
    finally:
        os.close(fd)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        raise Skipped(f"{command[0]}: {told.strip()[:200]}") from None
