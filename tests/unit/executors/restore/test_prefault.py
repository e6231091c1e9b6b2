"""Memory touched before the keepers decided: the right size, one owner, and never a failure."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from autockpt.executors.linux.restore_allocator import RestoreAllocator
from autockpt.executors.restore import prefault
from autockpt.executors.restore.apply_state import apply_state
from autockpt.executors.restore.prefault import PrefaultedMemory, new_bytes
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import one_shard
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_state, open_file
from tests.unit.executors.linux.test_restore_allocator import mapped

PAGE = 4096
WIDTH = 512


def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, LiveState]:
    """Large enough for pages of its own; its moments are twice its parameters."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, LiveState.of(model=model, optimizer=optimizer)


def saved(path: Path, *, step: int = 1) -> tuple[str, LiveState]:
    """(checkpoint directory, what was saved into it)."""
    model, optimizer, state = job(step)
    model(torch.ones(WIDTH)).sum().backward()
    optimizer.step()
    directory = CheckpointDirectory(str(path))
    directory.claim(directory.open(), "launch", 0, force=False)
    commit_state(directory, directory.open(), Generation(term=1, step=step), state)
    return str(path), state


def resident_bytes(address: int) -> int:
    """Memory that stands behind the mapping of an address, from the kernel."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(number, 16) for number in first.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("Rss:"):
            found = 1024 * int(line.split()[1])
    return found


def finished(pages: PrefaultedMemory) -> PrefaultedMemory:
    """It has touched all that it guessed."""
    pages._thread.join(30)
    assert not pages._thread.is_alive()
    return pages


def test_what_a_restore_will_allocate_is_told_by_the_newest_commit(tmp_path: Path) -> None:
    """Two moments of every parameter here; twice as many of a rank that holds twice as much."""
    folder, _ = saved(tmp_path)
    one = {"model.weight": torch.empty(WIDTH, WIDTH)}
    assert new_bytes(folder, 0, one) == 2 * one["model.weight"].nbytes
    assert new_bytes(folder, 5, one) == 2 * one["model.weight"].nbytes
    two = one | {"model.other": torch.empty(WIDTH, WIDTH)}
    assert new_bytes(folder, 0, two) == 4 * one["model.weight"].nbytes
    away = {"model.weight": torch.empty(WIDTH, WIDTH, device="meta")}
    assert new_bytes(folder, 0, away) == 3 * one["model.weight"].nbytes


def test_a_restore_takes_memory_that_was_touched_before(tmp_path: Path) -> None:
    """It comes back bit for bit, in those very pages."""
    folder, state = saved(tmp_path)
    twin, optimizer, fresh = job(99)
    pages = finished(PrefaultedMemory(folder, fresh, 0, ranks=1))
    start, moments = pages._address, 2 * WIDTH * WIDTH * 4
    assert moments <= resident_bytes(start) < moments + 2**21
    generation = f"{folder}/{Generation(term=1, step=1).name}"
    chunks = open_file(generation)
    restored = restore_shards(one_shard(chunks), fresh, pages.take)
    apply_state(restored, fresh)
    places = {optimizer.state[twin.weight][key].data_ptr() for key in ("exp_avg", "exp_avg_sq")}
    assert places == {start, start + moments // 2}
    assert {n: t.tolist() for n, t in fresh.tensors.items()} == {
        n: t.tolist() for n, t in state.tensors.items()
    }


def test_it_is_taken_once_and_the_rest_is_given_back(tmp_path: Path) -> None:
    """A second attempt finds none; more than was guessed is not to be had, and nothing stays."""
    folder, _ = saved(tmp_path)
    pages = finished(PrefaultedMemory(folder, job(2)[2], 0, ranks=1))
    end = pages._address + pages._room - PAGE
    address = pages.take(16 * PAGE)
    assert mapped(address + 15 * PAGE)
    assert not mapped(address + 16 * PAGE)
    assert not mapped(end)
    assert pages.take(16 * PAGE) == 0
    memory = RestoreAllocator([16 * PAGE], lambda nbytes: address)
    assert memory.tensor((16 * PAGE,), torch.uint8).data_ptr() == address

    pages = finished(PrefaultedMemory(folder, job(2)[2], 0, ranks=1))
    start = pages._address
    assert pages.take(pages._room + PAGE) == 0
    assert not mapped(start)
    pages = finished(PrefaultedMemory(folder, job(2)[2], 0, ranks=1))
    start = pages._address
    pages.close()
    pages.close()
    assert not mapped(start)


def test_a_guess_that_is_not_ready_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore from memory must not hang because a directory does."""
    folder, _ = saved(tmp_path)
    hanging, end = threading.Event(), threading.Event()

    def hang(*_: object) -> int:
        hanging.set()
        end.wait(30)
        return 2**24

    monkeypatch.setattr(prefault, "new_bytes", hang)
    pages = PrefaultedMemory(folder, job(2)[2], 0, ranks=1)
    assert hanging.wait(30)
    began = time.monotonic()
    assert pages.take(PAGE) == 0
    assert time.monotonic() - began < 10
    end.set()
    finished(pages)
    assert pages._room == 0


@pytest.mark.parametrize("fault", ["nothing", "no directory", "damaged", "no room"])
def test_without_a_guess_there_is_none_and_nobody_hears_of_it(fault: str, tmp_path: Path) -> None:
    """Whatever is wrong with a checkpoint is for the restore to say."""
    folder = str(tmp_path / "none")
    if fault in ("damaged", "no room"):
        folder, _ = saved(tmp_path)
    if fault == "nothing":
        os.mkdir(folder)
    if fault == "damaged":
        (Path(folder) / Generation(term=1, step=1).name / "COMMIT").write_text("{")
    ranks = 10**9 if fault == "no room" else 1
    pages = finished(PrefaultedMemory(folder, job(2)[2], 0, ranks=ranks))
    assert pages.take(PAGE) == 0
