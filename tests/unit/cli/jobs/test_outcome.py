"""What a training is worth of which nothing is durable."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Literal

import pytest

from autockpt.cli.jobs import outcome
from autockpt.console import Console
from autockpt.launch.elastic.request import Ending, Limit
from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory
from autockpt.values.exit_codes import NOTHING_DURABLE, SAVED_REQUEUE
from autockpt.values.generation import SCRATCH, Generation
from autockpt.values.telemetry import RunEnded, RunStarted, event_data

ENDED = Ending(state="finished", exit_code=0, restarts=0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose trainer has attached and trained 40 steps."""
    made = RunDirectory.create(tmp_path / "run")
    event = {
        "event": "IterationsTimed",
        "at_s": 2.0,
        "rank": 0,
        "step": 40,
        "count": 40,
        "total_s": 1.0,
    }
    idle = {"checkpoint_s": 0.0, "quiet_s": 0.0, "busy_s": 0.0}
    made.rank_telemetry(0).write_text(json.dumps(event | idle) + "\n")
    return made


def start(run: RunDirectory, *, term: int, resumed: str) -> None:
    """A trainer attaches."""
    event = RunStarted(
        at_s=term * 100.0, rank=0, wall=f"2026-01-0{term}T00:00:00Z", run_id="r", term=term,
        world_size=1, pid=1, plan_id="p", plan_version=1, state_bytes=1, restart_count=0,
        resumed=resumed,
    )  # fmt: skip
    with open(run.rank_telemetry(0), "a", encoding="utf-8") as file:
        file.write(json.dumps(event_data(event)) + "\n")


def train(run: RunDirectory, step: int) -> None:
    """Up to that step."""
    event = RunEnded(at_s=1.0, rank=0, step=step, reason="finished")
    with open(run.rank_telemetry(0), "a", encoding="utf-8") as file:
        file.write(json.dumps(event_data(event)) + "\n")


