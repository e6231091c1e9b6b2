"""The training that every contestant checkpoints: the example's model with short iterations.

It imports nothing of autockpt: peers run it in environments that have none.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt" / "train.py"


def load_example() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


class Job:
    """The example's model and optimizer with batches small enough for short iterations."""

    def __init__(self, size: str, tokens: int) -> None:
        example = load_example()
        torch.manual_seed(0)
        self.model = example.GPT(size, tokens, 0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(0, 256, (1, tokens + 1))
        self.before_update: Callable[[], None] = lambda: None

    def iterate(self) -> None:
        """One iteration."""
        self.model(self.batch[:, :-1], self.batch[:, 1:]).backward()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def state(self) -> dict[str, Any]:
        """What a user saves by hand."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def take(self, state: dict[str, Any]) -> None:
        """Puts a loaded `state()` back, as a user does by hand."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def flat(self) -> dict[str, torch.Tensor]:
        """The live tensors by name, each once: for formats that know tensors only."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found = {f"model.{name}": p.detach() for p, name in names.items()}
        found.update({f"buffer.{name}": b for name, b in self.model.named_buffers()})
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer.{names[parameter]}.{key}"] = value
        return found

    def take_flat(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copies tensors loaded by name into the live ones."""
        for name, tensor in self.flat().items():
            tensor.copy_(saved[name])

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state but the model's buffers."""
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*(p.detach() for p in self.model.parameters()), *moments]

    def digests(self) -> dict[str, str]:
        """Of every tensor's bits: equal before a save and after its load, or it was torn."""
        return {
            name: hashlib.blake2b(
                tensor.contiguous().view(-1).view(torch.uint8).numpy().data, digest_size=8
            ).hexdigest()
            for name, tensor in self.flat().items()
        }

    def wipe(self) -> None:
        """Zeroes the state, so that a load that did nothing is seen."""
        for tensor in self.flat().values():
            tensor.zero_()
