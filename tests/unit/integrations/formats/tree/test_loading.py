"""`autockpt.load`: other people's checkpoints, and files that want to do harm."""

import io
import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model

import autockpt
from autockpt.integrations.dcp.metadata import read_metadata
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError, ConfigError, CorruptCheckpointError
from autockpt.values.goal import Goal
from tests.unit.integrations.formats.convert.test_export import same
from tests.unit.integrations.trained import saved, trained_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_a_generation_comes_back_as_state_dicts(tmp_path: Path) -> None:
    """By run, directory or generation; ties stay ties; what belongs to a rank is left out."""
    job = trained_job()
    folder = saved(tmp_path / "checkpoints", job)
    state = autockpt.load(folder)
    assert set(state) == {"model", "optimizer", "scheduler", "step"}
    assert same(state["model"], dict(job[0].state_dict()))
    assert state["scheduler"] == job[2].state_dict()
    assert state["model"]["head.weight"] is state["model"]["embed.weight"]
    again = autockpt.load(str(tmp_path / "checkpoints"), generation=Path(folder).name)
    assert same(again, state)


def test_a_length_in_a_pickle_asks_for_no_more_than_the_file_has(tmp_path: Path) -> None:
    """2 GiB of text in a file of eight bytes: found by `fuzz`."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"X" + struct.pack("<I", 2**31 - 17) + b"K\x03\x04")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match=r"model\.pt: .*refuses it"):
            autockpt.load(str(path))
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_others_files_are_read(tmp_path: Path) -> None:
    """safetensors by file, with ties; torch.save of a bare state dict or of more."""
    job = trained_job()
    weights = dict(job[0].state_dict())
    save_model(job[0], str(tmp_path / "m.safetensors"))
    assert same(autockpt.load(str(tmp_path / "m.safetensors"))["model"], weights)
    torch.save(weights, tmp_path / "bare.pt")
    assert same(autockpt.load(str(tmp_path / "bare.pt")), {"model": weights})
    torch.save({"net": weights, "n": 3, "o": job[1].state_dict()}, tmp_path / "more.pt")
    more = autockpt.load(str(tmp_path / "more.pt"))
    assert same(more, {"net": weights, "n": 3, "o": job[1].state_dict()})
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors"}})
    )
    assert same(autockpt.load(str(tmp_path)), {"model": {"x": torch.ones(2)}})


def test_others_dcp_directories_are_read(tmp_path: Path) -> None:
    """Nested dicts and lists, values, tensors of every shape."""
    state = {"model": {"a.b": torch.randn(3, 4), "c": torch.tensor(2.0)}, "n": 3,
             "list": [{"x": torch.ones(2)}, {"x": torch.zeros(2)}], "text": "é"}  # fmt: skip
    dcp.save(state, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    assert same(autockpt.load(str(tmp_path / "d")), state)


def test_what_is_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    """A missing path, an empty directory, options that mean nothing there."""
    with pytest.raises(ConfigError, match="no such file"):
        autockpt.load(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="neither a run or checkpoint of autockpt"):
        autockpt.load(str(tmp_path))
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="holds a list, expected a dict"):
        autockpt.load(str(tmp_path / "list.pt"))
    with pytest.raises(ConfigError, match="only those have generations"):
        autockpt.load(str(tmp_path / "list.pt"), rank=1)


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def test_a_run_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """Its storage is not mounted, its goal is damaged: a run all the same."""
    run = RunDirectory.create(tmp_path / "run")
    run.write_goal(Goal(storage_path=str(tmp_path / "elsewhere")))
    for how in ({}, {"generation": "ckpt-t0001-step-00000007"}):
        with pytest.raises(ConfigError, match=r"not mounted \(.*elsewhere is not there\)"):
            autockpt.load(str(run.path), **how)
    (run.path / "goal.json").write_text("{")
    with pytest.raises(ConfigError, match=r"goal\.json: "):
        autockpt.load(str(run.path))


def test_no_pickle_runs_code(tmp_path: Path) -> None:
    """In a torch.save file, in DCP's metadata, and in the values of a DCP directory."""
    mark = str(tmp_path / "mark")
    torch.save({"x": Bomb(mark)}, tmp_path / "bomb.pt")
    with pytest.raises(CorruptCheckpointError, match="weights_only=True"):
        autockpt.load(str(tmp_path / "bomb.pt"))
    folder = tmp_path / "d"
    dcp.save({"x": torch.ones(2), "v": Bomb(mark)}, checkpoint_id=str(folder), no_dist=True)
    with pytest.raises(CorruptCheckpointError, match="weights_only=True"):
        autockpt.load(str(folder))
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(CorruptCheckpointError, match=r"names posix\.mkdir"):
        autockpt.load(str(folder))
    assert not os.path.exists(mark)


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'true'\ntR.",
        b"ctorch.distributed.checkpoint.filesystem\npickle\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0eos.path.exists\x93.",
        b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nS'__globals__'\ntR.",
        b"Ppersistent\n.",
        b"\x82\x01.",
        b"(lp0\n" * 5000,
        b"\x80\x05]\x94" + b"(" * 20_000,
        b"",
        b"\x80",
        b"N.",
    ],
)
def test_hostile_metadata_is_an_error_of_ours(tmp_path: Path, program: bytes) -> None:
    """Unknown names, names that lead on, persistent ids, nonsense: CorruptCheckpointError."""
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        read_metadata(str(tmp_path / ".metadata"))


