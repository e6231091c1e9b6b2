"""A launcher whose node ends the job again and again leaves, where the job may go on without."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.console import Console
from autockpt.launch.elastic.agent import Watch
from autockpt.launch.elastic.news import News
from autockpt.launch.elastic.node_numbers import Seated
from autockpt.launch.elastic.request import Launch
from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory
from autockpt.values.exit_codes import LEFT_OUT
from autockpt.values.failure import FailureRecord
from autockpt.values.record import to_json

KILLED = {0: SimpleNamespace(exitcode=-9, error_file_data={}, timestamp=0.0, local_rank=0)}
NODES = 4


def interrupted(run: RunDirectory, *, by: int, times: int) -> None:
    """As the keepers of all nodes write it."""
    with (run.path / "failures.jsonl").open("a") as log:
        for _ in range(times):
            term = run.path.joinpath("failures.jsonl").stat().st_size + 1
            for node in range(NODES):
                record = FailureRecord(
                    wall="", kind="process", what="trainer", node=node, step=5, exposure_s=60.0,
                    restart_s=11.0 if node == by else 10.0, term=term,
                )  # fmt: skip
                log.write(to_json(record) + "\n")
                log.flush()


def watch_of(
    run: RunDirectory, nnodes: str, monkeypatch: pytest.MonkeyPatch, *, number: int = 3
) -> tuple[Watch, Seated]:
    """The launcher of a node, which has met the others."""
    monkeypatch.setattr(Seated, "number", number)
    console = Console()
    keeper: Any = SimpleNamespace(seats=lambda: (), node=number, started=True)
    request = Launch(
        run=run, script=Script(target="train.py", module=False, args=(), shown="train.py"),
        mode="run", nnodes=nnodes, rdzv_endpoint="elsewhere:1",
    )  # fmt: skip
    watch = Watch(request, console, keeper, News(run, console))
    seated = watch.seated(SimpleNamespace())
    seated.nodes = NODES
    return watch, seated


def test_it_leaves_once_it_has_begun_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own exit code, and without closing the rendezvous of the others."""
    run = RunDirectory.create(tmp_path / "run")
    watch, seated = watch_of(run, "3:4", monkeypatch)
    interrupted(run, by=3, times=4)
    assert watch.goes_on(KILLED, left=9)
    interrupted(run, by=3, times=1)
    assert not watch.goes_on(KILLED, left=9)
    assert seated.leaves
    ending = watch.failed(KILLED)
    assert ending.exit_code == LEFT_OUT
    assert "node 3 began 5 of the newest 5 interruptions of 4 nodes" in ending.reason


@pytest.mark.parametrize(
    ("nnodes", "number", "said"),
    [("4", 3, "--nnodes 3:4"), ("3:4", 0, "it leaves at its next failure")],
    ids=["not elastic", "another node"],
)
def test_where_it_may_not_leave_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    nnodes: str, number: int, said: str,
) -> None:  # fmt: skip
    """And starts its ranks again."""
    run = RunDirectory.create(tmp_path / "run")
    watch, seated = watch_of(run, nnodes, monkeypatch, number=number)
    interrupted(run, by=3, times=5)
    assert watch.goes_on(KILLED, left=9)
    assert watch.goes_on(KILLED, left=9)
    assert not seated.leaves
    assert capsys.readouterr().err.count(said) == 1


def test_a_machine_that_takes_over_a_number_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interruptions before its launcher began are another machine's."""
    run = RunDirectory.create(tmp_path / "run")
    interrupted(run, by=3, times=6)
    watch, seated = watch_of(run, "3:4", monkeypatch)
    assert watch.goes_on(KILLED, left=9)
    assert not seated.leaves
