"""WHICH NODE OF THE JOB IS THIS?  The same one after every restart, while its machine is there.

A rendezvous numbers nodes by their names, so one lost or replaced machine may move all the others.
Each would look for its checkpoints under its new number while its keeper holds them under the old
one.  All state in memory would then be read from storage.  So launchers tell each other through the
rendezvous' store which numbers they had, and keep them; newcomers take what is free.  A job that
goes on with fewer nodes has gaps in its numbers; ranks are counted in their order without.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "autockpt/seats"


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


class Seated:
    """A rendezvous handler of torchelastic in which nodes keep their numbers."""

    def __init__(self, handler: Any, local_addr: str | None, kept: Sequence[int]) -> None:
        """`kept`: see `Claim`, as found when this launcher began."""
        self._handler, self._local_addr = handler, local_addr
        self._claim = Claim(kept=tuple(kept))

    @property
    def number(self) -> int | None:
        """Of this node; None before the first rendezvous."""
        return self._claim.held

    def __getattr__(self, name: str) -> Any:
        """All else is the handler's."""
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """The handler's answer, with nodes counted in the order of their numbers."""
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

        met = self._handler.next_rendezvous()
        store = PrefixStore(PREFIX, met.store)
        store.set(f"claim/{met.rank}", json.dumps(asdict(self._claim)))
        if met.rank == 0:
            said = [json.loads(store.get(f"claim/{n}")) for n in range(met.world_size)]
            claims = [Claim(held=one["held"], kept=tuple(one["kept"])) for one in said]
            store.set("numbers", json.dumps(numbers(claims)))
        every = json.loads(store.get("numbers"))
        number = every[met.rank]
        self._claim = Claim(held=number)
        seat = sorted(every).index(number)
        # Seat 0 is where the trainers' own store will be, so its address is told anew.
        master = RendezvousStoreInfo.build(seat, store, self._local_addr)
        return RendezvousInfo(met.store, seat, met.world_size, master)
