"""A resumed training says whether it draws the random numbers of the one before."""

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autockpt.executors.state.rng import rng_state
from autockpt.session.place.replay_check import former_mark, state_digest
from autockpt.values.generation import Generation
from tests.support import trainings

SAVED, STOP, TOTAL, EPOCH = 4, 6, 9, 3


Train = Callable[[int], bool]
"""Trains a step; True: the process goes away."""


def warmed_up(ckpt: Any, own: random.Random, train: Train) -> None:
    """Drawn at each start, as by an evaluation before the training."""
    torch.rand(3)
    own.random()
    any(train(step) for step in ckpt.steps(TOTAL))


def seeded(ckpt: Any, own: random.Random, train: Train) -> None:
    """Behind attach, at each start."""
    torch.manual_seed(7)
    own.seed(7)
    any(train(step) for step in ckpt.steps(TOTAL))


def seeded_each_epoch(ckpt: Any, own: random.Random, train: Train) -> None:
    """At a restart the epochs that are over are seeded again, and have no steps."""
    for epoch in range(TOTAL // EPOCH):
        torch.manual_seed(epoch)
        own.seed(epoch)
        if any(train(step) for step in ckpt.steps(TOTAL, until=(epoch + 1) * EPOCH)):
            break


def drawn_behind_each_epoch(ckpt: Any, own: random.Random, train: Train) -> None:
    """As by an evaluation; at a restart behind the epochs that are over too."""
    for epoch in range(TOTAL // EPOCH):
        if any(train(step) for step in ckpt.steps(TOTAL, until=(epoch + 1) * EPOCH)):
            break
        torch.rand(3)
        own.random()


def begun_at_the_count(ckpt: Any, own: random.Random, train: Train) -> None:
    """A loop of the script's own, which reads the count where it begins."""
    torch.rand(3)
    for step in range(ckpt.step_count, TOTAL):
        if train(step):
            break
        ckpt.step()


def watched_by_a_thread(ckpt: Any, own: random.Random, train: Train) -> None:
    """Its reads of the count are of no place where the loop begins."""
    for step in range(ckpt.step_count, TOTAL):
        torch.rand(())
        watch = threading.Thread(target=lambda: ckpt.step_count)
        watch.start()
        watch.join()
        if train(step):
            break
        ckpt.step()


def drawn_between_loops(ckpt: Any, own: random.Random, train: Train) -> None:
    """An order for each epoch, whose loop is left by `step()` and `break`."""
    while ckpt.step_count < TOTAL:
        torch.rand(3)
        for step in ckpt.steps(TOTAL):
            if train(step):
                return
            if (step + 1) % SAVED == 0:
                ckpt.step()
                break


class Noise(Dataset[torch.Tensor]):
    """Samples that draw in the training process."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def two_loaders(ckpt: Any, own: random.Random, train: Train) -> None:
    """Both draw, one behind the other; the second one does not rewind what the first one drew."""
    loaders = [ckpt.loader(DataLoader(Noise()), name=name) for name in "ab"]
    step = ckpt.step_count
    for _ in range(loaders[0].epoch, 2):
        for _ in zip(*loaders, strict=True):
            if train(step):
                return
            step = ckpt.step()
            if step == TOTAL:
                return


def drawn_behind_the_count(ckpt: Any, own: random.Random, train: Train) -> None:
    """Nothing shows that these numbers are drawn before the loop."""
    start = ckpt.step_count
    torch.rand(3)
    for step in range(start, TOTAL):
        if train(step):
            break
        ckpt.step()


Style = Callable[[Any, random.Random, Train], None]
EXACT: list[Style] = [
    warmed_up, seeded, seeded_each_epoch, drawn_behind_each_epoch, begun_at_the_count,
    watched_by_a_thread, drawn_between_loops, two_loaders,
]  # fmt: skip


def trained(attach: Callable[..., Any], run_dir: str, stop: int, style: Style) -> list[float]:
    """What the iterations draw; after `stop` of them the process is gone."""
    torch.manual_seed(0)
    own = random.Random(5)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
    start, numbers = int(ckpt.restored.step if ckpt.restored else 0), []

    def train(step: int) -> bool:
        numbers.append(torch.rand(()).item() + own.random())
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if step == start + 1:  # the mark of the process before is read beside the training
            assert ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
            time.sleep(0.2)
        if step == SAVED > start:
            assert ckpt.wait_durable(60)
        return step == stop

    style(ckpt, own, train)
    ckpt.close(final_checkpoint=False)
    return numbers


def checks(run_dir: str) -> list[bool]:
    """Each comparison that the run has made."""
    text = Path(run_dir, "telemetry", "rank-00000.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    return [event["equal"] for event in events if event["event"] == "ReplayChecked"]


@pytest.mark.parametrize("style", [*EXACT, drawn_behind_the_count])
def test_a_resume_repeats_the_random_numbers_or_says_that_it_does_not(
    attach: Callable[..., Any],
    new_run: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    style: Style,
) -> None:
    """Numbers that a script draws before its loop, at each start, are none of the loop's."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=SAVED, disk=SAVED))
    before = trained(attach, run_dir, STOP, style)
    assert checks(run_dir) == []
    again = trained(attach, run_dir, TOTAL, style)
    assert len(again) == TOTAL - SAVED
    is_exact = again[: STOP - SAVED] == before[SAVED:STOP]
    assert is_exact == (style in EXACT)
    assert checks(run_dir) == [is_exact]
    assert ("not bit for bit" in capfd.readouterr().err) == (not is_exact)


@pytest.mark.parametrize("style", [seeded_each_epoch, drawn_behind_each_epoch])
def test_a_run_that_was_over_goes_on_with_what_its_script_seeds(
    attach: Callable[..., Any], new_run: Callable[..., str], style: Style,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """More epochs than before: the next one begins as the script begins it."""
    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), TOTAL, style)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=SAVED, disk=SAVED))
    monkeypatch.setitem(globals(), "TOTAL", 2 * EPOCH)
    begun = trained(attach, run_dir, TOTAL, style)
    monkeypatch.setitem(globals(), "TOTAL", 3 * EPOCH)
    rest = trained(attach, run_dir, TOTAL, style)
    assert len(rest) == EPOCH
    assert [*begun, *rest] == whole


