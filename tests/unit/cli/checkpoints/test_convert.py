"""`autockpt convert` and `autockpt diff` as one types them: output, JSON, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.cli.app import run
from autockpt.run_directory import RunDirectory
from tests.support.profiles import example_profile
from tests.unit.integrations.trained import FIRST, saved, train, trained_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run of one checkpoint, called r."""
    monkeypatch.chdir(tmp_path)
    RunDirectory.create(tmp_path / "r").write_profile(example_profile())
    saved(tmp_path / "r" / "checkpoints", trained_job())
    return tmp_path


def object_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    """The object that a command prints with --json: stdout holds nothing else."""
    capsys.readouterr()
    assert run([*argv, "--json"]) == code
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert body["schema_version"] == 1
    return body


@pytest.mark.parametrize("target", ["safetensors", "dcp", "torch"])
def test_convert_says_what_it_wrote_and_what_it_left_out(
    here: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """As text and as an object; a second time is refused with exit code 78."""
    assert run(["convert", "r", "out", "--to", target]) == 0
    out, err = capsys.readouterr()
    assert f"as {target}" in out
    assert "left out: random states" in err
    assert run(["convert", "r", "out", "--to", target]) == 78
    assert "--force" in capsys.readouterr().err
    body = object_of(capsys, "convert", "r", "out", "--to", target, "--force")
    assert (body["command"], body["step"], body["target"]) == ("convert", 7, target)
    assert body["tensors"] > 5
    assert ("scheduler" in body["left_out"]) == (target == "safetensors")


def test_diff_is_like_diff(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when the same, 1 when not, and the difference in numbers."""
    assert run(["convert", "r", "d", "--to", "dcp"]) == 0
    assert run(["diff", "r", "d"]) == 0
    job = trained_job()
    train(job, 1)
    folder = saved(here / "other", job)
    body = object_of(capsys, "diff", "r", folder, code=1)
    assert body["equal"] is False
    assert {group["name"] for group in body["groups"]} >= {"model", "optimizer"}
    assert any(d["kind"] == "values" and d["max_abs"] > 0 for d in body["differences"])
    assert run(["diff", "r", folder]) == 1
    out, err = capsys.readouterr()
    assert "values   model.low.bias: bfloat16 [16]" in out
    assert "-v lists them" in err or "more differences" not in err


def test_diff_can_be_asked_for_one_part(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights alone have no optimizer to compare."""
    assert run(["convert", "r", "w", "--to", "safetensors"]) == 0
    assert run(["diff", "r", "w"]) == 1
    assert run(["diff", "r", "w", "--only", "model"]) == 0
    assert run(["diff", "r", "w", "--only", "modle"]) == 78
    assert "there are: step, model, optimizer" in capsys.readouterr().err


def test_a_difference_that_is_infinite_is_json(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN against a number: JSON has no infinity."""
    torch.save({"x": torch.tensor([1.0])}, "a.pt")
    torch.save({"x": torch.tensor([float("nan")])}, "b.pt")
    (found,) = object_of(capsys, "diff", "a.pt", "b.pt", code=1)["differences"]
    assert found["max_abs"] == "inf"


def test_damage_has_its_exit_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """65, one sentence, and nothing at the destination."""
    shard = next((here / "r").rglob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    assert run(["convert", "r", "out", "--to", "safetensors", "--include-optimizer"]) == 65
    assert "expected digest" in capsys.readouterr().err
    assert not (here / "out").exists()
    assert run(["diff", "r", "r"]) == 65


def test_wrong_usage_names_the_way_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No target, an unknown one, a size without a unit, a source that is nothing."""
    assert run(["convert", "r", "out"]) == 2
    assert run(["convert", "r", "out", "--to", "onnx"]) == 2
    assert "safetensors" in capsys.readouterr().err
    for size in ("5", "0 GB"):
        assert run(["convert", "r", "out", "--to", "safetensors", "--max-shard-size", size]) == 2
    assert run(["convert", "nothing", "out", "--to", "torch"]) == 78
    assert run(["convert", "r", "out", "--to", "torch", "--generation", "x"]) == 78
    assert not (here / "out").exists()


def test_convert_makes_a_run_of_somebody_elses_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of torch.save becomes a run directory, of the same content, which stays."""
    weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    torch.save({"model": weights, "optimizer": torch.optim.SGD([torch.ones(1)]).state_dict()}, "w")
    assert run(["convert", "w", "new", "--to", "autockpt"]) == 0
    out, err = capsys.readouterr()
    assert "ckpt-t0001-step-00000001 (step 0) -> new: 2 tensors" in out
    assert "left out" not in err
    assert "autockpt run --run-dir new SCRIPT" in err
    assert run(["diff", "w", "new", "--only", "model"]) == 0
    assert run(["verify", "new"]) == 0
    assert run(["convert", "w", "new", "--to", "autockpt", "--force"]) == 70
    assert "which no export writes" in capsys.readouterr().err


def test_show_tells_parts_of_tensors(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole's shape and the boxes that a rank stores."""
    from autockpt.executors.image.layout.boxes import Box
    from tests.unit.integrations.formats.convert.test_image_reader import write_parts

    boxes = [[Box(offset=(0, 0), shape=(1, 3))], [Box(offset=(1, 0), shape=(1, 3))]]
    write_parts("parts", torch.ones(2, 3), boxes)
    assert run(["show", "parts", "--tensors"]) == 0
    assert "[2, 3] [1:2, 0:3]" in capsys.readouterr().out
    shown = object_of(capsys, "show", "parts")
    (row,) = [row for row in shown["shards"][1]["contents"] if row["name"] == "x"]
    assert (row["shape"], row["of"], row["boxes"]) == ([1, 3], [2, 3], ["[1:2, 0:3]"])


def test_a_checkpoint_is_shown_where_the_runs_records_are_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Telemetry of another version is a warning beside it."""
    run_directory = RunDirectory.create(tmp_path / "r")
    saved(Path(run_directory.checkpoints()), trained_job())
    line = '{"event": "Foretold", "schema_version": 1, "at_s": 1.0, "rank": 0}\n'
    run_directory.rank_telemetry(0).write_text(line)
    assert run(["show", str(run_directory.path)]) == 0
    shown = capsys.readouterr()
    assert "warning: tiers not shown: " in shown.err
    assert "Foretold" in shown.err
    assert f"generation    {FIRST.name}" in shown.out
