"""What an exchange costs reaches the trainer, and the rate of its plan reaches the keeper."""

import socket
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.client import KeeperClient
from autockpt.executors.keeper.client.listener import KeeperListener
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.keeper.server import Keeper
from autockpt.executors.keeper.trainers.trainers import Trainer
from autockpt.executors.protocol import messages as p
from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from autockpt.values.generation import Generation
from autockpt.values.redundancy import Redundancy

COPIES = Redundancy(scheme="replicas", copies=2, rate_bytes_per_s=4e8)
SLOWER = Redundancy(scheme="replicas", copies=2, rate_bytes_per_s=1e8)
OTHER = Redundancy(scheme="xor", set_size=4, parity=1, rate_bytes_per_s=2e8)
"""The next start takes it."""
ATTACH = p.TrainerAttached(
    rank=0, incarnation=p.Incarnation(launch_id="launch", restart_round=0), world_size=2,
    nodes=(0, 1), slots=0, redundancy=COPIES,
)  # fmt: skip
SAVED = Generation(term=1, step=30)


def test_the_rate_of_a_new_plan_holds_in_the_keeper_and_in_the_next_one(tmp_path: Path) -> None:
    """Told once; a plan with the same rate, or with another scheme, tells nothing."""
    link = KeeperClient(str(tmp_path), 0, checkpoints=str(tmp_path), attach=ATTACH, launcher_pid=0)
    sent: list[Any] = []
    link.send = sent.append  # type: ignore[method-assign, assignment]
    link.want_rate(COPIES)
    link.want_rate(OTHER)
    link.want_rate(SLOWER)
    link.want_rate(SLOWER)
    assert sent == [wire.RateWanted(rank=0, bytes_per_s=1e8)]
    assert link._hello()[0].attach.redundancy == SLOWER
    (tmp_path / "run").mkdir()
    keeper = Keeper(str(tmp_path / "run"), 0, str(tmp_path / "checkpoints"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        trainer = Trainer(
            rank=0, pid=1, launcher_pid=1, attach=ATTACH, connection=wire.Connection(ours)
        )
        keeper._trainers.live[0] = trainer
        keeper._protocol.state.phase = "open"
        assert keeper._copy_rate() == 4e8
        keeper._from_trainer(trainer, sent[0])
        assert keeper._copy_rate() == 1e8


def test_the_trainer_hears_what_came_and_how_long_it_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the telemetry; a checkpoint without copies is no exchange."""
    (tmp_path / "run").mkdir()
    keeper = Keeper(str(tmp_path / "run"), 0, str(tmp_path / "checkpoints"))
    told: list[Any] = []
    monkeypatch.setattr(keeper._trainers, "send_all", told.append)
    monkeypatch.setattr(keeper._replicas.link, "take", lambda: (1000, 0.25))
    keeper._note_protected(SAVED, "")
    keeper._note_protected(None, "node 1 is gone")
    assert told == [wire.CopiesArrived(generation=SAVED, bytes=1000, moving_s=0.25)]
    keeper._journal.close()
    (event,) = [
        one for one in RunDirectory(tmp_path / "run").events()
        if isinstance(one, t.GenerationReplicated)
    ]  # fmt: skip
    assert (event.bytes, event.moving_s) == (1000, 0.25)
    link = KeeperClient(str(tmp_path), 0, checkpoints=str(tmp_path), attach=ATTACH, launcher_pid=0)
    heard: list[tuple[Generation, int]] = []

    class Listener(KeeperListener):
        def on_copies_arrived(self, save: SaveHandle, message: wire.CopiesArrived) -> None:
            heard.append((save.generation, message.bytes))

    link.listener = Listener()
    link._tell(told[0])  # of a save that this rank has not made
    link.saves.ask(SAVED, disk=False)
    link._tell(told[0])
    assert heard == [(SAVED, 1000)]
