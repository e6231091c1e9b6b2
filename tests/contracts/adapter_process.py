"""The training process of an adapter's contract: what it watches, and where it dies.

A driver is a script that ends with `run(train)`; `train(case, watch, how)` trains a `Model` over
`Samples` in its framework, with `how` one of "bare", "protected" and "own" (the framework's own
checkpoints).  It calls `watch.follow(parts)` before it trains and `watch.end()` behind.  Needs
torch alone: each framework has its environment.
"""

import dataclasses
import hashlib
import json
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLES, BATCH, EPOCHS, WIDTH = 48, 4, 2, 8
OWN_EVERY = 4
"""Optimizer steps between two checkpoints of the framework's own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    kill: str = ""
    """forward:N, backward:N or sigterm:N in micro-batch N (from 1), boundary:N behind step N; at
    node:N the last rank waits until the test has done something."""
    workers: int = 0
    persistent: bool = False
    accumulation: int = 1
    ranks: int = 1
    draws: bool = False
    """Each sample draws from the global generator, in the main process."""
    evaluate_every: int = 0
    option: str = ""
    """Whatever a driver makes of it."""

    @property
    def undisturbed(self) -> "Case":
        """Without the kill."""
        return dataclasses.replace(self, kill="")

    @property
    def name(self) -> str:
        """As the identifier of a test."""
        fields = dataclasses.asdict(self)
        fields["ranks"] = 0 if self.ranks == 1 else self.ranks
        fields["accumulation"] = 0 if self.accumulation == 1 else self.accumulation
        said = [f"{n}={v}" if v is not True else n for n, v in fields.items() if v]
        return ",".join(said).replace("kill=", "") or "undisturbed"

    @property
    def batches(self) -> int:
        """Micro-batches of an epoch on one rank."""
        return SAMPLES // BATCH // self.ranks


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Numbered samples."""

    def __init__(self, case: Case) -> None:
        self._draws = case.draws
        self._x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(WIDTH) if self._draws else torch.zeros(WIDTH)
        return {"ids": torch.tensor(index), "x": self._x[index] + noise, "labels": self._x[index]}


