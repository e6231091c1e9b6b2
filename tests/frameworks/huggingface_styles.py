"""Trainers as other people write them; STYLE says which, MODE=protected adds the line.

`stops` ends early, and a callback keeps its patience in plain attributes.  `seq2seq` generates in
its evaluations, `dpo` and `reward` are TRL's, `merge` merges an adapter of PEFT into its base every
few steps and begins it anew.
"""

import os
from typing import Any

import torch
import transformers as hf

from tests.frameworks import small
from tests.frameworks.small import option

WORDS = 48
"""Samples; the first word of a sample is its number."""


class Watching:
    """Counts forwards in a buffer of the model, notes samples, and may end the process."""

    def __init__(self, model: Any, entry: Any) -> None:
        """`entry`: the module that gets the tokens."""
        model.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        entry.register_forward_hook(self, with_kwargs=True)
        self._model = model

    def __call__(self, entry: Any, arguments: Any, named: dict[str, Any], out: Any) -> None:
        """Behind a forward."""
        if not (self._model.training and torch.is_grad_enabled()):
            return
        self._model.forwards += 1
        number = int(self._model.forwards)
        tokens = named["input_ids"] if "input_ids" in named else arguments[0]
        small.note(f"batch {number}", tokens.tolist())
        small.place("forward", number)
        first = getattr(out, "last_hidden_state", out)
        first = first[0] if isinstance(first, tuple | dict) else first
        if first.requires_grad:
            first.register_hook(lambda _: small.place("backward", number))


class Logs(hf.TrainerCallback):  # type: ignore[misc]
    """Whatever is logged, without times."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """One line each."""
        kept = {
            name: value for name, value in logs.items()
            if not any(word in name for word in ("runtime", "per_second", "flos"))
        }  # fmt: skip
        if "train_loss" not in kept:
            small.note(f"log {state.global_step} {sorted(kept)}", kept)


class Patience(hf.TrainerCallback):  # type: ignore[misc]
    """Counts evaluations that are no better, and halves the rate; nobody asks it for a state."""

    def __init__(self) -> None:
        self.best, self.bad, self.seen = float("inf"), 0, []

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, optimizer: Any = None,
        lr_scheduler: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """Behind each."""
        loss = metrics["eval_loss"]
        self.seen.append(loss)
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        small.note(f"patience {state.global_step}", self.best, self.bad, self.seen[-3:])
        if self.bad >= 2:
            self.bad = 0
            lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]


class Merges(hf.TrainerCallback):  # type: ignore[misc]
    """As ReLoRA does: base += B A, then A is drawn anew, B and the moments are zero."""

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Every 5 steps."""
        if state.global_step % 5:
            return
        from peft.tuners.lora import LoraLayer

        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.get_base_layer().weight.data += layer.get_delta_weight("default").detach()
                layer.reset_lora_parameters("default", init_lora_weights=True)
        for kept in optimizer.state.values():
            kept["exp_avg"].zero_()
            kept["exp_avg_sq"].zero_()


def arguments(**more: Any) -> dict[str, Any]:
    """Of all styles."""
    return {
        "output_dir": option("NOTES") + "-own", "use_cpu": True, "report_to": [], "seed": 1,
        "disable_tqdm": True, "per_device_train_batch_size": 4, "num_train_epochs": 3,
        "learning_rate": 1e-2, "logging_steps": 2, "save_strategy": "no", "bf16": False, **more,
    }  # fmt: skip


def llama(kind: Any) -> Any:
    """Two small layers."""
    config = hf.LlamaConfig(
        vocab_size=WORDS + 8, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, attention_dropout=0.1, max_position_embeddings=64, num_labels=1,
        pad_token_id=WORDS + 6, eos_token_id=WORDS + 7, bos_token_id=WORDS + 5,
    )  # fmt: skip
    model = kind(config)
    Watching(model, model.model)
    return model


