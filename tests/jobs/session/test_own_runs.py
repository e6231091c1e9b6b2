"""Whose run is it?  What `attach` makes of the directory that it was given or has inherited."""

import concurrent.futures
import dataclasses
import datetime
import functools
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from autockpt.executors.storage.directory import lease as lease_module
from autockpt.executors.storage.directory.claims import own_claim, pid_start
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.job import JobRecord
from autockpt.launch.rank_env import place_of_rank
from autockpt.run_directory import RunDirectory
from autockpt.session import job as job_module
from autockpt.session.job import Job, current_identity, current_job
from autockpt.session.place.script.called_function import call_arguments
from autockpt.values import same_job
from autockpt.values.errors import ConfigError, DirectoryBusyError, StorageError
from autockpt.values.goal import Goal

ALONE = place_of_rank({})
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of `autockpt run`, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    for name in (*LAUNCHERS, "AUTOCKPT_SAME_JOB", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTOCKPT_RUN_DIR", str(tmp_path / "r"))


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Job:
    """What `attach` finds in a script with these arguments."""
    monkeypatch.setattr(sys, "argv", [sys.argv[0], *arguments])
    return current_job()


def test_processes_of_a_sweep_get_a_run_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has the directory of `autockpt run`, with the policy; the others their own."""
    RunDirectory.create("r").write_goal(Goal(storage_path="/fast/ckpt", objective="durability"))
    monkeypatch.setenv("AUTOCKPT_RESUME_FROM", "ckpt-t0001-step-00000003")
    first, second, third = (started(monkeypatch, "--lr", lr) for lr in "123")
    assert (first.run_directory, first.placed) == (str(tmp_path / "r"), "")
    assert first.checkpoints == "/fast/ckpt"
    assert str(first.resume_from) == "step 3 (term 1)"
    assert len({one.run_directory for one in (first, second, third)}) == 3
    assert "--lr 2 (there: 1)" in second.placed
    suffix = second.run_directory.removeprefix(first.run_directory)
    assert second.checkpoints == f"/fast/ckpt{suffix}"
    assert (second.goal.objective, second.resume_from) == ("durability", None)
    again = started(monkeypatch, "--lr", "2", "--steps", "9")
    assert (again.run_directory, again.goal) == (second.run_directory, second.goal)


FORK = multiprocessing.get_context("fork")


class Trial(FORK.Process):  # type: ignore[name-defined, misc]
    """A process that holds its settings."""

    def __init__(self, lr: float, found: Any) -> None:
        super().__init__()
        self.lr, self._found = lr, found

    def run(self) -> None:
        """Attach, as far as the directory goes."""
        self._found.put(current_job().run_directory)


def directory_of(*settings: Any, **more: Any) -> str:
    """The directory that a training with these settings gets; they count like options."""
    return current_job().run_directory


def told(settings: Any, *, loader: object = None) -> tuple[str, ...]:
    """What tells this call from others."""
    return call_arguments()


def in_process(call: Callable[[], str]) -> str:
    """What a call returns in a forked process of its own."""
    found = FORK.Queue()

    def work() -> None:
        try:
            found.put(call())
        except BaseException as error:
            found.put(repr(error))
            raise

    process = FORK.Process(target=work)
    process.start()
    result: str = found.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0, result
    return result


def test_arguments_of_a_function_in_a_process_of_its_own_count(tmp_path: Path) -> None:
    """A process each by closures, a pool and an executor: one command line, a run for each lr."""
    by_closure = [in_process(functools.partial(directory_of, lr)) for lr in (1e-1, 1e-2, 1e-1)]
    with FORK.Pool(1) as pool:
        by_pool = pool.map(directory_of, [1e-1, 1e-2])
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=FORK) as executor:
        by_executor = list(executor.map(directory_of, [1e-1, 1e-2]))
    assert by_closure[0] == by_closure[2] != by_closure[1]
    assert len({*by_pool}) == len({*by_executor}) == 2
    assert by_pool == by_executor
    found = FORK.Queue()
    trials = [Trial(lr, found) for lr in (1e-1, 1e-2)]
    for trial in trials:
        trial.start()
    assert found.get(timeout=60) != found.get(timeout=60)
    for trial in trials:
        trial.join(60)


def test_what_says_how_long_or_where_does_not_count_in_a_call(tmp_path: Path) -> None:
    """As with options: a longer training is the same job, in a dictionary or an object as well."""
    calls: list[Any] = [
        {"lr": 1, "epochs": 3}, {"lr": 1, "epochs": 4}, {"lr": 2, "epochs": 4},
        SimpleNamespace(max_steps=3), SimpleNamespace(max_steps=9),
    ]  # fmt: skip
    with FORK.Pool(1) as pool:
        first, longer, other, steps, more = pool.map(directory_of, calls)
        assert first == longer != other
        assert steps == more
        assert pool.apply(told, ({"lr": 1, "run": [2, None]},), {"loader": object()}) == (
            "settings.lr=1", "settings.run.0=2", "settings.run.1=None",
        )  # fmt: skip
    assert call_arguments() == ()


@dataclasses.dataclass(slots=True)
class Slotted:
    """Settings without `__dict__`."""

    since: datetime.date
    epochs: range
    lr: float = 0.1
    _private: int = 0


def read(settings: Any) -> tuple[str, ...]:
    """What tells this call from others."""
    return call_arguments()


class Raises(Mapping[str, int]):
    """A broken object of a user's."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError(key)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("iterated")

    def __len__(self) -> int:
        raise RuntimeError("counted")

    def __str__(self) -> str:
        raise RuntimeError("shown")


class Broken(float):
    """One whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("shown")


class Endless(Mapping[str, int]):
    """A data set behind a mapping; few of its items may be read."""

    def __getitem__(self, key: str) -> int:
        return int(key)

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self)):
            assert number < 10_000, "read whole"
            yield str(number)

    def __len__(self) -> int:
        return 10**9


def held(settings: float) -> bool:
    """Whether a variable lives on behind the call."""
    model = Raises()
    lives = weakref.ref(model)
    call_arguments()
    del model
    return lives() is not None


def kept(settings: float) -> bool:
    """Whether the dictionary that `locals()` gave before holds its values behind the call."""
    config = locals()
    call_arguments()
    return bool(config["settings"] == settings)


def test_any_object_may_be_an_argument(tmp_path: Path) -> None:
    """One that raises counts by its type, and of a large one little is read."""
    calls: list[Any] = [
        Raises(), {"a": Broken(), "lr": 1}, Endless(), list(range(10**5)), numpy.zeros((10, 10**4)),
        Slotted(datetime.date(2026, 1, 2), range(3)),
    ]  # fmt: skip
    with FORK.Pool(1) as pool:
        raises, broken, endless, many, array, slotted = pool.map(read, calls)
        assert raises == ("settings=Raises",)
        assert broken == ("settings.a=Broken", "settings.lr=1")
        assert 0 < len(endless) < 1000
        assert [len(many), many[0][:19]] == [1, "settings=list-10000"]
        assert array[0].startswith("settings=ndarray-10x10000-float64-")
        assert slotted == (
            "settings.since=2026-01-02", "settings.epochs=range(0, 3)", "settings.lr=0.1",
        )  # fmt: skip
        assert not pool.apply(held, (1.0,)), "a snapshot of the variables stays"
        assert pool.apply(kept, (1.0,))


def test_every_field_of_settings_tells_trials_apart(tmp_path: Path) -> None:
    """Though there are many of them; a port, a place for logs or a time is new at every start."""
    fields = {f"option_{number}": number for number in range(30)}
    calls = [
        SimpleNamespace(**fields, port=1, tmp_dir="/tmp/a", log_dir="a", pid=1, timestamp=1, lr=1),
        SimpleNamespace(**fields, port=2, tmp_dir="/tmp/b", log_dir="b", pid=2, timestamp=2, lr=1),
        SimpleNamespace(**fields, port=1, tmp_dir="/tmp/a", log_dir="a", pid=1, timestamp=1, lr=2),
    ]
    with FORK.Pool(1) as pool:
        first, again, other = pool.map(directory_of, calls)
    assert first == again != other


def test_code_on_the_command_line_is_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -c "train(lr=1)"` and `python -c "train(lr=2)"` are two jobs."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys, "argv", [])
    assert current_identity().args == ()
    directories = []
    for code in ("train(lr=1)", "train(lr=2)", " train(lr=1)\n"):
        monkeypatch.setattr(sys, "argv", ["-c", "--seed", "3"])
        monkeypatch.setattr(sys, "orig_argv", ["python", "-Ic", code, "--seed", "3"])
        directories.append(current_job().run_directory)
    assert directories[0] == directories[2] != directories[1]
    assert "train" not in " ".join(current_identity().args), "the code may hold a secret"
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-c", "spawn_main()", "--multiprocessing-fork"]
    )
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert current_identity().args == ()


def test_a_goal_that_a_script_gives_has_places_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attach(goal=...)` in a sweep names one place for all."""
    goal = Goal(storage_path="/fast/ckpt")
    places = []
    for lr in ("1", "2", "2"):
        monkeypatch.setattr(sys, "argv", [sys.argv[0], lr])
        places.append(current_job(policy=goal).checkpoints)
    assert places[0] == "/fast/ckpt"
    assert places[1] == places[2] != places[0]


@pytest.mark.parametrize("is_of_all", [True, False])
def test_an_own_run_keeps_its_place_under_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_all: bool
) -> None:
    """The place came from an environment that is gone, or from the goal of the named directory."""
    monkeypatch.delenv("AUTOCKPT_RUN_DIR")
    monkeypatch.setenv("AUTOCKPT_DISK_WRITERS", "2")
    named, store = str(tmp_path / "r"), str(tmp_path / "ck")
    if is_of_all:
        RunDirectory.create(named).write_goal(Goal(storage_path=store))
    else:
        monkeypatch.setenv("AUTOCKPT_DISK_PATH", store)
    jobs = []
    for lr in ("1", "2", "2"):
        monkeypatch.setattr(sys, "argv", [sys.argv[0], lr])
        jobs.append(current_job(run_dir=named))
        if lr == "2":
            monkeypatch.delenv("AUTOCKPT_DISK_PATH", raising=False)
    suffix = jobs[1].run_directory.removeprefix(named)
    assert suffix
    assert [job.checkpoints for job in jobs] == [store, store + suffix, store + suffix]
    assert [job.goal.pins.writers for job in jobs] == [2, 2, 2]


