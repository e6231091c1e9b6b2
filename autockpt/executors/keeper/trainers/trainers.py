"""The trainers of a node by rank, and messages to them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autockpt.executors.keeper import wire
from autockpt.executors.protocol import messages as p
from autockpt.executors.storage.directory.claims import pid_start


@dataclass(slots=True)
class Trainer:
    """A connected trainer."""

    rank: int
    pid: int
    launcher_pid: int
    attach: p.TrainerAttached
    connection: wire.Connection
    leaving: str = ""
    note: str = ""
    """The note about its end, beside the reason."""
    step: int = 0
    """The step of its end."""
    launched: bool = False
    """`autockpt run` writes itself how it ended."""
    wanted: wire.SlotsWanted | None = None
    """Put off until it is known what the slots that it has are needed for."""
    process: int | None = None
    """Descriptor of its process, readable when that has ended; None where the system has none."""


class Trainers:
    """The live trainer of each rank, and trainers that a later start has replaced."""

    def __init__(
        self, post: Callable[[Callable[[], None]], None], log: Callable[[str], None]
    ) -> None:
        self.live: dict[int, Trainer] = {}
        self.replaced: list[Trainer] = []
        """Still connected: they may write into their slots."""
        self._post = post
        self._log = log

    def __iter__(self) -> Iterator[Trainer]:
        """All that are connected."""
        return iter([*self.live.values(), *self.replaced])

    def of(self, connection: wire.Connection) -> Trainer | None:
        """The live trainer behind a connection."""
        return next((one for one in self.live.values() if one.connection is connection), None)

    def send(self, trainer: Trainer, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Sends to a connected trainer; one that is not reachable is logged."""
        try:
            trainer.connection.send(message, descriptors)
        except OSError:
            # Its end is seen as a closed connection by the loop; nothing to do here.
            self._log(f"rank {trainer.rank} is not reachable: {type(message).__name__}")

    def send_to(self, rank: int, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Sends to the live trainer of a rank, if there is one."""
        if rank in self.live:
            self.send(self.live[rank], message, descriptors)

    def send_all(self, message: Any) -> None:
        """Sends to each live trainer."""
        for trainer in list(self.live.values()):
            self.send(trainer, message)

    def post_to(self, rank: int, message: Any, descriptors: tuple[int, ...]) -> None:
        """Sends to a rank, from any thread; takes the descriptors over."""

        def send() -> None:
            self.send_to(rank, message, descriptors)
            for fd in descriptors:
                os.close(fd)

        self._post(send)

    def fence(self, fence: p.FenceTrainer) -> None:
        """Sends to the fenced trainers only, not to their successors."""
        for trainer in self:
            if (trainer.rank, trainer.attach.incarnation) == (fence.rank, fence.incarnation):
                self.send(trainer, fence)


def may_replace(new: p.TrainerAttached, old: p.TrainerAttached) -> bool:
    """Of two live processes with one rank the later round of the launch is right.

    Of two running ones that come to a new keeper, the newer term is right.
    """
    if new.term is not None and old.term is not None:
        return new.term > old.term
    same_launch = new.incarnation.launch_id == old.incarnation.launch_id
    return same_launch and new.incarnation != old.incarnation


def describe(trainer: Trainer) -> str:
    """For a person who has to end it."""
    text = f"pid {trainer.pid}, launch {trainer.attach.incarnation}"
    # In another pid namespace than ours neither of the two is seen.
    orphan = pid_start(trainer.pid) and not pid_start(trainer.launcher_pid)
    return f"{text}, whose launcher is dead" if orphan else text