class Model(nn.Module):
    """Dropout, and a buffer that counts training forwards: it is saved with the rest."""

    def __init__(self, watch: "Watch") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.__dict__["watch"] = watch

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Loss of a batch; in training the batch is noted, and the process may die."""
        out = self.layers(x)
        loss = (out - (x if labels is None else labels)).square().mean()
        if self.training and torch.is_grad_enabled():  # else an evaluation that drops out, too
            self.forwards += 1
            number, watch = int(self.forwards), self.__dict__["watch"]
            watch.batch(number, [] if ids is None else ids.tolist())
            loss.register_hook(lambda _: watch.reached("backward", number))
        return {"loss": loss, "logits": out}


class Watch:
    """Notes what is trained, and ends the process where the case says so, once."""

    def __init__(self, case: Case, folder: str, how: str) -> None:
        self.case, self.folder, self.how = case, folder, how
        self.rank = int(os.environ.get("RANK", "0"))
        self._attempt = f"{self.rank}-{os.getpid()}"
        self.session: Any = None
        self._parts: Callable[[], dict[str, Any]] = dict
        if how == "protected":
            self._watch_boundaries()

    def _wait_for_the_test(self) -> None:
        """Until it has disturbed what it wants to."""
        deadline = time.monotonic() + 300
        while not os.path.exists(os.path.join(self.folder, "disturbed")):
            if time.monotonic() > deadline:
                raise TimeoutError("the test has disturbed nothing within 300 s")
            time.sleep(0.05)

    def follow(self, parts: Callable[[], dict[str, Any]]) -> None:
        """`parts()`: model, optimizer, maybe scheduler and more, of which digests are noted."""
        self._parts = parts

    def batch(self, number: int, ids: list[int]) -> None:
        """Micro-batch `number` is trained."""
        with open(os.path.join(self.folder, f"samples-{self._attempt}"), "a") as file:
            file.write(json.dumps([number, ids, self._digests()]) + "\n")
        self.reached("forward", number)
        self.reached("sigterm", number)
        self.reached("node", number)

    def reached(self, place: str, number: int) -> None:
        """Dies here, if it is to and has not before; the last rank does."""
        mark = os.path.join(self.folder, "killed")
        last = self.rank == self.case.ranks - 1
        if self.case.kill != f"{place}:{number}" or not last or os.path.exists(mark):
            return
        if self.session is not None:
            link = self.session._client
            link.wait_until(lambda: link.saves.memory_committed is not None, 60)
            before = self.session.step_count - 1  # however slow this machine is
            link.wait_until(lambda: link.saves.memory_committed.step >= before, 5)
        with open(mark, "w") as file:
            file.write(str(number))
        if place == "node":
            self._wait_for_the_test()
            return
        os.kill(os.getpid(), signal.SIGTERM if place == "sigterm" else signal.SIGKILL)

    def end(self) -> None:
        """Writes a digest of everything at the end."""
        with open(os.path.join(self.folder, f"end-{self.rank}"), "w") as file:
            json.dump(self._digests(), file)

    def _digests(self) -> dict[str, str]:
        parts = self._parts()
        if not parts:
            return {}
        model, scheduler = parts.pop("model"), parts.pop("scheduler", None)
        optimizer = parts.pop("optimizer")
        optimizer = getattr(optimizer, "optimizer", optimizer)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        states = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
        parts |= {
            "model": dict(model.state_dict()),
            "optimizer": [states, groups],
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "random": [random.getstate(), np.random.get_state()[1], torch.get_rng_state()],
        }
        return {name: _digest(value) for name, value in parts.items()}

    def passed(self, session: Any, count: int) -> None:
        """A boundary is over, and the coming one has its slot."""
        # Within a window of accumulation no slot comes: the fence is the optimizer's step.
        within_s = 60 if self.case.accumulation == 1 else 1
        session._client.wait_until(lambda: session.ready or session._rank.is_closed, within_s)
        self.reached("boundary", count)

    def _watch_boundaries(self) -> None:
        """Each boundary has its slot, whatever else the machine does: a save would be skipped."""
        from autockpt.session import saving
        from autockpt.session.session import Session

        saving.GRANT_WAIT_S = 20.0
        step, begin, watch = Session.step, Session._begin, self

        def begun(session: Any) -> None:
            begin(session)
            watch.session = session
            at = session.step_count
            with open(os.path.join(watch.folder, f"began-{watch._attempt}"), "w") as file:
                file.write(str(at))

        def stepped(session: Any) -> int:
            count = step(session)
            watch.passed(session, count)
            return count

        Session._begin, Session.step = begun, stepped  # type: ignore[method-assign]


def seed() -> None:
    """All generators."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def run(train: Callable[[Case, Watch, str], None]) -> None:
    """`python driver.py FOLDER HOW CASE`."""
    folder, how, text = sys.argv[1:4]
    case = Case(**json.loads(text))
    torch.set_num_threads(1)
    seed()
    train(case, Watch(case, folder, how), how)


def forked(driver: str, folder: str, how: str, case: str, settings: list[str]) -> None:
    """What a zygote does for one rank; "protected" is `autockpt run` under a launcher like it."""
    arguments = [driver, folder, how, case]
    if how != "protected":
        sys.argv = arguments
        runpy.run_path(driver, run_name="__main__")
        return
    from autockpt.cli.app import run as autockpt

    sets = [word for one in settings for word in ("--set", one)]
    result = autockpt(["run", "--no-profile", "--run-dir", f"{folder}/run", *sets, *arguments])
    sys.exit(result() if callable(result) else result)


def _digest(value: Any) -> str:
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.hexdigest()[:16]


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, np.ndarray):
        hasher.update(value.tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            hasher.update(str(key).encode())
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(repr(value).encode())
