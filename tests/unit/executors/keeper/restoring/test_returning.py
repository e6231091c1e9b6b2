"""Memory kept for the next trainer: it is there, the kernel may have it, and it goes at once."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper.restoring.warm_pages import WarmPages, host_takes_free_pages
from tests.conftest import keeper_pids
from tests.jobs.kill.loops import PATIENCE_S, Loop, prepared

NBYTES = 64 * 2**20


@pytest.fixture
def kept() -> Iterator[WarmPages]:
    """Of a system whose host takes what is free."""
    made = WarmPages(needed=True)
    yield made
    made.close()
    await_true(lambda: not working())


def spare_bytes(pid: int | str = "self") -> int:
    """Memory of a process that the kernel may take at any time, from the kernel."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("LazyFree:"))


def working() -> bool:
    """A thread touches what is to be kept."""
    return any(thread.name == "autockpt-kept" for thread in threading.enumerate())


def await_true(done: Callable[[], bool]) -> None:
    """Soon."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_kept_is_there_and_nobody_goes_short_of_it(kept: WarmPages) -> None:
    """All of it is touched, all of it the kernel may take; given back, nothing is left."""
    before = spare_bytes()
    kept.keep(0, NBYTES)
    kept.keep(1, NBYTES)
    await_true(lambda: spare_bytes() >= before + 2 * NBYTES)
    kept.give_back(1)
    kept.give_back(1)
    assert before + NBYTES <= spare_bytes() < before + 2 * NBYTES
    kept.keep(0, NBYTES // 2)
    await_true(lambda: not working())
    assert before + NBYTES // 2 <= spare_bytes() < before + NBYTES
    kept.close()
    assert spare_bytes() == before


def test_it_is_given_back_while_it_is_still_touched(kept: WarmPages) -> None:
    """Whoever comes back sooner waits for nothing, and nothing of it stays."""
    before = spare_bytes()
    for _ in range(20):
        kept.keep(0, NBYTES)
        began = time.monotonic()
        kept.give_back(0)
        assert time.monotonic() - began < 1
    await_true(lambda: not working())
    assert spare_bytes() == before


@pytest.mark.parametrize(("needed", "nbytes"), [(False, NBYTES), (True, 0), (True, 2**50)])
def test_none_is_kept_where_it_is_not_needed_or_not_there(needed: bool, nbytes: int) -> None:
    """On a machine of its own, without slots, and beyond the memory that there is."""
    kept = WarmPages(needed=needed)
    kept.keep(0, nbytes)
    assert not working()
    kept.close()


@pytest.mark.parametrize(
    ("text", "takes"),
    [("9\n", True), ("0\n", True), ("-1\n", False), ("4294967295\n", False), (None, False)],
)
def test_a_replica_tells_its_host_about_blocks_of_some_size(
    text: str | None, takes: bool, tmp_path: Path
) -> None:
    """No such parameter, or none of a driver that asked for it: memory that is free stays."""
    parameter = tmp_path / "page_reporting_order"
    if text is not None:
        parameter.write_text(text)
    assert host_takes_free_pages(parameter) is takes


@pytest.mark.skipif(not host_takes_free_pages(), reason="free memory stays with this system")
def test_a_keeper_keeps_memory_from_a_loss_to_the_next_trainer(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """As much as an image; nothing while a trainer lives, nor when one has finished."""
    run_dir = prepared(new_run)
    loop = Loop(attach, run_dir, 16 * 2**20)
    loop.warm_up()
    loop.train()
    loop.ckpt.step()
    loop.durable()
    (keeper,) = keeper_pids(run_dir)
    assert spare_bytes(keeper) == 0
    loop.ckpt._closing.end("signal")
    await_true(lambda: spare_bytes(keeper) >= 16 * 2**20)
    again = Loop(attach, run_dir, 16 * 2**20)
    assert again.ckpt.step_count == 2
    assert keeper_pids(run_dir) == [keeper]
    assert spare_bytes(keeper) == 0
    again.ckpt.close()
