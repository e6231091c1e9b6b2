"""When the launcher parks a process for the next incarnation, and when it waits for one."""

import colorsys
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from autockpt.console import Console
from autockpt.launch.standby import imports, pool
from autockpt.launch.standby.twin import Adopted
from autockpt.run_directory import RunDirectory
from autockpt.values.record import to_json

COMMAND = ("-u", "-m", "autockpt.cli.script_runner", "s.py")
PARKED = """
import os, socket, time
launcher = socket.socket(fileno=int(os.environ["AUTOCKPT_STANDBY"]))
heard = b""
while heard.count(b"\\n") < 2:
    heard += launcher.recv(65536)
time.sleep(0.05)
launcher.sendall(b'{"ready": true}\\n')
time.sleep(0.05)
launcher.sendall(b'{"taken": true}\\n')
time.sleep(60)
"""
"""It imports until the order to be a rank comes, and a moment longer."""


def start(standbys: pool.StandbyPool, rank: int = 0) -> Any:
    """What a rank's start gets: the settings, where it is a cold one."""
    return standbys._rank(
        lambda **settings: settings, local_rank_id=rank, entrypoint=sys.executable, args=COMMAND,
        env={"RANK": str(rank)}, stdout=None, stderr=None,
    )  # fmt: skip


@pytest.mark.parametrize(("wish", "after_s", "starts", "parked"), [
    (None, 3600.0, 1, False), (None, 0.0, 1, True), ("on", 3600.0, 1, True),
    ("off", 0.0, 1, False), (None, 3600.0, 2, True),
])  # fmt: skip
def test_a_short_job_parks_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wish: Literal["on", "off"] | None,
    after_s: float,
    starts: int,
    parked: bool,
) -> None:
    """The pause counts from the moment at which the imports are known.

    `on` does not wait, nor does a job that has been restarted.
    """
    monkeypatch.setattr(pool, "AFTER_S", after_s)
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*words: Any, **settings: Any) -> Any:
        started.append(words)
        return real([sys.executable, "-c", ""], start_new_session=True)

    standbys = pool.StandbyPool(RunDirectory.create(tmp_path / "r"), wish, Console(verbosity=-1))
    for _ in range(starts):
        start(standbys)
    standbys.tick()
    assert not started
    imports.script_begins()
    imports.write(str(standbys._run.path), 0)
    monkeypatch.setattr(pool.subprocess, "Popen", popen)
    standbys.tick()
    time.sleep(0.01)
    standbys.tick()
    assert bool(started) is parked
    standbys.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restart_waits_for_a_process_that_still_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """It is ahead of a fresh one, unless another rank's has not even begun."""
    real = subprocess.Popen

    def popen(*_: Any, env: dict[str, str], pass_fds: tuple[int, ...], **settings: Any) -> Any:
        return real(
            [sys.executable, "-c", PARKED], env=env, pass_fds=pass_fds, start_new_session=True
        )

    monkeypatch.setattr(pool.subprocess, "Popen", popen)
    standbys = pool.StandbyPool(RunDirectory.create(tmp_path / "r"), "on", Console(verbosity=-1))
    imports.script_begins()
    for rank in range(ranks):
        start(standbys, rank)
        imports.write(str(standbys._run.path), rank)
    standbys.tick()
    place = standbys._places[0]
    assert place.process is not None
    assert not place.ready
    started = start(standbys)
    assert isinstance(started, dict) is (ranks == 2)
    place.process = place.process or getattr(started, "proc", None)
    standbys._end(place)
    standbys.close()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_process_that_does_not_take_its_imports_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    is_restarted: bool,
) -> None:  # fmt: skip
    """Its Python starts from a file system that stalls: the launcher hears signals all the same.

    The process is dropped, with one line, and the next restart is a cold one.
    """
    real = subprocess.Popen
    parked: list[Any] = []

    def popen(*_: Any, pass_fds: tuple[int, ...], **settings: Any) -> Any:
        parked.append(real(["sleep", "600"], pass_fds=pass_fds, start_new_session=True))
        return parked[-1]

    monkeypatch.setattr(pool.subprocess, "Popen", popen)
    standbys = pool.StandbyPool(RunDirectory.create(tmp_path / "r"), "on", Console())
    imports.script_begins()
    start(standbys)
    path = imports.path_of(standbys._run.path, 0)
    imports.write(str(standbys._run.path), 0)
    record = json.loads(path.read_text())
    record["modules"] |= {f"package.of.a.long.name.module_{n:05d}": "/x" * 20 for n in range(5000)}
    path.write_text(json.dumps(record))
    began_s = time.monotonic()
    for _ in range(3):
        standbys.tick()
    assert time.monotonic() - began_s < 3.0
    assert len(parked) == 1
    assert parked[0].poll() is None
    if is_restarted:  # it is not ahead of a fresh one
        assert isinstance(start(standbys), dict)
        assert time.monotonic() - began_s < 3.0
        why = "the standby was still being made"
    else:
        monkeypatch.setattr(pool, "IMPORTS_TAKEN_S", 0.0)
        for _ in range(3):
            standbys.tick()
        assert len(parked) == 1
        why = "the standby has not read its imports within"
    assert parked[0].poll() == -9
    said = capsys.readouterr().err
    assert said.count(why) == 1
    assert "restart is a cold one" in said
    standbys.close()


def test_the_second_process_of_a_node_is_forked_from_the_first(tmp_path: Path) -> None:
    """It is a child of the launcher, and ends with the pool.  Other imports have their own."""
    run = RunDirectory.create(tmp_path / "r")
    standbys = pool.StandbyPool(run, "on", Console(verbosity=-1))
    for local in range(3):
        standbys._rank(
            lambda **settings: settings, local_rank_id=local, entrypoint=sys.executable,
            args=("-u", "-m", "autockpt.cli.script_runner", str(tmp_path / "s.py")),
            env={"RANK": str(local), "LOCAL_RANK": str(local), "OMP_NUM_THREADS": "1"},
            stdout=None, stderr=None,
        )  # fmt: skip
        more = {"colorsys": colorsys.__file__} if local == 2 else {}
        record = imports.path_of(run.path, local)
        record.parent.mkdir(exist_ok=True)
        record.write_text(to_json(imports.Imports(modules={"json": json.__file__, **more})))
    try:
        deadline = time.monotonic() + 60.0
        while not all(place.ready for place in standbys._places.values()):
            assert time.monotonic() < deadline
            standbys.tick()
            time.sleep(0.01)
        processes = [place.process for place in standbys._places.values()]
        assert [isinstance(one, Adopted) for one in processes] == [False, True, False]
        for process in processes:
            assert process is not None
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            assert int(stat[1]) == os.getpid()
    finally:
        standbys.close()
    # One that sees its channel close may be quicker than the signal.
    assert {one.poll() for one in processes if one is not None} <= {0, -9}
