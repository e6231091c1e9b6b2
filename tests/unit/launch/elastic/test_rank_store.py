"""The launcher of one node keeps the store of its ranks."""

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from autockpt.launch.elastic import rank_store
from autockpt.launch.elastic.rank_store import RankStores

WAIT = datetime.timedelta(seconds=1)


class Meeting:
    """A handler of torchelastic that meets alone."""

    host = "localhost"

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(master_addr=self.host, master_port=1)
        kept: Any = SimpleNamespace()
        return RendezvousInfo(kept, 0, 1, address)

    def is_closed(self) -> bool:
        return False


def client(met: RendezvousInfo) -> TCPStore:
    """As a rank connects."""
    address = met.bootstrap_store_info
    return TCPStore(address.master_addr, address.master_port, 4, is_master=False, timeout=WAIT)


def test_a_rank_finds_the_store_without_rank_0() -> None:
    """And a new start finds an empty one."""
    stores = RankStores(Meeting())
    client(stores.next_rendezvous()).set("address", "of a rank that dies")
    assert stores.use_agent_store
    assert not client(stores.next_rendezvous()).check(["address"])
    assert not stores.is_closed()


def test_where_no_store_can_be_made_rank_0_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why that fails."""
    monkeypatch.setattr(rank_store, "WAIT_S", 0.1)
    stores = RankStores(Meeting())
    stores.next_rendezvous()
    monkeypatch.setattr(Meeting, "host", "no.such.host.invalid")
    met = stores.next_rendezvous()
    assert not stores.use_agent_store
    assert met.bootstrap_store_info.master_port == 1
    with pytest.raises(DistError, match="timed out"):
        client(met)
