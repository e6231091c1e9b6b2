"""Real jobs that turn NaN, under `autockpt run`: back to the last good checkpoint by the policy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.run_directory import RunDirectory
from autockpt.values.exit_codes import NO_PROGRESS
from tests.jobs.kill.zygote import environment

STEPS, POISONED = 24, 9
pytestmark = pytest.mark.usefixtures("warm_starts")
PATIENCE_S = 240.0
SCRIPT = """
import sys
import torch
import autockpt

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randn({count}, 8)
rows[{poisoned}] = torch.nan
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=1)
ckpt = autockpt.attach(model=model, optimizer=optimizer, data=data)
for step, (row,) in ckpt.batches({steps}):
    loss = model(row).square().mean()
    if "report" in sys.argv:
        ckpt.report_loss(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.wait_durable(60.0)
finite = all(bool(value.isfinite().all()) for value in model.parameters())
print("ended", step + 1, "finite" if finite else "nan", flush=True)
"""


def run(folder: Path, rollback: str, *more: str) -> "subprocess.CompletedProcess[str]":
    """The whole job, with a checkpoint at every second boundary."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(count=STEPS + POISONED, poisoned=POISONED, steps=STEPS))
    settings = ["memory.interval=2steps", "disk.interval=2steps", "retune=false",
                f"failures.rollback={rollback}"]  # fmt: skip
    sets = [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(
        [sys.executable, "-m", "autockpt", "run", "--run-dir", str(folder / "run"), "--no-profile",
         *sets, "--", str(script), *more],
        env=environment(), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip


def test_after_nan_the_data_up_to_it_is_left_out_and_the_training_ends_well(tmp_path: Path) -> None:
    """autockpt sees the NaN in a checkpoint; the second start trains on other data, to the end."""
    ended = run(tmp_path, "skip")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert f"ended {STEPS} finite" in ended.stdout, said
    (record,) = RunDirectory(tmp_path / "run").rollbacks()
    assert record.skips
    assert record.step > POISONED
    assert "batches are left out" in said
    assert "failures.rollback: skip" in said


@pytest.mark.slow
def test_a_spike_that_comes_again_ends_the_job_with_its_own_code(tmp_path: Path) -> None:
    """The script reports the loss, and the same data has the same NaN."""
    ended = run(tmp_path, "repeat", "report")
    said = ended.stdout + ended.stderr
    assert ended.returncode == NO_PROGRESS, said
    records = RunDirectory(tmp_path / "run").rollbacks()
    assert [record.step for record in records] == [POISONED + 1, POISONED + 1], said
    assert "the loss is nan" in said
    failures = (tmp_path / "run/failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["kind"] for line in failures} == {"script"}
