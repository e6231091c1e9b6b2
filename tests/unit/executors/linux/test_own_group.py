"""Workers of torch's loaders in groups of their own: they end when no more is asked of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autockpt.executors.linux import own_group
from autockpt.launch.owner import is_alive

SCRIPT = """
import functools, multiprocessing, os, signal, sys, time

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from autockpt.executors.linux import own_group


class Slow:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(600 if index > 1 else 0)
        return index


if __name__ == "__main__":
    own_group.loops[worker.__name__] = worker._worker_loop
    worker._worker_loop = functools.partial(own_group.work, worker.__name__)
    batches = iter(DataLoader(Slow(), num_workers=2))
    next(batches)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()
    own_group.end_workers(parent=os.getpid())
    os._exit(0)
"""


@pytest.mark.parametrize("killed", [True, False])
def test_workers_end_at_once_with_their_trainer(tmp_path: Path, killed: bool) -> None:
    """They would look for it between two batches."""
    (tmp_path / "s.py").write_text(SCRIPT)
    trainer = subprocess.Popen(
        [sys.executable, tmp_path / "s.py"], start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
    )  # fmt: skip
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    workers = [int(word) for word in trainer.stdout.readline().split()]
    try:
        assert len(workers) == 2
        assert [os.getpgid(pid) for pid in workers] == workers
        if killed:
            own_group.end_workers(sessions=[trainer.pid])
            time.sleep(0.2)
            assert all(map(is_alive, workers)), "their trainer lives, as one that a script started"
            trainer.kill()
            trainer.wait()
            own_group.end_workers(sessions=[os.getsid(0)])
            assert all(map(is_alive, workers)), "workers of another trainer"
            own_group.end_workers(sessions=[trainer.pid])
        else:
            trainer.stdin.close()
            assert trainer.wait(60) == 0
        deadline = time.monotonic() + 60
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for pid in [trainer.pid, *workers]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        trainer.wait()
        trainer.stdin.close()
        trainer.stdout.close()
