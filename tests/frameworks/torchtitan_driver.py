"""A trainer that calls TorchTitan's checkpoint manager at its five points, in its order.

TorchTitan's own trainer cannot be imported without a GPU: it needs triton.  The manager, its
config and what it derives from are the real ones.
"""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.contracts.adapter_process import (
    BATCH,
    EPOCHS,
    OWN_EVERY,
    SAMPLES,
    Case,
    Model,
    Samples,
    Watch,
    run,
    seed,
)  # fmt: skip

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers(torch.optim.Optimizer):
    """A container of torch optimizers, as TorchTitan's is one, which saves by the same calls."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizers = model, [optimizer]
        super().__init__(optimizer.param_groups[0]["params"], {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:
        """Of all."""
        self.optimizers[0].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all."""
        self.optimizers[0].zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Flat, as TorchTitan's."""
        return get_optimizer_state_dict(self.model, self.optimizers[0], options=FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of all."""
        set_optimizer_state_dict(self.model, self.optimizers[0], state_dict, options=FLAT)


class Trainer:
    """`train` has the order of torchtitan/trainer.py."""

    def __init__(self, case: Case, watch: Watch, how: str) -> None:
        self.case, self.step, self.ntokens_seen = case, 0, 0
        data = Samples(case)
        self.model = Model(watch)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizers = Optimizers(self.model, optimizer)
        self.schedulers = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        self.dataloader: Any = StatefulDataLoader(
            data, batch_size=BATCH, shuffle=True, num_workers=case.workers,
            persistent_workers=case.persistent,
        )  # fmt: skip
        self.evaluation = DataLoader(data, batch_size=BATCH)
        self.steps = EPOCHS * (SAMPLES // BATCH) // case.accumulation
        self.checkpointer = _config(watch, how).build(
            dataloader=self.dataloader, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedulers, states={"train_state": self}, sd_adapter=None,
            base_folder=watch.folder,
        )  # fmt: skip

    def train(self) -> None:
        """Until the last step."""
        self.checkpointer.load(step=-1)
        batches = self._batches()
        while self.step < self.steps:
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step, last_step=self.step == self.steps)
            if self.case.evaluate_every and self.step % self.case.evaluate_every == 0:
                self._validate()

    def train_step(self, batches: Iterator[Any]) -> None:
        """Batches of the whole step first, as there."""
        self.optimizers.zero_grad()
        for batch in [next(batches) for _ in range(self.case.accumulation)]:
            self.ntokens_seen += len(batch["x"])
            (self.model(**batch)["loss"] / self.case.accumulation).backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self.dataloader

    def _validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in self.evaluation:
                self.model(**batch)
        self.model.train()

    def state_dict(self) -> dict[str, Any]:
        """As of TorchTitan's trainer."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of TorchTitan's trainer."""
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def _config(watch: Watch, how: str) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager

    if how == "protected":
        from autockpt.integrations.torchtitan import AutockptCheckpointManager

        return AutockptCheckpointManager.Config(enable=True, last_save_model_only=False)
    own = how == "own"
    return CheckpointManager.Config(enable=own, interval=OWN_EVERY, folder="own")


def train(case: Case, watch: Watch, how: str) -> None:
    """One process with a group of one, as TorchTitan always has."""
    place = os.path.join(tempfile.mkdtemp(), "store")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}", rank=0, world_size=1
    )
    seed()
    trainer = Trainer(case, watch, how)
    watch.follow(lambda: {
        "model": trainer.model, "optimizer": trainer.optimizers.optimizers[0],
        "scheduler": trainer.schedulers, "counters": trainer.state_dict(),
    })  # fmt: skip
    trainer.train()
    trainer.checkpointer.close()
    watch.end()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(train)
