"""Other people's checkpoints become a generation that a job goes on from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import autockpt
from autockpt.cli.app import run
from autockpt.executors.restore.apply_state import apply_state, left_as_built
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import shards_on_disk
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import verify_generation
from autockpt.integrations.dcp.storage_reader import GenerationWriter
from autockpt.integrations.formats.convert.import_checkpoint import import_tree
from autockpt.integrations.formats.tree.loading import opened
from autockpt.integrations.places import generation_folder
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from tests.unit.executors.checkpoints import commit_state
from tests.unit.executors.states import step
from tests.unit.integrations.formats.convert.test_export import assert_same_job, same
from tests.unit.integrations.trained import (
    FIRST,
    Job,
    new_job,
    opened_directory,
    saved,
    saved_states,
    state_of,
    trained_job,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def imported(source: Path, out: Path) -> tuple[str, Any]:
    """(folder of the generation that was made, what the import says)."""
    with opened(str(source)) as found:
        done = import_tree(found.tree, str(out), models=found.models)
    return generation_folder(str(out)), done


def restored(folder: str, state: LiveState) -> dict[str, Any]:
    """As `attach` does it."""
    return apply_state(restore_shards(shards_on_disk(folder, 0, 1), state), state)


def write(kind: str, path: Path, job: Job) -> Path:
    """A whole job as somebody else stores it."""
    model, optimizer, scheduler = job
    state = {
        "model": dict(model.state_dict()),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(), "step": 3,
    }  # fmt: skip
    if kind == "dcp":
        save(state, checkpoint_id=str(path), no_dist=True)
    elif kind == "torch":
        torch.save(state, path)
    else:
        folder = saved(path.parent / "ours", job)
        assert (
            run(["convert", folder, str(path), "--to", "safetensors", "--include-optimizer"]) == 0
        )
    return path


@pytest.mark.parametrize("kind", ["dcp", "torch", "safetensors"])
def test_a_whole_job_goes_on(tmp_path: Path, kind: str) -> None:
    """Weights, moments, groups, schedule and step; ties stay ties."""
    job, fresh = trained_job(), new_job(1)
    folder, done = imported(write(kind, tmp_path / "theirs", job), tmp_path / "run")
    assert done.left_out == ()
    applied = restored(folder, state_of(fresh))
    assert applied["progress"]["step"] == (7 if kind == "safetensors" else 3)
    assert applied["rng"] is None
    assert_same_job(fresh, job)
    again = autockpt.load(str(tmp_path / "run"))
    assert same(again["model"], dict(job[0].state_dict()))
    if kind != "dcp":  # which knows no ties
        assert again["model"]["head.weight"] is again["model"]["embed.weight"]


@pytest.mark.parametrize("names", [("g", "d"), ("{what}_g", "{what}_d"), ("{what}.g", "d")])
def test_several_models_and_optimizers_go_on(tmp_path: Path, names: tuple[str, str]) -> None:
    """Whatever names they were attached by: what begins with its kind stays as it is."""

    def state(seed: int) -> LiveState:
        torch.manual_seed(seed)
        nets = [torch.nn.Linear(40, 3) for _ in names]
        made = [torch.optim.AdamW(net.parameters(), lr=10.0**-seed) for net in nets]
        return LiveState.of(
            model={n.format(what="model"): net for n, net in zip(names, nets, strict=True)},
            optimizer={n.format(what="optimizer"): o for n, o in zip(names, made, strict=True)},
        )

    trained, fresh = state(2), state(3)
    for net, optimizer in zip(trained.models.values(), trained.optimizers.values(), strict=True):
        step(net, optimizer)
    directory, run_id = opened_directory(tmp_path / "c")
    theirs = commit_state(directory, run_id, FIRST, trained)
    folder, done = imported(Path(theirs), tmp_path / "run")
    assert done.left_out == ()
    back = restore_shards(shards_on_disk(folder, 0, 1), fresh)
    apply_state(back, fresh)
    assert left_as_built(back, fresh) == ()
    for name, net in trained.models.items():
        assert same(dict(fresh.models[name].state_dict()), dict(net.state_dict()))
    for name, optimizer in trained.optimizers.items():
        assert optimizer.state_dict()["state"]
        assert same(fresh.optimizers[name].state_dict(), optimizer.state_dict())


def test_what_held_nan_before_the_training_may_hold_it_in_the_copy(tmp_path: Path) -> None:
    """Else the copy would be suspect when it is read back, and not be restored by itself."""
    job = trained_job()
    job[0].frozen.data[2] = float("nan")
    state = state_of(job)
    state.known_nan = frozenset({"model.frozen"})
    folder = saved_states(tmp_path / "ours", [state])
    out = tmp_path / "run"
    assert run(["convert", folder, str(out), "--to", "autockpt"]) == 0
    made = generation_folder(str(out))
    result = verify_generation(os.path.dirname(made), os.path.basename(made))
    assert (result.ok, result.sick) == (True, "")
    with opened(made) as found:
        assert found.known_nan == {"model.frozen"}
    assert restored(made, state_of(new_job(1)))["progress"]["nan"] == ["model.frozen"]


def test_what_an_import_lacks_is_named(tmp_path: Path) -> None:
    """A misnamed optimizer starts anew; nobody should have to guess that."""
    job, fresh = trained_job(), new_job(1)
    torch.save({"model": dict(job[0].state_dict())}, tmp_path / "w.pt")
    folder, _ = imported(tmp_path / "w.pt", tmp_path / "run")
    state = LiveState.of(model=fresh[0], optimizer={"g": fresh[1]}, scheduler=fresh[2])
    back = restore_shards(shards_on_disk(folder, 0, 1), state)
    said = "the checkpoint has nothing of optimizer.g, scheduler: as the script built it"
    assert left_as_built(back, state) == (said,)
    own = shards_on_disk(saved(tmp_path / "c", job), 0, 1)
    assert left_as_built(restore_shards(own, state_of(fresh)), state_of(fresh)) == ()


def test_weights_alone_leave_the_rest_as_it_was_built(tmp_path: Path) -> None:
    """Without the second name of tied weights, without buffers that do not persist."""
    job, fresh = trained_job(), trained_job(1)
    weights = {n: t for n, t in job[0].state_dict().items() if n != "head.weight"}
    save_file(weights, tmp_path / "w.safetensors")
    fresh[0].register_buffer("table", torch.ones(4), persistent=False)
    before = fresh[1].state_dict(), fresh[2].state_dict()
    folder, _ = imported(tmp_path / "w.safetensors", tmp_path / "run")
    applied = restored(folder, state_of(fresh))
    assert applied["progress"] == {"step": 0, "data": None}
    assert same(dict(fresh[0].state_dict()), dict(job[0].state_dict()))
    assert same((fresh[1].state_dict(), fresh[2].state_dict()), before)
    assert torch.equal(fresh[0].table, torch.ones(4))


def test_a_missing_weight_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """Only what cannot be in such a file may be left out of it."""
    job, fresh = trained_job(), new_job(1)
    weights = {n: t for n, t in job[0].state_dict().items() if n not in ("low.bias", "head.weight")}
    save_file(weights, tmp_path / "w.safetensors")
    folder, _ = imported(tmp_path / "w.safetensors", tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in fresh[0].state_dict().items()}
    with pytest.raises(ConfigError, match=r"not in the checkpoint, first 'model\.low\.bias'"):
        restored(folder, state_of(fresh))
    assert same(dict(fresh[0].state_dict()), before)


def test_files_of_torch_save_by_their_usual_keys(tmp_path: Path) -> None:
    """model_state_dict of a DDP model; an optimizer with names, and one with numbers only."""
    job, fresh = trained_job(), new_job(1)
    model = {f"module.{name}": tensor for name, tensor in job[0].state_dict().items()}
    numbered = job[1].state_dict()
    torch.save({"model_state_dict": model, "optimizer_state_dict": numbered}, tmp_path / "a.pt")
    folder, done = imported(tmp_path / "a.pt", tmp_path / "a")
    assert done.left_out == ()
    restored(folder, state_of(fresh))
    assert same(dict(fresh[0].state_dict()), dict(job[0].state_dict()))
    assert same(fresh[1].state_dict()["state"], job[1].state_dict()["state"])

    fresh = new_job(1)
    names = {id(p): name for name, p in job[0].named_parameters()}
    for group, live in zip(numbered["param_groups"], job[1].param_groups, strict=True):
        group["param_names"] = [names[id(p)] for p in live["params"]]
    torch.save({"model_state_dict": model, "optimizer_state_dict": numbered}, tmp_path / "b.pt")
    folder, done = imported(tmp_path / "b.pt", tmp_path / "b")
    assert done.left_out == ()
    restored(folder, state_of(fresh))
    assert same(fresh[1].state_dict()["state"], job[1].state_dict()["state"])


def test_a_flat_state_as_torchtitan_saves_it(tmp_path: Path) -> None:
    """Weights at the top, an optimizer by names; written by dcp.save into a directory of ours."""
    job, fresh = trained_job(), new_job(1)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer = get_optimizer_state_dict(job[0], job[1], options=flat)
    state = {**job[0].state_dict(), "optimizer": optimizer, "train_state": {"step": 3}}
    save(state, storage_writer=GenerationWriter(tmp_path / "titan"), no_dist=True)
    folder, done = imported(tmp_path / "titan", tmp_path / "run")
    assert done.left_out == ()
    restored(folder, LiveState.of(model=fresh[0], optimizer=fresh[1]))
    assert same(dict(fresh[0].state_dict()), dict(job[0].state_dict()))
    assert same(fresh[1].state_dict()["state"], job[1].state_dict()["state"])
    rates = [group["lr"] for group in fresh[1].param_groups]
    assert rates == [group["lr"] for group in job[1].param_groups]


def test_a_state_without_a_model_is_refused(tmp_path: Path) -> None:
    """The error says what there is."""
    torch.save({"weights": {"x": torch.ones(2)}, "epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"holds no model.*there are: weights, epoch"):
        imported(tmp_path / "x.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """A wrapper's prefix is no difference."""
    torch.save({"model": {"x": torch.ones(2), "module.x": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"two tensors would be called 'model\.x'"):
        imported(tmp_path / "x.pt", tmp_path / "run")


def test_a_damaged_source_imports_nothing(tmp_path: Path) -> None:
    """As with exports: there as a whole or not at all."""
    folder = saved(tmp_path / "c", trained_job())
    shard = next(Path(folder).glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="expected digest"):
        imported(Path(folder), tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


SCRIPT = """
import torch, autockpt
torch.manual_seed(1)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(7):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print("step", step, float(model.weight.sum()))
"""


@pytest.mark.slow
def test_run_goes_on_from_an_import(tmp_path: Path) -> None:
    """`autockpt convert --to autockpt`, then `autockpt run` in the directory it made."""
    weights = {"weight": torch.full((3, 4), 2.0), "bias": torch.zeros(3)}
    torch.save({"model": weights, "step": 5}, tmp_path / "w.pt")
    (tmp_path / "t.py").write_text(SCRIPT)
    assert run(["convert", str(tmp_path / "w.pt"), str(tmp_path / "r"), "--to", "autockpt"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "autockpt", "run", "--run-dir", "r", "t.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the checkpoint has nothing of optimizer: as the script built it" in done.stderr
    assert "resumed step 5 from disk" in done.stderr
    assert done.stdout.split() == ["step", "5", "24.0", "step", "6", "24.0"]


def in_a_directory(path: Path, job: Job, *, kind: str) -> Path:
    """A whole job as Trainer of Hugging Face, or Accelerate, stores it: by numbers."""
    model, optimizer, scheduler = job
    path.mkdir()
    weights = {n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}
    save_file(weights, path / "model.safetensors", {"head.weight": "embed.weight"})
    end = "pt" if kind == "huggingface" else "bin"
    torch.save(optimizer.state_dict(), path / f"optimizer.{end}")
    torch.save(scheduler.state_dict(), path / f"scheduler.{end}")
    if kind == "huggingface":
        (path / "trainer_state.json").write_text('{"global_step": 3, "epoch": 0.5}')
        (path / "rng_state.pth").write_bytes(b"")
        (path / "training_args.bin").write_bytes(b"")
    else:
        (path / "random_states_0.pkl").write_bytes(b"")
        (path / "sampler.bin").write_bytes(b"")
    return path


@pytest.mark.parametrize("kind", ["huggingface", "accelerate"])
def test_a_directory_of_a_trainer_is_taken_whole(tmp_path: Path, kind: str) -> None:
    """The attached optimizer's order gives the numbers their names; the rest is said."""
    job, fresh = trained_job(), new_job(1)
    source = in_a_directory(tmp_path / "theirs", job, kind=kind)
    with opened(str(source), whole=True) as found:
        done = import_tree(found.tree, str(tmp_path / "run"), left_out=found.left_out)
    assert done.step == 3
    said = " ".join(done.left_out)
    assert "random states" in said
    assert ("training arguments" if kind == "huggingface" else "state of the sampler") in said
    restored(generation_folder(str(tmp_path / "run")), state_of(fresh))
    assert_same_job(fresh, job)


def test_a_checkpoint_of_lightning_is_taken_whole(tmp_path: Path) -> None:
    """`optimizer_states`, `lr_schedulers` and `global_step`; its loops are named."""
    job, fresh = trained_job(), new_job(1)
    model, optimizer, scheduler = job
    torch.save(
        {
            "pytorch-lightning_version": "2.6.6", "global_step": 3, "epoch": 1,
            "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [scheduler.state_dict()], "loops": {"fit_loop": {}},
        },
        tmp_path / "theirs.ckpt",
    )  # fmt: skip
    folder, done = imported(tmp_path / "theirs.ckpt", tmp_path / "run")
    assert done.step == 3
    assert {what.split()[0] for what in done.left_out} == {"epoch", "loops"}
    restored(folder, state_of(fresh))
    assert_same_job(fresh, job)


@pytest.mark.parametrize("step", [300, torch.tensor(300, dtype=torch.int32)])
def test_the_step_of_torchtitan_is_in_its_train_state(tmp_path: Path, step: Any) -> None:
    """Its scheduler is attached as `scheduler`."""
    model, _, scheduler = trained_job()
    state = {
        **model.state_dict(), "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": step, "ntokens_seen": 9},
    }  # fmt: skip
    save(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    folder, done = imported(tmp_path / "theirs", tmp_path / "run")
    assert done.step == 300
    fresh = new_job(1)
    restored(folder, state_of(fresh))
    assert fresh[2].state_dict() == scheduler.state_dict()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda net: [{"params": [*net.parameters()]}], r"groups of 2, 4.*has groups of 7"),
        (
            lambda net: [
                {"params": [net.low.bias, net.low.weight]},
                {"params": [p for n, p in net.named_parameters() if n[:3] not in ("low", "fro")]},
            ],
            r"parameter #0 .* shape \[16, 16\], and model\.low\.bias.* has \[16\]",
        ),
    ],
)
def test_numbers_of_another_order_are_refused(tmp_path: Path, groups: Any, said: str) -> None:
    """Moments of one parameter never come to another one of another shape."""
    torch.save(
        {"model": dict(trained_job()[0].state_dict()), "optimizer": trained_job()[1].state_dict()},
        tmp_path / "theirs.pt",
    )
    folder, _ = imported(tmp_path / "theirs.pt", tmp_path / "run")
    net, _, scheduler = new_job(1)
    other = torch.optim.AdamW(groups(net), lr=1e-3)
    with pytest.raises(ConfigError, match=said):
        restored(folder, state_of((net, other, scheduler)))


@pytest.mark.parametrize("with_names", [False, True])
def test_a_numbered_optimizer_of_dcp_is_taken(tmp_path: Path, with_names: bool) -> None:
    """DCP makes texts of the numbers; moments that were lost in silence would begin anew.

    An optimizer that was made of `named_parameters()` has names beside the numbers.
    """
    job, fresh = trained_job(), new_job(1)
    optimizer = job[1].state_dict()
    names = {id(parameter): name for name, parameter in job[0].named_parameters()}
    if with_names:
        for saved, live in zip(optimizer["param_groups"], job[1].param_groups, strict=True):
            saved["param_names"] = [names[id(parameter)] for parameter in live["params"]]
    state = {
        "model": job[0].state_dict(), "optimizer": optimizer,
        "scheduler": job[2].state_dict(), "step": torch.tensor(3),
    }  # fmt: skip
    save(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    folder, done = imported(tmp_path / "theirs", tmp_path / "run")
    assert done.step == 3
    restored(folder, state_of(fresh))
    assert_same_job(fresh, job)


def test_a_step_that_is_no_number_is_said(tmp_path: Path) -> None:
    """The run begins at 0; the optimizer's strange entries are not dropped in silence either."""
    model, optimizer, _ = trained_job()
    strange = optimizer.state_dict()
    strange["state"]["another"] = {"step": 1}
    state = {"model": dict(model.state_dict()), "step": "third", "optimizer": strange}
    torch.save(state, tmp_path / "theirs.pt")
    _, done = imported(tmp_path / "theirs.pt", tmp_path / "run")
    assert done.step == 0
    assert {what.split()[0] for what in done.left_out} == {"step", "optimizer"}


@pytest.mark.parametrize("files", ["one", "several"])
def test_weights_of_older_trainers_are_taken(tmp_path: Path, files: str) -> None:
    """`pytorch_model.bin`, or its parts behind an index; ties come back."""
    job, fresh = trained_job(), new_job(1)
    source = in_a_directory(tmp_path / "theirs", job, kind="huggingface")
    (source / "model.safetensors").unlink()
    weights = job[0].state_dict()
    if files == "one":
        torch.save(weights, source / "pytorch_model.bin")
    else:
        tied = {name: "b.bin" if "head" in name or "embed" in name else "a.bin" for name in weights}
        for file in ("a.bin", "b.bin"):
            torch.save({n: t for n, t in weights.items() if tied[n] == file}, source / file)
        index = {"weight_map": tied}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with opened(str(source), whole=True) as found:
        import_tree(found.tree, str(tmp_path / "run"), left_out=found.left_out)
    restored(generation_folder(str(tmp_path / "run")), state_of(fresh))
    assert_same_job(fresh, job)


@pytest.mark.parametrize("zero", [False, True])
def test_a_checkpoint_of_deepspeed_with_whole_weights_is_taken(tmp_path: Path, zero: bool) -> None:
    """Without ZeRO all of it; else the weights, and the parts of the optimizer are named."""
    job, fresh = trained_job(), new_job(1)
    folder = tmp_path / "theirs" / "global_step3"
    folder.mkdir(parents=True)
    (tmp_path / "theirs" / "latest").write_text("global_step3")
    state = {
        "module": job[0].state_dict(), "lr_scheduler": job[2].state_dict(), "global_steps": 3,
        "optimizer": None if zero else job[1].state_dict(), "ds_version": "0.19.8",
        "ds_config": {"train_batch_size": 4}, "data_sampler": None,
    }  # fmt: skip
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    for rank in range(2 * zero):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"")
    with opened(str(folder.parent), whole=True) as found:
        done = import_tree(found.tree, str(tmp_path / "run"), left_out=found.left_out)
    assert done.step == 3
    assert done.left_out[0] == "ds_config (of DeepSpeed's engine)"
    assert len(done.left_out) == 1 + 2 * zero
    if zero:
        assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in done.left_out[1]
        assert autockpt.load(str(folder))["model"].keys() == job[0].state_dict().keys()
        return
    restored(generation_folder(str(tmp_path / "run")), state_of(fresh))
    assert_same_job(fresh, job)
