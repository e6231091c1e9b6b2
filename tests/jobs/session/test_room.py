"""Room on the disk and in memory is compared with the plan before the first checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autockpt.executors.image.layout.room import smallest_window
from autockpt.executors.linux.memory import Headroom
from autockpt.session import room
from autockpt.values.plan import CheckpointPlan
from autockpt.values.units import format_bytes
from tests.support import trainings
from tests.unit.cli.scripts import autockpt, write

TRAIN = """
import torch, autockpt
model = torch.nn.Linear(200, 200)
optimizer = torch.optim.SGD(model.parameters())
for step in autockpt.attach(model=model, optimizer=optimizer).steps(5):
    open("trained", "w").close()
    model(torch.randn(2, 200)).sum().backward()
    optimizer.step()
"""


def test_a_plan_that_fits_says_nothing() -> None:
    """What is stored already gives way to what comes."""
    assert room.shortage("d", free_bytes=10, stored_bytes=30, state_bytes=10, kept=3) == ""


def test_a_plan_that_does_not_fit_says_what_is_missing() -> None:
    """In bytes, and what to do."""
    said = room.shortage(
        "/disk", free_bytes=20 * 10**9, stored_bytes=0, state_bytes=10 * 10**9, kept=3
    )
    assert said.startswith("/disk: 20 GB free")
    assert "expected 40 GB for 3 checkpoints of 10 GB" in said
    assert "keep.last" in said


def test_it_looks_at_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only generations count as stored."""
    for name in ("ckpt-t0001-step-00000001", "spare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(1000))
    seen: list[int] = []

    def shortage(path: str, **bytes_: int) -> str:
        seen.append(bytes_["stored_bytes"])
        return "too small"

    monkeypatch.setattr(room, "shortage", shortage)
    said: list[str] = []
    room.look_for_room(str(tmp_path), state_bytes=1, kept=1, say=said.append)
    assert (seen, said) == ([1000], ["too small"])


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    """Its first save says it."""
    said: list[str] = []
    room.look_for_room(str(tmp_path / "no"), state_bytes=1, kept=1, say=said.append)
    assert said == []


def left(available: int) -> Headroom:
    """What a control group leaves."""
    return Headroom(available_bytes=available, binding="memory limit of cgroup g", limited=True)


def test_the_least_checkpoint_of_all_ranks_must_fit_in_what_is_left() -> None:
    """A window each where there is a disk, else the state; what is missing is said exactly."""
    both, memory = trainings.plan(memory=4, disk=4), trainings.plan(memory=4, disk=0)
    size = 2**30

    def lack(plan: CheckpointPlan, available: int, limit: int | None = None, ranks: int = 1) -> str:
        return room.lack_of_memory(
            plan, state_bytes=size, ranks=ranks, limit_bytes=limit, left=left(available)
        )

    window = smallest_window(both.staging.chunk_bytes)[0]
    assert lack(both, 2 * window) == ""
    said = lack(both, 2 * window, ranks=2)
    assert said.startswith(f"the least checkpoint of 2 ranks needs {format_bytes(2 * window)} of")
    assert f"memory limit of cgroup g has {format_bytes(2 * window)} left, of which" in said
    assert f"{format_bytes(window // 2)} are missing; free them, or raise that limit" in said
    assert lack(memory, 2 * size) == ""
    assert "needs 1.07 GB" in lack(memory, size)
    assert lack(both, 2 * size, limit=window) == ""
    said = lack(both, 2 * size, limit=4096)
    missing = format_bytes(window - 4096)
    assert f"the policy allows 4.1 kB: {missing} are missing; raise limits.host_memory" in said
    assert lack(trainings.plan(memory=0, disk=0), 0) == ""


@pytest.mark.timeout(200)
def test_a_launch_without_room_for_any_checkpoint_does_not_train(
    new_run: Callable[..., str], tmp_path: Path
) -> None:
    """It ends with the code of a policy that cannot work; python alone trains on and says so."""
    run_dir = new_run("r")
    write(tmp_path, "s.py", TRAIN)
    words = ["run", "--no-profile", "--run-dir", "r", "--set", "limits.host_memory=4 KiB", "s.py"]
    refused = autockpt(*words, cwd=tmp_path)
    said = refused.stderr + refused.stdout
    assert refused.returncode == 78, said
    assert "no checkpoint of this training can be made: the least checkpoint" in said
    assert "the policy allows 4.1 kB" in said
    assert "restarting" not in said
    assert not (tmp_path / "trained").exists()
    assert not list(Path(run_dir, "checkpoints").glob("*/COMMIT"))
