"""Which paths mean a checkpoint directory."""

from pathlib import Path

import pytest

import autockpt
from autockpt.cli.app import run
from autockpt.executors.storage.places import store
from autockpt.executors.storage.places.object_store import Objects
from autockpt.executors.storage.places.store import StorePlace
from autockpt.integrations.places import find_place, is_ours, runs_in, unpinned_name
from autockpt.run_directory import RunDirectory, RunInfo, control_path
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from tests.unit.integrations.trained import saved, trained_job


def test_a_run_directory_of_checkpoints_alone_is_one(tmp_path: Path) -> None:
    """`pull` and a copy by hand bring no run.json: the checkpoints in it are found all the same."""
    folder = saved(tmp_path / "again" / "checkpoints", trained_job())
    assert is_ours(str(tmp_path / "again"))
    assert find_place(str(tmp_path / "again")).directory == str(Path(folder).parent)
    assert autockpt.load(str(tmp_path / "again"))["step"] == 7


def test_a_run_in_a_store_is_loaded_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is in the store alone, where no path leads."""
    monkeypatch.setattr(store, "_bucket", lambda *_: Objects(f"file://{tmp_path}/objects"))
    saved(tmp_path / "objects" / "run", trained_job())
    run_dir = RunDirectory.create(tmp_path / "control")
    run_dir.write_info(RunInfo(run_id="0" * 32, created="2026", script="/t.py"))
    run_dir.write_goal(Goal(storage_path="s3://bucket/run"))
    assert autockpt.load(str(run_dir.path))["step"] == 7


def test_a_url_is_read_like_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By each command that takes a checkpoint; the events of the run are in its run directory."""
    monkeypatch.setattr(store, "_bucket", lambda *_: Objects(f"file://{tmp_path}/objects"))
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "objects" / "run", trained_job())
    url, one = "s3://bucket/run", f"s3://bucket/run/{Path(folder).name}"
    assert [autockpt.load(place)["step"] for place in (url, one)] == [7, 7]
    assert run(["diff", url, folder]) == 0
    assert run(["convert", one, str(tmp_path / "weights"), "--to", "safetensors"]) == 0
    assert run(["report", url]) == 78
    said = capsys.readouterr().err
    control = control_path(url)
    assert f"{url}: its run directory {tmp_path / control} is not here" in said
    RunDirectory.create(control).write_info(RunInfo(run_id="0" * 32, created="", script="/t.py"))
    assert RunDirectory.open(url).path == tmp_path / control
    own = RunDirectory.create(f"{control}-3f2a91bc")
    own.write_info(RunInfo(run_id="1" * 32, created="", script="/t.py"))
    assert RunDirectory.open(f"{url}-3f2a91bc").path == own.path
    with pytest.raises(ConfigError, match="is not here"):
        RunDirectory.open(f"{url}-other")


