"""Which directory a job gets where the named one may hold another."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from autockpt.job_directory import own_goal, own_runs, place
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal
from autockpt.values.same_job import Job


@pytest.fixture(autouse=True)
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two scripts."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "eval.py"):
        (tmp_path / name).write_text("")
    return tmp_path


def job(arguments: str = "", script: str = "train.py", task: str = "") -> Job:
    """A start in the working directory."""
    path = str(Path(script).absolute())
    return Job(script=path, args=tuple(arguments.split()), array_task=task)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (job("--lr 2"), "--lr 2 (there: 1)"),
        (job("--lr 1", task="4"), "array task 4 (there: none)"),
        (job("--lr 1", script="eval.py"), "eval.py (there: "),
    ],
    ids=["arguments", "array task", "script"],
)
def test_another_job_gets_a_run_of_its_own_and_finds_it_again(other: Job, said: str) -> None:
    """What differs is said; the first job keeps its directory."""
    other = Job(script=str(Path(Path(other.script).name).absolute()), args=other.args,
                array_task=other.array_task)  # fmt: skip
    assert place("runs/t", job("--lr 1")).path == "runs/t"
    placed = place("runs/t", other)
    assert placed.path == f"runs/t{placed.suffix}" != "runs/t"
    assert "runs/t holds another job" in placed.said
    assert said in placed.said
    assert "AUTOCKPT_SAME_JOB=1" in placed.said
    assert place("runs/t", other).path == placed.path
    assert place("runs/t", job("--lr 1")).said == ""
    assert own_runs(Path("runs/t")) == [Path(placed.path)]


def test_a_longer_run_of_the_same_job_goes_on(working: Path) -> None:
    """And it is said once: the new length is written down."""
    place("runs/t", job("--steps 10"))
    longer = place("runs/t", job("--steps 20"))
    assert RunDirectory("runs/t").read_job() == job("--steps 10"), "it may be refused yet"
    longer.renew()
    assert (longer.path, longer.suffix) == ("runs/t", "")
    assert longer.said == "runs/t goes on with --steps 20 (there: 10)"
    assert place("runs/t", job("--steps 20")).said == ""


def test_the_user_may_say_that_it_is_the_same_job() -> None:
    """It goes on, says so, and is that job from then on."""
    place("runs/t", job("--lr 1"))
    taken = place("runs/t", job("--lr 2"), take=True)
    taken.renew()
    assert taken.path == "runs/t"
    assert "holds another job, and goes on: --lr 2 (there: 1)" in taken.said
    assert place("runs/t", job("--lr 2")).said == ""


@pytest.mark.parametrize(
    ("before", "now", "is_kept"),
    [
        ("--lr 1", "--lr 2", True),
        ("--lr 1", "", True),
        ("optim.weight_decay=0", "optim.weight_decay=0.1", True),
        ("--warmup-steps 5", "--warmup-steps 9", True),
        ("--batch-size 4", "--batch-size 8", False),
        ("--lr 1 --dropout 0", "--lr 1 --dropout 0.1", False),
        ("--clr 1", "--clr 2", False),
    ],
)
def test_settings_that_the_saved_state_keeps_are_not_said_to_count(
    before: str, now: str, is_kept: bool
) -> None:
    """A new learning rate on the command line is named, and so is the fate that it has."""
    place("runs/t", job(before))
    said = place("runs/t", job(now), take=True).said
    note = "; optimizer and scheduler keep their saved settings, unless the loop sets them"
    assert said.endswith(note) == is_kept
    assert "holds another job, and goes on: " in said


def test_a_copied_project_gets_runs_of_its_own_and_a_moved_one_keeps_them(working: Path) -> None:
    """A copy lies beside its original; after a move that is gone."""
    project = working / "first"
    project.mkdir()
    (project / "train.py").write_text("")
    named = str(project / "runs" / "train")
    assert place(named, job(script="first/train.py")).path == named
    shutil.copytree(project, working / "copy")
    copied = str(working / "copy" / "runs" / "train")
    placed = place(copied, job(script="copy/train.py"))
    assert placed.path != copied
    assert "first/train.py)" in placed.said
    project.rename(working / "moved")
    moved = str(working / "moved" / "runs" / "train")
    back = place(moved, job(script="moved/train.py"))
    assert back.path == moved
    assert "is gone: its run goes on with" in back.said


def test_of_jobs_that_start_together_one_gets_the_directory(working: Path) -> None:
    """Eight at once, as a sweep starts them: eight directories, and the same ones again."""
    jobs = [job(f"--lr {number}") for number in range(8)]

    def all_at_once() -> list[str]:
        found: list[str] = [""] * len(jobs)
        barrier = threading.Barrier(len(jobs))

        def start(number: int) -> None:
            barrier.wait(60)
            found[number] = place("runs/t", jobs[number]).path

        threads = [threading.Thread(target=start, args=(n,)) for n in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    first = all_at_once()
    assert len(set(first)) == 8
    assert "runs/t" in first
    assert all_at_once() == first


def test_a_taken_name_is_gone_around(working: Path) -> None:
    """Of two jobs with one digest, or a directory that was made by hand."""
    place("runs/t", job("--lr 1"))
    own = place("runs/t", job("--lr 2")).path
    RunDirectory(own).write_job(job("--lr 3"))
    other = place("runs/t", job("--lr 2")).path
    assert other not in ("runs/t", own)
    assert RunDirectory(other).read_job() == job("--lr 2")


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 9}', "[]"])
def test_a_record_that_cannot_be_read_gives_way(working: Path, text: str) -> None:
    """Nobody's training ends for it."""
    RunDirectory.create("runs/t").write_text("job.json", text)
    assert place("runs/t", job("--lr 1")).path == "runs/t"
    assert json.loads(Path("runs/t/job.json").read_text())["args"] == ["--lr", "1"]


def test_a_directory_that_cannot_be_written_is_taken_as_it_is(working: Path) -> None:
    """Whoever writes there next says what is wrong with it."""
    (working / "file").write_text("")
    assert place("file/t", job()).path == "file/t"


def test_places_in_the_goal_are_the_runs_own_too() -> None:
    """Else two jobs would write their checkpoints into one directory; once, not at each start."""
    goal = Goal(storage_path="/fast/ckpt/")
    own = own_goal(goal, "-ab")
    assert own.storage_path == "/fast/ckpt-ab"
    assert own_goal(own, "-ab", kept=own) == own
    assert own_goal(goal, "-ab", kept=own) == own
    assert own_goal(Goal(), "-ab") == Goal()
