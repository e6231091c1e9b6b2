"""The launcher of one node keeps the store of its ranks."""

import datetime
import os
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from autockpt.launch.elastic.rendezvous import rank_store
from autockpt.launch.elastic.rendezvous.rank_store import RankStores
from autockpt.launch.in_process import kept_store

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


def client(port: int) -> TCPStore:
    """As a rank connects."""
    return TCPStore("localhost", port, 4, is_master=False, timeout=WAIT)


def kept() -> int:
    """Port of the store, as the ranks of this start are told."""
    found = kept_store.ports(os.environ)
    assert found is not None
    assert found.torch == 1
    return found.kept


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept_store.VARIABLE, "of an outer launcher")


def test_a_rank_finds_the_store_without_rank_0() -> None:
    """And a new start finds an empty one."""
    stores = RankStores(Meeting())
    assert stores.next_rendezvous().bootstrap_store_info.master_port == 1
    client(kept()).set("address", "of a rank that dies")
    stores.next_rendezvous()
    assert not client(kept()).check(["address"])
    assert not stores.is_closed()


def test_where_no_store_can_be_made_rank_0_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why that fails."""
    monkeypatch.setattr(rank_store, "WAIT_S", 0.1)
    stores = RankStores(Meeting())
    stores.next_rendezvous()
    before = kept()
    monkeypatch.setattr(Meeting, "host", "no.such.host.invalid")
    assert stores.next_rendezvous().bootstrap_store_info.master_port == 1
    assert kept_store.ports(os.environ) is None
    with pytest.raises(DistError, match="timed out"):
        client(before)
