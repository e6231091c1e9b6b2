"""A thread in a collective that nothing ends is told from one that does something else."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed

from autockpt.launch.in_process import standing
from autockpt.launch.in_process.standing import Standing

distributed: Any = torch.distributed
ENDS_S = 2.0


def waits_for_others() -> None:
    """The other rank never comes."""
    with contextlib.suppress(RuntimeError):
        distributed.init_process_group(
            "gloo", store=distributed.HashStore(), rank=0, world_size=2,
            timeout=timedelta(seconds=ENDS_S),
        )  # fmt: skip


def sleeps() -> None:
    """It may go on by itself."""
    time.sleep(ENDS_S)


def computes() -> None:
    """As an unwinding that takes long."""
    end_s = time.monotonic() + ENDS_S
    while time.monotonic() < end_s:
        sum(range(10_000))


@pytest.mark.parametrize(
    ("body", "stands"), [(waits_for_others, True), (sleeps, False), (computes, False)]
)
def test_what_stands_in_a_collective_is_named(
    body: Callable[[], None], stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its place in the script."""
    monkeypatch.setattr(standing, "STANDS_S", 0.5)
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    looks = Standing(thread)
    assert looks.place() == ""
    time.sleep(0.8)
    place = looks.place()
    time.sleep(0.1)
    thread.join(60)
    assert bool(place) is stands
    assert not stands or place.startswith("waits_for_others (")
