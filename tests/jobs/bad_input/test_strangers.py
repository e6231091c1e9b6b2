"""Other users of the machine get neither the socket of a keeper nor the memory that it holds."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autockpt.executors.keeper.launch import socket_path
from tests.jobs.bad_input.stranger import STRANGER
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings
from tests.support.live import SPEC, Live, granted

pytestmark = pytest.mark.root
PLAN = trainings.plan(memory=4, disk=4)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keepers of this test have their directories where everybody may look."""
    place = Path(tempfile.mkdtemp(prefix="autockpt-test-"))
    place.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    yield place
    shutil.rmtree(place)


@pytest.mark.usefixtures("sockets")
def test_another_user_is_kept_out(live: Live, zygote: Zygote, tmp_path: Path) -> None:
    """By the modes of folder and socket; where somebody has opened those, by the keeper itself."""
    whole = trainings.bare(trainings.build(SPEC))
    job, ckpt = live.attach(SPEC, PLAN)
    path = socket_path(live.run_dir, 0)
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
        if step == 6:
            memory = [each for pid in (ckpt.keeper_pid, os.getpid()) for each in held_by(pid)]
            assert len({Path(each).parents[1] for each in memory}) == 2, "both of them hold slots"
            closed = intruded(zygote, tmp_path / "closed", path, memory)
            assert set(closed.values()) == {"PermissionError"}
            for each in (Path(path).parents[1], Path(path).parent, Path(path)):
                each.chmod(0o777)
            opened = intruded(zygote, tmp_path / "opened", path, memory)
            assert opened.pop("socket") == "closed"
            assert set(opened.values()) == {"PermissionError"}
    log = Path(live.run_dir, "logs", "keeper-000.log").read_text()
    assert f"refused a connection of uid {STRANGER}" in log
    assert trainings.digest(job) == whole


def held_by(pid: int | None) -> list[str]:
    """The memory that a process holds, as other processes would open it."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # others come and go
            if os.readlink(fd).startswith("/memfd:"):
                found.append(str(fd))
    return found


def intruded(zygote: Zygote, out: Path, path: str, memory: list[str]) -> dict[str, str]:
    """What a process of another user came to."""
    out.mkdir()
    order = {"out": str(out), "path": path, "memory": memory}
    pid = zygote.call("tests.jobs.bad_input.stranger:intrude", order, out)
    assert zygote.finish(pid, out / "log") == 0, (out / "log").read_text()
    tried: dict[str, str] = json.loads((out / "tried").read_text())
    return tried
