"""`torchrun --rdzv-backend autockpt`: nodes keep their numbers under a launcher of the user."""

import os
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous

from autockpt.launch import environment
from autockpt.launch.elastic import torchrun_handler
from autockpt.launch.elastic.rendezvous.polls import LIVELY

JOIN_S = 60.0


def test_torchelastic_finds_the_backend_by_its_name() -> None:
    (found,) = entry_points(group="torchrun.handlers", name=torchrun_handler.BACKEND)
    assert found.load() is torchrun_handler.make_factory


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the nodes of a test meet; what the handler sets is taken back."""
    monkeypatch.setenv(environment.NODE, "")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")  # put back behind the test
    monkeypatch.setattr(dynamic_rendezvous, "_delay", dynamic_rendezvous._delay)
    return tmp_path / "store"


def handler(store: Path, address: str, *, nodes: int = 2, **settings: Any) -> Any:
    """One node of several, sorted by their addresses.

    Others count as lost for it when they have been silent for a minute: a busy machine is no loss.
    """
    settings = {"keep_alive_max_attempt": 60, **settings}
    parameters = RendezvousParameters(
        torchrun_handler.BACKEND, str(store), "job", nodes, nodes, local_addr=address,
        store_type="file", **settings,
    )  # fmt: skip
    return torchrun_handler.make_factory()(parameters)


def meet(*handlers: Any) -> list[int]:
    """The seats after a common rendezvous."""
    met: dict[int, Any] = {}

    def join(index: int) -> None:
        met[index] = handlers[index].next_rendezvous()

    threads = [threading.Thread(target=join, args=(at,)) for at in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    return [met[at].rank for at in range(len(handlers))]


def test_a_survivor_keeps_its_number_when_a_replacement_sorts_before_it(store: Path) -> None:
    """c10d would give the survivor, which was node 1, the number of the lost node."""
    survivor = handler(store, "127.0.0.2", keep_alive_max_attempt=6)
    lost = handler(store, "127.0.0.3")
    assert meet(lost, survivor) == [1, 0]
    assert (lost.number, survivor.number) == (1, 0)
    lost._stop_heartbeats()
    replacement = handler(store, "127.0.0.1")
    assert meet(replacement, survivor) == [1, 0]
    assert (replacement.number, survivor.number) == (1, 0)
    assert not survivor.use_agent_store
    assert survivor.get_backend() == "autockpt"
    for one in (survivor, replacement):
        one._stop_heartbeats()


def test_a_replacement_that_sorts_last_is_told_where_ranks_meet(store: Path) -> None:
    """By the survivor, which is node 0 in both starts."""
    survivor = handler(store, "127.0.0.2", keep_alive_max_attempt=6)
    lost = handler(store, "127.0.0.3")
    assert meet(lost, survivor) == [1, 0]
    lost._stop_heartbeats()
    replacement = handler(store, "127.0.0.4")
    assert meet(replacement, survivor) == [1, 0]
    for one in (survivor, replacement):
        one._stop_heartbeats()


def test_ranks_inherit_the_number_of_their_node(store: Path) -> None:
    """In the environment in which the launcher starts them."""
    alone = handler(store, "127.0.0.1", nodes=1)
    assert meet(alone) == [0]
    assert os.environ[environment.NODE] == "0"
    alone._stop_heartbeats()


def test_settings_of_the_user_come_before_ours(store: Path) -> None:
    parameters = RendezvousParameters(
        torchrun_handler.BACKEND, str(store), "job", 2, 2, store_type="file",
        keep_alive_interval=7,
    )  # fmt: skip
    torchrun_handler.make_factory()(parameters)
    assert parameters.config == {**LIVELY, "store_type": "file", "keep_alive_interval": 7}