def test_every_cut_and_flip_of_the_metadata_is_an_error_or_a_load(tmp_path: Path) -> None:
    """Also where the pickle still ends well and says something else."""
    dcp.save({"x": torch.arange(8.0), "n": 3}, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    data = (tmp_path / "d" / ".metadata").read_bytes()
    path = tmp_path / ".metadata"
    for place in range(0, len(data), 3):
        for broken in (data[:place], data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :]):
            path.write_bytes(broken)
            try:
                read_metadata(str(path))
            except CorruptCheckpointError:
                continue


def test_a_pickle_that_asks_for_memory_gets_none(tmp_path: Path) -> None:
    """A memo at 4 billion, a text of 2**60 bytes, a frame of as many."""
    for program in (
        b"]r\xff\xff\xff\xff.",
        b"\x8d" + struct.pack("<Q", 2**60) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
        b"\x8e" + struct.pack("<Q", 2**40) + b"x.",
    ):
        (tmp_path / ".metadata").write_bytes(program)
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
            read_metadata(str(tmp_path / ".metadata"))


def test_a_pickle_cannot_change_torchs_classes(tmp_path: Path) -> None:
    """BUILD sets attributes on whatever a name stands for: never on anything that lives on."""
    from torch.distributed.checkpoint.metadata import Metadata

    program = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'marked'\nI1\nstb."
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        read_metadata(str(tmp_path / ".metadata"))
    assert not hasattr(Metadata, "marked")


def _changed(folder: Path, change: Callable[[Any], None]) -> None:
    """The metadata of a directory with something else in it."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _outside(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"


def _huge(metadata: Any) -> None:
    for entry in metadata.state_dict_metadata.values():
        entry.size = torch.Size([2**40])
        entry.chunks[0].sizes = torch.Size([2**40])


def _hole(metadata: Any) -> None:
    for entry in metadata.state_dict_metadata.values():
        entry.size = torch.Size([9])


def _beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = 10**9


def _negative(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = -1


@pytest.mark.parametrize("change", [_outside, _huge, _hole, _beyond, _negative])
def test_metadata_that_lies_is_found_out(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """Files outside, sizes beyond the bytes, holes, places behind the end."""
    dcp.save({"x": torch.arange(8.0)}, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    _changed(tmp_path / "d", change)
    with pytest.raises(CorruptCheckpointError, match=str(tmp_path)):
        autockpt.load(str(tmp_path / "d"))


def test_every_cut_and_flip_of_a_safetensors_file_is_an_error_or_a_load(tmp_path: Path) -> None:
    """Never another exception: the file is somebody's."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, path)
    data = path.read_bytes()
    for place in range(len(data)):
        for broken in (data[:place], data[:place] + bytes([data[place] ^ 32]) + data[place + 1 :]):
            path.write_bytes(broken)
            try:
                autockpt.load(str(path))
            except AutockptError:
                continue


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    """Paths in it, missing tensors, nonsense."""
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map in ({"x": "../a.safetensors"}, {"y": "a.safetensors"}, {"x": 1}, [], None):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(AutockptError, match=r"index\.json"):
            autockpt.load(str(index))


def test_a_header_that_claims_gigabytes_allocates_nothing(tmp_path: Path) -> None:
    """The length is compared with the file first."""
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(CorruptCheckpointError, match="no sound safetensors file"):
        autockpt.load(str(tmp_path / "x.safetensors"))


def test_torch_files_that_are_cut_are_errors_of_ours(tmp_path: Path) -> None:
    """At a few places."""
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(100)}, buffer)
    data = buffer.getvalue()
    for length in (0, 1, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "x.pt").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match="refuses it"):
            autockpt.load(str(tmp_path / "x.pt"))
