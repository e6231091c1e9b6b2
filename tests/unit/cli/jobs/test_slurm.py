"""Under srun: which task launches, which is a rank, and the script that `slurm init` writes."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.app import run as autockpt
from autockpt.cli.jobs.slurm import (
    FIRST_PORT,
    PORTS,
    launching_on_nodes,
    meeting_port,
    rank_variables,
)
from autockpt.values.errors import ConfigError
from tests.unit.cli.scripts import ROOT

DEFAULTS = {
    "nproc_per_node": "8", "nnodes": "1", "node_rank": 0, "rdzv_endpoint": "", "rdzv_id": "",
}  # fmt: skip


def task(rank: int, tasks: int, nodes: int, **more: str) -> dict[str, str]:
    """A task of step 3 of job 41, as srun starts it."""
    local = tasks // nodes
    return {
        "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "3", "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_LOCALID": str(rank % local), "SLURM_STEP_TASKS_PER_NODE": f"{local}(x{nodes})",
        "SLURM_STEP_NODELIST": f"n[01-{nodes:02}]", **more,
    }  # fmt: skip


def found(host: str) -> bool:
    """A name service that knows all."""
    return bool(host)


def launching(environ: dict[str, str], *given: str, **values: Any) -> dict[str, Any] | None:
    """The options of a task with a name service that knows all."""
    return launching_on_nodes(environ, {**DEFAULTS, **values}, given, found)


def test_a_task_with_launch_options_launches_on_its_node() -> None:
    """Nodes, place to meet and number come from Slurm; both tasks find the same."""
    first = launching(task(0, 2, 2), "nproc_per_node")
    second = launching(task(1, 2, 2), "nproc_per_node")
    assert first is not None
    assert second == {**first, "node_rank": 1}
    assert (first["nnodes"], first["nproc_per_node"], first["node_rank"]) == ("2", "8", 0)
    assert first["rdzv_endpoint"] == f"n01:{meeting_port(task(0, 2, 2))}"
    assert first["rdzv_id"] == "slurm-41.3"


def test_jobs_that_share_a_host_meet_at_ports_of_their_own() -> None:
    """Jobs and steps beside one another, users, and clusters that number their jobs alike."""
    jobs = [
        task(0, 2, 2, SLURM_CLUSTER_NAME=cluster, SLURM_JOB_UID=user, SLURM_JOB_ID=job)
        | {"SLURM_STEP_ID": step}
        for cluster in ("east", "west") for user in ("1000", "1001")
        for job in ("41", "42") for step in ("0", "1")
    ]  # fmt: skip
    ports = [meeting_port(job) for job in jobs]
    assert len(set(ports)) == len(jobs)
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)
    assert meeting_port(jobs[0] | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}) == ports[0]


def test_written_options_win() -> None:
    """All of them, as torchrun's users write them."""
    written = {"nnodes": "1:2", "rdzv_endpoint": "h:1", "rdzv_id": "x", "node_rank": 7}
    made = launching(task(1, 2, 2), *written, **written)
    assert made == {**DEFAULTS, **written}


def test_without_launch_options_each_task_is_a_rank() -> None:
    """--max-restarts alone says nothing of nodes."""
    assert launching(task(0, 2, 2)) is None
    assert launching(task(0, 2, 2), "max_restarts") is None
    assert launching({}, "nnodes") is None
    assert launching(task(0, 1, 1), "nproc_per_node") is None


def test_several_launchers_on_a_node_are_refused() -> None:
    """Each would start all ranks of the node."""
    with pytest.raises(ConfigError, match=r"srun started 4 tasks on a node.*ntasks-per-node=1"):
        launching(task(0, 8, 2), "nproc_per_node")


