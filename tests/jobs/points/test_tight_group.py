"""`autockpt run` in a memory cgroup, where an allocation beyond the limit is an OOM kill."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.framework import Skipped
from tests.campaigns.oom import Group
from tests.conftest import end_keeper

AMPLE_BYTES = 4 * 2**30
MIB = 2**20
SCRIPT = """
import os, torch, autockpt
from pathlib import Path

group, left, steps = Path(os.environ["GROUP"]), int(os.environ["LEFT"]), int(os.environ["STEPS"])


def tighten():
    old = (group / "memory.limit_in_bytes").exists()
    limit, usage, cache = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if old
        else ("memory.max", "memory.current", "inactive_file")
    )
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / usage).read_text()) - int(stat[cache])
    (group / limit).write_text(str(used + left))


torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(3000, 3000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
grads = [torch.full_like(p, 1e-3) for p in model.parameters()]
ckpt = autockpt.attach(model=model, optimizer=optimizer)
print("begins at", ckpt.step_count, flush=True)
for number, _ in enumerate(ckpt.steps(steps)):
    for parameter, grad in zip(model.parameters(), grads):
        parameter.grad = grad
    optimizer.step()
    if number == 0:
        tighten()
print("sum", sum(row.double().sum().item() for row in model.weight.detach()), flush=True)
"""

GREEDY = """
import os, torch, autockpt

model = torch.nn.Linear(30, 30)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
begun = ckpt.step_count
for number, _ in enumerate(ckpt.steps(int(os.environ["STEPS"]))):
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    if number == 8 and begun == 0:
        held = torch.ones(2**31)
"""


@pytest.fixture
def group() -> Iterator[Group]:
    """Empty in the end."""
    try:
        made = Group(AMPLE_BYTES)
    except Skipped as skipped:
        pytest.skip(str(skipped))
    yield made
    made.close()


def trained(group: Group, folder: Path, left: int, steps: int) -> str:
    """What a run in the group says that has `left` bytes once the training has its memory."""
    (group.folder / _limit(group)).write_text(str(AMPLE_BYTES))
    words = [sys.executable, "-m", "autockpt", "run", "--no-profile", "--set"]
    words += ["disk.interval=4 steps", "--run-dir", "run", "job.py"]
    told = {"GROUP": str(group.folder), "LEFT": str(left), "STEPS": str(steps)}
    join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    ended = subprocess.run(
        ["sh", "-c", join, str(group.folder), *words], cwd=folder, capture_output=True, text=True,
        timeout=240, check=False, env={**os.environ, **told, "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    return said


def _limit(group: Group) -> str:
    old = (group.folder / "memory.limit_in_bytes").exists()
    return "memory.limit_in_bytes" if old else "memory.max"


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("left", "how"), [(180 * MIB, "made were 1"), (64 * MIB, "checkpoints go to storage through")]
)
def test_a_group_without_room_for_all_slots_still_gets_checkpoints(
    group: Group, tmp_path: Path, left: int, how: str
) -> None:
    """A state of 72 MB: in one slot, or through a window; the kernel kills nobody."""
    (tmp_path / "job.py").write_text(SCRIPT)
    try:
        first = trained(group, tmp_path, left, 16)
        assert how in first
        assert "begins at 0" in first
        assert list((tmp_path / "run" / "checkpoints").glob("ckpt-*/COMMIT"))
        second = trained(group, tmp_path, left, 24)
        assert "begins at 16" in second
        assert group.killed() == 0
    finally:
        end_keeper(str(tmp_path / "run"))
    (group.folder / _limit(group)).write_text(str(AMPLE_BYTES))
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "job.py").write_text(SCRIPT)
    whole = trained(group, tmp_path / "whole", AMPLE_BYTES // 4, 24)
    end_keeper(str(tmp_path / "whole" / "run"))
    assert [line for line in second.splitlines() if line.startswith("sum")] == [
        line for line in whole.splitlines() if line.startswith("sum")
    ]


@pytest.mark.slow
@pytest.mark.root
def test_a_rank_that_the_kernel_killed_for_memory_is_told_so(group: Group, tmp_path: Path) -> None:
    """The first start takes more than the group may have; the limit is in the message."""
    (tmp_path / "job.py").write_text(GREEDY)
    try:
        said = trained(group, tmp_path, 0, 12)
    finally:
        end_keeper(str(tmp_path / "run"))
    assert "rank 0 was killed by SIGKILL" in said
    assert f"out of memory: 4.29 GB are the limit of {group.folder}" in said
    assert group.killed() == 1
