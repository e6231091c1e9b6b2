"""What a resumed run goes on with: its goal, and the place of its checkpoints."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.cli.jobs.preparation import (
    Request,
    check,
    check_directory,
    check_environment,
    goal_for,
    goal_of,
    placed,
    prepare,
    profile_of,
)
from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.options import find_script
from autockpt.console import Console
from autockpt.executors.storage.catalogue import committed_names
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places import store
from autockpt.executors.storage.places.object_store import Objects
from autockpt.executors.storage.rewriting.commits import replace_commit
from autockpt.executors.storage.rewriting.weights_only import write_weights
from autockpt.executors.throttle.rate_limit import Unlimited
from autockpt.run_directory import RunDirectory
from autockpt.session.job import current_job
from autockpt.values.errors import ConfigError, StaleProfileError
from autockpt.values.goal import Goal
from autockpt.values.same_job import Job
from tests.support.profiles import example_profile
from tests.unit.cli.scripts import autockpt
from tests.unit.integrations.trained import FIRST, saved, trained_job

ONE = plan_choice.Scale(world_size=1, nodes=1)
POLICY = """
version: 1
disk: {path: PATH, writers: 4}
limits: {lost_time: 1 h}
redundancy: {floor: 1}
archive: {codec: none}
remote: {url: "file:///store/run"}
"""


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, policies for two places, and a launcher of nobody's."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "t.py").write_text("print('trained')\n")
    for name in ("first", "second"):
        text = POLICY.replace("PATH", str(tmp_path / name))
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "first"


ALONE = {"nnodes": "1", "nproc_per_node": "1"}


def request(*settings: str, policy: str | None = None, fresh: bool = False) -> Request:
    """`autockpt run --run-dir r t.py`."""
    return Request(
        script=find_script("t.py", False, ()), policy=policy, settings=settings, profile=None,
        use_profile=False, run_dir="r", fresh=fresh, resume_from=None, launching={"nnodes": "1"},
    )  # fmt: skip


def start(asked: Request) -> Goal:
    """As far as a launcher goes before the job."""
    asked = placed(asked, Console())
    goal = goal_for(asked, ONE)
    check_directory(asked, goal)
    prepare(RunDirectory.create(asked.run_dir), asked.script, "run", goal, ONE, anew=asked.takes)
    return goal


def test_a_checkpoint_is_resumed_by_its_pin(storage: Path) -> None:
    """A name that is neither is refused, and the pins that there are are named."""
    start(request(policy="first.yaml"))
    folder = Path(saved(storage, trained_job()))
    (folder / "PINNED").write_text("paper\n")
    launching = {"nnodes": "1", "nproc_per_node": "1"}
    asked = replace(request(), resume_from="paper", launching=launching)
    assert placed(asked, Console()).resume_from == folder.name
    assert placed(replace(asked, resume_from=folder.name), Console()).resume_from == folder.name
    with pytest.raises(ConfigError, match=r"--resume-from papers: .*pins in .*: paper"):
        placed(replace(asked, resume_from="papers"), Console())


def test_a_setting_changes_the_goal_that_the_run_has(storage: Path) -> None:
    """And nothing else of it: not the place, not the limits, not the copies."""
    first = start(request(policy="first.yaml"))
    saved(storage, trained_job())
    changed = start(request("keep.last=5", "limits.lost_time=auto"))
    assert changed == replace(
        first,
        limits=replace(first.limits, lost_time_s=None),
        pins=replace(first.pins, keep_last=5),
        retention=replace(first.retention, keep_last=5),
    )
    assert RunDirectory("r").checkpoints() == str(storage)
    assert start(request()) == changed


@pytest.mark.parametrize(
    ("settings", "policy"),
    [((), "second.yaml"), ((), "builtin:auto"), (("disk.path=third",), None)],
)
def test_a_start_that_would_not_find_the_checkpoints_is_refused(
    storage: Path, settings: tuple[str, ...], policy: str | None
) -> None:
    """From scratch is silent only where nothing was ever committed; both places are named."""
    asked = request(*settings, policy=policy)
    start(request(policy="first.yaml"))
    start(asked)  # nothing is there yet
    start(request(policy="first.yaml"))
    saved(storage, trained_job())
    kept = RunDirectory("r").read_goal()
    with pytest.raises(ConfigError, match=rf"1 checkpoints are in {storage}.*look for them in /"):
        start(asked)
    assert RunDirectory("r").read_goal() == kept
    start(replace(asked, fresh=True))


def test_the_command_exits_with_78(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it is only asked what would happen."""
    start(request(policy="first.yaml"))
    saved(storage, trained_job())
    words = ["run", "--dry-run", "--no-profile", "--run-dir", "r"]
    assert run([*words, "--policy", "second.yaml", "t.py"]) == 78
    assert f"--set disk.path={storage}" in capsys.readouterr().err
    again = ["--policy", "second.yaml", "--set", f"disk.path={storage}"]
    assert run([*words, *again, "t.py"]) == 0


