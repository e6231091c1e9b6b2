"""Exports load with the target's own library, bit for bit, into a model that was never trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import autockpt
from autockpt.executors.state.live_state import LiveState
from autockpt.integrations.dcp.storage_reader import GenerationReader
from autockpt.integrations.formats.convert.export import export
from autockpt.integrations.formats.convert.hugging_face import trainer_state
from autockpt.integrations.formats.convert.import_checkpoint import import_tree
from autockpt.integrations.formats.tree.loading import opened
from autockpt.values.errors import ConfigError
from tests.unit.executors.checkpoints import commit_state
from tests.unit.executors.states import DTYPES, ODD_NAMES, bytes_of, random_tensor
from tests.unit.integrations.trained import (
    FIRST,
    Job,
    new_job,
    opened_directory,
    saved,
    saved_tensors,
    trained_job,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def same(a: Any, b: Any) -> bool:
    """Bit for bit, dtypes and keys included."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_same_job(loaded: Job, original: Job) -> None:
    """Model, optimizer and scheduler."""
    assert same(dict(loaded[0].state_dict()), dict(original[0].state_dict()))
    assert same(loaded[1].state_dict(), original[1].state_dict())
    assert loaded[2].state_dict() == original[2].state_dict()


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("shard_bytes", [10**9, 600])
def test_safetensors_loads_with_its_own_library(
    tmp_path: Path, codec: str, shard_bytes: int
) -> None:
    """One file or several with an index; tied weights are stored once."""
    job, fresh = trained_job(), new_job(1)
    folder = saved(tmp_path / "checkpoints", job, codec=codec)
    done = export(folder, str(tmp_path / "out"), "safetensors", max_shard_bytes=shard_bytes)
    assert any("scheduler" in what for what in done.left_out)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (len(files) > 1)
    if len(files) == 1:
        load_model(fresh[0], str(files[0]))
    else:
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert "head.weight" not in found
        fresh[0].load_state_dict({**found, "head.weight": found["embed.weight"]})
    assert same(dict(fresh[0].state_dict()), dict(job[0].state_dict()))
    loaded = autockpt.load(str(tmp_path / "out"))
    assert same(loaded["model"], dict(job[0].state_dict()))
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]


def test_safetensors_with_everything(tmp_path: Path) -> None:
    """The optimizer stands in a file of its own, and `load` gives the whole state back."""
    job = trained_job()
    folder = saved(tmp_path / "checkpoints", job)
    export(folder, str(tmp_path / "out"), "safetensors", everything=True)
    moments = load_file(tmp_path / "out" / "state.safetensors")
    expected = job[1].state[job[0].low.weight]["exp_avg"]
    assert same(moments["optimizer.state.low.weight.exp_avg"], expected)
    assert same(autockpt.load(str(tmp_path / "out")), autockpt.load(folder))


def test_torch_loads_with_weights_only(tmp_path: Path) -> None:
    """Model, optimizer and scheduler take it as their own state dict."""
    job, fresh = trained_job(), new_job(1)
    export(saved(tmp_path / "checkpoints", job), str(tmp_path / "state.pt"), "torch")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 7
    fresh[0].load_state_dict(state["model"])
    fresh[1].load_state_dict(state["optimizer"])
    fresh[2].load_state_dict(state["scheduler"])
    # Optimizer.load_state_dict casts float32 moments of bfloat16 weights; these are bfloat16.
    assert_same_job(fresh, job)
    assert same(state["optimizer"], job[1].state_dict())
    assert state["model"]["head.weight"].data_ptr() == state["model"]["embed.weight"].data_ptr()


@pytest.mark.parametrize("through", ["directory", "reader"])
def test_dcp_loads_with_its_own_library(tmp_path: Path, through: str) -> None:
    """From an export, and from our own directory through the reader."""
    job, fresh = trained_job(), new_job(1)
    saved(tmp_path / "checkpoints", job)
    if through == "directory":
        export(str(next((tmp_path / "checkpoints").glob("ckpt-*"))), str(tmp_path / "o"), "dcp")
    how: dict[str, Any] = {
        "directory": {"checkpoint_id": str(tmp_path / "o")},
        "reader": {"storage_reader": GenerationReader(tmp_path / "checkpoints")},
    }[through]
    state = {
        "model": fresh[0].state_dict(),
        "optimizer": get_optimizer_state_dict(fresh[0], fresh[1]),
        "scheduler": fresh[2].state_dict(),
    }
    dcp.load(state, no_dist=True, **how)
    expected = get_optimizer_state_dict(job[0], job[1])
    assert same(state["optimizer"]["state"], expected["state"])
    assert same(state["optimizer"]["param_groups"], expected["param_groups"])
    fresh[0].load_state_dict(state["model"])
    set_optimizer_state_dict(fresh[0], fresh[1], state["optimizer"])
    fresh[2].load_state_dict(state["scheduler"])
    assert_same_job(fresh, job)


