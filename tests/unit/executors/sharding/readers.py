"""Ranks of one node that read together, as processes: forked, killed, stopped, counted.

    python -m tests.unit.executors.sharding.readers '{"members": 2, "needs": [[0, 1], [1]], ...}'

prints what every process read and took, and how it ended.  A module of its own, because whoever
forks must have no threads.
"""

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autockpt.executors.linux.memory import READING_HUGE_MARK, READING_TABLE_BYTES, Arena
from autockpt.executors.restore.cooperative_read import CooperativeRead
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.errors import CorruptCheckpointError

ROOT = Path(__file__).resolve().parents[4]
ENDS_WITHIN_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Who needs what, and what goes wrong."""

    needs: Sequence[Sequence[int]]
    """By member its chunks."""
    chunks: int
    chunk_bytes: int = 5000
    buffers: int = 8
    """Of every member in the ring; as many 8 KiB as that takes."""
    threads: int = 2
    direct: bool = False
    """Chunks are read into the buffers of the ring."""
    ahead: int = 0
    """Chunks that every member reads before it joins, from its part of all on."""
    patience_s: float = 30.0
    faults: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By member (as text) a fault and at which read: kill, stop, fail; late, absent: at join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    reads: list[list[int]]
    """[member][chunk]: how often it was read from its source."""
    takes: list[list[int]]
    """[member][chunk]: how often its right bytes were put."""
    ended: list[int]
    """By member: 0 well, 1 with an error, negative by a signal."""
    seconds: float

    def read_in_all(self, chunk: int) -> int:
        """How often a chunk was read by anybody."""
        return sum(row[chunk] for row in self.reads)


def play(scene: Scene) -> Outcome:
    """The scene in a process of its own."""
    data = {name: getattr(scene, name) for name in scene.__slots__}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.executors.sharding.readers", json.dumps(data)],
        cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=2 * ENDS_WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return Outcome(**json.loads(done.stdout))


# --- the processes --------------------------------------------------------------------------------


def content(chunk: int, nbytes: int) -> bytes:
    """The bytes of a chunk, which no other has."""
    return (np.arange(nbytes, dtype=np.uint64) * 2654435761 + chunk * 97).astype(np.uint8).tobytes()


class Member:
    """One process."""

    def __init__(self, scene: Scene, arena: Arena, me: int, counts: Any) -> None:
        self.scene, self.me = scene, me
        self.reads, self.takes = counts[0, me], counts[1, me]
        self.fault, self.at = scene.faults.get(str(me), ("", 0))
        self.group = CooperativeRead(
            arena, range(len(scene.needs)), me, chunks=scene.chunks,
            chunk_bytes=scene.chunk_bytes, patience_s=scene.patience_s,
        )  # fmt: skip

    def run(self) -> None:
        """Joins, reads and takes, leaves."""
        if self.fault == "absent":
            return
        if self.fault == "late":
            time.sleep(self.at)
        needed = self.scene.needs[self.me]
        try:
            self.read_ahead()
            self.group.join(needed)
            threads = self.scene.threads
            run_parallel(range(threads), self.work, workers=threads)
        finally:
            self.group.leave()

    def work(self, thread: int) -> None:
        """Of several threads the first one takes."""
        self.group.run(self.read, self.put, takes=thread == 0 and self.scene.threads > 1)

    def read_ahead(self) -> None:
        """Whatever goes wrong is met again."""
        first = self.scene.chunks * self.me // len(self.scene.needs)
        for chunk in range(first, first + self.scene.ahead):
            with contextlib.suppress(CorruptCheckpointError):
                self.group.read_ahead(chunk, self.read)

    def read(self, chunk: int, place: memoryview | None) -> memoryview:
        """From the source."""
        self.reads[chunk] += 1
        if self.reads.sum() == self.at:
            faults: dict[str, Callable[[], None]] = {"kill": self.die, "stop": self.stop}
            faults.get(self.fault, lambda: None)()
            if self.fault == "fail":
                raise CorruptCheckpointError(f"chunk {chunk} does not match")
        time.sleep(0.001)
        data = memoryview(content(chunk, self.scene.chunk_bytes))
        assert place is None or self.scene.direct
        if place is None:
            return data
        place[: len(data)] = data
        return place[: len(data)]

    def put(self, chunk: int, data: memoryview) -> None:
        """Where it belongs."""
        if self.scene.direct and self.reads[chunk]:
            time.sleep(0.01)  # the others take it before
        assert bytes(data[: self.scene.chunk_bytes]) == content(chunk, self.scene.chunk_bytes)
        self.takes[chunk] += 1

    def die(self) -> None:
        """As the kernel's out-of-memory killer does it."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Alive, and of no use to anybody."""
        os.kill(os.getpid(), signal.SIGSTOP)


def main(scene: Scene) -> Outcome:
    """Forks the members; the one that was stopped is ended when the others have."""
    members = len(scene.needs)
    arena = Arena.create_shared(
        READING_TABLE_BYTES + 8192 * scene.buffers * members, name="autockpt-test-reading"
    )
    arena.view[READING_HUGE_MARK] = scene.direct
    shared = mmap.mmap(-1, 8 * 2 * members * scene.chunks)
    counts = np.frombuffer(shared, dtype=np.int64).reshape(2, members, scene.chunks)
    began = time.monotonic()
    pids = [_fork(scene, arena, me, counts) for me in range(members)]
    stopped = [pid for pid, me in zip(pids, range(members), strict=True)
               if scene.faults.get(str(me), ("",))[0] == "stop"]  # fmt: skip
    ended = {pid: _wait(pid, began) for pid in pids if pid not in stopped}
    seconds = time.monotonic() - began
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
        ended[pid] = _wait(pid, began)
    return Outcome(
        reads=counts[0].tolist(), takes=counts[1].tolist(), ended=[ended[pid] for pid in pids],
        seconds=seconds,
    )  # fmt: skip


def _fork(scene: Scene, arena: Arena, me: int, counts: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        Member(scene, arena, me, counts).run()
        status = 0
    except CorruptCheckpointError:
        pass
    finally:
        os._exit(status)


def _wait(pid: int, began: float) -> int:
    while time.monotonic() < began + ENDS_WITHIN_S:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    raise SystemExit(f"member {pid} hangs")


if __name__ == "__main__":
    found = main(Scene(**json.loads(sys.argv[1])))
    print(json.dumps({name: getattr(found, name) for name in found.__slots__}))