@pytest.mark.parametrize(
    ("stop", "draw", "reason"),
    [(SAVED, True, "left a mark"), (STOP, False, "draws no random numbers")],
)
def test_a_resume_without_a_comparison_says_why(
    attach: Callable[..., Any], new_run: Callable[..., str], stop: int, draw: bool, reason: str
) -> None:
    """The process before ended at the checkpoint, or nothing is drawn."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=SAVED, disk=SAVED))
    for until in (stop, TOTAL):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
        for step in ckpt.steps(TOTAL):
            if step == 1:
                client = ckpt._client
                assert client.wait_until(lambda c=client: bool(c.slots), 60)
            if step == SAVED and not ckpt.restored:
                assert ckpt.wait_durable(60)
            if step == until:
                break
            if step == SAVED + 1:  # the mark of before is read beside the training
                time.sleep(0.2)
            if draw:
                torch.rand(())
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        ckpt.close(final_checkpoint=False)
    text = Path(run_dir, "telemetry", "rank-00000.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    (check,) = (event for event in events if event["event"] == "ReplayChecked")
    assert check["equal"] is None
    assert reason in check["reason"]


def test_a_mark_is_of_one_checkpoint_and_number_of_ranks(tmp_path: Path) -> None:
    """The first one counts; torn lines, later ones and missing files say nothing."""
    path, saved = tmp_path / "rank.jsonl", Generation(term=1, step=4)
    assert former_mark(path, saved, 2, written=99) == ""

    def mark(digest: str, generation: Generation = saved, ranks: int = 2) -> str:
        facts = {"event": "RandomMarked", "generation": str(generation), "world_size": ranks}
        return json.dumps({**facts, "digest": digest}) + "\n"

    others = [
        mark("other", Generation(term=2, step=4)),
        mark("fewer", ranks=1),
        "[]\n",
        '{"event":',
    ]
    first = "".join([*others[:2], mark("made it"), mark("resumed it"), *others[2:]])
    path.write_text(first + "\n" + mark("this process", Generation(term=1, step=5)))
    assert former_mark(path, saved, 2, written=len(first)) == "made it"
    assert former_mark(path, Generation(term=1, step=5), 2, written=len(first)) == ""


def test_equal_states_have_equal_digests() -> None:
    """Of every generator; one drawn number makes another digest."""
    torch.manual_seed(3)
    np.random.seed(3)
    first = state_digest(rng_state())
    assert state_digest(rng_state()) == first
    np.random.rand()
    drawn = state_digest(rng_state())
    np.random.seed(3)
    assert first == state_digest(rng_state()) != drawn
    torch.rand(())
    assert state_digest(rng_state()) != first
    assert state_digest({"a": [1, 2]}) != state_digest({"a": [1], "b": 2})
    assert state_digest(torch.ones(2)) != state_digest(torch.ones(2, dtype=torch.float64))
