"""`make bench-restart`: from the death of a rank to the next iteration, in parts.

Two ranks train a tiny model over gloo, and rank 1 is killed.  Contestants, in turns:
`autockpt run` with a parked process; the same, where rank 0 goes on in its own process
(`autockpt.restartable`); without either; and torchrun's own restart of a script that saves by hand
(`torch.save` at every tenth step, to a temporary file that is renamed).  With `--peers` also NVRx:
its launcher, and its restart in the same process, where only the survivors go on.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, parse, publish, row
from benchmarks.peers.environments import Needs
from benchmarks.peers.environments import environment as peer_environment

ROOT = Path(__file__).resolve().parents[1]
WARM, SAME, COLD = "autockpt, parked", "autockpt, in-process", "autockpt, cold"
PLAIN = "torchrun"
IN_JOB, IN_PROCESS = "NVRx, in-job", "NVRx, in-process"
NVRX = Needs(packages=("nvidia-resiliency-ext", "numpy"))
AT_MOST_S = {WARM: 0.8, SAME: 0.5}
"""Targets, seconds from the death to the next iteration."""
PARTS = {
    "detect_s": "failure noticed", "end_s": "the rest: other ranks ended, polls",
    "launch_s": "launcher", "interpreter_s": "interpreter", "torch_import_s": "import torch",
    "process_group_s": "process group", "script_s": "script", "wait_s": "keepers, other ranks",
    "read_s": "bytes", "apply_s": "state put together", "first_s": "first iteration",
}  # fmt: skip
SAVES = "saves at every tenth step by torch.save, with neither fsync nor random state"
NOTES = {
    PLAIN: SAVES,
    IN_JOB: f"ft_launcher, polls every 0.1 s; {SAVES}",
    IN_PROCESS: f"the survivor goes on alone: nothing replaces the dead rank; all intervals 0.1 s;"
    f" {SAVES}",
}
PATIENCE_S = 240.0
IMPORTS = """
import os, sys, time
import torch
import torch.distributed as dist
"""
SCRIPT = """
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
saved, begin = os.path.join(sys.argv[1], "saved.pt"), 0
ours = "AUTOCKPT_RUN_DIR" in os.environ
if ours:
    import autockpt
    steps = autockpt.attach(model=model, optimizer=optimizer).steps(10**9)
else:
    if os.path.exists(saved):
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    steps = range(begin, 10**9)
start = f"{os.getpid()}.{time.monotonic()}"
with open(os.path.join(sys.argv[1], f"rank-{dist.get_rank()}"), "a", buffering=1) as log:
    for step in steps:
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        log.write(f"{start} {time.monotonic()} {step}\\n")
        if not ours and step % 10 == 9 and dist.get_rank() == 0:
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**whole, "step": step + 1}, saved + ".new")
            os.replace(saved + ".new", saved)
"""
WRAPPED = """
import datetime
import nvidia_resiliency_ext.inprocess as inprocess
often = datetime.timedelta(seconds=0.1)
@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1}, monitor_thread_interval=often,
    monitor_process_interval=often, heartbeat_interval=often, progress_watchdog_interval=often,
    last_call_wait=often,
)
"""
STARTS = """
import os, subprocess, sys
ranks = []
for rank in range(2):
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    where = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables = {**os.environ, **place, **where, "OMP_NUM_THREADS": "1"}
    ranks.append(subprocess.Popen([sys.executable, *sys.argv[1:]], env=variables))
for rank in ranks:
    rank.wait()
