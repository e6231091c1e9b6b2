"""The files by which keepers trust and find one another, and who the ranks of a start are."""

import contextlib
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from autockpt.executors.network.discovery import (
    INTERFACE,
    KeeperAddress,
    listen_host,
    open_secret,
    read_address,
    write_address,
)
from autockpt.executors.protocol.messages import Incarnation
from autockpt.launch import rendezvous
from autockpt.launch.rank_env import RankPlace
from autockpt.launch.rendezvous import Node, Round, agree, next_incarnation, numbers_of
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.placement import FailureDomains
from autockpt.values.record import to_json


def test_the_secret_is_made_once_and_closed_to_others(tmp_path: Path) -> None:
    """Also when many come at the same time."""
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_secret(str(tmp_path)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    path = tmp_path / "control" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["secret"]


def test_a_secret_that_others_could_read_is_refused(tmp_path: Path) -> None:
    """The message names the mode and what to do."""
    open_secret(str(tmp_path))
    os.chmod(tmp_path / "control" / "secret", 0o640)
    with pytest.raises(StorageError, match="mode 640"):
        open_secret(str(tmp_path))


def test_a_secret_elsewhere_or_of_another_size_is_refused(tmp_path: Path) -> None:
    """A link could point to something known."""
    open_secret(str(tmp_path))
    path = tmp_path / "control" / "secret"
    path.write_bytes(b"short")
    with pytest.raises(StorageError, match="expected a file of 32"):
        open_secret(str(tmp_path))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="secret"):
        open_secret(str(tmp_path))


def test_an_address_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    """Garbage is as good as nothing."""
    open_secret(str(tmp_path))
    address = KeeperAddress(
        run_id="r", node=3, host="10.0.0.1", port=4000, nonce="n",
        incarnation=Incarnation(launch_id="a", restart_round=2),
    )  # fmt: skip
    assert read_address(str(tmp_path), 3) is None
    write_address(str(tmp_path), address)
    assert read_address(str(tmp_path), 3) == address
    (tmp_path / "control" / "node-003.json").write_text('{"host": ')
    assert read_address(str(tmp_path), 3) is None
    (tmp_path / "control" / "node-003.json").write_bytes(bytes(100_000))
    assert read_address(str(tmp_path), 3) is None


def test_a_keeper_never_listens_on_all_interfaces() -> None:
    """Loopback on one machine, else one address that others reach."""
    assert listen_host({}, one_host=True) == "127.0.0.1"
    assert listen_host({INTERFACE: "lo"}, one_host=False) == "127.0.0.1"
    assert listen_host({INTERFACE: "192.0.2.7"}, one_host=True) == "192.0.2.7"
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="one interface"):
            listen_host({INTERFACE: everywhere}, one_host=False)
    with pytest.raises(ConfigError, match="no such interface; there are"):
        listen_host({INTERFACE: "nothing0"}, one_host=False)
    host = ""
    with contextlib.suppress(ConfigError):  # a machine without a network
        host = listen_host({"MASTER_ADDR": "localhost"}, one_host=False)
    assert not host.startswith("127.")


def test_a_restart_continues_the_launch_and_a_new_launch_does_not() -> None:
    """One launcher in common is enough: the others may have been replaced."""
    newest = Round(incarnation=Incarnation(launch_id="a", restart_round=4), launchers=("a", "b"))
    assert next_incarnation(None, "a", ("a", "b")) == Incarnation(launch_id="a", restart_round=0)
    again = Incarnation(launch_id="a", restart_round=5)
    assert next_incarnation(newest, "a", ("a", "b")) == again
    assert next_incarnation(newest, "b", ("b", "c")) == again
    assert next_incarnation(newest, "d", ("d", "e")) == Incarnation(launch_id="d", restart_round=0)


def test_several_nodes_need_a_process_group(tmp_path: Path) -> None:
    """Without it the ranks cannot agree, and the message says what to do."""
    with pytest.raises(ConfigError, match="init_process_group"):
        agree(str(tmp_path), "launch", place(0))


