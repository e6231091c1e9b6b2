"""A script that starts its ranks by itself, as torch's tutorials do: its process group says who."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import autockpt

def work(rank, world, dies_at):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet-{os.getppid()}",
                            rank=rank, world_size=world)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.arange(24.0).reshape(-1, 1) / 24)
    sampler = DistributedSampler(data)
    ckpt = autockpt.attach(model=model, optimizer=optimizer)
    loader = ckpt.loader(DataLoader(data, batch_size=2, sampler=sampler))
    for epoch in range(loader.epoch, 3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            step = ckpt.step_count
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            print(f"rank {rank} step {step} weight {model.module.weight.item()!r}", flush=True)
            if step == 4 and dies_at > step:
                assert ckpt.wait_durable(60)
            if step == dies_at and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    mp.spawn(work, args=(2, int(os.environ["DIES_AT"])), nprocs=2)
"""
LINE = re.compile(r"rank (\d) step (\d+) weight (-?[0-9.]+(?:e-?[0-9]+)?)")


def run(folder: Path, dies_at: int) -> tuple[int, dict[tuple[int, int], str], str]:
    """(exit code, weight by rank and step, all output) of a start without any launcher."""
    environment = {
        name: value for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }  # fmt: skip
    environment |= {
        "DIES_AT": str(dies_at), "AUTOCKPT_NO_PROFILE": "1",
        "AUTOCKPT_MEMORY_INTERVAL": "2 steps", "AUTOCKPT_DISK_INTERVAL": "4 steps",
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    found = {(int(r), int(step)): weight for r, step, weight in LINE.findall(ended.stdout)}
    return ended.returncode, found, ended.stdout


@pytest.mark.slow
def test_ranks_that_a_script_spawns_are_told_apart_and_resume(tmp_path: Path) -> None:
    """One of both is killed.  The next start repeats the steps behind its checkpoint."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code, before, said = run(tmp_path, 9)
    assert code != 0
    assert (1, 9) in before, said
    code, again, said = run(tmp_path, -1)
    assert code == 0, said
    first = min(step for _, step in again)
    assert 4 <= first <= 9, said
    assert {rank for rank, _ in again} == {0, 1}
    assert max(step for _, step in again) == 17
    both = before.keys() & again.keys()
    assert both
    assert {key: again[key] for key in both} == {key: before[key] for key in both}
