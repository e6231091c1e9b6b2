"""The failure that is not in the log yet: how the processes before this start have ended.

A keeper writes a failure down when the training is back, which is after the next plan is decided.
The telemetry of the processes that died has all of it but the time that the restart takes.
"""

from pathlib import Path
from typing import Any, Literal

from autockpt.executors.storage.event_log import events_in, file_bytes, newest_bytes
from autockpt.run_directory import RunDirectory, utc_now
from autockpt.values.failure import FailureRecord

PIECE_BYTES = 2**20
"""Of a file its end is read, and as much behind the newest start: all that tells how it went."""
SOUGHT_BYTES = 2**30
"""The newest start is sought so far back: two months of training."""
STARTED = b'"RunStarted"'
COMMITS = ("MemoryCommitted", "CheckpointDurable")


def unrecorded_failure(run: RunDirectory) -> FailureRecord | None:
    """The failure that ended the newest processes of a run, if no keeper has written it down.

    Only for a start that has written no event of its own: it takes what has no end for dead.
    Raises StorageError where a file cannot be read.
    """
    events = _since_start(run.rank_telemetry(0))
    if not events or events[-1].get("event") == "RunEnded":
        return None
    started, newest = events[0], events[-1]
    if any(record.term > _number(started, "term") for record in run.failures()):
        return None
    begin = next(
        (
            int(_number(one, "step")) - 1
            for one in events
            if one.get("event") == "FirstIterationEnded"
        ),
        None,
    )
    step = int(max((_number(one, "step") for one in events), default=0))
    if begin is None:
        begin = step
    began_s = _number(started, "at_s")
    of_script = any(
        one.get("event") == "TrainerFailed" and one.get("origin") != "machine" for one in events
    )
    kept, seen = _kept(run, began_s)
    kind: Literal["process", "node", "script"] = "process" if seen else "node"
    safe = max(begin, kept["CheckpointDurable"], kept["MemoryCommitted"] if seen else 0)
    return FailureRecord(
        wall=utc_now(),
        kind="script" if of_script else kind,
        what="trainer" if seen else "keeper+trainer",
        node=0,
        step=step,
        exposure_s=max(0.0, _number(newest, "at_s") - began_s),
        lost_steps=max(0, step - safe),
        term=int(_number(started, "term")) + 1,
    )


def _kept(run: RunDirectory, began_s: float) -> tuple[dict[str, int], bool]:
    """Newest steps that were committed since, by event, and whether a keeper saw a trainer die."""
    kept, seen = dict.fromkeys(COMMITS, 0), False
    for path in sorted(run.telemetry.glob("keeper-*.jsonl")):
        for event in events_in(newest_bytes(path, PIECE_BYTES)):
            if _number(event, "at_s") < began_s:
                continue
            name = event.get("event")
            seen = seen or (name == "FailureObserved" and event.get("what") == "trainer")
            if name in kept:
                kept[name] = max(kept[name], int(_number(event, "step")))
    return kept, seen


def _since_start(path: Path) -> list[dict[str, Any]]:
    """The first and the newest events of a file since its newest start; of a short life all."""
    size = file_bytes(path)
    for end in range(size, max(0, size - SOUGHT_BYTES), -PIECE_BYTES):
        # Pieces overlap: a line may begin in one and go on in the next.
        text = newest_bytes(path, 2 * PIECE_BYTES, end=end)
        at = text.rfind(STARTED)
        if at < 0 or (b"\n" not in text[:at] and len(text) < end):  # its line may be cut
            continue
        first = text[text.rfind(b"\n", 0, at) + 1 :]
        if end == size:
            return list(events_in(first))
        newest = newest_bytes(path, min(PIECE_BYTES, size - end))
        return [*events_in(first), *events_in(newest)]
    return []


def _number(event: dict[str, Any], name: str) -> float:
    value = event.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0
