"""A training of two epochs that goes on with other settings, in each framework.

    python -m tests.frameworks.changed_settings accelerate RUN_DIR BATCH ACCUMULATION STOP

It prints the samples of each step of the optimizer since the first start, and of a gradient that
still waits for one.  STOP is the step behind which it asks for the end; 0 for none.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tests.contracts.adapter_contract import Framework

SAMPLES = 24
EPOCHS = int(os.environ.get("EPOCHS", "2"))
STEPS = int(os.environ.get("STEPS", "0"))


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Each sample is its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.zeros(1)}


class Net(torch.nn.Module):
    """Its gradient has a mark for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """A loss that no other sample of the data has a part in."""
        return {"loss": sum(self.weight[int(number)] for number in x.flatten())}


class Steps(torch.optim.SGD):
    """Notes the samples behind each gradient."""

    def __init__(self, net: Net) -> None:
        super().__init__(net.parameters(), lr=1e-3)
        self.net = net
        self.noted: list[list[int]] = []

    def waiting(self) -> list[int]:
        """Samples of the gradient as it is now."""
        grad = self.net.weight.grad
        return [] if grad is None else [n for n in range(SAMPLES) if grad[n]]

    def step(self, closure: Any = None) -> Any:
        """As SGD's."""
        loss = None if closure is None else closure()
        self.noted.append(self.waiting())
        super().step()
        return loss


def accelerate(run_dir: str, batch: int, accumulation: int, stop: int) -> list[list[int]]:
    """The script counts the windows, and finds the last batch by its number."""
    from accelerate import Accelerator

    from autockpt.integrations.accelerate import attach

    accelerator, net = Accelerator(cpu=True), Net()
    steps = Steps(net)
    model, optimizer, loader = accelerator.prepare(
        net, steps, DataLoader(Numbers(), batch, shuffle=True)
    )
    ckpt = attach(accelerator, run_dir=run_dir)
    for _ in range(ckpt.epoch, EPOCHS):
        for i, data in enumerate(loader, ckpt.first_batch):
            steps_now = (i + 1) % accumulation == 0 or i + 1 == len(loader)
            accelerator.gradient_state._set_sync_gradients(steps_now)
            accelerator.backward(model(**data)["loss"])
            if steps_now:
                optimizer.step()
                optimizer.zero_grad()
                if len(steps.noted) == stop:
                    ckpt.request_stop()
            ckpt.step()
            if ckpt.stopped:
                ckpt.close()
                return steps.noted
    ckpt.close()
    return [*steps.noted, steps.waiting()]


def accumulate(run_dir: str, batch: int, accumulation: int, stop: int) -> list[list[int]]:
    """Accelerate counts the windows."""
    from accelerate import Accelerator

    from autockpt.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    net = Net()
    steps = Steps(net)
    model, optimizer, loader = accelerator.prepare(
        net, steps, DataLoader(Numbers(), batch, shuffle=True)
    )
    ckpt = attach(accelerator, run_dir=run_dir)
    for _ in range(ckpt.epoch, EPOCHS):
        for data in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**data)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if len(steps.noted) == stop and accelerator.sync_gradients:
                ckpt.request_stop()
            ckpt.step()
            if ckpt.stopped:
                ckpt.close()
                return steps.noted
    ckpt.close()
    return [*steps.noted, steps.waiting()]