def test_a_folder_of_other_things_is_none(tmp_path: Path) -> None:
    """A folder called `checkpoints` with something else in it says nothing."""
    (tmp_path / "checkpoints" / "epoch-3").mkdir(parents=True)
    assert not is_ours(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a run nor a checkpoint directory"):
        find_place(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["trainer_state.json", "model.safetensors"], "Hugging Face Trainer at step 300"),
        (["model.safetensors", "optimizer.bin", "random_states_0.pkl"], "Accelerate"),
        ([".metadata", "__0_0.distcp"], r"torch\.distributed\.checkpoint"),
        (["model.safetensors"], "a directory of safetensors"),
    ],
)
def test_a_checkpoint_of_others_is_named(tmp_path: Path, files: list[str], said: str) -> None:
    """With what can be done with it; `ls`, `show` and `verify` say it alike."""
    for name in files:
        (tmp_path / name).write_text('{"global_step": 300}')
    with pytest.raises(ConfigError, match=f"is .*{said}.*autockpt convert PATH RUN --to autockpt"):
        find_place(str(tmp_path))


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_00_model_states.pt", "global_step300"])
def test_partitions_of_deepspeed_are_not_promised(tmp_path: Path, name: str) -> None:
    """`convert`, `load` and `ls` say what does read them."""
    for one in (name, "latest"):
        (tmp_path / one).write_bytes(b"")
    for look in (find_place, autockpt.load):
        with pytest.raises(ConfigError, match=r"DeepSpeed.*, no run of autockpt; .*zero_to_fp32"):
            look(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["trainer_state.json", "adapter_model.safetensors"], "PEFT adapter.*Trainer resume from"),
        (["trainer_state.json", "global_step300"], "Trainer at step 300.*no weights of a whole"),
        (["random_states_0.pkl", "pytorch_model_fsdp_0"], "Accelerate.*no weights of a whole"),
    ],
)
def test_a_directory_that_is_not_imported_does_not_promise_it(
    tmp_path: Path, files: list[str], said: str
) -> None:
    """`ls` and `convert` say the same, and of its parent which checkpoint is in it."""
    folder = tmp_path / "checkpoint-300"
    folder.mkdir()
    for name in files:
        (folder / name).write_text('{"global_step": 300}')
    for look in (find_place, autockpt.load):
        with pytest.raises(ConfigError, match=said) as raised:
            look(str(folder))
        assert "autockpt convert" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"; in it .*checkpoint-300 is a checkpoint of"):
        find_place(str(tmp_path))


def test_a_file_is_no_missing_directory(tmp_path: Path) -> None:
    """It is there."""
    (tmp_path / "x.ckpt").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a checkpoint of Lightning, no run of autockpt"):
        find_place(str(tmp_path / "x.ckpt"))


def test_a_folder_of_runs_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`autockpt ls runs`, oldest first; a folder that is no run is left out."""
    for name in ("b", "a"):
        made = RunDirectory.create(tmp_path / name)
        made.write_info(RunInfo(run_id="0" * 32, created=f"2026-{name}", script="/t.py"))
    (tmp_path / "other").mkdir()
    assert [each.path.name for each in runs_in(str(tmp_path))] == ["b", "a"]
    assert run(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "b", "a"]


@pytest.mark.parametrize("url", ["s3a://bucket/r", "abfss://c/r", "ftp://me:word@host/r", "s3://"])
def test_a_url_of_another_scheme_is_refused_with_those_that_are_taken(url: str) -> None:
    """It is no path on this machine; what may be a key is not repeated."""
    with pytest.raises(
        ConfigError, match=r"^\w+://: expected s3://, gs://, az://, file://"
    ) as told:
        find_place(url, in_store=True)
    assert "word" not in str(told.value)


@pytest.mark.parametrize("under", ["", "/team", "/team/run"])
def test_a_place_in_a_store_without_checkpoints_names_the_one_above(
    monkeypatch: pytest.MonkeyPatch, under: str
) -> None:
    """A bucket has none above it."""
    monkeypatch.setattr(StorePlace, "names", lambda self, folder: [])
    above = {"/team/run": "s3://bucket/team"}.get(under, "s3://bucket")
    with pytest.raises(ConfigError, match=f"holds no checkpoints; see `autockpt ls {above}`$"):
        find_place(f"s3://bucket{under}", in_store=True)


def test_a_step_names_its_checkpoint(tmp_path: Path) -> None:
    """A person knows the step; steps that two starts made are named with their terms."""
    for name in (
        "ckpt-t0001-step-00000042",
        "ckpt-t0001-step-00000050",
        "ckpt-t0002-step-00000050",
    ):
        (tmp_path / name).mkdir()
    assert unpinned_name(str(tmp_path), "42") == "ckpt-t0001-step-00000042"
    with pytest.raises(ConfigError, match=r"2 checkpoints of step 50; name one: ckpt-t0001.*t0002"):
        unpinned_name(str(tmp_path), "50")
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; steps: 42, 50"):
        unpinned_name(str(tmp_path), "7")
