"""A script makes process groups one after another, as for folds of a cross-validation.

torch lets rank 0 keep their stores.  In a restartable function the launcher keeps them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.kill.zygote import environment

SCRIPT = """
import importlib, os, signal, socket, sys, time
import torch
import torch.distributed as dist
import autockpt

folder, rank = sys.argv[1], int(os.environ["RANK"])

def meet(name):
    # By files: rank 0 closes its store before the other one asks for the next.
    name = f"{folder}/{name}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    open(f"{name}-{rank}", "w").close()
    while not all(os.path.exists(f"{name}-{one}") for one in (0, 1)):
        time.sleep(0.01)

def groups(part, **where):
    for number in range(3):
        dist.init_process_group("gloo", **where)
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == 3.0
        dist.destroy_process_group()
        if rank == 0:
            print("group", part, number, flush=True)
        meet(f"{part}-{number}")

calls = []

@autockpt.restartable
def train():
    calls.append(0)
    groups("in a function")
    if rank == 0:
        print("calls:", len(calls), flush=True)

train()
groups("outside")
if rank == 0:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with open(f"{folder}/port.new", "w") as out:
        out.write(str(port))
    os.rename(f"{folder}/port.new", f"{folder}/port")
meet("port")
port = open(f"{folder}/port").read()
groups("at an address", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
rendezvous = importlib.import_module("torch.distributed.rendezvous")
assert not rendezvous._torchelastic_use_agent_store()
own = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
own.set(str(rank), "here")
own.wait(["0", "1"])
meet("over")
"""


@pytest.mark.timeout(150)
def test_groups_are_made_one_after_another(tmp_path: Path) -> None:
    """In a restartable function of which rank 1 dies, behind it, and at an address of the script.

    At MASTER_PORT the script may make a store of its own.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "-m", "autockpt", "run", "--nproc-per-node", "2", "--no-profile",
         "--run-dir", str(tmp_path / "run"), "--", str(script), str(tmp_path)],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
    made = re.findall(r"group (.*) (\d)", ended.stdout)
    again = ("in a function", "0")
    parts = ("in a function", "outside", "at an address")
    assert made == [again, *((part, str(n)) for part in parts for n in range(3))]
    assert "calls: 2" in ended.stdout, ended.stderr[-6000:]
