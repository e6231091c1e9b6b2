"""A real run on a host without room for its slots: it asks again, and gives back what it held."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.session import Session, slots
from autockpt.values.telemetry import Degraded
from tests.conftest import end_keeper, keeper_pids
from tests.jobs.kill.loops import Loop
from tests.jobs.kill.test_keeper_death import durable_steps
from tests.jobs.points.tight_host.sitecustomize import held_bytes
from tests.support import trainings
from tests.support.live import PATIENCE_S, SPEC, Live, granted

HOST = Path(__file__).parent / "tight_host"
PLAN = trainings.plan(memory=2, disk=2)
AMPLE = 2**40
SLOT_AND_A_HALF = 180_000
"""Of the small training."""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes of slots that the host has room for."""
    file = tmp_path / "room"
    monkeypatch.setenv("TIGHT_HOST", str(file))
    monkeypatch.setenv("TIGHT_HOST_TRAINER", str(os.getpid()))
    monkeypatch.setenv("PYTHONPATH", str(HOST))
    return lambda nbytes: file.write_text(str(nbytes)) and None


def test_slots_are_asked_for_again_when_there_may_be_room(
    live: Live, room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shortage that passes costs the checkpoints that fell into it, and no other."""
    monkeypatch.setattr(slots, "FIRST_PAUSE_S", 0.01)
    room(0)
    job, ckpt = live.attach(SPEC, PLAN)
    link = ckpt._client
    for step, batch in ckpt.batches(SPEC.steps):
        if step == 5:
            assert link.wait_until(lambda: bool(link.slots_refused), PATIENCE_S)
            assert not link.slots
            room(AMPLE)
            slots.time.sleep(0.2)  # the pause
        trainings.train_step(job, step, batch)
        if step > 5:
            assert link.wait_until(lambda: bool(link.slots), PATIENCE_S)
            granted(ckpt)
    assert {8, SPEC.steps} <= set(live.durable_steps())
    assert not {2, 4} & set(live.durable_steps())
    assert {event.what for event in live.events(Degraded)} == {"memory tier"}


def test_pauses_between_refusals_grow(
    live: Live, room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that stays without room is not asked at every step."""
    room(0)
    monkeypatch.setattr(slots, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(slots, "LONGEST_PAUSE_S", 5000.0)
    job, ckpt = live.attach(SPEC, PLAN)
    link = ckpt._client
    pauses: list[float] = []
    batches = ckpt.batches(SPEC.steps)
    for _ in range(5):
        trainings.train_step(job, *next(batches))
        if ckpt._slots._asked is None:
            continue
        assert link.wait_until(lambda: link.no_room_s is not None, PATIENCE_S)
        pause = min(5000.0, 1000.0 * 2 ** len(pauses))
        assert link.no_room_s is not None
        for early, asks in ((1.0, False), (-1.0, True)):
            link.no_room_s = slots.time.monotonic() - pause + early
            assert ckpt._slots._asks_again(False) is asks
        pauses.append(pause)
    assert pauses[-2:] == [4000.0, 5000.0]
    room(AMPLE)
    ckpt._last.make()
    assert ckpt._client.saves.durable is not None, "the last one asks whatever the pause"


def test_fewer_slots_become_more_when_there_may_be_room(
    live: Live,
    room: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What a slot holds stays while others come beside it; how few there are is said once."""
    monkeypatch.setattr(slots, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(slots, "LONGEST_PAUSE_S", 0.01)
    others = held_bytes(os.getpid())
    room(others + SLOT_AND_A_HALF)
    job, ckpt = live.attach(SPEC, PLAN)
    link, first = ckpt._client, None
    seen: list[tuple[int, bool]] = []
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        if first is None:
            if ckpt._slots._asked is None:
                continue
            assert link.wait_until(lambda: bool(link.slots), PATIENCE_S), link.slots_refused
            first = link.slots[0]
        elif step == 5:
            assert ckpt._slots._more_asked > 1, "asked in vain"
            room(AMPLE)
        else:
            if step > 5 and len(link.slots) < 3:
                assert gains(ckpt)
            granted(ckpt)
        if step < 5:
            time.sleep(2 * slots.FIRST_PAUSE_S)  # each of these boundaries may ask
        seen.append((len(link.slots), link.slots[0] is first))
    assert {8, SPEC.steps} <= set(live.durable_steps())
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((1, True), (3, True))
    said = capfd.readouterr().err
    assert said.count("made were 1") == 1
    assert said.count("2 of 3 slots of 123 kB") <= 1
    assert said.count("there is room for 3 slots now") == 1


def gains(ckpt: Session) -> bool:
    """It has more slots in the end, asked for at each pause."""
    count, deadline_s = len(ckpt._client.slots), slots.time.monotonic() + PATIENCE_S
    while len(ckpt._client.slots) == count and slots.time.monotonic() < deadline_s:
        ckpt._slots.ask_for_another()
        ckpt._client.wait_until(lambda: len(ckpt._client.slots) > count, 0.02)
    return len(ckpt._client.slots) > count


@pytest.mark.parametrize("fit", [3, 0])
def test_slots_that_are_outgrown_make_room_for_larger_ones(
    attach: Callable[..., Any],
    new_run: Callable[..., str],
    room: Callable[[int], None],
    fit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host has room for either, and not for both; nothing of the old ones stays, also where
    there is none for the larger ones.  What the old ones still hold at first comes later."""
    monkeypatch.setattr(slots, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(slots, "LONGEST_PAUSE_S", 0.01)
    room(AMPLE)
    run_dir = trainings.prepare(new_run(), PLAN)
    found = outgrown(Loop(attach, run_dir, 8 * 2**20), room, fit)
    assert found == (fit, not fit, 0, bool(fit))


def outgrown(loop: Loop, room: Callable[[int], None], fit: int) -> tuple[int, bool, int, bool]:
    """(slots, whether they were refused, bytes held beside them, whether step 8 is durable) once
    the state has grown."""
    others, link = held_bytes(os.getpid()), loop.ckpt._client
    loop.warm_up()
    for _ in range(3):
        loop.train()
        loop.ckpt.step()
        loop.durable()
    small, changed = sum(arena.nbytes for arena in link.slots), link.slots_changed
    late = torch.nn.Parameter(torch.zeros(2**18))
    loop.model.register_parameter("late", late)
    loop.optimizer.add_param_group({"params": [late]})
    room(others + {3: small + small // 2, 0: 4096}[fit])
    for _ in range(4):
        loop.train()
        late.grad = torch.ones_like(late)
        loop.ckpt.step()
        if loop.ckpt.step_count == 6:
            assert link.wait_until(
                lambda: link.slots_changed > changed or bool(link.slots_refused), PATIENCE_S
            )
            while 0 < len(link.slots) < fit:
                assert gains(loop.ckpt)
        loop.durable()
    large = sum(arena.nbytes for arena in link.slots)
    (keeper,) = keeper_pids(str(loop.run_dir))
    held = held_bytes(os.getpid(), keeper)
    assert link.wait_until(lambda: bool(link.slots or link.slots_refused), PATIENCE_S)  # asked anew
    found = len(link.slots), bool(link.slots_refused), held - others - large
    loop.ckpt.close(final_checkpoint=False)
    end_keeper(str(loop.run_dir))
    return *found, 8 in durable_steps(str(loop.run_dir))