def commit(run: RunDirectory, *, failures: int = 0, step: int = 5, term: int = 1) -> None:
    """One durable checkpoint, and then so many that failed."""
    durable = {
        "event": "CheckpointDurable", "at_s": 1.0, "rank": -1,
        "generation": f"step {step} (term {term})", "step": step,
        "bytes": 1, "stored_bytes": 1, "latency_s": 0.1, "write_s": 0.1,
    }  # fmt: skip
    failed = {
        "event": "PersistFailed", "at_s": 1.5, "rank": -1,
        "generation": "step 9 (term 1)", "step": 9,
        "reason": "disk full",
    }  # fmt: skip
    with open(run.telemetry / "keeper-000.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(durable) + "\n" + failures * (json.dumps(failed) + "\n"))


def finish(run: RunDirectory, began: outcome.Before, ending: Ending = ENDED) -> int:
    """The exit code of the command."""
    script = Script(target="train.py", args=(), module=False, shown="train.py")
    return outcome.finish(run, ending, script, Console(), began)


def test_a_training_of_which_nothing_is_durable_has_a_code_of_its_own(run: RunDirectory) -> None:
    """Schedulers see no difference otherwise."""
    assert finish(run, outcome.Before(logged={})) == NOTHING_DURABLE
    status = run.read_status()
    assert status is not None
    assert (status.exit_code, status.protected) == (NOTHING_DURABLE, False)
    assert "nothing that it trained is durable" in status.reason


def test_something_durable_is_enough_however_many_failed_since(run: RunDirectory) -> None:
    """Failures fill the end of the telemetry."""
    commit(run, failures=2000)
    assert finish(run, outcome.Before(logged={})) == 0
    status = run.read_status()
    assert status is not None
    assert (status.protected, status.last_durable) == (True, "ckpt-t0001-step-00000005")


def test_what_an_earlier_launch_made_durable_does_not_count(run: RunDirectory) -> None:
    """The 30 steps of this one are nowhere."""
    commit(run)
    began = outcome.Before(logged=run.log_ends())
    train(run, 70)
    assert finish(run, began) == NOTHING_DURABLE


def test_a_start_from_scratch_counts_its_own_steps_and_checkpoints(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier start came further and was durable; `--fresh` has left it behind."""
    start(run, term=1, resumed=SCRATCH)
    train(run, 300)
    commit(run, step=300)
    began = outcome.Before(logged=run.log_ends())
    start(run, term=2, resumed=SCRATCH)
    train(run, 100)
    assert finish(run, began) == NOTHING_DURABLE
    status = run.read_status()
    assert status is not None
    assert (status.last_step, status.last_durable, status.protected) == (100, None, False)
    announced = Ending(state="interrupted", exit_code=128 + signal.SIGUSR1, restarts=0)
    assert finish(run, began, announced) == announced.exit_code
    commit(run, step=100, term=2)
    assert finish(run, began, announced) == SAVED_REQUEUE
    assert finish(run, began) == 0
    assert "finished at step 100 (durable)" in capsys.readouterr().err


def test_a_launch_that_ended_before_attach_was_at_no_step(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only an earlier one was."""
    commit(run)
    failed = Ending(state="failed", exit_code=74, restarts=0, reason="rank 0 ended")
    finish(run, outcome.Before(logged=run.log_ends()), failed)
    assert "failed (rank 0 ended)\n" in capsys.readouterr().err
    finish(run, outcome.Before(logged={}), failed)
    assert "failed (rank 0 ended) at step 40\n" in capsys.readouterr().err


def test_a_rollback_counts_from_its_checkpoint(run: RunDirectory) -> None:
    """Its 50 steps are nowhere; those that it went back behind do not count."""
    start(run, term=1, resumed=SCRATCH)
    train(run, 300)
    commit(run, step=50)
    commit(run, step=300)
    began = outcome.Before(logged=run.log_ends())
    start(run, term=2, resumed="step 50 (term 1)")
    assert (run.newest_step(), run.durable_step()) == (50, 50)
    train(run, 100)
    assert (run.newest_step(), run.durable_step()) == (100, 50)
    assert finish(run, began) == NOTHING_DURABLE
    assert run.newest_durable() == Generation(term=1, step=50)


@pytest.mark.parametrize(
    ("step", "source", "code"),
    [(40, "disk", 0), (30, "disk", NOTHING_DURABLE), (40, "memory", 0)],
    ids=["all", "a part", "from memory"],
)
def test_what_was_resumed_from_storage_is_durable(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], step: int, source: str, code: int
) -> None:
    """On a new machine the run directory knows nothing else of it."""
    restored = {
        "event": "Restored", "at_s": 1.0, "rank": 0, "generation": f"step {step} (term 1)",
        "step": step, "source": source, "bytes": 1, "restore_s": 0.1, "lost_steps": 0,
        "lost_s": 0.0, "down_s": 0.0, "detect_s": None,
    }  # fmt: skip
    with open(run.telemetry / "keeper-000.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(restored) + "\n")
    assert finish(run, outcome.Before(logged={})) == code
    status = run.read_status()
    assert status is not None
    assert status.protected == (source == "disk")
    kept = f"ckpt-t0001-step-{step:08d}" if source == "disk" else None
    assert status.last_durable == kept
    said = capsys.readouterr().err
    assert ("nothing of this training is durable" in said) == (source == "memory")
    assert ("at step 40 (durable)" in said) == (code == 0 and source == "disk")


def test_a_training_that_was_over_already_is_no_failure(run: RunDirectory) -> None:
    """Nothing was trained, so nothing is missing."""
    commit(run)
    assert finish(run, outcome.Before(logged=run.log_ends())) == 0


@pytest.mark.parametrize(
    ("code", "then"),
    [(1, "resumes"), (91, "is refused again, until the script"), (78, "is refused again, "),
     (66, "is refused again; autockpt verify"), (73, "goes on when the other run has ended")],
)  # fmt: skip
def test_a_command_that_would_be_refused_again_is_not_said_to_resume(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], code: int, then: str
) -> None:
    """Though a checkpoint is durable."""
    commit(run)
    ending = Ending(state="failed", exit_code=code, restarts=0)
    finish(run, outcome.Before(logged={}), ending)
    said = capsys.readouterr()
    assert f"the command below {then}" in said.err + said.out


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_a_script_that_ends_before_attach_is_not_said_to_lack_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: Literal["interrupted", "failed"]
) -> None:
    """Ctrl-C while it imports torch; one that ended well was unprotected."""
    bare = RunDirectory.create(tmp_path / "bare")
    began = outcome.Before(logged={})
    finish(bare, began, Ending(state=state, exit_code=130, restarts=0))
    said = capsys.readouterr().err
    assert "train.py ended before autockpt was attached" in said
    assert "UNPROTECTED" not in said
    finish(bare, began)
    assert "UNPROTECTED: train.py never called autockpt.attach" in capsys.readouterr().err


