"""Point 5: chunks are written while later ones are copied (builtin:datastates) or after all."""

import os
import threading
import time
from pathlib import Path

import pytest

from autockpt.executors.linux.memory import Arena
from autockpt.policies.policy_file import load_policy
from tests.unit.executors.checkpoints import CHUNK, PATIENCE_S, Persisted, pipeline, target

CHUNKS = 6
POLLS = 20


@pytest.mark.parametrize(("preset", "streaming"), [("datastates", True), ("easyckpt", False)])
def test_the_first_byte_is_written_before_the_last_is_copied_only_if_streaming(
    preset: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last chunk are copied; the writer looks many times, then the rest arrives."""
    assert load_policy(f"builtin:{preset}").goal.pins.streaming is streaming
    arena = Arena.anonymous(CHUNKS * CHUNK)
    arena.view[:] = bytes(range(256)) * (arena.nbytes // 256)
    copied, written = [0], []
    looked, wrote = threading.Semaphore(0), threading.Semaphore(0)
    pwrite = os.pwrite

    def recorded(fd: int, data: memoryview, at: int) -> int:
        written.append((at, copied[0]))
        done = pwrite(fd, data, at)
        wrote.release()
        return done

    class Seal(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            looked.release()
            return super().wait(timeout)

    monkeypatch.setattr(os, "pwrite", recorded)
    result = Persisted()
    shard = pipeline(
        arena.view, target(str(tmp_path / "shard"), writers=1), result,
        available=lambda: copied[0], streaming=streaming,
    )  # fmt: skip
    shard._sealed = Seal()
    shard.start()
    copied[0] = (CHUNKS - 1) * CHUNK
    for _ in range(POLLS if streaming else 1):
        assert looked.acquire(timeout=PATIENCE_S)
    if not streaming:
        time.sleep(0.1)  # time enough for a write that should not be
    for _ in range(CHUNKS - 2 if streaming else 0):
        assert wrote.acquire(timeout=PATIENCE_S)
    early = [at for at, _ in written]
    copied[0] = arena.nbytes
    shard.sealed()
    assert result.ended.wait(PATIENCE_S)
    shard.cancel()
    assert result.error is None
    assert len(early) >= CHUNKS - 2 if streaming else early == []
    # The header always comes last, so that a cut file is no image.
    assert [at for at, _ in written].index(0) == len(written) - 1
    assert all(seen == arena.nbytes for _, seen in written[len(early) :])
    assert (tmp_path / "shard").read_bytes() == arena.view
