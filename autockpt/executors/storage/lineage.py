"""decisions/e-N: what an incarnation resumed from, as text and back.

    {"epoch":2,"attempt":1,"parent":"gen-e000001-s000000042","reason":"...","digest":"..."}

A flipped bit here would name another parent, and with it another lineage: so the record carries the
sha256 of itself without its digest.  Records of before there was a digest are read without one.
"""

import hashlib
import json
from collections.abc import Mapping

from autockpt.executors.protocol.messages import EpochParent
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.record import parse_json

_KEYS = {"epoch", "attempt", "parent", "reason"}


def decision_text(epoch: int, attempt: int, parent: Generation | None, reason: str) -> bytes:
    """The record of a decision; `parent` None: from scratch."""
    name = None if parent is None else parent.name
    data = {"epoch": epoch, "attempt": attempt, "parent": name, "reason": reason}
    return json.dumps({**data, "digest": _digest(data)}).encode()


def read_decision(text: bytes, *, epoch: int, where: str) -> EpochParent:
    """The decision of `epoch` in a record.  Raises CorruptCheckpointError."""
    try:
        data = parse_json(text)
        digest = data.pop("digest", None)
        if set(data) != _KEYS or (digest is not None and digest != _digest(data)):
            raise ValueError("its own digest does not match")
        if type(data["epoch"]) is not int or data["epoch"] != epoch:
            raise ValueError(f"of epoch {data['epoch']!r:.20}")
        parent = data["parent"]
        return EpochParent(
            epoch=epoch, parent=None if parent is None else Generation.from_name(parent)
        )
    except (ValueError, TypeError, AttributeError, ConfigError) as error:
        raise CorruptCheckpointError(f"{where}: no decision: {error!r:.200}") from None


def _digest(data: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
