"""How long a trainer waits for what the keepers decide."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper.client.client import KeeperClient
from autockpt.executors.protocol import messages as m
from autockpt.executors.restore import resume
from autockpt.values.errors import AutockptError, RestartError
from tests.simulation.cluster import LAUNCH, Cluster, gen

NEXT = m.Incarnation(launch_id="launch", restart_round=1)
HEARD = (m.RestoreShard, m.Resume, m.StartFresh, m.RestoreRefused)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[KeeperClient]:
    """Of rank 3; no keeper is there yet."""
    attach = m.TrainerAttached(
        rank=3, incarnation=LAUNCH, world_size=4, nodes=(0, 0, 0, 0), slots=0
    )
    link = KeeperClient(
        str(tmp_path), 0, checkpoints=str(tmp_path / "checkpoints"), attach=attach,
        launcher_pid=os.getpid(),
    )  # fmt: skip
    yield link
    link.board.close()


def test_a_trainer_waits_longer_than_the_keepers_are_silent() -> None:
    """The other rank attaches at the last moment, storage is slow, its keeper does not answer, and
    then it restores nothing until the deadline: the verified one hears nothing of all this."""
    cluster = Cluster()
    cluster.start()
    cluster.save(gen(1, 3), disk=True)
    for rank in (0, 1):
        cluster.tell_node(rank, m.TrainerLost(rank=rank, incarnation=LAUNCH))
    cluster.done = []
    heard = [cluster.now_s]

    def wait(seconds: float) -> None:
        for _ in range(int(seconds / 5)):
            cluster.tick(5)
            if any(isinstance(x, HEARD) and x.rank == 0 for x in cluster.done):
                heard.append(cluster.now_s)
            cluster.done = []

    cluster.attach(0, NEXT)
    wait(595)
    cluster.attach(1, NEXT)
    wait(resume.DIRECTORY_S / 2)
    cluster.cut = {1}
    parents = (m.TermParent(term=1, parent=None),)
    records = tuple({"file": f"{rank}", "root": f"{gen(1, 3)}:{rank}"} for rank in (0, 1))
    entry = m.CatalogueEntry(generation=gen(1, 3), step=3, world_size=2, records=records)
    cluster.claim(2, NEXT, parents=parents, committed=(entry,), ever_committed=True)
    wait(30)
    cluster.cut = set()
    wait(resume.DIRECTORY_S / 2)
    cluster.tell(m.DecisionWritten(term=2, attempt=1))
    wait(5)
    assert len(heard) == 2, "an order"
    cluster.tell_node(0, m.ShardVerified(rank=0, term=2, attempt=1))
    wait(1900)
    assert len(heard) == 3, "the deadline has passed"
    silences = [after - before for before, after in itertools.pairwise(heard)]
    assert max(silences) > 1500
    assert max(silences) < resume.PATIENCE_S
    assert silences[0] > 600


def test_an_order_that_comes_late_is_carried_out(
    link: KeeperClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user is told why nothing happens, and then it happens."""
    monkeypatch.setattr(resume, "QUIET_S", 0.1)
    order = m.StartFresh(rank=3, term=7)
    late = threading.Timer(0.5, link.restore_orders.put, (order,))
    late.start()
    unused: Any = None
    assert resume.resume(link, unused, "", unused).term == 7
    late.join()
    assert "rank 3: waiting for the other ranks" in capsys.readouterr().err


def test_a_process_that_has_read_a_checkpoint_does_not_begin_anew(
    link: KeeperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters are those of the checkpoint, or of a part of it."""
    monkeypatch.setattr(resume, "_carry_out", lambda *_, **__: (None, ""))  # it was damaged
    generation = gen(1, 4)
    source = m.ShardSource(kind="memory", slot=0)
    link.restore_orders.put(
        m.RestoreShard(rank=3, term=2, attempt=1, generation=generation, step=4, source=source)
    )
    link.restore_orders.put(m.StartFresh(rank=3, term=2, reason="nothing else is left"))
    unused: Any = None
    with pytest.raises(RestartError, match=r"begins at step 0 \(nothing else is left\)"):
        resume.resume(link, unused, "", unused)


def test_a_wait_for_nobody_ends(link: KeeperClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """No coordinator can be reached: the error says where to look."""
    monkeypatch.setattr(resume, "QUIET_S", 0.1)
    monkeypatch.setattr(resume, "PATIENCE_S", 0.2)
    unused: Any = None
    with pytest.raises(AutockptError, match=r"rank 3: no decision .* is a rank missing\?"):
        resume.resume(link, unused, "", unused)
