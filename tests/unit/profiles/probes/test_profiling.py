"""Whole profiles of small scripts that know nothing of autockpt, each in a process of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autockpt.policies.decide import decide
from autockpt.values.goal import Goal
from autockpt.values.profile import Profile
from autockpt.values.record import from_json

WARM = pytest.mark.usefixtures("warm_starts")
"""For processes that begin with torch imported.  One test begins cold, with imports of its own."""
ROOT = Path(__file__).resolve().parents[4]

DRIVER = """
import runpy, sys
from autockpt.profiles.schedule import ProfileSettings
from autockpt.profiling import conductor, entry
settings = ProfileSettings(
    quiet_steps=4, quiet_s=0.05, probes_s=1.0, interference_s=0.3, rounds_min=2, rounds_max=2,
    unit_s=0.01,
)
entry.install(sys.argv[1], settings=settings)
script, sys.argv[:] = sys.argv[2], sys.argv[2:]
try:
    runpy.run_path(script, run_name="__main__")
    entry.finish()
except conductor.StopTraining:
    print("stopped", flush=True)
"""

MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Linear(128, 8)
)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@dataclass
class Ended:
    """What a profiled script left behind."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def profile(self) -> Profile:
        path = self.directory / "profile.json"
        return from_json(Profile, path.read_text(), where=str(path))


def profiled(tmp_path: Path, script: str, *command: str, **environ: str) -> Ended:
    """Runs `script` under a short profile."""
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "driver.py").write_text(DRIVER)
    directory = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable,
            *command,
            str(tmp_path / "driver.py"),
            str(directory),
            str(tmp_path / "script.py"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **environ,
        },
    )
    return Ended(done.returncode, done.stdout, done.stderr, directory)


def test_an_untouched_script_is_profiled_and_stopped(tmp_path: Path) -> None:
    """State, phases, links, storage, interference: found by hooks alone; nothing else is left."""
    ended = profiled(
        tmp_path,
        MODEL
        + """
try:
    while True:
        try:
            step()
        except Exception:
            print("swallowed")
finally:
    print("cleaned up")
""",
    )

    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["cleaned up", "stopped"]
    assert os.listdir(ended.directory) == ["profile.json"]
    profile = ended.profile
    elements = 64 * 128 + 128 + 2 * 128 + 128 * 8 + 8
    by_name = {c.name: c for c in profile.state.classes}
    moments = 2 * 4 * elements
    # Running mean and variance are floating point and belong to the model.
    assert by_name["parameters"].bytes == 4 * (elements + 2 * 128)
    assert by_name["moments"].bytes == moments
    assert profile.state.lazy_bytes == 4 * elements + moments + 6 * 4
    assert profile.state.boundary_bytes > 2 * 128 * 4
    for phase in ("forward", "backward", "optimizer", "data_wait"):
        assert profile.phases_s[phase].p50 > 0
    assert sum(p.mean for p in profile.phases_s.values()) == pytest.approx(profile.iteration_s.mean)
    assert {link.link for link in profile.links} == {"host_copy", "host_to_peer"}
    assert {m.operation for m in profile.storage} == {"write", "read"}
    works = {m.work for m in profile.interference}
    assert works == {"snapshot_copy", "storage_write", "persist", "encode"}
    assert profile.encoders is not None
    assert 0 < profile.encoders.worth.mean <= profile.encoders.threads == 2
    assert profile.stall_s
    assert profile.snapshot_s
    assert profile.persist_s
    assert profile.recovery.restore_disk.source == "derived"
    assert profile.fingerprint.world_size == 1
    assert "written" in ended.err


PIPELINE = """
import time, torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
def loss(output, target):
    time.sleep(0.005)
    return ((output - target) ** 2).mean()
schedule = Schedule1F1B(PipelineStage(model, 0, 1, torch.device("cpu")), 4, loss_fn=loss)
batch = torch.randn(8, 256)
while True:
    schedule.step(batch, target=batch)
    optimizer.step()
    optimizer.zero_grad()
"""


@WARM
def test_a_pipeline_is_profiled_under_every_schedule_of_copying(tmp_path: Path) -> None:
    """Lazily, in windows and at the boundary, in turn; stalls of each apart."""
    ended = profiled(tmp_path, PIPELINE)

    assert ended.code == 0, ended.err
    profile = ended.profile
    assert {b.what for b in profile.bubbles if b.after >= 0} == {"device"}
    found = {m.work: m for m in profile.interference}
    for work in ("snapshot_copy", "snapshot_windows", "snapshot_blocking"):
        assert found[work].stall_s is not None, work
        assert found[work].slowdown.n >= 2
    assert found["storage_write"].stall_s is None
    # What was measured for the other schedules is not in the profile's own stall, which is lazy.
    assert profile.stall_s is not None
    lazy = [m.stall_s for w, m in found.items() if m.stall_s and w in ("snapshot_copy", "persist")]
    assert profile.stall_s.n == sum(stall.n for stall in lazy)
    choice = decide(profile, Goal()).choice("staging")
    assert choice is not None
    assert {
        "windows_cost_s",
        "windows_predicted_s",
        "blocking_predicted_s",
    } <= choice.numbers.keys()


@WARM
def test_a_tensor_that_changes_behind_the_fence_is_named(tmp_path: Path) -> None:
    """A write through numpy between boundary and step has no version and no hook."""
    ended = profiled(
        tmp_path,
        MODEL
        + """
while True:
    step()
    model[0].bias.detach().numpy()[:] += 1.0
""",
    )

    assert ended.code == 0, ended.err
    (said,) = (w for w in ended.profile.warnings if "changed between boundary" in w)
    assert "model.0.bias" in said
    assert "weight" not in said
    elements = 64 * 128 + 128 + 2 * 128 + 128 * 8 + 8
    assert ended.profile.state.lazy_bytes == 3 * 4 * elements - 4 * 128 + 6 * 4


