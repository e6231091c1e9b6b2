"""Loops in users' styles: which of their values a checkpoint would have to contain, and lacks."""

import linecache
import re
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from autockpt.session.place.script.carried_values import (
    CarriedNumbers,
    CarriedValues,
    carried_numbers,
    carried_values,
    counted_batches,
)
from autockpt.session.place.script.frames import is_within_loop

FETCHED_AHEAD = """
    x, y = fetch()
    n = 0
    while True:
        loss = model(x, y)
        x, y = fetch()
        n += 1
        boundary()
        if n > 1:
            break
"""
"""As nanoGPT does it."""
ACCUMULATED = """
    x, y = fetch()
    for n in range(3):
        for micro in range(2):
            loss = model(x, y)
            x, y = fetch()
        boundary()
"""
PREFETCHER = """
    x = loader.next()
    while x is not None:
        model(x)
        boundary()
        x = loader.next()
"""
HIDDEN = """
    for epoch in range(1):
        hidden = zeros()
        for x in data:
            hidden = hidden.detach()
            out, hidden = model(x, hidden)
            boundary()
"""
METHOD = """
    class Trainer:
        def __init__(self):
            self.model = model

        def fit(self):
            batch = {"x": fetch()[0]}
            for n in range(2):
                self.model(batch["x"])
                batch = {"x": fetch()[0]}
                self.end()

        def end(self):
            boundary()

    Trainer().fit()
"""
ENVIRONMENT = """
    seen = observe()
    for n in range(2):
        action = model(torch.as_tensor(seen))
        seen = observe()
        boundary()
"""
HELPER = """
    def step(network, x):
        return network(x)

    x = fetch()[0]
    for n in range(2):
        step(model, x)
        x = fetch()[0]
        boundary()
"""
PLAIN = """
    for n in range(2):
        x, y = fetch()
        model(x, y)
        boundary()
"""
TIMED = """
    import time
    began = time.time()
    total = torch.zeros(1)
    for x in data:
        x = x.to("cpu")
        loss = model(x)
        total += loss
        mean = 0.9 * total
        began, took = time.time(), time.time() - began
        boundary()
"""
EVALUATED = """
    best = model(data[0])
    for epoch in range(2):
        for x in data:
            model(x)
            boundary()
        found = model(data[0])
        best = found if found < best else best
"""
GENERATOR = """
    noise = torch.randn(2)
    for x in data:
        fake = model(noise)
        model(fake.detach())
        boundary()
"""
CLOSURE = """
    for x in data:
        def closure():
            return model(x)
        closure()
        rows = [model(x) for x in data]
        boundary()
"""
COUNTED = """
    rate = 1.0
    for x in data:
        model(x, rate)
        rate = rate * 0.9
        boundary()
"""
BEST = """
    best, bad = None, 0
    for epoch in range(2):
        for x in data:
            model(x)
            boundary()
        loss = float(epoch)
        if not best or loss < best:
            best, bad = loss, 0
        else:
            bad += 1
            if bad >= 3:
                break
"""
BEST_OF = """
    def train():
        for x in data:
            model(x)
            boundary()

    best = 0.0
    for epoch in range(2):
        train()
        best = max(best, float(epoch))
"""
"""As torch's example for ImageNet does it."""
ANNEALED = """
    lr = 20.0

    def train():
        for x in data:
            model(x, lr)
            boundary()

    for epoch in range(2):
        train()
        lr /= 4.0
"""
"""As torch's example of a word language model does it."""
DECAYED = """
    epsilon, n = 1.0, 0
    while n < 3:
        model(torch.ones(2))
        epsilon = max(epsilon * 0.99, 0.1)
        n += 1
        boundary()
"""
WARMED_UP = """
    def rate(step):
        return 0.1 / (step + 1)

    step, shown = 0, 0
    for x in data:
        lr = rate(step)
        model(x, lr)
        step += 1
        shown += 1
        print(f"{shown} {lr}", shown % 7, data[shown % 2])
        if shown % 100 == 0:
            print(shown)
        boundary()
"""
"""As llama2.c and nanoGPT set their rates."""
SUMMED = """
    import time
    total, n, began, running = 0.0, 0, time.time(), 0.0
    soon = time.time() + 1
    for epoch in range(2):
        for x in data:
            total += float(model(x))
            running = 0.9 * running + 0.1 * total
            n += 1
            if n % 2 == 0 and time.time() - began > 9 and time.time() > soon:
                began = time.time()
                soon = time.time() + 1
            boundary()
"""
INNER = """
    for epoch in range(2):
        for x in data:
            loss = float(model(x))
            boundary()
        try:
            with torch.no_grad():
                found = loss + 1
        except ValueError:
            found = 0.0
        if loss > 3 or found < 1:
            break
"""
RESTORED = """
    start = session.step_count
    n, best = start, session.extra["best"]
    while n < 3:
        model(torch.ones(2))
        best = max(best, 1.0)
        n += 1
        boundary()
"""


