"""WHICH NODE OF THE JOB IS THIS?  The same one after every restart, while its machine is there.

A rendezvous numbers nodes by their names, so one lost or replaced machine may move all the others.
Each would look for its checkpoints under its new number while its keeper holds them under the old
one.  All state in memory would then be read from storage.  So launchers tell each other through the
rendezvous' store which numbers they had, and keep them; newcomers take what is free.  A job that
goes on with fewer nodes has gaps in its numbers; ranks are counted in their order without.
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autockpt.launch.elastic.rendezvous.membership import LOOK_S, Full, Membership

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
PREFIX = "autockpt/seats"
DEFAULT_PORT = "29400"
"""Of an endpoint without one, as torch's c10d backend takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The numbers that one launcher has a right to."""

    held: int | None = None
    """Its number in the former round."""
    kept: tuple[int, ...] = ()
    """Numbers whose keepers live on its machine; a new launcher may follow a dead one."""


def numbers(claims: Sequence[Claim]) -> tuple[int, ...]:
    """Number of every launcher's node, by the launcher's number in the rendezvous.

    A launcher with a number keeps it.  Then a launcher gets a free number whose keeper lives on its
    machine; others take the lowest free numbers.  One that two claim goes to the first of them.
    """
    taken: dict[int, int] = {}

    def take(launcher: int, wanted: Sequence[int | None]) -> None:
        number = next((n for n in wanted if n is not None and n not in taken.values()), None)
        if launcher not in taken and number is not None:
            taken[launcher] = number

    for launcher, claim in enumerate(claims):
        take(launcher, (claim.held,))
    for launcher, claim in enumerate(claims):
        take(launcher, claim.kept)
    for launcher in range(len(claims)):
        lowest = next(n for n in itertools.count() if n not in taken.values())
        take(launcher, (lowest,))
    return tuple(taken[launcher] for launcher in range(len(claims)))


def hosts_rendezvous(endpoint: str, *, proc: str = "/proc") -> bool:
    """Whether this process serves the store at which the nodes of the job meet."""
    _, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        port = DEFAULT_PORT
    listening = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"{proc}/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                local, state, inode = fields[1], fields[3], fields[9]
                if state == LISTENING and int(local.rpartition(":")[2], 16) == int(port):
                    listening.add(f"socket:[{inode}]")
    for name in os.listdir(f"{proc}/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"{proc}/self/fd/{name}") in listening:
                return True
    return False


class Seated:
    """A rendezvous handler of torchelastic in which nodes keep their numbers."""

    def __init__(
        self, handler: Any, local_addr: str | None, kept: Sequence[int], *,
        lost_nodes: Callable[[], Iterable[int]] = tuple,
        say: Callable[[str], object] = print,
        idle: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """`kept`: see `Claim`, as found when this launcher began.  `lost_nodes`: see `Membership`.
        `say` and `idle`: see `Membership.await_place`."""
        self._handler, self._local_addr = handler, local_addr
        self._claim = Claim(kept=tuple(kept))
        self._membership = Membership(handler, lost_nodes)
        self._say, self._idle = say, idle
        self.nodes = 0
        """That met in the newest round."""
        self.leaves = False
        """This node leaves, and the others go on: it must not close the rendezvous for them."""

    def shutdown(self) -> bool:
        """The handler's, which ends the job on all nodes; a node that leaves only falls silent."""
        if not self.leaves:
            return bool(self._handler.shutdown())
        stop = getattr(self._handler, "_stop_heartbeats", None)
        if stop is not None:  # without it, the others miss this node when its process has ended
            stop()
        return False

    @property
    def number(self) -> int | None:
        """Of this node; None before the first rendezvous."""
        return self._claim.held

    def __getattr__(self, name: str) -> Any:
        """All else is the handler's."""
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """The handler's answer, with nodes counted in the order of their numbers.

        A spare waits here.  Raises NotNeeded when the job ends without it.
        """
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

        met = self._meet()
        store = PrefixStore(PREFIX, met.store)
        said = {**asdict(self._claim), "name": self._membership.name}
        store.set(f"claim/{met.rank}", json.dumps(said))
        if met.rank == 0:
            every = [json.loads(store.get(f"claim/{n}")) for n in range(met.world_size)]
            found = numbers([Claim(held=one["held"], kept=tuple(one["kept"])) for one in every])
            names = [one["name"] for one in every]
            store.set("numbers", json.dumps([*zip(found, names, strict=True)]))
        seats = [(number, tuple(name)) for number, name in json.loads(store.get("numbers"))]
        number, self.nodes = seats[met.rank][0], met.world_size
        self._claim = Claim(held=number)
        self._membership.met(dict(seats), first=met.rank == 0)
        seat = sorted(number for number, _ in seats).index(number)
        # Seat 0 is where the trainers' own store will be, so its address is told anew.
        master = RendezvousStoreInfo.build(seat, store, self._local_addr)
        return RendezvousInfo(met.store, seat, met.world_size, master)

    def _meet(self) -> Any:
        """The handler's answer, as soon as there is a place for this node."""
        has_place = self.number is not None
        while True:
            if not has_place:
                self._await_place()
            with contextlib.suppress(Full), self._membership.meeting():
                return self._handler.next_rendezvous()
            has_place = False
            time.sleep(LOOK_S)  # the others tell who they are

    def _await_place(self) -> None:
        self.leaves = True  # what ends a spare does not end the job
        most = getattr(getattr(self._handler, "settings", None), "max_nodes", 0)
        self._membership.await_place(most, self._say, self._idle)
        self.leaves = False