def huggingface(run_dir: str, batch: int, accumulation: int, stop: int) -> list[list[int]]:
    """Trainer, which counts steps of an epoch from its arguments."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from autockpt.integrations.huggingface import protect

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop - 1:
                trainer.autockpt.request_stop()

    net = Net()
    steps = Steps(net)
    arguments = TrainingArguments(
        output_dir=os.path.join(run_dir, "own"), use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        num_train_epochs=EPOCHS, max_steps=STEPS or -1, save_strategy="no",
        label_names=["labels"], max_grad_norm=0,
    )  # fmt: skip
    trainer = Trainer(
        net, arguments, train_dataset=Numbers(), callbacks=[Stops()], optimizers=(steps, None)
    )
    protect(trainer, run_dir=run_dir).train()
    return [*steps.noted, [] if stop else steps.waiting()]


def lightning(run_dir: str, batch: int, accumulation: int, stop: int) -> list[list[int]]:
    """Trainer, which steps at the last batch too, and validates behind it."""
    import lightning as L

    from autockpt.integrations.lightning import Autockpt

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, data: Any, _: int) -> Any:
            if len(self.steps.noted) == stop - 1 and callback.session is not None:
                callback.session.request_stop()
            return self.net(**data)["loss"]

        def on_train_epoch_end(self) -> None:
            self.steps.noted += [[-1]] * validated.count(1)
            validated.clear()

        def validation_step(self, data: Any, number: int) -> None:
            if number == 0:
                validated.append(1)

        def configure_optimizers(self) -> Any:
            self.steps = Steps(self.net)
            return self.steps

    validated: list[int] = []
    callback, module = Autockpt(run_dir=run_dir), Module()
    trainer = L.Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=accumulation, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback], num_sanity_val_steps=0, max_steps=STEPS or -1,
    )  # fmt: skip
    data = DataLoader(Numbers(), batch, shuffle=True)
    trainer.fit(module, data, DataLoader(Numbers(), SAMPLES))
    return [*module.steps.noted, [] if stop else module.steps.waiting()]


def ignite(run_dir: str, batch: int, accumulation: int, stop: int) -> list[list[int]]:
    """An engine, which counts epochs by its iterations."""
    from ignite.engine import Engine, Events

    from autockpt.integrations.ignite import attach

    net = Net()
    steps = Steps(net)

    def update(engine: Any, data: Any) -> None:
        if len(steps.noted) == stop - 1:
            ckpt.request_stop()
        net(**data)["loss"].backward()
        within = (engine.state.iteration - 1) % engine.state.epoch_length + 1
        if within % accumulation == 0 or within == engine.state.epoch_length:
            steps.step()
            steps.zero_grad()

    engine = Engine(update)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda _: steps.noted.append([-1]))
    ckpt = attach(engine, model=net, optimizer=steps, run_dir=run_dir)
    length = {"max_iters": STEPS} if STEPS else {"max_epochs": EPOCHS}
    engine.run(ckpt.loader(DataLoader(Numbers(), batch, shuffle=True)), **length)
    return [*steps.noted, [] if stop else steps.waiting()]


STYLES: dict[str, Callable[[str, int, int, int], list[list[int]]]] = {
    "accelerate": accelerate, "accumulate": accumulate, "huggingface": huggingface,
    "lightning": lightning, "ignite": ignite,
}  # fmt: skip


def trained(
    framework: Framework,
    style: str,
    run_dir: str,
    *,
    batch: int,
    accumulation: int,
    stop: int = 0,
    epochs: int = 2,
    steps: int = 0,
) -> tuple[list[list[int]], str]:
    """(samples of each step, what it printed) of one start."""
    words = [style, run_dir, str(batch), str(accumulation), str(stop)]
    done = subprocess.run(
        [framework.python, "-m", "tests.frameworks.changed_settings", *words],
        text=True, capture_output=True, check=False, timeout=240,
        env=os.environ | {"AUTOCKPT_SAME_JOB": "1", "EPOCHS": str(epochs), "STEPS": str(steps)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    line = done.stdout.splitlines()[-1]
    return json.loads(line), done.stdout + done.stderr


def each_epoch(steps: list[list[int]]) -> list[list[list[int]]]:
    """Steps of each epoch of which all samples were trained; each sample is in one of its steps.

    Marks of an epoch's end, [-1], and the rest of an epoch are left out.
    """
    epochs: list[list[list[int]]] = []
    current: list[list[int]] = []
    for step in (one for one in steps if one != [-1]):
        current.append(step)
        numbers = sorted(number for one in current for number in one)
        assert len(numbers) == len(set(numbers)), steps
        if len(numbers) == SAMPLES:
            epochs.append(current)
            current = []
    return epochs


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(STYLES[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:6]))))
