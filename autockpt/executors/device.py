"""Copies from a CUDA device: a side stream, events, and no wait on the training thread.

The side stream follows everything the training stream has been given at the boundary; the training
stream is made to wait for an event of it before the optimizer changes what is being copied.  Both
waits are the device's: no call here blocks the thread that trains.  With enough free memory the
state is cloned on the device first, at hundreds of GB/s, and nobody waits for the link at all.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autockpt.executors.memory import Arena

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


class DeviceCopier:
    """The side stream of one device.  Used from the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def has_room(self, nbytes: int) -> bool:
        """A clone of `nbytes` fits beside the reserve.

        Blocks that the allocator holds and nobody uses count as free.
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
        """What the training stream is given from now on happens after `event`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def read(self, values: torch.Tensor) -> DeviceRead:
        """Reads a small tensor in the order of the training stream, without waiting."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return DeviceRead(host, event)


def _pieces(
    target: torch.Tensor, source: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    if not source.is_contiguous() or source.nbytes <= PIECE_BYTES:
        return ((target, source),)
    count = PIECE_BYTES // source.element_size()
    return zip(target.view(-1).split(count), source.detach().view(-1).split(count), strict=True)


def register_with_cuda(arena: Arena) -> bool:
    """Pins a slot for DMA when there is a GPU; False when that is not possible."""
    if not torch.cuda.is_available():
        return False
    with contextlib.suppress(RuntimeError):
        code = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 1)
        arena.pinned = int(code) == 0
    return arena.pinned