@WARM
def test_a_script_that_swallows_everything_is_ended(tmp_path: Path) -> None:
    """A bare except gets the stop three times, then the process is gone, with the profile."""
    ended = profiled(
        tmp_path,
        MODEL
        + """
while True:
    try:
        step()
    except:
        print("swallowed", flush=True)
""",
    )

    assert ended.code == 0, ended.err
    assert ended.out == "swallowed\n" * 3
    assert ended.profile.iteration_s.n >= 4


@WARM
def test_a_short_script_gives_what_there_is(tmp_path: Path) -> None:
    """Too few iterations: a profile without interference, and a warning."""
    ended = profiled(tmp_path, MODEL + "for _ in range(5): step()")

    assert ended.code == 0, ended.err
    assert "ended after 5 iterations" in ended.profile.warnings[0]
    assert ended.profile.interference == ()
    assert ended.profile.link("host_copy") is not None


@WARM
@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("print('hello')", "no module", id="nothing"),
        pytest.param(
            "import torch; torch.nn.Linear(2, 2)(torch.ones(2))", "Linear", id="no optimizer"
        ),
        pytest.param(MODEL + "step()", "ended after 1 optimizer step", id="one step"),
    ],
)
def test_a_script_that_does_not_train_is_a_clear_error(
    tmp_path: Path, script: str, said: str
) -> None:
    """The error names what was seen instead; the exit code says: fix the input."""
    ended = profiled(tmp_path, f"{script}\nraise SystemExit")

    assert ended.code == 78
    assert "cannot be profiled" in ended.err
    assert said in ended.err
    assert not (ended.directory / "profile.json").exists()


@WARM
def test_a_script_that_fails_keeps_its_own_error(tmp_path: Path) -> None:
    """A traceback and exit code 1, no word of a profile."""
    ended = profiled(tmp_path, MODEL + "step(); raise ValueError('mine')")

    assert ended.code == 1
    assert "ValueError: mine" in ended.err
    assert "cannot be profiled" not in ended.err


@WARM
def test_an_attached_script_gets_a_session_that_only_iterates(tmp_path: Path) -> None:
    """attach in mode `profile`: declared state, the loader's wait, batches over many epochs."""
    ended = profiled(
        tmp_path,
        MODEL
        + """
import autockpt
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(48, 64)), batch_size=16, shuffle=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader, schedule=schedule)
steps = []
for number, (batch,) in ckpt.batches(100_000):
    assert number == ckpt.step_count and batch.shape == (16, 64)
    loss = model(batch).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
""",
        AUTOCKPT_MODE="profile",
    )

    assert ended.code == 0, ended.err
    assert ended.out == "stopped\n"
    assert ended.profile.phases_s["data_wait"].p50 > 0
    assert ended.profile.state.total_bytes > 0


@WARM
def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    """Two ranks under DDP: one profile, one step count, nobody hangs."""
    script = (
        MODEL
        + """
import os, atexit
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
count = 0
def say():
    print(f"rank {dist.get_rank()} did {count} steps", flush=True)
    os._exit(0)
atexit.register(say)
while True:
    count += 1
    step()
"""
    )
    ended = profiled(tmp_path, script, "-m", "torch.distributed.run", "--nproc-per-node=2")

    assert ended.code == 0, ended.err
    did = [line.split(" did ")[1] for line in ended.out.splitlines() if " did " in line]
    assert len(did) == 2
    assert did[0] == did[1]
    assert ended.profile.fingerprint.world_size == 2
    assert {m.work for m in ended.profile.interference} >= {"snapshot_copy"}


@WARM
def test_time_until_durable_is_that_of_all_ranks_of_a_node(tmp_path: Path) -> None:
    """Two ranks write to storage that takes an image in 0.2 s: both are durable after 0.4 s."""
    script = (
        MODEL
        + """
import atexit, fcntl, os, time
import torch.distributed as dist
atexit.register(os._exit, 0)
from autockpt.profiling.measure import movers
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
def throttled(path, image):
    with open("storage", "w") as storage:
        for _ in range(20):
            fcntl.flock(storage, fcntl.LOCK_EX)
            time.sleep(0.01)
            fcntl.flock(storage, fcntl.LOCK_UN)
            time.sleep(0.001)  # the other's turn
movers.persist = throttled
while True:
    step()
"""
    )
    ended = profiled(tmp_path, script, "-m", "torch.distributed.run", "--nproc-per-node=2")

    assert ended.code == 0, ended.err
    assert ended.profile.persist_s is not None
    assert ended.profile.persist_s.mean > 0.35


@WARM
def test_a_profile_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    """SIGKILL while the storage is probed: the next listing shows nothing of the probe."""
    (tmp_path / "script.py").write_text(MODEL + "while True: step()")
    (tmp_path / "driver.py").write_text(DRIVER.replace("probes_s=1.0", "probes_s=60.0"))
    directory = tmp_path / "run"
    process = subprocess.Popen(
        [
            sys.executable,
            str(tmp_path / "driver.py"),
            str(directory),
            str(tmp_path / "script.py"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if "storage" in line:
                break
        process.kill()
        process.wait()
    left = [path for path in directory.rglob("*") if path.is_file()]
    assert [path for path in left if not path.name.startswith(".autockpt-probe-")] == []
    # Where a mover cannot write to an unnamed file the next profile sweeps what is left.
    from autockpt.profiles.probes import clean

    clean.sweep(str(directory / "checkpoints"))
    assert [path for path in directory.rglob("*") if path.is_file()] == []