def test_a_dcp_export_in_several_files_is_what_load_reads(tmp_path: Path) -> None:
    """Our reader agrees with torch's about every tensor and value."""
    folder = saved(tmp_path / "checkpoints", trained_job())
    export(folder, str(tmp_path / "out"), "dcp", max_shard_bytes=2000)
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 3
    assert same(autockpt.load(str(tmp_path / "out")), autockpt.load(folder))


@pytest.mark.parametrize("target", ["safetensors", "dcp", "torch"])
def test_every_dtype_and_odd_names_come_back(tmp_path: Path, target: str) -> None:
    """Complex, float8, 0-d, empty; quotes, line breaks and blanks in names."""
    tensors = {f"t_{kind}": random_tensor(kind, (3, 4), seed=i) for i, kind in enumerate(DTYPES)}
    tensors |= {name: torch.randn(3) for name in ODD_NAMES if "." not in name}
    tensors |= {"zero_d": torch.tensor(2.5, dtype=torch.complex128), "empty": torch.empty(0, 3)}
    out = tmp_path / "out"
    folder = saved_tensors(tmp_path / "checkpoints", tensors)
    export(folder, str(out), target)
    assert same(autockpt.load(folder)["model"], tensors)
    assert same(autockpt.load(str(out))["model"], tensors)
    if target == "safetensors":
        theirs = load_file(out / "model.safetensors")
        for name in ("t_bfloat16", "t_complex64", "t_float8_e4m3fn", "empty", *ODD_NAMES):
            assert same(theirs[name], tensors[name])
    elif target == "torch":
        assert same(torch.load(out, weights_only=True)["model"], tensors)


def test_several_ranks_export_as_one_when_they_hold_the_same(tmp_path: Path) -> None:
    """Running statistics may differ; weights may not, unless one rank is asked for."""
    from tests.unit.integrations.trained import saved_ranks

    jobs = [trained_job(), trained_job()]
    jobs[1][0].norm.running_mean.add_(1.0)  # type: ignore[union-attr]
    folder = saved_ranks(tmp_path / "same", jobs)
    export(folder, str(tmp_path / "out"), "torch")
    with torch.no_grad():
        jobs[1][0].low.bias[0] = 5.0
    folder = saved_ranks(tmp_path / "other", jobs)
    with pytest.raises(ConfigError, match=r"rank 1 does not hold the same model\.low\.bias"):
        export(folder, str(tmp_path / "out2"), "torch")
    export(folder, str(tmp_path / "out2"), "torch", rank=1)
    state = torch.load(tmp_path / "out2", weights_only=True)
    assert state["model"]["low.bias"][0] == 5.0
    with pytest.raises(ConfigError, match="ranks 0 to 1, not 2"):
        export(folder, str(tmp_path / "out3"), "torch", rank=2)


def test_the_newest_good_generation_is_taken(tmp_path: Path) -> None:
    """Not one that a person or a check has marked."""
    from autockpt.integrations.places import generation_folder
    from autockpt.values.generation import Generation

    job = trained_job()
    folders = [saved(tmp_path, job, Generation(term=1, step=step)) for step in (1, 2, 3)]
    assert generation_folder(str(tmp_path)) == folders[2]
    Path(folders[2], "CORRUPT").touch()
    Path(folders[1], "QUARANTINE").touch()
    assert generation_folder(str(tmp_path)) == folders[0]
    assert generation_folder(str(tmp_path), Path(folders[1]).name) == folders[1]


def test_what_a_rollback_left_behind_is_taken_by_name_only(tmp_path: Path) -> None:
    """--resume-from an older one, and --fresh, also before the first checkpoint after them."""
    from autockpt.integrations.places import generation_folder
    from autockpt.values.errors import NoCheckpointError
    from autockpt.values.generation import Generation
    from tests.unit.integrations.trained import opened_directory

    job = trained_job()
    old, diverged = (saved(tmp_path, job, Generation(term=1, step=step)) for step in (7, 9))
    assert generation_folder(str(tmp_path)) == diverged
    directory, run_id = opened_directory(tmp_path)
    directory.claim(run_id, "rollback", 0, force=True)
    directory.write_decision(2, 1, Generation.from_name(Path(old).name), "--resume-from")
    assert generation_folder(str(tmp_path)) == old
    assert generation_folder(str(tmp_path), Path(diverged).name) == diverged
    directory.claim(run_id, "fresh", 0, force=True)
    directory.write_decision(3, 1, None, "--fresh")
    with pytest.raises(NoCheckpointError, match="--generation takes one"):
        generation_folder(str(tmp_path))
    assert generation_folder(str(tmp_path), Path(old).name) == old


