"""A CUDA device made of two threads: everything given to it happens later, in the order of streams.

It has the interface of `executors.device.DeviceCopier`.  Its memory is the host's: tensors that a
test names as the device's are copied by its side stream, and what a test gives to its training
stream (`compute`) happens when that stream gets there.  Either stream can be held.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from autockpt.executors.snapshot import copy_plan, optimizer_hooks, snapshotter

PATIENCE_S = 30.0


class Stream:
    """Work in order, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Behind everything that was put before; returns at once."""
        self._work.put(work)

    def hold(self) -> threading.Event:
        """Nothing put from now on happens until the event is set."""
        opened = threading.Event()
        self.put(lambda: opened.wait(PATIENCE_S))
        return opened

    def drain(self) -> None:
        """Waits for everything put so far."""
        done = threading.Event()
        self.put(done.set)
        assert done.wait(PATIENCE_S)

    def close(self) -> None:
        """Ends the thread."""
        self._work.put(None)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class FakeEvent:
    """A place in a stream; `nbytes` were copied right before it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.error: Exception | None = None
        self._done = threading.Event()

    def done(self) -> None:
        """The stream has come here."""
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Everything before it has happened."""
        return self._done.is_set()

    def arrive(self) -> None:
        """As another stream waits: nothing is raised there."""
        assert self._done.wait(PATIENCE_S), "the device was never let go"

    def synchronize(self) -> None:
        """Waits for the stream, and raises what went wrong in it."""
        self.arrive()
        if self.error is not None:
            raise self.error


class FakeRead:
    """Values that arrive when the training stream gets there."""

    def __init__(self, values: torch.Tensor, event: FakeEvent) -> None:
        self._values, self._event = values, event

    def wait(self) -> torch.Tensor:
        """The values."""
        self._event.synchronize()
        return self._values


class FakeDevice:
    """The copier and the device in one."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.training, self.side = Stream("training"), Stream("side")
        self.room = False
        """A clone fits."""
        self.full = False
        """It does not, although it seemed to."""
        self.error: Exception | None = None
        """What goes wrong in every copy from now on."""
        self.ordered: list[FakeEvent] = []
        """What the training stream was made to wait for."""
        self.copies: list[FakeEvent] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self.take(tensors)

    def take(self, tensors: Iterable[torch.Tensor], number: int = 0) -> None:
        """These are tensors of device `number`."""
        for tensor in tensors:
            self._kept.append(tensor.data)  # so that no address is given out again
            self._numbers[tensor.untyped_storage().data_ptr()] = number

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """As `executors.device.device_of`."""
        number = self._numbers.get(tensor.untyped_storage().data_ptr())
        return None if number is None else torch.device("cuda", number)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The engine asks this device from now on."""
        monkeypatch.setattr(snapshotter, "device_of", self.device_of)
        monkeypatch.setattr(copy_plan, "device_of", self.device_of)
        monkeypatch.setattr(optimizer_hooks, "device_of", self.device_of)

    def compute(self, work: Callable[[], object]) -> None:
        """Gives a kernel to the training stream."""
        self.training.put(work)

    def close(self) -> None:
        """Ends both streams."""
        self.training.close()
        self.side.close()

    # ------------------------------------------------------------------ DeviceCopier

    def has_room(self, nbytes: int) -> bool:
        """Whether a clone fits."""
        return self.room

    def clone(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in the order of the training stream."""
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        clones = [torch.empty_like(source) for source in sources]
        self.training.put(lambda: torch._foreach_copy_(clones, list(sources)))
        return clones

    def follow(self) -> None:
        """The side stream goes on after what the training stream has been given so far."""
        here = FakeEvent(0)
        self.training.put(here.done)
        self.side.put(here.arrive)

    def mark(self) -> FakeEvent:
        """A place in the training stream."""
        event = FakeEvent(0)
        event.error = self.error
        self.training.put(event.done)
        return event

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> FakeEvent:
        """A copy in the side stream: it reads what stands there when its turn comes."""
        event = FakeEvent(sum(source.nbytes for source in sources))
        self.copies.append(event)

        def run() -> None:
            event.error = self.error
            if event.error is None:
                torch._foreach_copy_(targets, sources)
            event.done()

        self.side.put(run)
        return event

    def order(self, event: FakeEvent) -> None:
        """The training stream waits."""
        self.ordered.append(event)
        self.training.put(event.arrive)

    def read(self, values: torch.Tensor) -> FakeRead:
        """In the order of the training stream."""
        event = FakeEvent(values.nbytes)
        self.training.put(event.done)
        return FakeRead(values.clone(), event)