def test_a_failed_script_keeps_its_code(run: RunDirectory) -> None:
    """It says more."""
    ending = Ending(state="failed", exit_code=3, restarts=0)
    assert finish(run, outcome.Before(logged={}), ending) == 3


@pytest.mark.parametrize(
    ("number", "durable", "code"),
    [
        (signal.SIGUSR1, 40, SAVED_REQUEUE),
        (signal.SIGUSR2, 40, SAVED_REQUEUE),
        (signal.SIGUSR1, 39, 128 + signal.SIGUSR1),
        (signal.SIGTERM, 40, 128 + signal.SIGTERM),
    ],
)
def test_an_announced_end_with_all_saved_asks_for_another_start(
    run: RunDirectory, number: int, durable: int, code: int
) -> None:
    """Not where something is missing, and not where a person may have ended it."""
    event = {
        "event": "CheckpointDurable", "at_s": 3.0, "rank": -1,
        "generation": f"step {durable} (term 1)", "step": durable,
        "bytes": 1, "stored_bytes": 1, "latency_s": 0.1, "write_s": 0.1,
    }  # fmt: skip
    (run.telemetry / "keeper-000.jsonl").write_text(json.dumps(event) + "\n")
    told = Ending(state="interrupted", exit_code=128 + number, restarts=0, reason="told")
    assert finish(run, outcome.Before(logged={}), told) == code


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ("finished", 0, "autockpt: newest durable checkpoint: ckpt-t0001-step-00000005"),
        (
            "failed",
            1,
            "autockpt: 35 steps are lost (875 ms of training): the newest durable checkpoint",
        ),
    ],
)
def test_the_last_lines_say_what_was_lost(
    run: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    state: Literal["finished", "failed"],
    code: int,
    said: str,
) -> None:
    """Step 40 was trained, and step 5 is on disk."""
    commit(run)
    finish(run, outcome.Before(logged={}), Ending(state=state, exit_code=code, restarts=0))
    text = capsys.readouterr().err
    assert said in text
    assert "(durable)" not in text


