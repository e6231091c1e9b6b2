"""Copies from a CUDA device: a side stream, events, and no wait on the training thread.

The side stream follows all work that the training stream has at the boundary.  The training stream
waits for an event of the side stream before the optimizer changes the tensors being copied.  Both
waits are the device's: no call here blocks the thread that trains.  With enough free memory the
state is cloned on the device first, at hundreds of GB/s, and no thread waits for the link.

Without a gate all copies are issued at the boundary.  With a gate the copy thread issues them piece
by piece, one in flight at a time.  The fence issues the remaining pieces at once and without a
wait.
"""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from autockpt.executors.linux.memory import Arena
from autockpt.executors.throttle.idle_windows import IdleWindowThrottle

PIECE_BYTES = 64 * 2**20
"""Bytes per transfer: one of 20 GB would keep every collective's host traffic waiting."""

CLONE_RESERVE = 0.1
"""Part of the device's memory that a clone never takes: the training's peaks come later."""


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """The device that copies a tensor by itself; None: the copy thread does.

    The engine asks nowhere else, so that its device path can be driven without a GPU.
    """
    return tensor.device if tensor.is_cuda else None


class DeviceRead:
    """A few bytes on their way to the host."""

    def __init__(self, host: torch.Tensor, event: Any) -> None:
        self._host, self._event = host, event

    def wait(self) -> torch.Tensor:
        """The bytes; blocks the calling thread, which must not be the one that trains."""
        self._event.synchronize()
        return self._host


class Copies(Protocol):
    """The device operations that a delayed copy needs."""

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Issues copies to host memory, from any thread; the event behind them."""


class GatedCopy:
    """A copy that a device is given piece by piece, in order.

    The copy thread gives a piece when the gate lets it, and waits for that piece before it asks for
    the next.  The fence gives all remaining pieces.  The second of the two finds the pieces given.
    """

    def __init__(
        self,
        device: Copies,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        gate: IdleWindowThrottle,
    ) -> None:
        """Several tensors, or one that is not contiguous, are one piece."""
        self._device, self._gate = device, gate
        self._targets, self._sources = targets, sources
        self._nbytes = sum(source.nbytes for source in sources)
        self._whole = len(sources) > 1 or not sources[0].is_contiguous()
        self._lock = threading.Lock()
        self._given = 0
        """Bytes from the beginning on."""
        self._event: Any = None

    def give(self, until: int | None = None) -> Any:
        """Issues what is not issued yet of the first `until` bytes (None: all); the event behind.

        Waits for nothing but another thread that issues a piece.
        """
        with self._lock:
            stop = self._nbytes if until is None or self._whole else until
            if self._given < stop:
                self._event = self._device.copy(*self._piece(self._given, stop))
                self._given = stop
            if self._given == self._nbytes:
                self._targets, self._sources = [], []  # a clone's memory is free once it is copied
            return self._event

    def synchronize(self) -> None:
        """Until every byte has arrived, in pieces that each ask the gate; not for who trains."""
        asked = 0
        while asked < self._nbytes:
            piece = self._nbytes if self._whole else self._gate.use.chunk_bytes
            count = min(piece, self._nbytes - asked)
            self._gate.wait(count)
            asked += count
            self.give(asked).synchronize()

    def _piece(self, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._whole or (start, stop) == (0, self._nbytes):
            return self._targets, self._sources
        (target,), (source,) = self._targets, self._sources
        begin, end = start // source.element_size(), stop // source.element_size()
        return [target.view(-1)[begin:end]], [source.detach().view(-1)[begin:end]]


class DeviceCopier:
    """The side stream of one device.  Used from the training thread, `copy` also beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def has_room(self, nbytes: int) -> bool:
        """A clone of `nbytes` fits beside the reserve.

        Unused blocks that the allocator holds count as free.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return nbytes + CLONE_RESERVE * total <= free + cached

    def clone(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the device, in the order of the training stream."""
        with torch.no_grad():
            clones = [torch.empty_like(source) for source in sources]
            torch._foreach_copy_(clones, list(sources))
        return clones

    def follow(self) -> None:
        """The side stream goes on only after what the training stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Any:
        """An event of the training stream: it happens when the device has come so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Issues copies to pinned host memory; the event behind them."""
        with torch.cuda.stream(self._stream), torch.no_grad():
            if len(sources) > 1:  # small ones: one call, hundreds of them are optimizer steps
                torch._foreach_copy_(targets, sources, non_blocking=True)
            else:
                for into, part in _pieces(targets[0], sources[0]):
                    into.copy_(part, non_blocking=True)
            for source in sources:
                source.record_stream(self._stream)  # its memory is not given to others meanwhile
            event = torch.cuda.Event(blocking=True)  # else the copy thread spins on a core
            event.record(self._stream)
        return event

    def order(self, event: Any) -> None:
        """Order all further work of the training stream after `event`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def read(self, values: torch.Tensor) -> DeviceRead:
        """Reads a small tensor in the order of the training stream, without waiting."""
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        return DeviceRead(host, self.mark())


def _pieces(
    target: torch.Tensor, source: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    if not source.is_contiguous() or source.nbytes <= PIECE_BYTES:
        return ((target, source),)
    count = PIECE_BYTES // source.element_size()
    return zip(target.view(-1).split(count), source.detach().view(-1).split(count), strict=True)


def register_with_cuda(arena: Arena) -> bool:
    """Pins a slot for DMA, until it is unmapped, when there is a GPU; False when that is not
    possible."""
    if arena.pinned or not torch.cuda.is_available():
        return arena.pinned
    with contextlib.suppress(RuntimeError):
        device = torch.cuda.current_device()
        if not int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 1)):
            arena.pin(partial(_unregister, arena.address, device))
        else:
            _take_error()
    return arena.pinned


def _unregister(address: int, device: int) -> bool:
    """On any thread, which may have no device of its own; False when it failed."""
    with contextlib.suppress(RuntimeError):
        cudart = torch.cuda.cudart()  # in a forked child it raises
        with torch.cuda.device(device):
            if not int(cudart.cudaHostUnregister(address)):
                return True
            _take_error()
    return False


def _take_error() -> None:
    """Clear the error that a failed call of the runtime leaves to its thread's next launch.

    This launch gets it instead of one of the training's.  torch has no call to read it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.float32, device="cuda").add_(1)
