"""What is kept of a script's objects that nothing asks for a state."""

import importlib.util
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autockpt.session.place.script.changed_attributes import ChangedAttributes

SCRIPT = """
import time
from collections import deque
from argparse import Namespace

class Base:
    def __init__(self, patience):
        self.patience = patience
        self.best, self.bad = float("inf"), 0

class Watching(Base):
    __slots__ = ()
    def __init__(self, patience=3):
        super().__init__(patience)
        self.losses, self.last = [], deque(maxlen=2)
        self.by_epoch, self.seen, self.pair = {}, set(), (0, 0)
        self.model, self.name = object(), ""

    def begin(self):
        self.started = time.time()

    def end(self, epoch, loss):
        self.best, self.bad = min(self.best, loss), self.bad + 1
        self.losses.append(loss)
        self.last.append(loss)
        self.by_epoch[epoch] = {"loss": loss}
        self.seen.add(epoch)
        self.pair = (epoch, loss)
        self.name = f"epoch {epoch}"
        self.model = object()
        self.spent = time.time() - self.started

class Namespaced(Namespace):
    pass
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Any]:
    """A module of the script's."""
    file = tmp_path / "callbacks_of_a_script.py"
    file.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[file.stem]


def test_changed_values_come_back(script: Any) -> None:
    """Of base classes too, in the same objects, as JSON holds them; times are of the process."""
    former = script.Watching()
    former.begin()
    kept = ChangedAttributes({"one": former})
    assert kept.state() == {}
    for epoch in range(3):
        former.end(epoch, 1.0 / (epoch + 1))
    state = json.loads(json.dumps(kept.state()))
    assert "spent" not in state["one"]
    assert "model" not in state["one"]
    again = script.Watching()
    losses = again.losses
    resumed = ChangedAttributes({"one": again})
    resumed.load(state)
    for name in ("best", "bad", "losses", "last", "by_epoch", "seen", "pair", "name"):
        assert getattr(again, name) == getattr(former, name), name
    assert again.losses is losses
    assert type(again.last) is deque
    assert again.last.maxlen == 2
    assert json.loads(json.dumps(resumed.state())) == state


def test_what_a_constructor_sets_is_of_this_start(script: Any) -> None:
    """An argument that the user has changed is not undone."""
    former = script.Watching(patience=3)
    former.begin()
    kept = ChangedAttributes({"one": former})
    former.end(0, 0.5)
    again = script.Watching(patience=9)
    ChangedAttributes({"one": again}).load(kept.state())
    assert (again.patience, again.best) == (9, 0.5)


def test_objects_of_packages_keep_their_own(script: Any) -> None:
    """Only attributes that a class of the script assigns count."""
    owner = script.Namespaced(count=0)
    kept = ChangedAttributes({"one": owner})
    owner.count = 5
    assert kept.state() == {}


def test_what_does_not_fit_is_left(script: Any) -> None:
    """Owners that are gone, attributes that cannot be set, and histories without end."""
    owner = script.Watching()
    kept = ChangedAttributes({"one": owner})
    owner.losses.extend([0.0] * 10_001)
    owner.bad = 2
    assert kept.state() == {"one": {"bad": 2}}
    kept.load({"gone": {"bad": 1}, "one": {"__class__": 1, "bad": 7}})
    assert owner.bad == 7
