"""The store at which restartable functions of one start meet, kept by the launcher.

torch would have rank 0 keep it.  The others then wait for rank 0.  When it dies before it has made
the store, they ask an address at which nothing listens, and only a time limit ends that.  Every
start has a store of its own: in an older one ranks would find the addresses of dead ranks.

torchelastic is not told of it.  With `TORCHELASTIC_USE_AGENT_STORE=True` torch has every group of
a start read the keys of the first one, also at addresses that the script names.
"""

import contextlib
import os
from datetime import timedelta
from typing import Any

from autockpt.launch import environment
from autockpt.launch.in_process import kept_store

WAIT_S = 10.0
"""The launcher connects to its own store within this time, under the address of the ranks."""


class RankStores:
    """A rendezvous handler of torchelastic, of one node."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._store: Any = None

    def __getattr__(self, name: str) -> Any:
        """All else is the handler's."""
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """The handler's answer; the ranks that start now inherit the port of the new store."""
        from torch import distributed

        met = self._handler.next_rendezvous()
        dist: Any = distributed
        wait = timedelta(seconds=WAIT_S)
        address = met.bootstrap_store_info
        self._store = None
        os.environ.pop(environment.KEPT_STORE, None)
        with contextlib.suppress(RuntimeError):  # rank 0 makes one, and says why that fails
            self._store = dist.TCPStore(
                address.master_addr, 0, is_master=True, timeout=wait, wait_for_workers=False
            )
            ports = kept_store.Ports(torch=address.master_port, kept=self._store.port)
            os.environ[environment.KEPT_STORE] = ports.text()
        return met
