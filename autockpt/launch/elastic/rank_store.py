"""The store at which the ranks of one start meet, kept by the launcher.

torch would have rank 0 keep it.  The others then wait for rank 0.  When it dies before it has made
the store, they ask an address at which nothing listens, and only a time limit ends that.  Every
start has a store of its own: in an older one ranks would find the addresses of dead ranks.
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` takes care that torchelastic hands out no older one.
"""

import contextlib
from datetime import timedelta
from typing import Any

WAIT_S = 10.0
"""The launcher connects to its own store within this time, under the address of the ranks."""


class RankStores:
    """A rendezvous handler of torchelastic, of one node."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._store: Any = None
        self.use_agent_store = False
        """Whether the ranks find a store, as torchelastic tells them."""

    def __getattr__(self, name: str) -> Any:
        """All else is the handler's."""
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """The handler's answer, with the address of the new store."""
        from torch import distributed
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

        met = self._handler.next_rendezvous()
        dist: Any = distributed
        wait = timedelta(seconds=WAIT_S)
        host = met.bootstrap_store_info.master_addr
        self._store, self.use_agent_store = None, False
        with contextlib.suppress(RuntimeError):  # rank 0 tries it as well, and says why it fails
            self._store = dist.TCPStore(
                host, 0, is_master=True, timeout=wait, wait_for_workers=False
            )
            self.use_agent_store = True
            own = RendezvousStoreInfo(master_addr=host, master_port=self._store.port)
            return RendezvousInfo(met.store, met.rank, met.world_size, own)
        return met