def test_a_run_whose_last_step_is_durable_says_so(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the line of its end."""
    commit(run)
    path = run.telemetry / "keeper-000.jsonl"
    path.write_text(path.read_text().replace("step 5 (", "step 40 (").replace(": 5,", ": 40,"))
    finish(run, outcome.Before(logged={}))
    assert "finished at step 40 (durable)\n" in capsys.readouterr().err


def test_only_runs_of_other_jobs_that_this_launch_began_are_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older ones were named when they began."""
    commit(run)
    old, new = (run.path.with_name(f"run-{digest}") for digest in ("3f2a91bc", "4f2a91bc"))
    for path in (old, new):
        path.mkdir()
        (path / "job.json").touch()
    finish(run, outcome.Before(logged={}, own_runs=(old,)))
    said = capsys.readouterr().err
    assert str(new) in said
    assert str(old) not in said


def fill(run: RunDirectory, *, lines: int) -> None:
    """The telemetry of a long training on two ranks."""
    times = {"count": 1, "total_s": 1.0, "checkpoint_s": 0.0, "quiet_s": 0.9, "busy_s": 0.1}
    for rank in (0, 1):
        timed = {"event": "IterationsTimed", "at_s": 10.0, "rank": rank, "step": 40, **times}
        with open(run.rank_telemetry(rank), "a", encoding="utf-8") as file:
            file.write((json.dumps(timed) + "\n") * (lines // 2))


def test_the_exit_code_is_there_in_bounded_time(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """An announced end leaves half a minute, however long the training was.

    The report is not waited for any longer, and it can be written afterwards.
    """
    started = {
        "event": "RunStarted", "at_s": 0.5, "rank": 0, "wall": "2026-01-01T00:00:00Z",
        "run_id": "r", "term": 1, "world_size": 2, "pid": 1, "plan_id": "p", "plan_version": 1,
        "state_bytes": 1, "restart_count": 0,
    }  # fmt: skip
    with open(run.rank_telemetry(0), "a", encoding="utf-8") as file:
        file.write(json.dumps(started) + "\n")
    fill(run, lines=400_000)
    commit(run)
    path = run.telemetry / "keeper-000.jsonl"
    path.write_text(path.read_text().replace("step 5 (", "step 40 (").replace(": 5,", ": 40,"))
    trouble = {
        "event": "Degraded", "at_s": 9.0, "rank": -1, "what": "storage", "reason": "no disk",
    }  # fmt: skip
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(trouble) + "\n")
    began_s = time.monotonic()
    limit = Limit(by_s=began_s, exit_code=128 + signal.SIGUSR1)
    told = Ending(state="interrupted", exit_code=limit.exit_code, restarts=0, limit=limit)
    assert finish(run, outcome.Before(logged={}), told) == SAVED_REQUEUE
    assert time.monotonic() - began_s < 6.0
    assert limit.exit_code == SAVED_REQUEUE
    status = run.read_status()
    assert status is not None
    assert (status.exit_code, status.last_step, status.report) == (SAVED_REQUEUE, 40, None)
    (tier,) = status.degraded
    assert (tier.tier, tier.because, tier.since) == ("disk", "no disk", "2026-01-01T00:00:08Z")
    assert f"autockpt report {run.path}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_training_ends_only_the_report(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """How the training went is decided: its exit code and its last lines stand."""
    fill(run, lines=100_000)
    commit(run)
    others = set(threading.enumerate())

    def end() -> None:
        while not any("report" in t.name for t in set(threading.enumerate()) - others):
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=end, daemon=True)
    sender.start()
    began_s = time.monotonic()
    assert finish(run, outcome.Before(logged={})) == 0
    sender.join()
    assert time.monotonic() - began_s < 6.0
    said = capsys.readouterr().err
    assert f"{number.name} came" in said
    assert "finished at step 40" in said


def test_views_that_cannot_be_written_change_no_exit_code(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that became read-only, say: that is told, and the training has ended well."""
    commit(run)
    (run.path / "status.json").mkdir()
    (run.path / "report.html").mkdir()
    assert finish(run, outcome.Before(logged={})) == 0
    said = capsys.readouterr().err
    assert "status.json does not tell how the run ended, and the logs may lack" in said
    assert "no report was written" in said
    assert "finished at step 40 or later\n" in said, "the logs may lack its last steps"
    assert "newest durable checkpoint: ckpt-t0001-step-00000005" in said


def test_telemetry_that_cannot_be_read_changes_no_exit_code(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known of what is durable then, and that is said."""
    run.rank_telemetry(0).unlink()
    run.rank_telemetry(0).mkdir()
    assert finish(run, outcome.Before(logged={})) == 0
    assert "whether all is durable is not known" in capsys.readouterr().err