KEPT = """
    hidden = zeros()
    if session.step_count == 0:
        hidden = session.hidden
    for x in data:
        hidden = hidden.detach()
        out, hidden = model(x, hidden)
        session.hidden = hidden.detach()
        boundary()
"""
STORED_ONLY = KEPT.replace("hidden = session.hidden", "hidden = zeros()", 1)
TAKEN_ONLY = KEPT.replace("session.hidden = hidden.detach()", "pass")


class Model(torch.nn.Module):
    """Takes what a loop gives it."""

    def forward(self, *given: Any) -> Any:
        """A tensor, or two where it gets two tensors of which one is a state."""
        return (given[0], given[1]) if len(given) == 2 else given[0].sum()


class Session:
    """As the script's code sees it."""

    step_count, extra = 0, {"best": 0.0}
    hidden = torch.zeros(2)


Session.__module__ = "autockpt.session.session"
Found = TypeVar("Found", CarriedValues, CarriedNumbers)


def found_in(
    text: str, name: str, look: Callable[[types.FrameType], Found | None] = carried_values
) -> Found | None:
    """The answer at the first boundary of a script."""
    answers: list[Found | None] = []
    file = f"/scripts/{name}.py"
    source = textwrap.dedent(text)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    data = [torch.ones(2), torch.zeros(2), torch.ones(2)]
    batches = iter([*data, None])
    model = Model()
    scope = {
        "__name__": "__main__", "torch": torch, "model": model, "data": data,
        "fetch": lambda: (torch.ones(2), torch.zeros(2)), "zeros": lambda: torch.zeros(2),
        "observe": lambda: torch.ones(2).numpy(),
        "loader": type("Loader", (), {"next": staticmethod(lambda: next(batches))}),
        "boundary": lambda: answers.append(look(sys._getframe(1))), "session": Session(),
    }  # fmt: skip
    exec(compile(source, file, "exec"), scope)
    assert len(answers) > 1
    return answers[0]


@pytest.mark.parametrize(
    ("text", "names", "line"),
    [
        (FETCHED_AHEAD, ("x", "y"), 6),
        (ACCUMULATED, ("x", "y"), 6),
        (PREFETCHER, ("x",), 6),
        (HIDDEN, ("hidden",), 5),
        (STORED_ONLY, ("hidden",), 6),
        (TAKEN_ONLY, ("hidden",), 6),
        (METHOD, ("batch",), 10),
        (ENVIRONMENT, ("seen",), 5),
        (HELPER, ("x",), 8),
    ],
)
def test_what_a_loop_hands_on_to_a_model_is_named(
    text: str, names: tuple[str, ...], line: int
) -> None:
    """With the line in the loop where it gets its next value."""
    found = found_in(text, "carries")
    assert found is not None
    assert (found.names, found.line) == (names, line)
    assert f"(carries.py, line {line})" in found.warning


@pytest.mark.parametrize("text", [PLAIN, TIMED, EVALUATED, GENERATOR, CLOSURE, COUNTED, KEPT])
def test_what_each_iteration_makes_anew_is_not(text: str) -> None:
    """Clocks, sums, best values and closures, too: no model gets them from an iteration before.

    Nor is a value that the script keeps in a TrainState and takes from it."""
    assert found_in(text, "plain") is None


@pytest.mark.parametrize(
    ("text", "names", "line"),
    [
        (BEST, ("best", "bad"), 9),
        (BEST_OF, ("best",), 10),
        (ANNEALED, ("lr",), 11),
        (DECAYED, ("epsilon", "n"), 5),
        (COUNTED, ("rate",), 5),
        (WARMED_UP, ("step",), 9),
    ],
)
def test_numbers_that_decide_something_are_named(
    text: str, names: tuple[str, ...], line: int
) -> None:
    """Of every loop around the boundary, also where a function is called in it."""
    found = found_in(text, "numbers", carried_numbers)
    assert found is not None
    assert (found.names, found.line) == (names, line)
    assert f"{', '.join(names)} (numbers.py, line {line})" in found.notice
    assert f"TrainState({names[0]}=...)" in found.notice


@pytest.mark.parametrize("text", [SUMMED, INNER, RESTORED, PLAIN])
def test_numbers_for_show_and_restored_ones_are_not(text: str) -> None:
    """Sums, times, and values that the script takes from the session."""
    assert found_in(text, "sums", carried_numbers) is None


COUNTING = """
    for epoch in range(1):
        for i, x in {loader}:
            model(x)
            boundary()
            {use}
"""


