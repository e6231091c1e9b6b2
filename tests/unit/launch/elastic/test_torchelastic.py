"""Real launches through torchelastic, each of a script that takes no time."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autockpt.executors.linux import memcpy_threshold
from autockpt.launch.owner import is_alive
from autockpt.profiling.facts.failure_history import failure_history
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import LostNodesError
from autockpt.values.exit_codes import EXIT_CODES, NO_PROGRESS
from autockpt.values.status import RunStatus
from tests.conftest import end_keeper
from tests.unit.cli.scripts import ROOT, autockpt, environment, python, write


def status_of(directory: Path) -> RunStatus:
    """status.json of the only run under `runs/`, or of `directory` itself."""
    status = RunDirectory(directory).read_status()
    assert status is not None
    return status


def test_an_untouched_script_trains_unchanged_and_is_unprotected(tmp_path: Path) -> None:
    """Its output is its own; the lines to add and the report say UNPROTECTED."""
    script = ROOT / "examples" / "untouched" / "train.py"
    done = autockpt("run", "--run-dir", "r", str(script), "--steps", "3", cwd=tmp_path)
    assert done.returncode == 0
    assert "autockpt" not in done.stdout
    assert done.stderr.count("UNPROTECTED") == 1
    assert "ckpt = autockpt.attach(model=" in done.stderr
    status = status_of(tmp_path / "r")
    assert (status.state, status.protected, status.restarts) == ("finished", False, 0)
    assert status.report is not None
    assert "UNPROTECTED" in Path(status.report).read_text()


def test_arguments_arrive_byte_for_byte(tmp_path: Path) -> None:
    """Even those that torchelastic would fill in; --json leaves one object on stdout."""
    write(tmp_path, "s.py", "import sys; print(sys.argv[1:])")
    arguments = ["--r=1", "$$HOME", "${local_rank}", "--", "-x", "", "a b"]
    done = autockpt("run", "--json", "s.py", *arguments, cwd=tmp_path)
    assert str(arguments) in done.stderr
    body = json.loads(done.stdout)
    assert (body["command"], body["state"], body["exit_code"]) == ("run", "finished", 0)
    assert status_of(Path(body["run_dir"])).exit_code == 0


def test_the_exit_code_is_the_scripts_own(tmp_path: Path) -> None:
    """A script that decides to exit is not started again."""
    write(tmp_path, "s.py", "import sys; print('once'); sys.exit(7)")
    done = autockpt("run", "--run-dir", "r", "s.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "once\n")
    status = status_of(tmp_path / "r")
    assert (status.state, status.exit_code, status.restarts) == ("failed", 7, 0)
    assert "would do so again" in status.reason


def test_a_crash_loop_ends_with_the_last_traceback(tmp_path: Path) -> None:
    """The same exception twice; rank 1 writes to a file, whose end is shown."""
    source = """
import os, time
if os.environ["RANK"] == "1":
    raise RuntimeError("poisoned batch")
time.sleep(30)
"""
    write(tmp_path, "s.py", source)
    argv = ("run", "--run-dir", "r", "--nproc-per-node", "2", "s.py")
    done = autockpt(*argv, cwd=tmp_path)
    assert done.returncode == NO_PROGRESS
    assert "the same exception at the same step a second time" in done.stderr
    assert status_of(tmp_path / "r").restarts == 1
    logs = sorted(path.name for path in (tmp_path / "r" / "logs").glob("*-attempt-*/*.err"))
    assert logs == ["rank-00001.err"] * 2


MISTAKEN = """
import sys, torch, autockpt
model = torch.nn.Linear(2, 2)
ckpt = autockpt.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
if sys.argv[1:] == ["usage"]:
    list(ckpt.batches(10))
for step in ckpt.steps(10):
    if step == 3:
        raise ValueError("typo")
