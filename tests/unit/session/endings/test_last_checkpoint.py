"""How often the last checkpoint is tried, by the reason for which a try came to nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.session.endings import last_checkpoint
from autockpt.session.endings.last_checkpoint import FINAL_FAILURES, LastCheckpoint
from autockpt.values.generation import Generation

BUSY = "rank 1: no slot may be overwritten"
BEHIND = "rank 1 went on to step 8 (term 1), attempt 40"


class Ranks:
    """What a rank sees of the others: the reason of each try that they drop, then none."""

    def __init__(self, *reasons: str) -> None:
        self.reasons, self.tried, self.said = list(reasons), 0, ""
        saves = SimpleNamespace(
            asked=None, writing=set(), memory_committed=None, get=lambda _: None,
            is_durable=lambda _: False, is_over=lambda _: True,
            discard_reason=lambda _: self.reasons.pop(0),
        )  # fmt: skip
        client = SimpleNamespace(
            slots=[1, 2], saves=saves, connected=True, wait_until=lambda known, _: known()
        )
        rank: Any = SimpleNamespace(
            job=SimpleNamespace(world_size=2, rank=0), client=client, open=0, step=8, start_step=0,
            plan=SimpleNamespace(tier=lambda _: SimpleNamespace(interval_steps=4)),
            generation=lambda step, attempt=0: Generation(term=1, step=step, attempt=attempt),
            report_degraded=self._degraded,
        )  # fmt: skip
        saver: Any = SimpleNamespace(
            begin=self._begin, fence=lambda: None, wait_durable=lambda *_: not self.reasons
        )
        unused: Any = None
        self.last = LastCheckpoint(rank, unused, saver, unused)

    def _begin(self, *_: Any, **__: Any) -> bool:
        self.tried += 1
        return True

    def _degraded(self, _: str, reason: str) -> None:
        self.said = reason


@pytest.mark.parametrize("reason", [BUSY, BEHIND])
def test_it_is_tried_as_long_as_another_rank_has_no_slot_yet(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank asks on; alone it would wait a quarter of an hour for the one that gave up."""
    monkeypatch.setattr(last_checkpoint.time, "sleep", lambda _: None)
    ranks = Ranks(*[reason] * 40)
    ranks.last.make()
    assert (ranks.tried, ranks.said) == (41, "")


def test_what_fails_of_itself_is_tried_a_few_times() -> None:
    """A full disk, for one."""
    ranks = Ranks(*["rank 1: no space left"] * 40)
    ranks.last.make()
    assert ranks.tried == FINAL_FAILURES
    assert "no space left" in ranks.said


def test_a_rank_that_never_gets_a_slot_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so long as it asks itself."""
    monkeypatch.setattr(last_checkpoint, "SLOT_WAIT_S", 0.2)
    ranks = Ranks(*[BUSY] * 1000)
    ranks.last.make()
    assert 1 < ranks.tried < 10
    assert BUSY in ranks.said
