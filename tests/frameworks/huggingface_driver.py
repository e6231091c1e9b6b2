"""Hugging Face Trainer over the samples of the contract.

The option `lora` trains an adapter of PEFT, `sft` a small language model in TRL's SFTTrainer,
`stream` a data set without a length.  With `torn` Trainer saves too, and finds its newest save
damaged; with `beside` a second net and its optimizer are trained, and a callback averages weights.
"""

import os
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from tests.contracts.adapter_process import (
    BATCH,
    EPOCHS,
    OWN_EVERY,
    SAMPLES,
    WIDTH,
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


class Language(LlamaForCausalLM):  # type: ignore[misc]
    """Two small layers; the first token of a sample is its number."""

    def __init__(self, watch: Watch) -> None:
        config = LlamaConfig(
            vocab_size=SAMPLES + 8, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, attention_dropout=0.1, max_position_embeddings=32,
        )  # fmt: skip
        super().__init__(config)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.__dict__["watch"] = watch
        # Not in `forward`: TRL puts another one in its place.
        self.model.register_forward_hook(self._noted, with_kwargs=True)

    def _noted(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        """Notes the batch, and may die."""
        if not self.training or not torch.is_grad_enabled():
            return
        self.forwards += 1
        number, watch = int(self.forwards), self.__dict__["watch"]
        tokens = named["input_ids"] if "input_ids" in named else arguments[0]
        watch.batch(number, tokens[:, 0].tolist())
        out[0].register_hook(lambda _: watch.reached("backward", number))


def _sft(args: dict[str, Any], watch: Watch) -> Trainer:
    """TRL's trainer of a model that a config makes; nothing is downloaded."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    words = {f"w{number}": number for number in range(SAMPLES + 6)}
    words |= {"<pad>": SAMPLES + 6, "<eos>": SAMPLES + 7}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    rows = [{"input_ids": [number, *((number * k) % SAMPLES for k in range(1, 8))]}
            for number in range(SAMPLES)]  # fmt: skip
    config = SFTConfig(**args, max_length=16, bf16=False, gradient_checkpointing=False)
    return SFTTrainer(
        model=Language(watch), args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Counting()],
    )  # fmt: skip


class Average(TrainerCallback):  # type: ignore[misc]
    """Of the weights: it says its state as modules do, once a training has begun."""

    def __init__(self) -> None:
        self.mean: dict[str, torch.Tensor] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Builds it."""
        self.mean = {name: one.detach().clone() for name, one in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Behind each step."""
        for name, one in model.named_parameters():
            self.mean[name].lerp_(one.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The mean."""
        if not self.mean:
            raise RuntimeError("not built")
        return dict(self.mean)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """The mean."""
        for name, one in state.items():
            self.mean[name].copy_(one)


class Critic(Trainer):
    """Trains a second net by an optimizer of its own."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.critic = torch.nn.Linear(WIDTH, 1)
        self.second = torch.optim.Adam(self.critic.parameters(), lr=1e-2)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **named: Any) -> Any:
        """With what the critic says."""
        out = model(**inputs)
        self.second.zero_grad()
        (self.critic(out["logits"].detach()).mean() + torch.rand(())).square().backward()
        self.second.step()
        return out["loss"] + 0.01 * self.critic(out["logits"]).mean()


def _stream(data: Samples) -> Any:
    """The same samples, of which nobody knows the number."""
    from datasets import Dataset

    rows = [{name: one.tolist() for name, one in data[n].items()} for n in range(len(data))]
    return Dataset.from_list(rows).to_iterable_dataset(num_shards=2).shuffle(3, buffer_size=8)


def _trainer(args: dict[str, Any], case: Case, watch: Watch) -> Trainer:
    if case.option == "sft":
        return _sft(args, watch)
    data, model = Samples(case), Model(watch)
    if case.option == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["layers.0", "layers.2"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, lora_dropout=0.1))
    own: dict[str, Any] = {"label_names": ["labels"], "remove_unused_columns": False}
    if case.option == "stream":
        own["max_steps"] = EPOCHS * case.batches // case.accumulation
    kind = Critic if case.option == "beside" else Trainer
    return kind(
        model=model, args=TrainingArguments(**args, **own), eval_dataset=data,
        train_dataset=_stream(data) if case.option == "stream" else data,
        callbacks=[Counting(), *([Average()] if case.option == "beside" else [])],
    )  # fmt: skip


def _beside(trainer: Any) -> dict[str, Any]:
    if not isinstance(trainer, Critic):
        return {}
    (average,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Average))
    second = [trainer.second.state[p] for p in trainer.critic.parameters() if trainer.second.state]
    return {"critic": dict(trainer.critic.state_dict()), "second": second, "mean": average.mean}


def train(case: Case, watch: Watch, how: str) -> None:
    """As a user writes it."""
    own_folder = os.path.join(watch.folder, "own")
    args: dict[str, Any] = {
        "output_dir": own_folder, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "learning_rate": 1e-2,
        "gradient_accumulation_steps": case.accumulation, "warmup_steps": 3, "logging_steps": 2,
        "save_strategy": "steps" if how == "own" or case.option == "torn" else "no",
        "save_steps": OWN_EVERY,
        "eval_strategy": "steps" if case.evaluate_every else "no",
        "eval_steps": case.evaluate_every or 1, "dataloader_num_workers": case.workers,
        "dataloader_persistent_workers": case.persistent, "seed": 1,
    }  # fmt: skip
    seed()
    trainer = _trainer(args, case, watch)
    resume = None
    if how == "protected":
        from autockpt.integrations import huggingface

        huggingface.protect(trainer)
    if (how == "own" or case.option == "torn") and os.path.isdir(own_folder):
        resume = get_last_checkpoint(own_folder)
    if case.option == "torn" and resume is not None:
        os.unlink(f"{resume}/model.safetensors")
    ended: dict[str, Any] = {}
    """What is known at the end alone."""

    def parts() -> dict[str, Any]:
        return {
            "model": trainer.model, "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "state": [trainer.state.global_step, trainer.state.total_flos], **ended,
            **_beside(trainer),
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