"""


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [((), "ValueError: typo", 1), (("usage",), "needs attach(data=...)", 1)],
)
def test_a_mistake_after_attach_is_final_and_no_machines_fault(
    tmp_path: Path, arguments: tuple[str, ...], said: str, code: int
) -> None:
    """One traceback, no restart, no failure in the history that later plans are made from."""
    write(tmp_path, "s.py", MISTAKEN)
    options = ("run", "--no-profile", "--run-dir", "runs/r", "s.py")
    done = autockpt(*options, *arguments, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.count("Traceback") == 1
    status = status_of(tmp_path / "runs" / "r")
    assert (status.state, status.restarts) == ("failed", 0)
    assert "would do so again" in status.reason
    assert said in status.reason
    rates, _ = failure_history(str(tmp_path / "runs" / "other"), nodes=1)
    assert (rates.per_node.events, rates.per_job.events) == (0, 0)


def test_a_killed_rank_is_restarted(tmp_path: Path) -> None:
    """The launcher says who was killed, and what its keeper saved; the second attempt ends well."""
    source = """
import json, os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
saved = {"event": "CheckpointDurable", "at_s": 1.0, "rank": -1, "generation": "", "step": 7,
         "bytes": 1, "stored_bytes": 1, "latency_s": 1.0, "write_s": 1.0}
with open(os.environ["AUTOCKPT_RUN_DIR"] + "/telemetry/keeper-000.jsonl", "a") as events:
    events.write(json.dumps(saved) + "\\n")
print("second", os.environ["AUTOCKPT_MODE"], os.path.basename(os.environ["AUTOCKPT_RUN_DIR"]))
"""
    write(tmp_path, "s.py", source)
    done = autockpt("run", "-v", "--run-dir", "r", "s.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "second run r\n")
    assert "step 7: checkpoint on disk after 1 s" in done.stderr
    assert "torch.distributed.elastic" not in done.stderr, "heartbeats of the launcher"
    assert "rank 0 was killed by SIGKILL" in done.stderr
    assert status_of(tmp_path / "r").restarts == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded_once_and_becomes_the_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The ranks get to clean up; the state is `interrupted`."""
    source = """
import signal, sys, time
def leave(number, frame):
    print("told", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave); signal.signal(signal.SIGINT, leave)
open("ready", "w").close()
time.sleep(60)
"""
    write(tmp_path, "s.py", source)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "autockpt", "run", "--run-dir", "r", "s.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for(tmp_path / "ready")
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert out == f"told {int(number)}\n"
    assert number.name in err
    status = status_of(tmp_path / "r")
    assert (status.state, status.exit_code) == ("interrupted", 128 + number)


@pytest.mark.parametrize("at", ["import", pytest.param("training", marks=pytest.mark.slow)])
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path, at: str) -> None:
    """They trained on for ever, and refused every other start of the run."""
    source = """
import os, sys, time
open("pid", "w").write(str(os.getpid()))
if sys.argv[1] == "training":
    import torch, autockpt
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ckpt = autockpt.attach(model=model, optimizer=optimizer)
    for step in ckpt.steps(1000000):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        open("ready", "w").close()
open("ready", "w").close()
time.sleep(600)
"""
    write(tmp_path, "s.py", source)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "autockpt", "run", "--no-profile", "--run-dir", "r", "s.py", at],
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(tmp_path / "ready")
        rank = int((tmp_path / "pid").read_text())
        launcher.kill()
        launcher.wait(60)
        deadline = time.monotonic() + 60
        while is_alive(rank):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        launcher.kill()
        launcher.wait(60)
        end_keeper(str(tmp_path / "r"))