def test_a_profile_over_a_run_leaves_its_goal(storage: Path) -> None:
    """Nor does it forget where the checkpoints are.  The script never trains."""
    first = start(request(policy="first.yaml"))
    saved(storage, trained_job())
    words = ("profile", "--out", "r")
    refused = autockpt(*words, "--policy", "second.yaml", "t.py", cwd=storage.parent)
    assert "would look for them in" in refused.stderr
    assert RunDirectory("r").read_goal() == first
    assert "cannot be profiled" in autockpt(*words, "t.py", cwd=storage.parent).stderr
    assert RunDirectory("r").read_goal() == first


def test_attach_with_another_place_is_refused_as_well(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it begins anew; a launcher's `--fresh` or `--resume-from` says so too."""
    first, second = (plan_choice.read_goal(f"{name}.yaml", ()) for name in ("first", "second"))
    current_job(run_dir="r", policy=first)
    saved(storage, trained_job())
    with pytest.raises(ConfigError, match=rf"1 checkpoints are in {storage}.*attach\(fresh=True\)"):
        current_job(run_dir="r", policy=second)
    assert RunDirectory("r").read_goal() == first
    assert current_job(run_dir="r", policy=second, fresh=True).fresh
    current_job(run_dir="r", policy=second)
    current_job(run_dir="r", policy=first)
    monkeypatch.setenv("AUTOCKPT_FRESH", "1")
    assert current_job(run_dir="r", policy=second).fresh


def test_a_script_is_itself_by_every_path(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative, by a link, from another directory; after a move of the checkout it is said."""
    for name in ("sub", "code"):
        (storage.parent / name).mkdir()
    Path("code/t.py").write_text("print('trained')\n")
    Path("link").symlink_to("code")
    Path("link.py").symlink_to("code/t.py")

    def begun(spelling: str) -> None:
        start(replace(request(), script=find_script(spelling, False, ("--lr", "1"))))

    monkeypatch.chdir("sub")
    goal = goal_of("../r", None, (), ONE)
    first = find_script("../code/t.py", False, ("--lr", "1"))
    prepare(RunDirectory.create("../r"), first, "run", goal, ONE)
    monkeypatch.chdir("..")
    for spelling in ("code/t.py", "link/t.py", "sub/../code/t.py", "link.py"):
        begun(spelling)
    assert "gone" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"holds a run of .*link.py, not of .*; resume it with"):
        begun("t.py")
    begun("code/t.py")
    Path("code").rename("moved")
    begun("moved/t.py")
    assert re.search(
        r"code/t.py is gone: its run goes on with .*moved/t.py", capsys.readouterr().err
    )
    Path("moved/t.py").rename("other.py")
    with pytest.raises(ConfigError, match="name another --run-dir"):
        begun("other.py")


def trains(*args: str, asked: Request | None = None) -> Request:
    """Where `autockpt run --run-dir r t.py ARGS` trains, prepared as a launcher does."""
    asked = replace(asked or request(), script=find_script("t.py", False, args))
    found = placed(asked, Console())
    start(asked)
    return found


def test_another_job_in_the_directory_gets_a_run_of_its_own(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other arguments or another task; what differs is said, and the run is found again."""
    assert trains("--lr", "1", "--steps", "5").run_dir == "r"
    assert trains("--steps=9", "--lr", "1.0").run_dir == "r"
    assert "r goes on with --steps 9 (there: 5)" in capsys.readouterr().err
    own = trains("--lr", "2").run_dir
    assert own != "r"
    said = capsys.readouterr().err
    assert "r holds another job: --lr 2 (there: 1); this job has a run of its own in" in said
    assert "--same-job" in said
    assert trains("--lr", "2", "--steps", "7").run_dir == own
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    task = trains("--lr", "1").run_dir
    assert str(task).startswith("r-task3-")
    assert "array task 3 (there: none)" in capsys.readouterr().err
    assert trains("--lr", "1").run_dir == task


def test_a_user_who_means_the_run_that_is_there_gets_it(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By --same-job, which is said; by --fresh, which begins anew in the named directory."""
    trains("--lr", "1")
    RunDirectory("r").claim_job(Job(script="t.py", args=("--lr", "1")))
    assert trains("--lr", "2", asked=replace(request(), same_job=True)).run_dir == "r"
    assert "r holds another job, and goes on: --lr 2 (there: 1)" in capsys.readouterr().err
    assert RunDirectory("r").read_job() is None  # whoever attaches next has it
    assert trains("--lr", "2").run_dir == "r"
    assert trains("--lr", "3", asked=request(fresh=True)).run_dir == "r"
    with pytest.raises(ConfigError, match="which run"):
        check(replace(request(), run_dir=None, same_job=True, launching=ALONE), same_job=True)
    stored = request("disk.path=s3://bucket/run")
    check(replace(stored, run_dir=None, same_job=True, launching=ALONE), same_job=True)
    check(replace(stored, run_dir=None, resume_from="paper", launching=ALONE))


def test_a_run_of_its_own_has_places_of_its_own(storage: Path) -> None:
    """A policy names one directory for checkpoints, and two jobs would write there."""
    asked = request(policy="first.yaml")
    trains("--lr", "1", asked=asked)
    own = trains("--lr", "2", asked=asked)
    goal = RunDirectory(str(own.run_dir)).read_goal()
    assert goal is not None
    assert goal.storage_path == f"{storage}{own.suffix}"
    assert goal.remote.url == f"file:///store/run{own.suffix}"
    trains("--lr", "2", asked=asked)
    trains("--lr", "2")  # keeps the goal that it has
    assert RunDirectory(str(own.run_dir)).read_goal() == goal


def test_a_profile_of_another_job_is_not_taken_in_silence(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another script it is refused, other arguments are said, a longer run is the same job."""
    monkeypatch.setattr(plan_choice, "machine_mismatches", lambda *_: [])
    Path("u.py").write_text("print('another')\n")
    run = RunDirectory.create("runs/p")
    profiled = find_script("t.py", False, ("--size", "8", "--steps", "400"))
    prepare(run, profiled, "profile", Goal(), ONE)
    run.write_profile(example_profile())

    def found(name: str, *args: str, named: str | None = None) -> plan_choice.FoundProfile:
        script = find_script(name, False, args)
        asked = replace(request(), script=script, use_profile=True, profile=named, run_dir=None)
        return profile_of(asked, ONE, Console())

    for named in ("runs/p", "runs/p/profile.json", None):
        assert found("t.py", "--size", "8", "--steps", "200", named=named).profile is not None
    assert capsys.readouterr().err == ""
    assert found("t.py", "--size", "9").why_not == ("no profile fits (runs/p: --size 9 (there: 8))")
    assert re.match(r"no profile fits \(runs/p: script .*u.py \(there: ", found("u.py").why_not)
    assert found("t.py", "--size", "9", named="runs/p").profile is not None
    assert "measured with other arguments: --size 9 (there: 8)" in capsys.readouterr().err
    with pytest.raises(StaleProfileError, match=r"was measured with .*t.py, this job is .*u.py"):
        found("u.py", "--size", "8", named="runs/p")
    monkeypatch.chdir("/")
    assert plan_choice.find_profile(profiled, ONE).why_not == "no profile under runs/"


def test_checkpoints_may_move(storage: Path) -> None:
    """Moved or copied they are found; those of another run under the same name are not them."""
    start(request(policy="first.yaml"))
    saved(storage, trained_job())
    saved(storage.parent / "second", trained_job())
    with pytest.raises(ConfigError, match=f"1 checkpoints are in {storage}"):
        start(request(policy="second.yaml"))
    shutil.rmtree(storage.parent / "second")
    shutil.copytree(storage, storage.parent / "second")
    start(request(policy="second.yaml"))
    start(request(policy="first.yaml"))
    shutil.rmtree(storage.parent / "second")
    storage.rename(storage.parent / "second")
    start(request(policy="second.yaml"))
    assert Path(RunDirectory("r").checkpoints(), FIRST.name).is_dir()


def test_weights_of_another_run_count_as_its_checkpoints(storage: Path) -> None:
    """They are nothing to resume from, and not for this run to mix with its own."""
    saved(storage, trained_job())
    directory = CheckpointDirectory(str(storage))
    term = directory.claim(directory.open(), "launch", 0, force=True)
    commit, records = write_weights(directory, FIRST, Unlimited(), term=term)
    replace_commit(directory, commit, records, term=term)
    assert committed_names(str(storage)) == []
    with pytest.raises(ConfigError, match=f"{storage}: already holds 1 checkpoints of another run"):
        start(request(policy="first.yaml"))


def test_of_two_first_launches_in_a_store_one_goes_on(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looked before either was there; the record of the job decides."""
    monkeypatch.setattr(store, "_bucket", lambda *_: Objects(f"file://{tmp_path}/objects"))
    goal = replace(Goal(), storage_path="s3://bucket/run")
    first, second = (find_script("t.py", False, ("--lr", lr)) for lr in ("1", "2"))
    for _ in range(2):
        prepare(RunDirectory.create("one"), first, "run", goal, ONE)
    with pytest.raises(ConfigError, match="another job"):
        prepare(RunDirectory.create("two"), second, "run", goal, ONE)
    prepare(RunDirectory.create("two"), second, "run", goal, ONE, anew=True)


def test_a_variable_that_is_nearly_one_of_ours_is_named() -> None:
    """Keys of policies too; what resembles none may be of another program."""
    environ = {
        "AUTOCKPT_DISK_WRITRES": "4", "AUTOCKPT_METRIC_PORT": "1", "AUTOCKPT_WHATEVER": "1",
        "AUTOCKPT_DISK_WRITERS": "4", "AUTOCKPT_METRICS_PORT": "9400", "DISK_WRITRES": "4",
    }  # fmt: skip
    said = check_environment(environ)
    assert [text.rsplit(" ", 1)[1] for text in said] == [
        "AUTOCKPT_DISK_WRITERS?", "AUTOCKPT_METRICS_PORT?",
    ]  # fmt: skip
    assert said[0].startswith("AUTOCKPT_DISK_WRITRES is no variable of autockpt")


@pytest.mark.parametrize("port", ["abc", "65536", "-1", "tcp://10.96.0.12:9400"])
def test_a_port_that_is_none_is_named_and_ends_no_start(port: str) -> None:
    """Kubernetes sets the last one for a Service that is named autockpt-metrics."""
    said = check_environment({"AUTOCKPT_METRICS_PORT": port})
    assert said == [f"AUTOCKPT_METRICS_PORT={port}: is no port; no metrics are served"]


def test_variables_of_a_service_are_no_misspelled_ones() -> None:
    """A Service named autockpt-metric, as Kubernetes writes it into a pod."""
    assert check_environment({"AUTOCKPT_METRIC_PORT": "tcp://10.96.0.12:9400"}) == []
