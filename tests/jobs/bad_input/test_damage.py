"""Checkpoints that were damaged after their commit: found, named, and passed over."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.executors.storage.catalogue import verify_generation
from autockpt.values.errors import ConfigError, NoCheckpointError
from autockpt.values.telemetry import Restored
from tests.support import trainings
from tests.support.live import SPEC, Live
from tests.unit.executors.checkpoints import CHUNK

PLAN = trainings.plan(memory=4, disk=4)


def file(folder: Path, kind: str) -> Path:
    """The only file of a kind (shard, idx, COMMIT) of a generation."""
    (found,) = folder.glob(f"{kind}*")
    return found


def flip(folder: Path) -> None:
    """One bit of the second chunk of the shard."""
    path = file(folder, "shard")
    data = bytearray(path.read_bytes())
    data[CHUNK + 100] ^= 0x04
    path.write_bytes(data)


def remove(folder: Path) -> None:
    """The shard is gone."""
    file(folder, "shard").unlink()


def cut(folder: Path) -> None:
    """Half an index."""
    path = file(folder, "idx")
    os.truncate(path, path.stat().st_size // 2)


def scribble(folder: Path) -> None:
    """A COMMIT that is none."""
    file(folder, "COMMIT").write_bytes(b"\0garbage{" * 20)


DAMAGES = [
    (flip, "shard-00000-a1.safetensors.*chunk 1"),
    (remove, "shard-00000-a1.safetensors.*No such file"),
    (cut, "idx-00000-a1.json"),
    (scribble, "COMMIT"),
]


@pytest.mark.parametrize(
    ("damage", "named"), DAMAGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_newest_damaged_generation_is_named_and_the_one_before_is_resumed(
    damage: Callable[[Path], None], named: str, live: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    """By `verify` and by a restart, which ends in the digest of an undisturbed run all the same."""
    whole = trainings.bare(trainings.build(SPEC))
    assert live.train(SPEC, PLAN) == whole
    live.leave()
    before = live.durable_steps()
    assert set(before) == {4, 8, 12}
    damage(Path(live.checkpoints, before[12]))
    result = verify_generation(live.checkpoints, before[12])
    assert not result.ok
    assert any(re.search(named, problem) for problem in result.problems), result.problems
    for step in (4, 8):
        assert verify_generation(live.checkpoints, before[step]).ok
    job, ckpt = live.attach(SPEC)
    assert ckpt.step_count == 8
    assert "resumed step 8 from disk" in capfd.readouterr().err
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
    assert trainings.digest(job) == whole
    live.leave()
    assert live.events(Restored)[-1].step == 8
    job, ckpt = live.attach(SPEC)
    assert ckpt.step_count == 12, "the run is whole again"


def test_when_every_generation_is_damaged_nothing_starts_from_scratch_by_itself(live: Live) -> None:
    """The error says how to do it on purpose."""
    live.train(SPEC, PLAN)
    live.leave()
    for name in live.durable_steps().values():
        flip(Path(live.checkpoints, name))
    with pytest.raises(NoCheckpointError, match="start over on purpose with --fresh") as caught:
        live.attach(SPEC)
    assert caught.value.exit_code == 66
    assert live.checkpoints in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            replace(SPEC, width=48),
            r"model\.\S+: is \(\S+.*\) torch.float32 now, .* in the checkpoint",
        ),
        (
            replace(SPEC, model="odd"),
            r"tensors are not in the checkpoint, first 'model\.brain_float",
        ),
        (replace(SPEC, model="bf16"), r"model\.\S+: is .* torch.bfloat16 now, .* torch.float32"),
        (
            replace(SPEC, optimizer="sgd"),
            "optimizer: a SGD with dampening, .* from the checkpoint, whose optimizer has .*betas",
        ),
    ],
    ids=["shape", "new-tensor", "dtype", "optimizer"],
)
def test_a_state_that_changed_names_the_tensor_and_spoils_nothing(
    changed: trainings.JobSpec, said: str, live: Live
) -> None:
    """The code that wrote the checkpoint still loads it."""
    whole = live.train(SPEC, PLAN)
    live.leave()
    with pytest.raises(ConfigError, match=said) as caught:
        live.attach(changed)
    assert caught.value.exit_code == 78
    live.leave()
    job, ckpt = live.attach(SPEC)
    assert ckpt.step_count == 12
    ckpt.close()
    assert trainings.digest(job) == whole
