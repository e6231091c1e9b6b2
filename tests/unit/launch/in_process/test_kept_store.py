"""Where a restartable function meets the other ranks."""

import datetime
import importlib
import socket
from typing import Any

import pytest
import torch.distributed

from autockpt.launch.in_process import kept_store
from autockpt.launch.in_process.kept_store import Ports

WAIT = datetime.timedelta(seconds=20)
distributed: Any = torch.distributed
rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")


def meet(port: int, rank: int = 1) -> Any:
    """As `init_process_group` asks for its store."""
    url = f"tcp://127.0.0.1:{port}"
    return next(rendezvous.rendezvous(url, rank, 1, timeout=WAIT))[0]


def test_each_group_of_a_start_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 needs no rank 0; a process of the next start counts anew, as a new one does."""
    kept = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(kept_store.VARIABLE, Ports(torch=1, kept=kept.port).text())
    kept_store.begin_anew()
    with kept_store.in_use():
        meet(1).set("address", "of the first group")
        assert not meet(1).check(["address"])
        kept_store.begin_anew()
        assert meet(1).check(["address"])
    kept_store.begin_anew()


@pytest.mark.parametrize("kept", ["1:2", ""])
def test_other_addresses_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """Rank 0 keeps the store where the script names the port, and where the launcher keeps none."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = rendezvous._create_c10d_store
    monkeypatch.setenv(kept_store.VARIABLE, kept)
    with kept_store.in_use():
        assert (rendezvous._create_c10d_store is before) == (not kept)
        of_rank_0 = meet(port, rank=0)
        of_rank_0.set("key", "value")
        assert meet(port).get("key") == b"value"
    assert rendezvous._create_c10d_store is before
