"""decisions/t-N: the generation an incarnation resumed from, as text and back.

    {"term":2,"attempt":1,"parent":"ckpt-t0001-step-00000042","reason":"...","digest":"..."}

A flipped bit here would name another parent, and with it another lineage: so the record carries the
sha256 of itself without its digest.  Records of before there was a digest are read without one.
"""

import hashlib
import json
from collections.abc import Mapping

from autockpt.executors.protocol.messages import TermParent
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.record import parse_json

_KEYS = {"term", "attempt", "parent", "reason"}


def decision_text(term: int, attempt: int, parent: Generation | None, reason: str) -> bytes:
    """The record of a decision; `parent` None: from scratch."""
    name = None if parent is None else parent.name
    data = {"term": term, "attempt": attempt, "parent": name, "reason": reason}
    return json.dumps({**data, "digest": _digest(data)}).encode()


def read_decision(text: bytes, *, term: int, where: str) -> TermParent:
    """The decision of `term` in a record.  Raises CorruptCheckpointError."""
    try:
        data = parse_json(text)
        digest = data.pop("digest", None)
        if set(data) != _KEYS or (digest is not None and digest != _digest(data)):
            raise ValueError("its own digest does not match")
        if type(data["term"]) is not int or data["term"] != term:
            raise ValueError(f"of term {data['term']!r:.20}")
        parent = data["parent"]
        return TermParent(
            term=term, parent=None if parent is None else Generation.from_name(parent)
        )
    except (ValueError, TypeError, AttributeError, ConfigError) as error:
        raise CorruptCheckpointError(f"{where}: no decision: {error!r:.200}") from None


def _digest(data: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