def test_a_user_may_say_that_it_is_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array that is a chain of restarts, say."""
    started(monkeypatch, "--lr", "1")
    monkeypatch.setenv("AUTOCKPT_SAME_JOB", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    found = started(monkeypatch, "--lr", "1")
    assert found.run_directory == str(tmp_path / "r")
    assert "and goes on: array task 2 (there: none)" in found.placed


class Store:
    """Where the ranks of a process group meet."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, name: str, value: str) -> None:
        """By rank 0."""
        self.kept[name] = value.encode()

    def get(self, name: str) -> bytes:
        """By the others; waits in earnest."""
        return self.kept[name]


@pytest.mark.parametrize("several", [True, False])
def test_a_process_group_of_one_is_no_group_of_ranks(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """A script that sets one up in each of its trainings: their arguments tell them apart."""
    store, asked = Store(), []

    def identity(ranks: int = 0, *, alone: bool = False) -> same_job.Job:
        asked.append(alone)
        return same_job.Job(script="s.py")

    monkeypatch.setattr(job_module, "group_store", lambda: store)
    monkeypatch.setattr(job_module, "in_group_of_several", lambda: several)
    monkeypatch.setattr(job_module, "current_identity", identity)
    current_job()
    assert asked == [not several]


@pytest.mark.parametrize("group", [True, False])
def test_ranks_with_arguments_of_their_own_are_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: bool
) -> None:
    """Rank 0 says where, if they can hear it; else the number of a rank is known as such."""
    store = Store()

    def group_store() -> Store:
        if not group:
            raise ConfigError("no process group")
        return store

    monkeypatch.setattr(job_module, "group_store", group_store)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for lr in ("1", "7"):
        found = []
        monkeypatch.setattr(job_module, "_calls", 0)
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", rank)
            monkeypatch.setattr(job_module, "_calls", 0)
            unlike = [f"host-{rank}"] if group else []
            found.append(started(monkeypatch, "--lr", lr, "--id", rank, *unlike))
        assert found[0].run_directory == found[1].run_directory
        assert (found[0].run_directory == str(tmp_path / "r")) == (lr == "1")
        assert (found[0].placed != "", found[1].placed) == (lr == "7", "")


