"""Whatever happens to the state while a snapshot is in flight, what is saved is the boundary's.

The copy is held after its first piece by a gate, so that every mutation here really falls between
boundary and fence.  Either the fence waited and the saved bytes are those of the boundary, or the
generation is discarded, the tensor is named, and the next one is good.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from autockpt.executors.snapshot import copy_engine as snapshots
from autockpt.session.boundaries import changing_tensors
from tests.support import trainings
from tests.support.live import granted

PATIENCE_S = 30.0


class Gate:
    """Holds the copy thread after its first piece until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.held = threading.Event()
        publish = snapshots.ProgressCounter.set

        def set_and_wait(counter: Any, copied: int) -> None:
            publish(counter, copied)
            if threading.current_thread().name == "autockpt-copy":
                self.held.set()  # also where a boundary that waits has opened the gate before
                assert self.opened.wait(PATIENCE_S)

        monkeypatch.setattr(snapshots.ProgressCounter, "set", set_and_wait)
        waited = snapshots.CopyEngine.wait_for

        def wait_and_open(engine: Any, done: Any) -> float:
            if not done():
                self.fenced.append(True)
                self.opened.set()
            return waited(engine, done)

        self.fenced: list[bool] = []
        """One entry for every time that somebody waited for a copy under way."""
        monkeypatch.setattr(snapshots.CopyEngine, "wait_for", wait_and_open)

    def close(self) -> None:
        """The next copy stops after its first piece."""
        self.held.clear()
        self.fenced.clear()
        self.opened.clear()


