"""Hugging Face Trainer over the samples of the contract."""

import os
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tests.contracts.adapter_process import (
    BATCH,
    EPOCHS,
    OWN_EVERY,
    Case,
    Model,
    Samples,
    Watch,
    run,
    seed,
)  # fmt: skip


class Counting(TrainerCallback):  # type: ignore[misc]
    """What a callback sees of the training."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing but the steps."""
        self.seen.append(state.global_step)


def train(case: Case, watch: Watch, how: str) -> None:
    """As a user writes it."""
    args = TrainingArguments(
        output_dir=os.path.join(watch.folder, "own"), use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, learning_rate=1e-2,
        gradient_accumulation_steps=case.accumulation, warmup_steps=3, logging_steps=2,
        save_strategy="steps" if how == "own" else "no", save_steps=OWN_EVERY,
        eval_strategy="steps" if case.evaluate_every else "no", eval_steps=case.evaluate_every or 1,
        dataloader_num_workers=case.workers, dataloader_persistent_workers=case.persistent,
        label_names=["labels"], remove_unused_columns=False, seed=1,
    )  # fmt: skip
    seed()
    data = Samples(case)
    trainer = Trainer(
        model=Model(watch), args=args, train_dataset=data, eval_dataset=data, callbacks=[Counting()]
    )
    resume = None
    if how == "protected":
        from autockpt.integrations import huggingface

        huggingface.protect(trainer)
    if how == "own" and os.path.isdir(args.output_dir):
        resume = get_last_checkpoint(args.output_dir)
    ended: dict[str, Any] = {}
    """What is known at the end alone."""

    def parts() -> dict[str, Any]:
        return {
            "model": trainer.model, "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "state": [trainer.state.global_step, trainer.state.total_flos], **ended,
        }  # fmt: skip

    watch.follow(parts)
    out = trainer.train(resume_from_checkpoint=resume)
    logs = [
        {k: v for k, v in each.items() if "runtime" not in k and "per_second" not in k}
        for each in trainer.state.log_history
    ]
    ended.update(log=logs[:-1], epoch=trainer.state.epoch, loss=out.training_loss)
    watch.end()


if __name__ == "__main__":
    run(train)
