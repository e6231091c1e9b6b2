"""Tells a person at the launcher what protects the job: since when, and with -v every save.

A launcher reads telemetry: the file of its own keeper and, on the first node, the file of rank 0.
It begins where the files ended when it started.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from autockpt.console import Console
from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.units import format_duration

LOOK_S = 0.5
FEW = 3
"""Up to so many saves of one kind in one look have a line each; more of them share one."""
SAVES = (t.MemoryCommitted, t.CheckpointDurable, t.GenerationReplicated)


class News:
    """Of one launcher."""

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self._folder, self._console = run.telemetry, console
        self._ends = {path: path.stat().st_size for path in self._folder.glob("*.jsonl")}
        """Bytes of each file that were read, or were there before."""
        self._looked_s = 0.0
        self._in_memory = self._on_disk = False
        """Whether the terminal already says that checkpoints protect the job there."""

    def look(self, node: int | None, *, last: bool = False) -> None:
        """Say what is new on `node`, rarely; or the rest, when the job is over."""
        if not last and time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        events = list(self._new_events(node))
        if not last:
            for sentence in self._firsts(events):
                self._console.say(sentence)
        if self._console.verbosity > 0:
            for sentence in sentences(events):
                self._console.say(sentence)

    def _firsts(self, events: Iterable[t.Event]) -> Iterator[str]:
        """Yield the sentences about the first checkpoint that protects, in memory and on disk.

        A job that resumed was protected before; the rank says from where it resumed.
        """
        was_in_memory = self._in_memory
        since: dict[str, int] = {}
        for event in events:
            if isinstance(event, t.Restored):
                self._in_memory = self._on_disk = True
            elif isinstance(event, t.MemoryCommitted) and not self._in_memory:
                self._in_memory, since["memory"] = True, event.step
            elif isinstance(event, t.CheckpointDurable) and not self._on_disk:
                self._in_memory = self._on_disk = True
                since["disk"] = event.step
        if "disk" in since:
            begin = "also durable" if was_in_memory else "protected"
            at, survived = f"{begin} since step {since['disk']}", "ranks and keeper"
        elif since:
            at, survived = f"protected since step {since['memory']}", "its ranks"
        else:
            return
        yield f"{at}: the training survives the death of {survived}"

    def _new_events(self, node: int | None) -> Iterator[t.Event]:
        names = [f"keeper-{node or 0:03d}.jsonl", *([] if node else ["rank-00000.jsonl"])]
        found: list[t.Event] = []
        for path in (self._folder / name for name in names):
            for line in self._new_lines(path):
                with contextlib.suppress(ValueError, ConfigError):
                    found.append(t.event_from_data(json.loads(line), where=str(path)))
        yield from sorted(found, key=lambda event: event.at_s)

    def _new_lines(self, path: Path) -> list[bytes]:
        """Whole lines that were written since the last look."""
        begin = self._ends.get(path, 0)
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                text = file.read()
        except OSError:
            return []
        whole, newline, _ = text.rpartition(b"\n")
        self._ends[path] = begin + len(whole) + len(newline)
        return whole.split(b"\n") if whole else []


def sentences(events: Iterable[t.Event]) -> Iterator[str]:
    """Yield a sentence for each event that a person follows; many saves of a kind are one."""
    events = list(events)
    for kind in SAVES:
        steps = [event.step for event in events if isinstance(event, kind)]
        if len(steps) > FEW:
            yield f"{len(steps)} checkpoints {_PLACE[kind]}, steps {steps[0]} to {steps[-1]}"
            events = [event for event in events if not isinstance(event, kind)]
    for event in events:
        text = sentence(event)
        if text:
            yield text


_PLACE: dict[type[t.Event], str] = {
    t.MemoryCommitted: "in memory",
    t.CheckpointDurable: "on disk",
    t.GenerationReplicated: "on other nodes",
}


def sentence(event: t.Event) -> str:
    """Return the sentence about an event; "": it has none."""
    match event:
        case t.MemoryCommitted() | t.CheckpointDurable() | t.GenerationReplicated():
            after = format_duration(event.latency_s)
            return f"step {event.step}: checkpoint {_PLACE[type(event)]} after {after}"
        case t.SaveSkipped():
            return f"step {event.step}: checkpoint skipped: {event.reason}"
        case t.SnapshotDiscarded():
            return f"step {event.step}: snapshot discarded: {event.reason}"
        case t.PersistFailed():
            return f"step {event.step}: checkpoint not on disk: {event.reason}"
        case t.RemoteCopied():
            after = format_duration(event.latency_s)
            return f"step {event.step}: checkpoint in the object store {after} later"
        case t.CheckpointDeleted():
            return f"step {event.step}: checkpoint deleted by the retention policy"
        case t.OptimizerStateDropped():
            return f"step {event.step}: checkpoint holds weights only from now on"
        case t.Scrubbed():
            detail = f": {event.detail}" if event.detail else ""
            return f"{_named(event.generation)} read back: {event.verdict}{detail}"
        case t.PlanChanged():
            return f"plan {event.plan_version} from step {event.step}: {event.reason}"
        case t.PlanChangeWithheld():
            return f"step {event.step}: plan kept ({event.kind} withheld): {event.reason}"
        case t.ReplicationLost():
            return f"copies on other nodes: {event.reason}"
        case t.Restored():
            return f"step {event.step}: resumed from {event.source}, {event.lost_steps} steps lost"
        case t.Degraded():
            return f"degraded, {event.what}: {event.reason}"
    return ""


def _named(generation: str) -> str:
    with contextlib.suppress(ConfigError):
        return f"step {Generation.from_text(generation).step}: checkpoint"
    return generation