def attach_to_store(monkeypatch: pytest.MonkeyPatch, url: str, *words: str, fresh: bool) -> None:
    """Does what `attach` does first in a script without `autockpt run`, on a machine of its own."""
    monkeypatch.setattr(sys, "argv", [sys.argv[0], *words])
    job_module._require_own_store("-".join(["run", *words]), url, ALONE, "ours", takes=fresh)


def held_by(url: str, launch_id: str, monkeypatch: pytest.MonkeyPatch) -> CheckpointDirectory:
    """A store that a process which lives has claimed."""
    parent, directory = os.getppid(), CheckpointDirectory(url)
    with monkeypatch.context() as patch:
        patch.setattr(
            lease_module,
            "own_claim",
            lambda *facts: dataclasses.replace(
                own_claim(*facts), pid=parent, pid_start=pid_start(parent) or 0
            ),
        )
        directory.claim(directory.open(), launch_id, 0, force=False)
    return directory


@pytest.mark.parametrize("same_job", [False, True])
def test_a_start_takes_no_store_from_a_run_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_job: bool
) -> None:
    """A refused start leaves the record of the job: the run's own restarts are let in."""
    url = f"file://{tmp_path}/store/run"
    attach_to_store(monkeypatch, url, "--lr", "1", fresh=False)
    directory = held_by(url, "theirs", monkeypatch)
    before = directory.job()
    if same_job:
        monkeypatch.setenv("AUTOCKPT_SAME_JOB", "1")
    with pytest.raises(DirectoryBusyError, match="launch theirs"):
        attach_to_store(monkeypatch, url, "--lr", "2", fresh=not same_job)
    assert directory.job() == before
    directory.release(1)
    attach_to_store(monkeypatch, url, "--lr", "2", fresh=not same_job)
    assert directory.job() != before


def test_the_keeper_of_a_run_answers_in_place_of_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory has the run, a store that hangs is not asked; else a start says that it does."""
    url, asked = f"file://{tmp_path}/store/run", []

    def fail(self: JobRecord, text: bytes, *, replace: bool) -> bool:
        asked.append(replace)
        raise StorageError("the store does not answer")

    monkeypatch.setattr(JobRecord, "claim", fail)
    with pytest.raises(StorageError, match="does not answer"):
        attach_to_store(monkeypatch, url, fresh=False)
    here = {"ours"}
    monkeypatch.setattr(job_module, "launches_here", lambda path, in_memory=False: here)
    attach_to_store(monkeypatch, url, fresh=False)
    attach_to_store(monkeypatch, url, fresh=True)
    assert asked == [False]
    here.clear()
    here.add("an earlier launch")
    attach_to_store(monkeypatch, url, fresh=False)
    with pytest.raises(StorageError, match="does not answer"):
        attach_to_store(monkeypatch, url, fresh=True)
