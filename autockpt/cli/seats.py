"""WHICH NODE OF THE JOB IS THIS?  The same one after every restart, while its machine is there.

A rendezvous numbers nodes by their names, so one replaced machine may move all the others.  Each
would look for its checkpoints under its new number while its keeper holds them under the old one,
and what every memory held would be read from storage.  So launchers tell each other through the
rendezvous' store which seats they had, and take them again; newcomers take what is free.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "autockpt/seats"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one launcher has a right to."""

    held: int | None = None
    """Its seat in the former round."""
    kept: tuple[int, ...] = ()
    """Seats whose keepers live on its machine; a new launcher may follow a dead one."""


def seats(claims: Sequence[Claim]) -> tuple[int, ...]:
    """Seat of every launcher, 0 to n - 1, by its number in the rendezvous.

    Who sits keeps his seat; then who has the keeper of a free one; the rest in order.  A seat that
    two claim goes to the first of them, one that no longer exists to nobody.
    """
    free = set(range(len(claims)))
    taken: dict[int, int] = {}

    def take(number: int, wanted: Sequence[int | None]) -> None:
        seat = next((seat for seat in wanted if seat in free), None)
        if number not in taken and seat is not None:
            taken[number] = seat
            free.remove(seat)

    for number, claim in enumerate(claims):
        take(number, (claim.held,))
    for number, claim in enumerate(claims):
        take(number, claim.kept)
    for number in range(len(claims)):
        take(number, sorted(free))
    return tuple(taken[number] for number in range(len(claims)))


class Seated:
    """A rendezvous handler of torchelastic in which nodes keep their numbers."""

    def __init__(self, handler: Any, local_addr: str | None, kept: Sequence[int]) -> None:
        """`kept`: see `Claim`, as found when this launcher began."""
        self._handler, self._local_addr = handler, local_addr
        self._claim = Claim(kept=tuple(kept))

    def __getattr__(self, name: str) -> Any:
        """All else is the handler's."""
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """The handler's answer with this node's seat as its rank."""
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

        met = self._handler.next_rendezvous()
        store = PrefixStore(PREFIX, met.store)
        store.set(f"claim/{met.rank}", json.dumps(asdict(self._claim)))
        if met.rank == 0:
            said = [json.loads(store.get(f"claim/{n}")) for n in range(met.world_size)]
            claims = [Claim(held=one["held"], kept=tuple(one["kept"])) for one in said]
            store.set("seats", json.dumps(seats(claims)))
        seat = json.loads(store.get("seats"))[met.rank]
        self._claim = Claim(held=seat)
        # Seat 0 is where the trainers' own store will be, so its address is told anew.
        master = RendezvousStoreInfo.build(seat, store, self._local_addr)
        return RendezvousInfo(met.store, seat, met.world_size, master)