def tokenizer() -> Any:
    """Of words w0, w1, ...; nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(WORDS + 6)}
    words |= {"<pad>": WORDS + 6, "<eos>": WORDS + 7}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="right"
    )


def text(*numbers: int) -> str:
    """A sentence."""
    return " ".join(f"w{number % WORDS}" for number in numbers)


def seq2seq() -> Any:
    """A translation, with sampling, early stopping and the best model at the end."""
    config = hf.T5Config(
        vocab_size=WORDS + 8, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config)
    Watching(model, model.encoder)
    model.generation_config.update(max_new_tokens=4, do_sample=True)
    rows = [
        {"input_ids": [n + 2, *((n * k) % WORDS + 2 for k in range(1, 3 + n % 5))], "labels": [
            (n * k) % WORDS + 2 for k in range(2, 6)
        ]} for n in range(WORDS)
    ]  # fmt: skip
    given = arguments(
        predict_with_generate=True, eval_strategy="steps", eval_steps=4, save_strategy="steps",
        save_steps=4, save_total_limit=2, load_best_model_at_end=True, label_smoothing_factor=0.1,
        metric_for_best_model="eval_mean", lr_scheduler_type="cosine", warmup_steps=3,
        max_grad_norm=0.5, train_sampling_strategy="group_by_length",
    )  # fmt: skip
    known = hf.Seq2SeqTrainingArguments.__dataclass_fields__
    return hf.Seq2SeqTrainer(
        model=model, train_dataset=rows, eval_dataset=rows[:8],
        args=hf.Seq2SeqTrainingArguments(**{k: v for k, v in given.items() if k in known}),
        data_collator=hf.DataCollatorForSeq2Seq(_padding(), model=model),
        compute_metrics=lambda found: {"mean": float(found.predictions.mean())},
        callbacks=[Logs(), hf.EarlyStoppingCallback(20)],
    )  # fmt: skip


def _padding() -> Any:
    """A tokenizer that only pads."""
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n + 2 for n in range(WORDS + 6)}}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip


def dpo() -> Any:
    """Preferences, against a copy of the model."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": text(n, n + 1), "chosen": text(n * 3, n * 5), "rejected": text(n * 7)}
        for n in range(WORDS)
    ]
    return DPOTrainer(
        model=llama(hf.LlamaForCausalLM), ref_model=llama(hf.LlamaForCausalLM),
        args=DPOConfig(**arguments(gradient_checkpointing=False, max_length=32)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), callbacks=[Logs()],
    )  # fmt: skip


def reward() -> Any:
    """A score for each answer."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rows = [{"chosen": text(n, n * 3, n * 5), "rejected": text(n, n * 7)} for n in range(WORDS)]
    return RewardTrainer(
        model=llama(hf.LlamaForSequenceClassification),
        args=RewardConfig(**arguments(gradient_checkpointing=False, max_length=32)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), callbacks=[Logs()],
    )  # fmt: skip


class Net(torch.nn.Module):
    """A classifier that drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )
        Watching(self, self.layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """With a loss."""
        out = self.layers(x)
        loss = torch.nn.functional.cross_entropy(out, labels) if labels is not None else None
        return {"loss": loss, "logits": out}


def stops() -> Any:
    """Two micro-batches a step, an accuracy, and an end before the last epoch."""
    data = torch.utils.data.StackDataset(
        x=torch.randn(WORDS * 2, 8), labels=torch.randint(0, 3, (WORDS * 2,))
    )
    given = arguments(
        eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_accuracy",
        gradient_accumulation_steps=2, num_train_epochs=6, learning_rate=3e-2, logging_steps=4,
        label_names=["labels"], remove_unused_columns=False,
    )  # fmt: skip
    return hf.Trainer(
        model=Net(), args=hf.TrainingArguments(**given), train_dataset=data,
        eval_dataset=torch.utils.data.Subset(data, range(30)),
        compute_metrics=lambda found: {
            "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
        callbacks=[Logs(), Patience(), hf.EarlyStoppingCallback(3)],
    )  # fmt: skip


def merge() -> Any:
    """An adapter whose product goes into the frozen base."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(llama(hf.LlamaForCausalLM), LoraConfig(target_modules=targets, r=4))
    rows = []
    for n in range(WORDS):
        words = [n, *((n * k) % WORDS for k in range(1, 8))]
        rows.append({"input_ids": words, "labels": words})
    return hf.Trainer(
        model=model, args=hf.TrainingArguments(**arguments()), train_dataset=rows,
        data_collator=hf.default_data_collator, callbacks=[Logs(), Merges()],
    )  # fmt: skip


def main() -> None:
    """Three epochs of twelve batches."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    small.seed()
    hf.set_seed(1)
    styles = {
        "seq2seq": seq2seq, "dpo": dpo, "reward": reward, "merge": merge, "stops": stops
    }  # fmt: skip
    trainer = styles[option("STYLE")]()
    if option("MODE") == "protected":
        from autockpt.integrations import huggingface

        huggingface.protect(trainer)
    trainer.train()
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    small.digest(
        model=trainer.model.state_dict(), optimizer=inner.state_dict(),
        scheduler=trainer.lr_scheduler.state_dict(),
        state=[trainer.state.global_step, trainer.state.epoch, trainer.state.best_metric],
    )  # fmt: skip


if __name__ == "__main__":
    main()
