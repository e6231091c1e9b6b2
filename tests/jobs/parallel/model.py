"""A small language model that can be divided in every way, and its data.

Sizes that no number of ranks divides: 11 words, 6 features, 10 inner features.  With four ranks
some hold 3, some 2, some 1 and some no row of a tensor.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

WORDS, FEATURES, INNER, BLOCKS = 11, 6, 10, 4
BATCH, LENGTH = 8, 5


class Block(nn.Module):
    """Normalised, widened, narrowed, added: `up` can be divided by rows and `down` by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, INNER)
        self.down = nn.Linear(INNER, FEATURES)
        self.gain: torch.Tensor
        self.register_buffer("gain", torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, features] in and out."""
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.gain * y


class Net(nn.Module):
    """The whole model, or those of its blocks that a pipeline stage has, under the same names."""

    def __init__(
        self, seed: int, blocks: Sequence[int] = range(BLOCKS), *, tied: bool = False
    ) -> None:
        """All random numbers are drawn, so that a part is equal to that part of the whole.

        `tied`: head and embedding are one weight; of a whole model only.
        """
        super().__init__()
        torch.manual_seed(seed)
        parts: dict[str, nn.Module] = {"embed": nn.Embedding(WORDS, FEATURES)}
        every = {str(number): Block() for number in range(BLOCKS)}
        parts |= {"norm": nn.LayerNorm(FEATURES), "head": nn.Linear(FEATURES, WORDS)}
        first, last = 0 in blocks, BLOCKS - 1 in blocks
        self.embed = parts["embed"] if first else None
        self.blocks = nn.ModuleDict({str(number): every[str(number)] for number in blocks})
        self.norm = parts["norm"] if last else None
        self.head = parts["head"] if last else None
        if tied:
            parts["head"].weight = parts["embed"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words [batch, length], or what the stage before gave, to logits, or to the next stage."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(words, words that follow) of one of the equal parts of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    rows = words.chunk(parts)[part]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()  # a pipeline compares strides


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Mean over batch and length."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())