def test_several_models_keep_the_names_they_were_attached_by(tmp_path: Path) -> None:
    """As a script with two of each would ask torch for them."""
    from autockpt.executors.state.live_state import LiveState
    from tests.unit.executors.checkpoints import commit_state
    from tests.unit.executors.states import step
    from tests.unit.integrations.trained import FIRST, opened_directory

    models = {name: torch.nn.Linear(40, 3) for name in ("g", "d")}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    for name, model in models.items():
        step(model, optimizers[name])
    directory, run_id = opened_directory(tmp_path / "c")
    state = LiveState.of(model=models, optimizer=optimizers)
    loaded = autockpt.load(commit_state(directory, run_id, FIRST, state))
    assert set(loaded) == {"step", "model", "optimizer.g", "optimizer.d"}
    assert set(loaded["model"]) == {"g.weight", "g.bias", "d.weight", "d.bias"}
    moments = optimizers["d"].state[models["d"].bias]
    assert same(loaded["optimizer.d"]["state"]["d.bias"], moments)


@pytest.mark.parametrize("target", ["safetensors", "dcp", "torch"])
def test_attached_objects_and_extra_states_travel(tmp_path: Path, target: str) -> None:
    """Averages, numpy, tuples, numbers as keys; what torch.save turns into something else."""
    import numpy as np

    from tests.unit.executors.states import Holder

    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"calls": 3}

    job = trained_job()
    job[0].low = Counting(16, 16, dtype=torch.bfloat16)
    state = {"ema": torch.ones(3), "pair": (torch.zeros(2), 1.5), "array": np.arange(3),
             "scalar": np.float32(0.5), "set": {1, 2}, "none": None, "big": 2**80}  # fmt: skip
    job[1].add_param_group({"params": list(job[0].low.parameters()), "lr": 1.0})
    optimizer = torch.optim.AdamW(job[0].parameters())
    folder = saved(tmp_path / "c", (job[0], optimizer, job[2]), others={"mine": Holder(state)})
    loaded = autockpt.load(folder)
    assert same(loaded["mine"]["ema"], state["ema"])
    assert same(loaded["mine"]["pair"], state["pair"])
    assert (loaded["mine"]["array"] == state["array"]).all()
    assert loaded["model"]["low._extra_state"] == {"calls": 3}
    done = export(folder, str(tmp_path / "out"), target, everything=True)
    mine = autockpt.load(str(tmp_path / "out"))["mine"]
    assert same(mine["pair"], state["pair"])
    assert (torch.as_tensor(mine["array"]) == torch.arange(3)).all()
    assert {key: mine[key] for key in ("scalar", "set", "none", "big")} == {
        key: state[key] for key in ("scalar", "set", "none", "big")
    }
    assert any("_extra_state" in what for what in done.left_out) == (target == "safetensors")


def test_a_directory_for_trainer_of_hugging_face(tmp_path: Path) -> None:
    """Files as Trainer reads them; an import of them is the same job again."""
    job, fresh = trained_job(), new_job(1)
    folder = saved(tmp_path / "checkpoints", job, others={"extra": torch.nn.Linear(1, 1)})
    out = tmp_path / "checkpoint-7"
    done = export(folder, str(out), "hf")
    assert "extra" in done.left_out
    assert any("random states" in what for what in done.left_out)
    load_model(fresh[0], str(out / "model.safetensors"))
    for part, name in ((fresh[1], "optimizer"), (fresh[2], "scheduler")):
        part.load_state_dict(torch.load(out / f"{name}.pt", weights_only=True))
    assert_same_job(fresh, job)
    state = json.loads((out / "trainer_state.json").read_text())
    assert (state["global_step"], state["log_history"]) == (7, [])
    with opened(str(out), whole=True) as found:
        assert import_tree(found.tree, str(tmp_path / "run")).step == 7
    export(folder, str(out), "hf", force=True)


def test_the_adapters_trainer_state_goes_along() -> None:
    """Its log, its best metric; the step is that of the checkpoint."""
    kept = {"state": {"log_history": [{"loss": 1.0}], "best_metric": 0.5, "global_step": 6}}
    state = trainer_state(7, kept)
    assert state["log_history"] == [{"loss": 1.0}]
    assert (state["best_metric"], state["global_step"]) == (0.5, 7)
    assert trainer_state(7, {"state": {"epoch": 3}})["epoch"] == 0.0


def test_without_a_scheduler_there_is_no_directory_for_trainer(tmp_path: Path) -> None:
    """Trainer would read neither."""
    net, optimizer, _ = trained_job()
    state = LiveState.of(model=net, optimizer=optimizer)
    directory, run_id = opened_directory(tmp_path / "checkpoints")
    folder = commit_state(directory, run_id, FIRST, state)
    with pytest.raises(ConfigError, match=r"has no scheduler.*there are: model, optimizer"):
        export(str(folder), str(tmp_path / "out"), "hf")
    assert not (tmp_path / "out").exists()
