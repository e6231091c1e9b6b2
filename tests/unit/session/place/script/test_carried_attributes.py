"""Trainers as users write them: which attributes a checkpoint would have to contain, and lacks."""

import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import autockpt
from autockpt.session.place.script.carried_attributes import CarriedAttributes
from autockpt.values.errors import ConfigError

STOPPER = """
    class Stopper:
        def __init__(self, patience):
            self.patience, self.best, self.bad = patience, 9e9, 0

        def __call__(self, value):
            if value < self.best:
                self.best, self.bad = value, 0
            else:
                self.bad += 1
            return self.bad >= self.patience
"""
TRAINER = """
    class Trainer:
        def __init__(self):
            self.stopper, self.step, self.seen, self.total = Stopper(3), 0, 0, 0.0
            self.epoch, self.callbacks = 0, [Stopper(9)]

        def fit(self):
            for epoch in range(4):
                self.epoch = epoch
                self.run()
                if self.stopper(epoch % 2) or self.callbacks[0](-epoch):
                    break

        def run(self):
            self.total = 0.0
            for n in range(2):
                self.step += 1
                self.seen += 16
                self.total += n
                rate(self.step)
                boundary()
            if self.total > self.epoch and self.seen % 100 == 0:
                print(self.total / 2, self.seen)

    trainer = Trainer()
    trainer.fit()
"""
MEMORY = """
    import collections
    import random
    memory, losses = collections.deque(maxlen=4), []

    def train():
        for n in range(8):
            memory.append(n)
            losses.append(float(n))
            rows, total = [n], sum(losses) / len(losses)
            random.choice(memory)
            print(sum(rows), total)
            boundary()

    train()
"""
ROLLOUT = """
    import random

    class Buffer:
        def __init__(self):
            self.rows = []

    buffer = Buffer()
    for n in range(3):
        for m in range(4):
            buffer.rows.append(m)
        random.choice(buffer.rows)
        buffer.rows.clear()
        boundary()
"""
MODEL = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.tau = torch.nn.Linear(1, 1), 1.0

        def forward(self, x):
            self.tau *= 0.9
            return self.inner(x) / self.tau

    net = Net()
    for n in range(3):
        net(torch.ones(1, 1))
        boundary()
"""
METER = """
    class Meter:
        def __init__(self):
            self.worst = 0.0

        def add(self, value):
            if value > self.worst:
                self.worst = value

    for epoch in range(2):
        meter = Meter()
        for n in range(3):
            meter.add(float(n))
            boundary()
"""


def notices_of(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    kept: Callable[[types.ModuleType], set[tuple[int, str]]] = lambda _: set(),
) -> list[str]:  # fmt: skip
    """The sentences of a script in a file of its own."""
    file = folder / "job.py"
    file.write_text(textwrap.dedent(source))
    job = types.ModuleType("job_of_a_test")
    job.__file__ = str(file)
    look, found = CarriedAttributes(), list[str]()
    monkeypatch.setitem(sys.modules, job.__name__, job)

    def boundary() -> None:
        found.append(look.look(sys._getframe(1), kept(job)))

    vars(job).update(boundary=boundary, rate=lambda step: step)
    exec(compile(file.read_text(), str(file), "exec"), vars(job))
    assert len(found) > 2
    return [text for text in found if text]


def test_a_trainer_that_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums for show, and attributes that each epoch assigns anew, are not among them."""
    step, best, bad = notices_of(STOPPER + TRAINER, tmp_path, monkeypatch)
    assert step == (
        "self.step (job.py, line 31) is not in a checkpoint, so a restart begins it anew. To keep "
        'it: attach(..., state=autockpt.TrainState.of(self, "step"))'
    )
    assert best.startswith("self.stopper.best, self.callbacks.0.best (job.py, line 7) are not in")
    assert bad.startswith("self.stopper.bad (job.py, line 11) is not in")


def test_what_an_attached_object_keeps_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attribute of a trainer, and a whole object."""

    def kept(job: types.ModuleType) -> set[tuple[int, str]]:
        trainer = job.trainer
        names = {autockpt.TrainState.of(trainer, "step").kept("step")}
        return names | {(id(trainer.stopper), ""), (id(trainer.callbacks[0]), "")}

    assert notices_of(STOPPER + TRAINER, tmp_path, monkeypatch, kept) == []


def test_a_memory_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script draws from it; of the losses it only shows the mean."""
    (text,) = notices_of(MEMORY, tmp_path, monkeypatch)
    assert text == (
        "memory (job.py, line 11) is not in a checkpoint, so a restart begins it anew. To keep it: "
        "state = autockpt.TrainState(memory=...), attach(..., state=state), and state.memory "
        "instead of memory"
    )


def test_an_attribute_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no buffer, and its next value comes from the last one."""
    (text,) = notices_of(MODEL, tmp_path, monkeypatch)
    assert 'autockpt.TrainState.of(net, "tau")' in text


@pytest.mark.parametrize("source", [ROLLOUT, METER])
def test_what_begins_anew_is_not_named(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is empty at each boundary, and a meter of one epoch."""
    assert notices_of(source, tmp_path, monkeypatch) == []


class Owner:
    """Has values, and an object with more."""

    def __init__(self) -> None:
        self.step, self.history, self.mean = 0, [1.0], torch.zeros(2)
        self.inner, self.rows = types.SimpleNamespace(best=9.0), [{"a": types.SimpleNamespace(n=1)}]


def test_attributes_come_back_where_they_are() -> None:
    """A list stays the same object, and a value that is no longer named is left."""
    owner = Owner()
    names = ("step", "history", "mean", "inner.best", "rows.0.a.n")
    state = autockpt.TrainState.of(owner, *names)
    owner.step, owner.inner.best, owner.rows[0]["a"].n = 7, 0.5, 4
    owner.history.append(2.0)
    owner.mean += 1
    saved = {key: (list(v) if key == "history" else v) for key, v in state.state_dict().items()}
    restarted = Owner()
    shown = restarted.history
    autockpt.TrainState.of(restarted, *names).load_state_dict(saved)
    assert (restarted.step, restarted.inner.best, restarted.history) == (7, 0.5, [1.0, 2.0])
    assert restarted.history is shown
    assert restarted.rows[0]["a"].n == 4
    assert restarted.mean.tolist() == [1.0, 1.0]
    assert restarted.mean is not owner.mean
    autockpt.TrainState.of(restarted, "step").load_state_dict({"step": 8, "gone": 1})
    assert restarted.step == 8
    autockpt.TrainState.of(owner, "history").load_state_dict({"history": owner.history})
    assert owner.history == [1.0, 2.0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "which attributes"),
        (("steps",), r"TrainState.of\(..., 'steps'\): a Owner has no attribute steps"),
        (("outer.best",), "a Owner has no attribute or item outer"),
        (("rows.1.a.n",), "a list has no attribute or item 1"),
        (("inner.worst",), "a SimpleNamespace has no attribute worst"),
    ],
)
def test_a_name_that_is_none_is_refused(names: tuple[str, ...], message: str) -> None:
    """Where it is written, and not at the first checkpoint."""
    with pytest.raises(ConfigError, match=message):
        autockpt.TrainState.of(Owner(), *names)
