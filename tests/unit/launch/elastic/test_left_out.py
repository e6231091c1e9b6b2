"""A launcher whose node ends the job again and again leaves, where the job may go on without."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from autockpt.console import Console
from autockpt.launch.elastic.agent import Watch
from autockpt.launch.elastic.news import News
from autockpt.launch.elastic.rendezvous.node_numbers import Seated
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
                    told_s=11.0 if node == by else 10.0, term=term, nodes=tuple(range(NODES)),
                )  # fmt: skip
                log.write(to_json(record) + "\n")
                log.flush()


def watch_of(
    run: RunDirectory, nnodes: str, monkeypatch: pytest.MonkeyPatch, *, number: int = 3,
    policy: Literal["name", "leave"] | None = "leave",
) -> tuple[Watch, Seated]:  # fmt: skip
    """The launcher of a node, which has met the others."""
    monkeypatch.setattr(Seated, "number", number)
    console = Console()
    keeper: Any = SimpleNamespace(seats=tuple, lost_nodes=tuple, node=number, started=True)
    request = Launch(
        run=run, script=Script(target="train.py", module=False, args=(), shown="train.py"),
        mode="run", nnodes=nnodes, rdzv_endpoint="elsewhere:1", faulty_node=policy,
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
    interrupted(run, by=3, times=7)
    assert watch.goes_on(KILLED, left=9)
    interrupted(run, by=3, times=1)
    assert not watch.goes_on(KILLED, left=9)
    assert seated.leaves
    ending = watch.failed(KILLED)
    assert ending.exit_code == LEFT_OUT
    assert "node 3 began 8 of the newest 8 interruptions of 4 nodes" in ending.reason


@pytest.mark.parametrize(
    ("nnodes", "number", "said"),
    [("4", 3, "--nnodes 3:4"), ("3:4", 0, "it leaves at the next failure that begins there")],
    ids=["not elastic", "another node"],
)
def test_where_it_may_not_leave_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    nnodes: str, number: int, said: str,
) -> None:  # fmt: skip
    """And starts its ranks again."""
    run = RunDirectory.create(tmp_path / "run")
    watch, seated = watch_of(run, nnodes, monkeypatch, number=number)
    interrupted(run, by=3, times=8)
    assert watch.goes_on(KILLED, left=9)
    assert watch.goes_on(KILLED, left=9)
    assert not seated.leaves
    assert capsys.readouterr().err.count(said) == 1


def test_a_machine_that_takes_over_a_number_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interruptions before its launcher began are another machine's."""
    run = RunDirectory.create(tmp_path / "run")
    interrupted(run, by=3, times=9)
    watch, seated = watch_of(run, "3:4", monkeypatch)
    assert watch.goes_on(KILLED, left=9)
    assert not seated.leaves


def ended(code: int, **told: object) -> dict[int, Any]:
    """A failure of rank 0."""
    data = {"autockpt": told} if told else {}
    return {0: SimpleNamespace(exitcode=code, error_file_data=data, timestamp=0.0, local_rank=0)}


@pytest.mark.parametrize(
    ("policy", "failures", "left", "met"),
    [
        (None, KILLED, 9, NODES),
        ("name", KILLED, 9, NODES),
        ("leave", ended(1), 9, NODES),
        ("leave", ended(-6), 9, NODES),
        ("leave", ended(-9, final=True), 9, NODES),
        ("leave", KILLED, 0, NODES),
        ("leave", KILLED, 9, NODES - 1),
    ],
    ids=["auto", "name", "an error", "an abort", "final", "no restarts left", "too few nodes"],
)
def test_it_stays_where_the_policy_or_this_failure_does_not_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    policy: Literal["name", "leave"] | None, failures: dict[int, Any], left: int, met: int,
) -> None:  # fmt: skip
    """It is named all the same."""
    run = RunDirectory.create(tmp_path / "run")
    watch, seated = watch_of(run, "3:4", monkeypatch, policy=policy)
    seated.nodes = met
    interrupted(run, by=3, times=8)
    watch.goes_on(failures, left=left)
    assert not seated.leaves
    assert watch.failed(failures).exit_code != LEFT_OUT
    assert "node 3 began 8 of the newest 8" in capsys.readouterr().err
