"""Wire messages as JSON data, and back."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

from autockpt.executors.protocol.messages.facts import Incarnation
from autockpt.executors.protocol.messages.families import TO_COORDINATOR, TO_NODE, WireMessage
from autockpt.executors.protocol.messages.to_coordinator import (
    RELAYABLE,
    RankAttached,
    Relayable,
    Relayed,
)
from autockpt.values import record as record_io
from autockpt.values.errors import ProtocolError

BY_NAME: dict[str, type] = {kind.__name__: kind for kind in (*TO_COORDINATOR, *TO_NODE)}


MOST_RANKS = 2**20
"""The most ranks of a job in a wire message: far beyond any job, and no list that fills the
memory."""


def message_to_data(message: WireMessage) -> dict[str, Any]:
    """JSON data of a wire message: {"type": class name, "body": its fields}."""
    if isinstance(message, RankAttached):
        return {"type": "RankAttached", "body": _attached_to_data(message)}
    if isinstance(message, Relayed):
        event = {"type": type(message.event).__name__, "body": record_io.to_data(message.event)}
        head = record_io.to_data(message.incarnation)
        return {
            "type": "Relayed", "body": {"incarnation": head, "term": message.term, "event": event},
        }  # fmt: skip
    return {"type": type(message).__name__, "body": record_io.to_data(message)}


def _attached_to_data(message: RankAttached) -> dict[str, Any]:
    """The nodes of all ranks as runs: every rank sends them, so plain they would be N * N."""
    body: dict[str, Any] = record_io.to_data(
        replace(message, attach=replace(message.attach, nodes=()))
    )
    body["attach"]["nodes"] = [list(run) for run in _node_runs(message.attach.nodes)]
    return body


@functools.lru_cache(maxsize=4)
def _node_runs(nodes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(first node, nodes, ranks of each): nodes that follow one another with as many ranks each."""
    runs: list[tuple[int, int, int]] = []
    for node, here in itertools.groupby(nodes):
        ranks = len(list(here))
        first, count, each = runs[-1] if runs else (0, 0, 0)
        if (first + count, each) == (node, ranks):
            runs[-1] = (first, count + 1, each)
        else:
            runs.append((node, 1, ranks))
    return tuple(runs)


@functools.lru_cache(maxsize=4)
def _nodes_of(runs: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Node by rank, the same object for the same runs: then they are equal at a glance."""
    found: list[int] = []
    for first, nodes, ranks in runs:
        for node in range(first, first + nodes):
            found += [node] * ranks
    return tuple(found)


def _read_runs(data: Any) -> tuple[int, ...]:
    """Raises ProtocolError for data that no sender writes."""
    runs: list[tuple[int, int, int]] = []
    for run in data if isinstance(data, list) else [data]:
        whole = isinstance(run, list) and len(run) == 3 and all(type(n) is int for n in run)
        if not whole or run[0] < 0 or min(run[1:]) < 1:
            raise ProtocolError(f"no run of nodes [first, nodes, ranks of each]: {str(run)[:80]}")
        runs.append((run[0], run[1], run[2]))
    ranks = sum(nodes * each for _, nodes, each in runs)
    if ranks > MOST_RANKS:
        raise ProtocolError(f"a job of {ranks} ranks; at most {MOST_RANKS} are expected")
    return _nodes_of(tuple(runs))


def message_from_data(data: Any) -> WireMessage:
    """The wire message of `message_to_data`.  Raises ProtocolError or ConfigError if it is none."""
    kind = BY_NAME.get(str(data.get("type"))) if isinstance(data, dict) else None
    if kind is None or set(data) != {"type", "body"}:
        raise ProtocolError(f"no wire message of this version: {str(data)[:80]!r}")
    body = data["body"]
    if kind is RankAttached and isinstance(body, dict) and isinstance(body.get("attach"), dict):
        nodes = _read_runs(body["attach"].get("nodes"))
        body = {**body, "attach": {**body["attach"], "nodes": []}}
        read = record_io.from_data(RankAttached, body, where="RankAttached")
        return replace(read, attach=replace(read.attach, nodes=nodes))
    if kind is Relayed:
        return _relayed_from_data(body)
    message: WireMessage = record_io.from_data(kind, body, where=kind.__name__)
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class _RelayedFrame:
    """A `Relayed` whose event is not read yet: it is tagged, because two kinds look alike."""

    incarnation: Incarnation
    term: int
    event: dict[str, Any]


def _relayed_from_data(body: Any) -> Relayed:
    """Raises ProtocolError or ConfigError for a body that no sender writes."""
    frame = record_io.from_data(_RelayedFrame, body, where="Relayed")
    kind = next((k for k in RELAYABLE if k.__name__ == frame.event.get("type")), None)
    if kind is None or set(frame.event) != {"type", "body"}:
        raise ProtocolError(f"no event that a node relays: {str(frame.event)[:80]!r}")
    event: Relayable = record_io.from_data(kind, frame.event["body"], where=kind.__name__)
    return Relayed(incarnation=frame.incarnation, term=frame.term, event=event)
