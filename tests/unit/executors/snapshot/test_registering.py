"""Slots are registered with CUDA while they are mapped, and no longer; errors stay here.

The runtime is stood in for where there is no GPU: what it is told, and in which order.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autockpt.executors.linux import memory
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot import device as device_module
from autockpt.executors.snapshot.device import register_with_cuda

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
NBYTES = 2**22


class Runtime:
    """What CUDA knows of host memory, and the error that it keeps for the next launch."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.registered: dict[int, int] = {}
        self.error = 0
        self.device = 3
        self.stuck = False
        """Nothing can be unregistered any more."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Refuses what overlaps with what it has."""
        self.told.append(("register", address))
        other = (a < address + nbytes and address < a + n for a, n in self.registered.items())
        if any(other):
            self.error = ALREADY_REGISTERED
            return ALREADY_REGISTERED
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Refuses what it has not."""
        self.told.append(("unregister", address))
        if self.stuck or self.registered.pop(address, None) is None:
            self.error = NOT_REGISTERED
            return NOT_REGISTERED
        return 0

    def launch(self, *_: Any, **__: Any) -> torch.Tensor:
        """A kernel: raises the error that was kept, as torch does, and forgets it."""
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")
        return torch.empty(1)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A machine with a GPU."""
    found = Runtime()
    real: Callable[[int, int], None] = memory.unmap_memory

    def unmap(address: int, nbytes: int) -> None:
        if ("register", address) in found.told:  # and not what a new mapping has too much
            found.told.append(("unmap", address))
        real(address, nbytes)

    @contextlib.contextmanager
    def on(number: int) -> Iterator[None]:
        assert number == found.device
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch, "ones", found.launch)
    monkeypatch.setattr(memory, "unmap_memory", unmap)
    return found


def test_a_slot_is_unregistered_before_it_is_unmapped(runtime: Runtime) -> None:
    """Else its pages stay pinned, and what is mapped there next cannot be registered."""
    slot = Arena.create_shared(NBYTES, name="slot")
    address = slot.address
    assert register_with_cuda(slot)
    assert register_with_cuda(slot), "once is enough"
    view = torch.frombuffer(slot.view, dtype=torch.uint8)
    slot.let_go()
    del slot
    assert runtime.told == [("register", address)], "somebody still looks at it"
    del view
    assert runtime.told == [("register", address), ("unregister", address), ("unmap", address)]
    assert runtime.registered == {}


def test_slots_in_the_place_of_former_ones_are_registered(runtime: Runtime) -> None:
    """The system gives the addresses of outgrown slots to the larger ones."""
    for size in (NBYTES, 2 * NBYTES, 3 * NBYTES):
        slot = Arena.create_shared(size, name="slot")
        assert register_with_cuda(slot)
        slot.close()
        del slot
    assert runtime.error == 0


def test_an_error_of_a_registration_is_left_to_nobody(runtime: Runtime) -> None:
    """The next launch of this thread would raise it: the training's."""
    slot = Arena.create_shared(NBYTES, name="slot")
    runtime.registered[slot.address + 4096] = 4096
    assert not register_with_cuda(slot)
    assert runtime.error == 0
    slot.close()
    del slot
    assert [what for what, _ in runtime.told] == ["register", "unmap"]


def test_memory_that_a_device_keeps_is_not_given_to_others(runtime: Runtime) -> None:
    """What is copied to an address that it knows would go to the former pages."""
    slot = Arena.create_shared(NBYTES, name="slot")
    address = slot.address
    assert register_with_cuda(slot)
    runtime.stuck = True
    slot.close()
    del slot
    assert runtime.told[-1] == ("unregister", address)
    assert runtime.error == 0
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert any(line.startswith(f"{address:x}-") for line in maps)
    memory.unmap_memory(address, NBYTES)


@pytest.mark.gpu
def test_a_device_takes_slots_one_after_another() -> None:
    """And one that it refuses leaves no error behind."""
    for size in (NBYTES, 2 * NBYTES, 3 * NBYTES):
        slot = Arena.create_shared(size, name="slot")
        assert register_with_cuda(slot)
        again = torch.cuda.cudart().cudaHostRegister(slot.address, slot.nbytes, 1)
        assert int(again) == ALREADY_REGISTERED
        device_module._take_error()
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
        slot.close()
        del slot
