"""Which launch a rank belongs to: all ranks and restarts of one torchrun, and no other."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autockpt.executors.storage.directory.records import read_commit
from autockpt.session import job
from tests.unit.cli.scripts import environment, python, write

AGENT = """
import os, subprocess, sys
named = {"TORCHELASTIC_RUN_ID": "job"} if sys.argv.pop(1) == "torchrun" else {}
told = [{**os.environ, **named, "RANK": str(rank)} for rank in range(2)]
ranks = [subprocess.Popen(sys.argv[1:], env=one) for one in told]
sys.exit(max(rank.wait() for rank in ranks))
"""
ASKS = """
import os
from autockpt.cli.jobs import worker
from autockpt.cli.shared.plan_choice import Scale
from autockpt.launch.rank_env import agent_of
scale, parent = Scale(world_size=2, nodes=1), os.getppid()
found = parent, agent_of(os.environ, parent), worker._launch_id(scale)
os.write(1, f"{' '.join(map(str, found))}\\n".encode())
os.read(0, 1)
"""
"""A rank that waits, so that those above it live."""
WRAPPER = ("sh", "-c", '"$@"; exit $?', "wrapper")
"""More than one command: its process does not become the rank's."""


@pytest.mark.parametrize("wrappers", [0, 1, 2])
@pytest.mark.parametrize("launcher", ["torchrun", "a script"])
def test_the_agent_is_found_above_scripts_that_start_the_ranks(
    launcher: str, wrappers: int
) -> None:
    """One process for all ranks of a launch, whatever stands between."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, launcher, *wrappers * WRAPPER, sys.executable, "-c", ASKS],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert agent.stdin is not None
    assert agent.stdout is not None
    parents, agents, launches = zip(*(agent.stdout.readline().split() for _ in (0, 1)), strict=True)
    assert (str(agent.pid) in parents) == (not wrappers)
    assert set(agents) == {str(agent.pid)}
    assert len(set(launches)) == 1
    agent.communicate("xx", timeout=60)
    assert agent.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a pid namespace")
@pytest.mark.parametrize("wrappers", [0, 1])
def test_where_everybody_was_told_it_is_the_parent(wrappers: int) -> None:
    """A pod sets RANK for all its processes: those above ours say nothing of a launch."""
    asks = (
        "import os; from autockpt.launch.rank_env import agent_of;"
        "print(os.getppid(), agent_of(os.environ, os.getppid()))"
    )
    pod = ("unshare", "--pid", "--fork", "--mount-proc", *WRAPPER, *wrappers * WRAPPER)
    told = {**environment(), "RANK": "0"}
    done = subprocess.run(
        [*pod, sys.executable, "-c", asks], env=told, capture_output=True, text=True, timeout=60
    )
    parent, agent = map(int, done.stdout.split())
    assert agent == parent == 1 + wrappers, done.stderr


def test_launches_with_one_run_id_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and restarts of an agent share theirs."""
    monkeypatch.delenv("AUTOCKPT_LAUNCH_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    names = []
    for agent in (os.getpid(), os.getpid(), os.getppid()):
        monkeypatch.setattr(os, "getppid", lambda agent=agent: agent)
        names.append(job._launcher()[0])
    assert names[0] == names[1] != names[2]
    assert names[0].startswith(f"torchrun-job-{os.getpid()}-")


TRAINING = """
import os, time, torch, autockpt
net = torch.nn.Linear(64, 64)
opt = torch.optim.AdamW(net.parameters())
ckpt = autockpt.attach(model=net, optimizer=opt)
first = ckpt.step_count
print("first", first, flush=True)
for step in ckpt.steps(100):
    net(torch.randn(4, 64)).pow(2).mean().backward()
    opt.step(); opt.zero_grad()
    ckpt.save()
    if step == first + 5:
        ckpt.wait_durable(30.0)
        os._exit(1)
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_next_launch_under_one_run_id_does_what_it_was_asked_for(
    tmp_path: Path, new_run: Callable[..., str]
) -> None:
    """The one before crashed; this one is neither refused nor taken for a restart of it."""
    run = new_run()
    write(tmp_path, "s.py", TRAINING)
    command = [
        "-m", "torch.distributed.run", "--rdzv-id", "job", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "--max-restarts", "0", "s.py",
    ]  # fmt: skip

    def first_step(**more: str) -> int:
        done = python(*command, cwd=tmp_path, AUTOCKPT_RUN_DIR=run, AUTOCKPT_NO_PROFILE="1", **more)
        said = [line for line in done.stdout.splitlines() if line.startswith("first ")]
        assert said, done.stderr[-3000:]
        return int(said[0].split()[1])

    assert first_step() == 0
    assert first_step() > 0
    oldest = min(Path(run).glob("checkpoints/ckpt-*/COMMIT"))
    wanted = read_commit(str(oldest))
    assert first_step(AUTOCKPT_RESUME_FROM=wanted.generation.name) == wanted.step
    assert first_step(AUTOCKPT_FRESH="1") == 0
