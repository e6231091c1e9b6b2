"""What the trainings share: a net that draws, numbered samples, kills that happen once, digests.

`KILL` names places ("batch13,backward21"); at each the process ends itself once, by `SIGNAL`.
"""

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Samples(Dataset[tuple[int, torch.Tensor]]):
    """Numbered; with DRAW=1 each draws from the global generator, as augmentation does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values + torch.rand(8) / 100 if option("DRAW") else values


def option(name: str, default: str = "") -> str:
    """Of the environment."""
    return os.environ.get(name, default)


def seed() -> None:
    """All generators that a digest holds."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def net() -> torch.nn.Module:
    """With dropout: random numbers matter."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    )


def plan() -> dict[str, Any]:
    """For attach, where no `autockpt run` brings a plan."""
    if not option("PLAN"):
        return {}
    from autockpt.policies.policy_file.layers import with_settings
    from autockpt.values.goal import Goal

    return {"goal": with_settings(Goal(), option("PLAN").split(";"))}


def rank() -> str:
    """This process among those of its node."""
    return option("LOCAL_RANK", "0")


def note(*what: Any) -> None:
    """Of an iteration: a later line with the same first word stands for an earlier one."""
    with open(f"{option('NOTES')}-{rank()}", "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def place(name: str, number: int) -> None:
    """A place where the process may be killed."""
    here = f"{name}{number}"
    mark = Path(f"{option('NOTES')}.killed-{here}")
    if here in option("KILL").split(",") and rank() == option("KILL_RANK", "0"):
        if mark.exists():
            return
        mark.touch()
        os.kill(os.getpid(), getattr(signal, option("SIGNAL", "SIGKILL")))


def digest(**parts: Any) -> None:
    """Of the end, all generators included."""
    parts["rng"] = [random.getstate(), np.random.get_state()[1], torch.get_rng_state()]
    with open(f"{option('NOTES')}-{rank()}.end", "w", encoding="utf-8") as file:
        json.dump({name: _digest(part) for name, part in parts.items()}, file)


def _digest(value: Any) -> str:
    feed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            add(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray):
            feed.update(value.tobytes())
        elif isinstance(value, dict):
            for key in value:
                add(key)
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            feed.update(repr(value).encode())

    add(value)
    return feed.hexdigest()[:16]
