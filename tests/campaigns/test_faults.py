"""The faults by themselves: what an error must say, and what a device forgets."""

import contextlib
import errno
import os
import random
from pathlib import Path

import pytest

from autockpt.values.errors import StorageError
from tests.campaigns import power
from tests.campaigns.errno_ops import attack
from tests.campaigns.faults import Errno
from tests.campaigns.framework import Violation
from tests.campaigns.job import ACTS, SHAPES, Job


@pytest.mark.parametrize("told", ["idx-00001-a1.json", "idx-00000-a1.json"])
def test_an_error_names_the_file_that_it_is_about(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not another one of the same directory, which would be another rank's."""

    def act(job: Job) -> None:
        with contextlib.suppress(OSError):
            os.stat(f"{job.path}/idx-00001-a1.json")
        raise StorageError(f"{job.path}/{told}: cannot read: {os.strerror(errno.EIO)}")

    monkeypatch.setitem(ACTS, "read", act)
    job, rule = Job(path=str(tmp_path), shape=SHAPES[0]), Errno(0, errno.EIO, False)
    right = told.startswith("idx-00001")
    with contextlib.nullcontext() if right else pytest.raises(Violation, match="names none of"):
        assert attack(job, "read", rule, "here", cause=os.strerror(errno.EIO)) == "refused"


def test_a_device_forgets_only_what_it_was_not_told_to_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks since the last flush, some of them."""
    monkeypatch.setattr(power, "write_back", lambda mount: None)
    device, blocks = tmp_path / "device", 64
    old, flushed, given = (bytes([n]) * power.BLOCK for n in (0, 1, 2))
    device.write_bytes(old * blocks)
    fade = power.Fade(99, 98, tmp_path, device)
    device.write_bytes(flushed * blocks)
    with device.open("rb") as file:
        fade(power.Call("fsync", True, 0), os.fsync, [file.fileno()], {})
    device.write_bytes(flushed * (blocks // 2) + given * (blocks // 2))
    fade.forget(random.Random(1))
    found = device.read_bytes()
    assert found[: len(found) // 2] == flushed * (blocks // 2)
    rest = found[len(found) // 2 :]
    assert {rest[i : i + power.BLOCK] for i in range(0, len(rest), power.BLOCK)} == {flushed, given}