@pytest.mark.parametrize(
    ("loader", "use", "begins"),
    [
        ("enumerate(loader)", "if i % 2 == 0: pass", "loader.first_batch"),
        ("enumerate(shown(loader))", "if i + 1 == len(loader): pass", "loader.first_batch"),
        ("enumerate(loader)", "ends = (i + 1) % 2 == 0", "loader.first_batch"),
        ("enumerate(loader)", "str(epoch + i / len(loader))", "loader.first_batch"),
        ("enumerate(around)", "if i % 2 == 0: pass", "ckpt.first_batch"),
        ("enumerate(engine)", "if i % 2 == 0: pass", "loader.first_batch"),
        ("enumerate(loader, loader.first_batch)", "if i % 2 == 0: pass", ""),
        ("enumerate(loader)", "if epoch: pass", ""),
        ("enumerate(loader)", "print(i + 1)", ""),
        ("enumerate(data)", "if i % 2 == 0: pass", ""),
    ],
)
def test_a_count_of_batches_that_begins_at_0_is_named(loader: str, use: str, begins: str) -> None:
    """If the loop does more with it than to show it; adapters' loaders are known as well."""
    scope = f"""
    from autockpt.executors.state.data.epoch_loader import EpochLoader
    from autockpt.integrations.deepspeed import EngineLoader
    from torch.utils.data import DataLoader
    from types import SimpleNamespace
    loader = EpochLoader(DataLoader(data), begin=lambda: None)
    class Around:
        def __init__(self, inner):
            self.base_dataloader = inner
        def __iter__(self):
            return iter(self.base_dataloader)
    around = Around(loader)
    whole = SimpleNamespace(finish_iteration=lambda: None, stopped=False)
    engine = EngineLoader(whole, loader, None)
    shown = iter
    {COUNTING.format(loader=loader, use=use).lstrip()}"""
    said: list[str] = []

    def look(frame: types.FrameType) -> None:
        said.append(counted_batches(frame))

    found_in(textwrap.dedent(scope), "counting", look)
    assert said[0].endswith(f"enumerate(loader, {begins})" if begins else "")
    assert bool(said[0]) == bool(begins)
    if begins:
        assert said[0].startswith("i (counting.py, line ")


@pytest.mark.parametrize(("loop", "advice"), [
    ("for x in islice(loader, 2)", "islice(loader, 2 - loader.first_batch)"),
    ("for step in range(len(loader))", "range(loader.first_batch, len(loader))"),
    ("for step in range(2)", "range(loader.first_batch, 2)"),
    ("for step in range(loader.first_batch, 3)", ""),
    ("for x in islice(plain, 2)", ""),
])  # fmt: skip
def test_a_loop_over_a_fixed_number_of_batches_is_named(loop: str, advice: str) -> None:
    """In the rest of an epoch it would take batches of the next one, or end with an error."""
    scope = f"""
    from autockpt.executors.state.data.epoch_loader import EpochLoader
    from itertools import islice
    from torch.utils.data import DataLoader
    plain = DataLoader(data)
    loader = EpochLoader(plain, begin=lambda: None)
    for epoch in range(1):
        batches = iter(loader)
        {loop}:
            {"x" if "islice" in loop else "x = next(batches)"}
            boundary()
"""
    said: list[str] = []
    name = re.sub(r"\W", "", loop)
    found_in(textwrap.dedent(scope), name, lambda frame: said.append(counted_batches(frame)))
    assert said[0].endswith(f"For the number of then: {advice}" if advice else "")
    assert bool(said[0]) == bool(advice)


def test_a_script_without_source_has_none() -> None:
    """As one that is typed in."""
    scope = {"ask": lambda: carried_values(sys._getframe(1)), "model": Model()}
    exec("for n in range(2):\n    found = ask()\n", scope)
    assert scope["found"] is None


def test_a_loop_of_a_library_that_calls_the_script_counts(tmp_path: Path) -> None:
    """As where a framework's loop calls a function of the script."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "driver.py").write_text("def run(do):\n    for _ in range(1):\n        do()\n")
    answers: list[bool] = []
    script = tmp_path / "script.py"
    source = "def do():\n    ask()\n\nask()\nrun(do)\nfor _ in range(1):\n    do()\n"
    library: dict[str, Any] = {"__name__": "driver"}
    exec(compile((folder / "driver.py").read_text(), folder / "driver.py", "exec"), library)
    scope = {
        "__name__": "__main__", "run": library["run"],
        "ask": lambda: answers.append(is_within_loop(sys._getframe(1))),
    }  # fmt: skip
    exec(compile(source, script, "exec"), scope)
    assert answers == [False, True, True]