def test_a_node_that_never_comes_has_a_code_of_its_own(tmp_path: Path) -> None:
    """No bug, no traceback: torch says nothing but the class of its error."""
    write(tmp_path, "s.py", "")
    done = autockpt(
        "run", "--no-profile", "--run-dir", "r", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "x", "--rdzv-conf", "join_timeout=1",
        "s.py", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == LostNodesError.exit_code == 95
    assert "did not meet, or meet no longer, at 127.0.0.1:0: RendezvousTimeoutError." in done.stderr
    assert "A node never came" in done.stderr
    assert "Traceback" not in done.stderr
    assert 95 in EXIT_CODES


def test_a_run_directory_of_another_script_is_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    from autockpt.cli.jobs.preparation import prepare
    from autockpt.cli.shared.options import find_script
    from autockpt.cli.shared.plan_choice import Scale
    from autockpt.values.goal import Goal

    write(tmp_path, "a.py", "")
    write(tmp_path, "b.py", "")
    run = RunDirectory.create(tmp_path / "r")
    script = find_script(str(tmp_path / "a.py"), False, ())
    prepare(run, script, "run", Goal(), Scale(world_size=1, nodes=1))
    done = autockpt("run", "--run-dir", "r", "b.py", cwd=tmp_path)
    assert done.returncode == 78
    assert "holds a run of" in done.stderr
    assert "--fresh" in done.stderr


def test_two_launchers_do_not_share_a_directory(tmp_path: Path) -> None:
    """The second one is refused with exit code 73 and leaves the first one's files alone."""
    write(tmp_path, "s.py", "")
    run = RunDirectory.create(tmp_path / "r")
    with run.owned():
        done = autockpt("run", "--run-dir", "r", "s.py", cwd=tmp_path)
    assert done.returncode == 73
    assert f"in use by another launcher (process {os.getpid()})" in done.stderr
    assert run.read_info() is None
    with run.owned():
        pass


def two_ranks(command: list[str], folder: Path) -> "list[subprocess.Popen[str]]":
    """Started by a launcher that is none of ours, rank 1 first."""
    return [
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"),
        )
        for rank in (1, 0)
    ]  # fmt: skip


@pytest.mark.usefixtures("warm_starts")
def test_under_a_foreign_launcher_the_script_runs_in_this_process(tmp_path: Path) -> None:
    """torchrun's rank 1 waits for rank 0's directory, spawns nothing, and passes the code on."""
    source = """
import os, sys
print(os.getppid(), os.path.basename(os.environ["AUTOCKPT_RUN_DIR"]), sys.argv[1:])
sys.exit(9)
"""
    write(tmp_path, "s.py", source)
    command = [sys.executable, "-m", "autockpt", "run", "--run-dir", "r", "s.py", "--lr=1"]
    ranks = two_ranks(command, tmp_path)
    for process in ranks:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 9
        assert out == f"{os.getpid()} r ['--lr=1']\n"
        assert "Traceback" not in err


@pytest.mark.usefixtures("warm_starts")
def test_a_profile_under_a_foreign_launcher_keeps_its_policy(tmp_path: Path) -> None:
    """Rank 0 writes goal and run before rank 1 begins; the plan that comes next is under it."""
    write(
        tmp_path, "s.py", "import os; print(os.path.exists('p/goal.json'), flush=True); os._exit(0)"
    )
    write(tmp_path, "pol.yaml", "version: 1\ndisk: {path: ckpt}\n")
    command = [sys.executable, "-m", "autockpt", "profile", "--out", "p", "--policy", "pol.yaml",
               "--set", "limits.stall=50 ms", "s.py", "--lr=1"]  # fmt: skip
    ranks = two_ranks(command, tmp_path)
    outs = [process.communicate(timeout=60) for process in ranks]
    assert [out for out, _ in outs] == ["True\n", "True\n"]
    words = "--policy pol.yaml --set 'limits.stall=50 ms'"
    assert f"next: autockpt plan --profile p {words}\n" in outs[1][1]
    assert "the command below is for when it is over" in outs[1][1]
    run = RunDirectory(tmp_path / "p")
    goal, info = run.read_goal(), run.read_info()
    assert goal is not None
    assert (goal.storage_path, goal.limits.stall_s) == (str(tmp_path / "ckpt"), 0.05)
    assert info is not None
    assert (info.mode, info.args, info.ranks_per_node) == ("profile", ("--lr=1",), 2)
    assert run.checkpoints() == str(tmp_path / "ckpt")
    refused = autockpt("profile", "--out", "s.py/p", "s.py", cwd=tmp_path, RANK="0", WORLD_SIZE="1")
    assert "a file stands where a directory is needed" in refused.stderr
    assert "bug" not in refused.stderr


