"""Hugging Face Trainer under autockpt: a tiny GPT-2 made from a config, so nothing is downloaded.

    autockpt run examples/frameworks/huggingface_trainer.py

Kill the training process while it runs; it goes on where it was.
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autockpt


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens: 400 samples of 32."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(2, 512, (400, 32), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def main() -> None:
    """Three epochs of 100 steps."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=512, n_positions=64, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir="runs/huggingface-own", per_device_train_batch_size=4, num_train_epochs=3,
        logging_steps=20, save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Tokens())
    autockpt.integrations.huggingface.protect(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