"""
"""A launcher that leaves the survivors alone: torchrun ends them."""


@dataclass(slots=True)
class Samples:
    """What one contestant took, seconds."""

    total_s: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    standby_bytes: list[float] = field(default_factory=list)
    lost_steps: list[float] = field(default_factory=list)


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="NVRx too, installed at first")
    args = parse(parser, rounds=1)
    names, python = [WARM, SAME, COLD, PLAIN], sys.executable
    if args.peers:
        peer = peer_environment(NVRX)
        if peer.absent:
            print(f"NVRx is absent: {peer.absent}", file=sys.stderr)
        else:
            names, python = [*names, IN_JOB, IN_PROCESS], peer.python
    found = {name: Samples() for name in names}
    for _ in range(args.rounds):
        for name, samples in found.items():
            folder = Path(tempfile.mkdtemp(prefix="bench-restart-", dir=os.getcwd()))
            try:
                measure(name, folder, samples, python)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    rows = [one for name, samples in found.items() for one in figures(name, samples)]
    publish("restart", rows, settings={"rounds": args.rounds}, notes=NOTES, smoke=args.smoke)


def figures(name: str, samples: Samples) -> list[Row]:
    """Of one contestant."""
    total = "death to next iteration"
    rows = [row(name, total, samples.total_s, "s", at_most=AT_MOST_S.get(name))]
    for part, label in PARTS.items():
        if samples.parts.get(part):
            rows.append(row(name, label, samples.parts[part], "s"))
    rows.append(row(name, "iterations trained again", samples.lost_steps, "steps"))
    if samples.standby_bytes:
        rows.append(row(name, "memory of a parked process", samples.standby_bytes, "MB"))
    return rows


def measure(name: str, folder: Path, samples: Samples, python: str) -> None:
    """One job, one death; `python`: the interpreter that has the peer."""
    (folder / "job.py").write_text(script(name))
    run = folder / "run"
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command(name, folder, run, python), stdout=log, stderr=subprocess.STDOUT, cwd=folder,
            env=environment(), start_new_session=True,
        )  # fmt: skip
    try:
        wait(process, folder, lambda: len(lines(folder)) >= 100)
        if name in AT_MOST_S:
            wait(process, folder, lambda: len(parked(process.pid)) == 2)
            samples.standby_bytes += [own_bytes(pid) / 1e6 for pid in parked(process.pid)]
        before = {start for start, _ in lines(folder)}
        victim = int(lines(folder, rank=1)[-1][0].partition(".")[0])
        died_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        wait(process, folder, lambda: {start for start, _ in lines(folder)} - before)
        again_s = next(at for start, at in lines(folder) if start not in before)
        samples.total_s.append(again_s - died_s)
        steps = steps_of(folder)
        reached = max(step for start, step in steps if start in before)
        again = next(step for start, step in steps if start not in before)
        samples.lost_steps.append(float(reached + 1 - again))
        parts = startup(run)
        if parts:
            parts |= noticed(run, died_s)
            known = sum(seconds for part, seconds in parts.items() if part != "detect_s")
            detected = parts.get("detect_s", 0.0)
            parts["end_s"] = max(0.0, samples.total_s[-1] - known - detected)
        for part, seconds in parts.items():
            samples.parts.setdefault(part, []).append(seconds)
    finally:
        end(process)


def script(name: str) -> str:
    """Of a contestant."""
    opening = {SAME: "import autockpt\n@autockpt.restartable\n", IN_PROCESS: WRAPPED}.get(name)
    if opening is None:
        return IMPORTS + SCRIPT
    body = textwrap.indent(SCRIPT, "    ")
    return f"{IMPORTS}{opening}def main():\n{body}\nmain()\n"


def command(name: str, folder: Path, run: Path, python: str) -> list[str]:
    """Of a contestant."""
    job = [str(folder / "job.py"), str(folder)]
    if name == IN_PROCESS:
        return [python, "-c", STARTS, *job]
    if name == IN_JOB:
        launcher = ["nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone"]
        options = ["--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
        options += ["--ft-enable-nic-monitor", "false", "--ignore-missing-fault-tol-cfg"]
        return [python, "-m", *launcher, *options, *job]
    if name == PLAIN:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [sys.executable, "-m", *launcher, "--max-restarts", "3", *job]
    standby = "on" if name in AT_MOST_S else "off"
    options = ["--nproc-per-node", "2", "--run-dir", str(run), "--no-profile"]
    return [
        sys.executable, "-m", "autockpt", "run", *options, "--set", f"restart.standby={standby}",
        "--set", "memory.interval=10steps", "--set", "retune=false", *job,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """The same for all."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Without it torchrun's restarts hang now and then (a store of the attempt before).
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "MASTER_PORT": str(free_port()),  # of ranks that no launcher gives one
    }


def free_port() -> int:
    """With the next one, which the wrapper's own store takes."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", one.getsockname()[1] + 1))
                return int(one.getsockname()[1])


def wait(process: "subprocess.Popen[bytes]", folder: Path, done: Callable[[], object]) -> None:
    """Polls with a deadline; fails with the job's output."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "log").read_text(errors="replace")[-3000:])
        time.sleep(0.01)


def lines(folder: Path, rank: int = 0) -> list[tuple[str, float]]:
    """(start, when) of each iteration of a rank; a line under way is left out."""
    with contextlib.suppress(FileNotFoundError):
        rows = (folder / f"rank-{rank}").read_text().split("\n")[:-1]
        return [(row.split()[0], float(row.split()[1])) for row in rows]
    return []


def steps_of(folder: Path) -> list[tuple[str, int]]:
    """(start, step) of each iteration of rank 0."""
    rows = (folder / "rank-0").read_text().split("\n")[:-1]
    return [(row.split()[0], int(row.split()[2])) for row in rows]


def noticed(run: Path, died_s: float) -> dict[str, float]:
    """When the keeper saw the death, and how long the first iteration took."""
    events = read_events(run / "telemetry" / "keeper-000.jsonl")
    seen = [e["at_s"] for e in events if e["event"] == "FailureObserved" and e["at_s"] >= died_s]
    own = read_events(run / "telemetry" / "rank-00000.jsonl")
    began = [e["at_s"] for e in own if e["event"] == "RunStarted"][-1]
    first = [e["at_s"] for e in own if e["event"] == "FirstIterationEnded" and e["at_s"] > began]
    return {
        **({"detect_s": min(seen) - died_s} if seen else {}),
        **({"first_s": first[-1] - began} if first else {}),
    }


def read_events(path: Path) -> list[dict[str, Any]]:
    """A line under way is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def parked(launcher: int) -> list[int]:
    """Parked processes that are ready."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{launcher}/task"):
            children = Path(f"/proc/{launcher}/task/{task}/children").read_text().split()
            for child in map(int, children):
                shown = Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0")
                found += [child] if shown == b"autockpt: standby for a restart" else []
    return found


def own_bytes(pid: int) -> int:
    """Memory that is not mapped from files; what processes share is divided among them."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in rows if line.startswith("Pss_Anon:"))


def startup(run: Path) -> dict[str, float]:
    """The parts of the newest start of rank 0, as the run tells them."""
    events = read_events(run / "telemetry" / "rank-00000.jsonl")
    if not events:
        return {}
    started = [event for event in events if event["event"] == "RunStarted"][-1]
    return {part: started[part] for part in PARTS if started.get(part) is not None}


def end(process: "subprocess.Popen[bytes]") -> None:
    """The launcher ends its ranks and its keeper."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # ranks that outlive their launcher
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