ATTACHED = """
import torch, autockpt
net = torch.nn.Linear(8, 8)
opt = torch.optim.AdamW(net.parameters())
ckpt = autockpt.attach(model=net, optimizer=opt)
for step in ckpt.steps(3):
    net(torch.randn(4, 8)).sum().backward(); opt.step(); opt.zero_grad()
print("ranks", ckpt._job.nodes, ckpt._job.incarnation)
"""


def test_tasks_of_srun_are_ranks_of_one_launch(tmp_path: Path) -> None:
    """Each below a shell of its own, and the script knows of no RANK: rank 1 is not refused."""
    write(tmp_path, "s.py", ATTACHED)
    command = f"{sys.executable} -m autockpt run --no-profile --run-dir r s.py; exit $?"
    ranks = [
        subprocess.Popen(
            ["bash", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, env=environment(
                SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_NTASKS="2", SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank), SLURM_STEP_TASKS_PER_NODE="2",
            ),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for process in reversed(ranks):
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert out == "ranks (0, 0) slurm-7.0#0\n"
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        end_keeper(str(tmp_path / "r"))


TRAINING = """
import os, signal, time, torch, autockpt
torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
opt = torch.optim.AdamW(net.parameters())
ckpt = autockpt.attach(model=net, optimizer=opt)
for step in ckpt.steps(40):
    loss = net(torch.randn(4, 64)).pow(2).mean()
    loss.backward(); opt.step(); opt.zero_grad()
    time.sleep(0.02)
    if step == 25 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
print("sum", float(net.weight.sum()))
"""


@pytest.mark.slow
def test_a_protected_run_resumes_and_its_checkpoints_can_be_read(tmp_path: Path) -> None:
    """Killed at step 25, resumed from memory, finished; ls, show, verify, explain; then damage."""
    write(tmp_path, "s.py", TRAINING)
    settings = ("--set", "interval=10 steps", "--set", "restart.standby=off")
    words = ("run", "-v", "--no-profile", *settings, "--run-dir", "r", "s.py")
    done = python("-m", "autockpt", *words, cwd=tmp_path)  # with all parts of a cold start
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("protected since step 10") == 1
    assert "step 40: checkpoint on disk after" in done.stderr
    assert "resumed step 20 from memory" in done.stderr
    status = status_of(tmp_path / "r")
    assert (status.protected, status.restarts, status.last_step) == (True, 1, 40)
    _require_breakdown(tmp_path / "r")
    assert status.last_durable is not None
    listed = json.loads(autockpt("ls", "r", "--json", cwd=tmp_path).stdout)["generations"]
    assert listed[-1]["name"] == status.last_durable
    assert listed[-1]["step"] == 40
    shown = json.loads(autockpt("show", "r", "--json", cwd=tmp_path).stdout)
    contents = {row["name"]: row for row in shown["shards"][0]["contents"]}
    assert any(row["shape"] == [64, 64] for row in contents.values())
    assert autockpt("verify", "r", "--all", cwd=tmp_path).returncode == 0
    assert "resumed at step 20 from memory" in autockpt("explain", "r", cwd=tmp_path).stdout
    folder = Path(RunDirectory(tmp_path / "r").checkpoints(), status.last_durable)
    _flip_a_byte(folder / shown["shards"][0]["file"])
    damaged = autockpt("verify", "r", cwd=tmp_path)
    assert damaged.returncode == 65
    assert "DAMAGED" in damaged.stdout
    refused = autockpt("run", "--run-dir", "r", "--resume-from", "ckpt-t0009-step-00000001", "s.py",
                       cwd=tmp_path)  # fmt: skip
    assert refused.returncode == 78
    assert "no such committed checkpoint" in refused.stderr


def test_variables_of_the_user_count_as_their_options_do(tmp_path: Path) -> None:
    """A rollback by AUTOCKPT_RESUME_FROM, and a rank of another launcher that would launch."""
    write(tmp_path, "s.py", "print('ran')")
    wanted = {"AUTOCKPT_RESUME_FROM": "ckpt-t0009-step-00000001"}
    refused = autockpt("run", "--run-dir", "r", "s.py", cwd=tmp_path, **wanted)
    assert refused.returncode == 78
    assert "--resume-from ckpt-t0009-step-00000001: no such committed" in refused.stderr
    ranked = {"RANK": "0", "WORLD_SIZE": "1"}
    refused = autockpt(
        "run", "--run-dir", "r", "--nproc-per-node", "2", "s.py", cwd=tmp_path, **ranked
    )
    assert refused.returncode == 78
    assert "--nproc-per-node: a launcher's, but RANK and WORLD_SIZE" in refused.stderr
    assert autockpt("run", "--run-dir", "r", "s.py", cwd=tmp_path, **ranked).returncode == 0


def _require_breakdown(run: Path) -> None:
    """The report's parts of the restart are all there and add up to it."""
    shown = autockpt("report", "r", "--format", "json", cwd=run.parent)
    (restart,) = json.loads(shown.stdout)["restarts"]
    parts = restart["parts"]
    assert None not in parts.values()
    assert sum(parts.values()) == pytest.approx(restart["total_s"], abs=0.05)
    assert parts["torch"] > 0.1
    assert parts["detect"] < restart["total_s"] / 2


@pytest.mark.slow
def test_profile_of_an_untouched_script_leads_to_a_plan(tmp_path: Path) -> None:
    """profile.json, decision, plan, report; the command that comes next is printed."""
    script = ROOT / "examples" / "untouched" / "train.py"
    done = autockpt("profile", "--out", "p", str(script), "--steps", "100000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = RunDirectory(tmp_path / "p")
    assert run.read_profile() is not None
    assert run.read_decision() is not None
    assert run.read_plan() is not None
    assert run.report.exists()
    assert not Path(run.checkpoints()).exists()
    assert "next: autockpt run --profile p/profile.json" in done.stderr


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_dead_launcher_is_noticed_soon_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    """torchelastic's defaults take 15 s for that, and large jobs keep them."""
    from autockpt.launch.elastic.rank_output import OutputFiles
    from autockpt.launch.elastic.rendezvous.polls import LIVELY
    from autockpt.launch.elastic.request import Launch
    from autockpt.launch.elastic.torchelastic import _config
    from autockpt.launch.script import Script

    def settings(nodes: str, said: str = "") -> dict[str, int]:
        request = Launch(
            run=RunDirectory(tmp_path), mode="run",
            script=Script(target="s.py", args=(), module=False, shown="s.py"),
            nnodes=nodes, rdzv_endpoint="127.0.0.1:1", rdzv_conf=said,
        )  # fmt: skip
        outputs = OutputFiles(tmp_path, print)
        return {k: int(v) for k, v in _config(request, outputs).rdzv_configs.items() if k in LIVELY}

    assert settings("4") == LIVELY
    assert settings("4", "keep_alive_interval=7") == {**LIVELY, "keep_alive_interval": 7}
    assert settings("512") == {}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a tunable of x86 only")
def test_copies_of_the_trainers_pass_the_caches_by_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their glibc is told so by the launcher, in addition to what the user told it."""
    from autockpt.launch.elastic import request, torchelastic
    from autockpt.launch.script import Script

    wanted = request.Launch(
        run=RunDirectory(tmp_path), mode="run",
        script=Script(target="s.py", args=(), module=False, shown="s.py"),
    )  # fmt: skip
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")
    told = f"glibc.malloc.arena_max=4:{memcpy_threshold.TUNABLE}={memcpy_threshold.THRESHOLD_BYTES}"
    for gain, expected in ((1.8, told), (1.1, None), (None, None)):
        monkeypatch.setattr(torchelastic, "copy_gain", lambda added, piece_bytes, gain=gain: gain)
        assert torchelastic._variables(wanted).get("GLIBC_TUNABLES") == expected


def test_what_the_user_tells_the_c_library_reaches_the_trainers(tmp_path: Path) -> None:
    """Whatever the launcher finds."""
    own = f"glibc.malloc.arena_max=4:{memcpy_threshold.TUNABLE}=5000000"
    write(tmp_path, "s.py", "import os; print(os.environ['GLIBC_TUNABLES'])")
    done = autockpt("run", "--run-dir", "r", "s.py", cwd=tmp_path, GLIBC_TUNABLES=own)
    assert done.stdout.strip() == own