def test_nodes_exchange_what_they_know_of_their_failure_domains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank hears the same; a level that one of them does not know is left out."""
    from torch.distributed import HashStore

    store = HashStore()
    labels = {"power": "p1", "rack": "r2"}
    other = Node(launcher="b", ranks=1, network="n", labels=labels, number=None)
    store.set("autockpt/1/node/1", to_json(other))
    store.set("autockpt/1/sees/1", "shared")
    monkeypatch.setattr(rendezvous, "group_store", lambda: store)
    monkeypatch.setattr(rendezvous, "_calls", 0)
    said = agree(str(tmp_path), "a", place(0), {"rack": "r1"})
    assert said.domains == FailureDomains(levels=("rack",), labels=(("r1",), ("r2",)))
    assert said.nodes == (0, 1)
    monkeypatch.setattr(rendezvous, "_calls", 0)
    assert agree(str(tmp_path), "b", place(1), labels) == said


def _two_nodes(monkeypatch: pytest.MonkeyPatch, within_s: float) -> None:
    """Rank 0 and rank 1 are on two nodes, and this thread speaks for both."""
    from torch.distributed import HashStore

    store = HashStore()
    node = Node(launcher="b", ranks=1, network="n", labels={}, number=None)
    store.set("autockpt/1/node/1", to_json(node))
    store.set("autockpt/1/sees/1", "shared")
    monkeypatch.setattr(rendezvous, "group_store", lambda: store)
    monkeypatch.setattr(rendezvous, "_calls", 0)
    monkeypatch.setattr(rendezvous, "SHARED_WITHIN_S", within_s)


@pytest.mark.parametrize("earlier", [False, True])
def test_nodes_with_directories_of_their_own_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """Also where an earlier try has left a secret in each: the job would wait without a word."""
    _two_nodes(monkeypatch, 0.2)
    agree(str(tmp_path / "first"), "a", place(0))
    monkeypatch.setattr(rendezvous, "_calls", 0)
    second = tmp_path / "second"
    if earlier:
        second.mkdir()
        open_secret(str(second))
    sees = "another directory" if earlier else "nothing"
    with pytest.raises(StorageError, match=f"not shared by all nodes.*rank 1 .*{sees}.*--run-dir"):
        agree(str(second), "b", place(1))


def test_all_nodes_end_where_one_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that see the same one, rank 0 too: they would wait for the other without a word."""
    from torch.distributed import HashStore

    store = HashStore()
    for rank in (1, 2):
        node = Node(launcher="b", ranks=1, network="n", labels={}, number=None)
        store.set(f"autockpt/1/node/{rank}", to_json(node))
    store.set("autockpt/1/sees/1", "shared")
    store.set("autockpt/1/sees/2", "not shared by all nodes, rank 2 sees nothing")
    monkeypatch.setattr(rendezvous, "group_store", lambda: store)
    for rank in (0, 1):
        monkeypatch.setattr(rendezvous, "_calls", 0)
        with pytest.raises(StorageError, match="rank 2 sees nothing"):
            agree(str(tmp_path), "a", place(rank, world_size=3))


def test_a_copy_of_the_directory_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has a disk of its own with a copy of the run, its secret and its last round."""
    _two_nodes(monkeypatch, 0.2)
    first, second = tmp_path / "first", tmp_path / "second"
    agree(str(first), "a", place(0))
    shutil.copytree(first, second)
    monkeypatch.setattr(rendezvous, "_calls", 0)
    agree(str(first), "c", place(0))
    monkeypatch.setattr(rendezvous, "_calls", 0)
    with pytest.raises(StorageError, match=r"not shared by all nodes.*sees another directory"):
        agree(str(second), "b", place(1))


def test_a_directory_that_a_node_sees_late_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show it after a while."""
    _two_nodes(monkeypatch, 60.0)
    shared, late = tmp_path / "shared", tmp_path / "late"
    said = agree(str(shared), "a", place(0))
    monkeypatch.setattr(rendezvous, "_calls", 0)
    timer = threading.Timer(0.3, lambda: late.symlink_to(shared))
    timer.start()
    assert agree(str(late), "b", place(1)) == said
    timer.join()


def test_nodes_have_the_numbers_that_they_keep_and_as_many_ranks_as_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 is gone, node 2 has two ranks; domains follow the numbers."""
    from torch.distributed import HashStore

    store = HashStore()
    other = Node(launcher="b", ranks=2, network="n", labels={"rack": "r2"}, number=2)
    store.set("autockpt/1/node/1", to_json(other))
    store.set("autockpt/1/sees/1", "shared")
    monkeypatch.setattr(rendezvous, "group_store", lambda: store)
    monkeypatch.setattr(rendezvous, "_calls", 0)
    said = agree(str(tmp_path), "a", place(0, world_size=3), {"rack": "r1"}, number=0)
    assert said.nodes == (0, 2, 2)
    assert [said.domains.of(node) for node in (0, 1, 2)] == [("r1",), ("",), ("r2",)]


def test_nodes_are_counted_where_two_have_one_number() -> None:
    """Launchers that do not know of one another, or one that gives none."""
    nodes = [Node(launcher="a", ranks=1, network="n", labels={}, number=n) for n in (4, 4, None)]
    assert numbers_of(nodes[:2]) == (0, 1)
    assert numbers_of(nodes[1:]) == (0, 1)
    assert numbers_of(nodes[:1]) == (4,)


def place(rank: int, world_size: int = 2) -> RankPlace:
    """The only rank of its node."""
    return RankPlace(rank=rank, world_size=world_size, local_rank=0, local_size=1, nodes=2)