class Bench:
    """A training under a plan that saves every step, and what it saved."""

    def __init__(
        self, job: trainings.Job, ckpt: Any, gate: Gate, run_dir: str, attached: dict[str, Any]
    ) -> None:
        self.job, self.ckpt, self.gate, self.run_dir = job, ckpt, gate, Path(run_dir)
        self.attached = attached
        self.batches = iter(job.loader)
        self.step = 0

    def train(self) -> None:
        """One iteration, without its boundary."""
        batch = next(self.batches)
        trainings.train_step(self.job, self.step, batch)
        self.step += 1

    def warm_up(self) -> None:
        """Until the slots are there and nothing is in flight; the first boundary saves nothing."""
        saver = self.ckpt._saver
        saver.is_due = lambda step: False
        self.train()
        self.ckpt.step()
        assert self.ckpt._client.wait_until(lambda: bool(self.ckpt._client.slots), PATIENCE_S)
        self.train()
        del saver.is_due

    def boundary(self) -> dict[str, torch.Tensor]:
        """Ends the iteration, with the copy held; the state that must be saved."""
        granted(self.ckpt)
        self.gate.close()
        expected = self.state()
        self.ckpt.step()
        begun = self.gate.held.wait(PATIENCE_S)
        assert begun, ("no snapshot began", self.events("SaveSkipped")[-2:])
        return expected

    def state(self) -> dict[str, torch.Tensor]:
        """Everything with a name, as of now."""
        found = {}
        models = self.attached["model"]
        for prefix, model in models.items() if isinstance(models, dict) else [("", models)]:
            start = f"model.{prefix}." if prefix else "model."
            for name, tensor in model.state_dict().items():
                found[start + name] = tensor.detach().clone()
        optimizer = self.job.optimizers["optimizer"]
        names = {id(p): n for n, p in self.job.model.named_parameters()}
        inner = "model.net." if isinstance(models, dict) else "model."
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                name = f"optimizer.{inner}{names[id(parameter)]}.{key}"
                if isinstance(value, torch.Tensor):
                    found[name] = value.detach().clone()
        return found

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        """What stands on disk for a step."""
        assert self.ckpt._client.wait_until(lambda: self.on_disk(step) is not None, PATIENCE_S)
        folder = self.on_disk(step)
        assert folder is not None
        (shard,) = folder.glob("shard-*.safetensors")
        with safe_open(shard, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def on_disk(self, step: int) -> Path | None:
        """The committed generation of a step."""
        for commit in self.run_dir.glob("checkpoints/ckpt-*/COMMIT"):
            if json.loads(commit.read_text())["step"] == step:
                return commit.parent
        return None

    def discarded(self) -> dict[str, Any]:
        """The one snapshot that was; the copy's thread gives the verdict behind the fence."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.events("SnapshotDiscarded")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (event,) = found
        return event

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Telemetry of this rank."""
        self.ckpt._rank.telemetry.flush()
        lines = (self.run_dir / "telemetry" / "rank-00000.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def assert_saved(saved: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every byte of the boundary."""
    for name, tensor in expected.items():
        assert name in saved, f"{name} is not in {sorted(saved)}"
        assert torch.equal(saved[name].view(tensor.dtype), tensor), name


@pytest.fixture
def bench(
    attach: Callable[..., Any], new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Bench]]:
    """Makes a Bench; extra models go under their own names beside `net`.

    `changing`: names that an earlier process of the run left.
    """
    torch.set_num_threads(1)
    gate = Gate(monkeypatch)

    def make(
        optimizer: str = "adamw", changing: frozenset[str] = frozenset(), **models: nn.Module
    ) -> Bench:
        job = trainings.build(trainings.JobSpec(optimizer=optimizer, width=64))
        run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
        if changing:
            changing_tensors.write(changing_tensors.path_of(run_dir, 0), changing)
        attached = job.attached
        del attached["data"]
        if models:
            attached["model"] = {"net": job.model, **models}
        ckpt = attach(**attached, run_dir=run_dir)
        bench = Bench(job, ckpt, gate, run_dir, attached)
        bench.warm_up()
        return bench

    yield make
    gate.opened.set()


@pytest.mark.parametrize("optimizer", ["fused", "adamw", "fp32-states"])
def test_an_optimizer_step_waits_for_the_copy(bench: Callable[..., Bench], optimizer: str) -> None:
    """The hook fences, whatever the optimizer does to version counters."""
    it = bench(optimizer)
    expected = it.boundary()
    it.train()  # its step opens the gate by waiting
    assert it.gate.fenced
    assert_saved(it.saved(2), expected)
    assert not it.events("SnapshotDiscarded")


def test_running_statistics_are_saved_as_of_the_boundary(bench: Callable[..., Bench]) -> None:
    """BatchNorm changes its buffers in the forward, unseen by any hook: they were copied before."""
    it = bench()
    expected = it.boundary()
    before = it.job.model.norm.running_mean.clone()
    it.job.model(torch.randn(8, trainings.FEATURES))
    assert not torch.equal(it.job.model.norm.running_mean, before)
    it.ckpt.wait_for_staging()
    assert_saved(it.saved(2), expected)


def test_load_state_dict_waits_for_the_copy(bench: Callable[..., Bench]) -> None:
    """Of the module and of the optimizer."""
    it = bench()
    for step in (2, 4):
        expected = it.boundary()
        if step == 2:
            zeros = {k: torch.zeros_like(v) for k, v in it.job.model.state_dict().items()}
            it.job.model.load_state_dict(zeros)
        else:
            optimizer = it.job.optimizers["optimizer"]
            optimizer.load_state_dict(optimizer.state_dict())
        assert it.gate.fenced
        assert_saved(it.saved(step), expected)
        it.train()
        it.ckpt.step()
        # A save asked for while the last one is still being digested is skipped, rightly.
        assert it.ckpt.wait_durable(PATIENCE_S)
        it.train()
    assert not it.events("SnapshotDiscarded")


def test_a_public_fence_makes_a_manual_update_safe(bench: Callable[..., Bench]) -> None:
    """`ckpt.wait_for_staging()` before code that changes the state by itself."""
    it = bench()
    expected = it.boundary()
    it.ckpt.wait_for_staging()
    with torch.no_grad():
        it.job.model.head.weight.data.add_(1.0)
    assert_saved(it.saved(2), expected)
    assert not it.events("SnapshotDiscarded")


def _data_add(model: trainings.Net) -> None:
    model.again.weight.data.add_(1.0)


def _numpy_write(model: trainings.Net) -> None:
    model.again.weight.detach().numpy()[:] *= 2.0


def _no_grad_add(model: trainings.Net) -> None:
    with torch.no_grad():
        model.again.weight.add_(1.0)


def _new_data(model: trainings.Net) -> None:
    model.again.weight.data = torch.zeros_like(model.again.weight)


@pytest.mark.parametrize("mutate", [_data_add, _numpy_write, _no_grad_add, _new_data])
def test_a_change_behind_the_fence_discards_and_names(
    bench: Callable[..., Bench], mutate: Callable[[trainings.Net], None],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The torn snapshot never counts; from then on the tensor is copied at the boundary."""
    it = bench()
    it.boundary()
    mutate(it.job.model)
    it.train()
    discarded = it.discarded()
    assert discarded["step"] == 2
    assert "model.again.weight" in discarded["reason"]
    assert "model.head" not in discarded["reason"]
    said, deadline = "", time.monotonic() + 10
    while "model.again.weight; copied at the boundary" not in said:  # behind the event
        assert time.monotonic() < deadline, said
        said += capfd.readouterr().err

    expected = it.boundary()
    mutate(it.job.model)
    it.train()
    assert len(it.events("SnapshotDiscarded")) == 1
    assert_saved(it.saved(3), expected)
    assert it.on_disk(2) is None
    left = changing_tensors.read(changing_tensors.path_of(it.run_dir, 0))
    assert left == {"model.again.weight"}


def test_the_next_process_loses_no_snapshot_to_what_is_known(bench: Callable[..., Bench]) -> None:
    """Each restart of a script that averages its weights would lose its first one otherwise."""
    it = bench(changing=frozenset({"model.again.weight", "model.of.another.time"}))
    expected = it.boundary()
    _data_add(it.job.model)
    it.train()
    assert_saved(it.saved(2), expected)
    assert not it.events("SnapshotDiscarded")


def test_an_average_updated_in_place_is_noticed(bench: Callable[..., Bench]) -> None:
    """No optimizer owns an EMA: its update between boundary and step is behind the fence."""
    ema = trainings.Net(trainings.JobSpec(width=64))
    it = bench(ema=ema)

    def update() -> None:
        with torch.no_grad():
            for mean, value in zip(ema.parameters(), it.job.model.parameters(), strict=True):
                mean.data.mul_(0.9).add_(value, alpha=0.1)

    expected = it.boundary()
    update()
    it.train()
    assert it.ckpt._client.wait_until(
        lambda: bool(it.events("SnapshotDiscarded")) or it.on_disk(2) is not None, PATIENCE_S
    )
    discarded = it.events("SnapshotDiscarded")
    if discarded:
        assert "model.ema." in discarded[0]["reason"]
        assert "model.net." not in discarded[0]["reason"]
        expected = it.boundary()
        update()
        it.train()
        assert_saved(it.saved(3), expected)
    else:
        assert_saved(it.saved(2), expected)
    assert len(it.events("SnapshotDiscarded")) <= 1
