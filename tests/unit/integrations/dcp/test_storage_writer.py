"""`dcp.save` into a directory of ours: whatever a state holds, under the lease of a run."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import autockpt
from autockpt.executors.storage.catalogue import list_generations, verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.integrations.dcp.storage_reader import GenerationReader, GenerationWriter
from autockpt.integrations.formats.convert.committing import GenerationsOf
from autockpt.values.generation import Generation
from tests.unit.executors.states import DTYPES, random_tensor
from tests.unit.integrations.formats.convert.test_export import same
from tests.unit.integrations.trained import trained_job

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def written(path: Path, state: dict[str, Any], **how: Any) -> GenerationWriter:
    """One save in this process."""
    writer = GenerationWriter(path, **how)
    save(state, storage_writer=writer, no_dist=True)
    return writer


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """Nested dicts and lists, values, every dtype, 0-d and empty tensors, tuples with tensors."""
    state = {
        "model": {kind: random_tensor(kind, (3, 4), seed=i) for i, kind in enumerate(DTYPES)},
        "odd": {"zero": torch.tensor(2.5), "empty": torch.empty(0, 3), "text": "é", "none": None},
        "list": [{"x": torch.ones(2)}, {"x": torch.zeros(2)}], "n": 2**70,
        "pair": (torch.ones(2), 1.5), "raw": bytes(range(256)),
    }  # fmt: skip
    written(tmp_path / "c", state, step=40)
    found = autockpt.load(str(tmp_path / "c"))
    assert found.pop("step") == 40
    assert same(found, state)
    (record,) = list_generations(str(tmp_path / "c"))
    assert verify_generation(str(tmp_path / "c"), record.name).ok


def test_a_training_by_dcp_alone_goes_on(tmp_path: Path) -> None:
    """Save, load into a new job through the reader, save again: the newest one counts."""
    job, fresh = trained_job(), trained_job(1)

    def state_of(one: Any) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(one[0], one[1])
        return {"model": one[0].state_dict(), "optimizer": optimizer, "at": 3}

    written(tmp_path / "c", state_of(job)).close()
    found = state_of(fresh)
    load(found, storage_reader=GenerationReader(tmp_path / "c"), no_dist=True)
    assert same(found, state_of(job))
    found["at"] = 4
    written(tmp_path / "c", found)
    assert autockpt.load(str(tmp_path / "c"))["at"] == 4
    names = [record.name for record in list_generations(str(tmp_path / "c"))]
    assert names == ["ckpt-t0001-step-00000001", "ckpt-t0002-step-00000001"]


def test_a_checkpoint_id_is_a_directory_of_its_own(tmp_path: Path) -> None:
    """As torch's own writer takes it."""
    writer = GenerationWriter(tmp_path / "unused")
    for step in (1, 2):
        place = tmp_path / f"step-{step}"
        save({"x": torch.ones(step)}, checkpoint_id=place, storage_writer=writer, no_dist=True)
    assert GenerationWriter.validate_checkpoint_id(tmp_path / "step-1")
    assert not GenerationWriter.validate_checkpoint_id(tmp_path)
    found = {"x": torch.zeros(2)}
    reader = GenerationReader(tmp_path)
    load(found, checkpoint_id=tmp_path / "step-2", storage_reader=reader, no_dist=True)
    assert torch.equal(found["x"], torch.ones(2))
    assert not (tmp_path / "unused").exists()


def test_a_value_that_only_pickle_can_store_is_refused(tmp_path: Path) -> None:
    """By name; the checkpoint before it stays the newest one, and the next save succeeds."""
    writer = written(tmp_path / "c", {"x": torch.ones(2)})
    with pytest.raises(CheckpointException, match=r"bad: holds an object of _io\.StringIO"):
        save({"x": torch.zeros(2), "bad": io.StringIO}, storage_writer=writer, no_dist=True)
    assert torch.equal(autockpt.load(str(tmp_path / "c"))["x"], torch.ones(2))
    save({"x": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    states = [record.state for record in list_generations(str(tmp_path / "c"))]
    assert states == ["committed", "committed"]


def test_a_newer_run_fences_the_writer(tmp_path: Path) -> None:
    """Its save fails, and what the newer run commits is what counts."""
    writer = written(tmp_path / "c", {"x": torch.ones(2)})
    newer = GenerationsOf(str(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="fenced by a newer incarnation"):
        save({"x": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    newer.close()
    assert torch.equal(autockpt.load(str(tmp_path / "c"))["x"], torch.ones(2))


def test_it_goes_on_from_what_a_restart_would_take(tmp_path: Path) -> None:
    """Not from what a rollback left behind, nor from a suspect one."""
    path = tmp_path / "c"
    writer = written(path, {"x": torch.ones(2)})
    for _ in range(2):
        save({"x": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    writer.close()
    first = Generation.from_name(list_generations(str(path))[0].name)
    directory = CheckpointDirectory(str(path))
    term = directory.claim(directory.open(), "resumed by hand", 0, force=False)
    directory.write_decision(term, 1, first, "--resume-from")
    directory.release(term)
    written(path, {"x": torch.full((2,), 3.0)}).close()
    newest = list_generations(str(path))[-1]
    assert newest.parent == first.name
    (path / newest.name / "SUSPECT").touch()
    written(path, {"x": torch.full((2,), 4.0)}).close()
    assert list_generations(str(path))[-1].parent == first.name


def test_plans_that_were_kept_are_refused(tmp_path: Path) -> None:
    """They name an image of an earlier generation."""
    writer = GenerationWriter(tmp_path / "c")
    planner = DefaultSavePlanner(enable_plan_caching=True)
    state = {"x": torch.ones(2)}
    save(state, storage_writer=writer, planner=planner, no_dist=True)
    with pytest.raises(CheckpointException, match="enable_plan_caching=False"):
        save(state, storage_writer=writer, planner=planner, no_dist=True)