def test_a_rank_gets_what_its_script_needs() -> None:
    """As under torchrun; a value that is set stays."""
    ranks = [rank_variables(task(rank, 4, 2, MASTER_PORT="7"), found) for rank in range(4)]
    assert [one["RANK"] for one in ranks] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in ranks] == ["0", "1", "0", "1"]
    assert {one["WORLD_SIZE"] for one in ranks} == {"4"}
    assert {one["LOCAL_WORLD_SIZE"] for one in ranks} == {"2"}
    assert {one["MASTER_ADDR"] for one in ranks} == {"n01"}
    assert not any("MASTER_PORT" in one for one in ranks)
    assert rank_variables({"RANK": "0", "WORLD_SIZE": "1"}) == {}


def test_a_node_without_a_name_is_found_by_its_address_or_said() -> None:
    """Several slurmd of one machine, say."""
    nameless = task(0, 2, 2, SLURM_LAUNCH_NODE_IPADDR="10.0.0.7")
    assert rank_variables(nameless, lambda name: False)["MASTER_ADDR"] == "10.0.0.7"
    assert rank_variables(task(0, 2, 1), lambda name: False)["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"first node of 'n\[01-02\]' has no address here"):
        rank_variables(task(0, 2, 2), lambda name: False)


def with_commands(folder: Path, bodies: dict[str, str]) -> dict[str, str]:
    """An environment of job 5 with commands of these bodies instead of Slurm's."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}


def test_the_script_is_sound_and_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It requeues after 75 and nothing else; the shell reads it."""
    monkeypatch.chdir(tmp_path)
    command = ["slurm", "init", "--nodes", "4", "--gpus", "8", "train.py", "--lr", "1e-3", "a b"]
    assert autockpt(command) == 0
    text = (tmp_path / "autockpt.sbatch").read_text()
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "--nproc-per-node 8" in text
    assert "train.py --lr 1e-3 'a b'" in text
    assert all(line[0] in "#\n" for line in text.splitlines(keepends=True)[:14])
    assert autockpt(command) == 78
    assert "exists already" in capsys.readouterr().err

    commands = {"srun": 'exit "$CODE"', "scontrol": 'echo "$@" >> requeued'}
    for code in (0, 1, 75, 93):
        ended = subprocess.run(
            ["bash", "autockpt.sbatch"], check=False, cwd=tmp_path,
            env={**with_commands(tmp_path, commands), "CODE": str(code)},
        )  # fmt: skip
        assert ended.returncode == code
    assert (tmp_path / "requeued").read_text() == "requeue 5\n"


SRUN = """
sleep 0.3  # the shell waits by now
echo $$ > srun.new; mv srun.new srun.pid
while [ ! -e end ]; do sleep 0.05; done
exit 75
"""
UNTIL_GONE = 'while kill -0 "$(cat srun.pid)" 2>/dev/null; do sleep 0.05; done'


@pytest.mark.parametrize("then", [UNTIL_GONE, ""], ids=["srun ends before the trap", "after it"])
def test_the_documented_batch_script_requeues_whenever_srun_ends(tmp_path: Path, then: str) -> None:
    """The code of a `wait` that a signal has ended is not that of srun."""
    page = (ROOT / "docs" / "howto" / "launch" / "slurm.md").read_text(encoding="utf-8")
    lines = page.partition("passes a signal on like this:\n\n")[2].partition("\n\n")[0]
    environ = with_commands(
        tmp_path,
        {
            "srun": SRUN,
            "scancel": f'echo "$@" > told; touch end; {then}',
            "scontrol": 'echo "$@" >> requeued',
        },
    )
    (tmp_path / "job.sh").write_text(lines)
    with subprocess.Popen(
        ["bash", "job.sh"], cwd=tmp_path, env=environ, start_new_session=True
    ) as shell:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "srun.pid").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            shell.send_signal(signal.SIGUSR1)
            shell.wait(60)
        finally:
            (tmp_path / "end").touch()
            shell.kill()
    assert (tmp_path / "told").read_text() == "--signal=USR1 5\n"
    assert (tmp_path / "requeued").read_text() == "requeue 5\n"
