"""A decision comes back as it was written, or it is none."""

import json
from pathlib import Path

import pytest

from autockpt.executors.protocol.messages import TermParent
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.lineage import decision_text, read_decision
from autockpt.values.errors import CorruptCheckpointError
from autockpt.values.generation import Generation

PARENT = Generation(term=1, step=40)


@pytest.mark.parametrize("parent", [PARENT, None])
def test_a_decision_comes_back(parent: Generation | None) -> None:
    """With its parent, or from scratch."""
    text = decision_text(2, 1, parent, "the newest")
    assert read_decision(text, term=2, where="x") == TermParent(term=2, parent=parent)


def test_every_flipped_bit_is_noticed() -> None:
    """Another parent would be another lineage."""
    text = decision_text(2, 1, PARENT, "the newest")
    for place in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[place] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match="x: no decision"):
                read_decision(bytes(damaged), term=2, where="x")


def test_the_decision_of_another_term_is_none() -> None:
    """A stale file under a new name."""
    with pytest.raises(CorruptCheckpointError, match="of term 2"):
        read_decision(decision_text(2, 1, PARENT, ""), term=3, where="x")


def test_records_from_before_the_digest_are_read() -> None:
    """Directories outlive versions."""
    old = {"term": 2, "attempt": 1, "parent": PARENT.name, "reason": "newest"}
    assert read_decision(json.dumps(old).encode(), term=2, where="x").parent == PARENT


def test_a_damaged_claim_does_not_stop_the_next_one(tmp_path: Path) -> None:
    """Its number is in its name; who held it is unknown, so force says that nobody does."""
    directory = CheckpointDirectory(str(tmp_path))
    run_id = directory.open()
    assert directory.claim(run_id, "launch", 0, force=False) == 1
    (tmp_path / "terms" / "t-000001").write_bytes(b'{"term":7}')
    assert directory.claim(run_id, "another", 0, force=True) == 2
