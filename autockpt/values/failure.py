"""Failure records: our own log, and imported histories."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autockpt.values.errors import ConfigError

Kind = Literal["process", "node", "nodes", "storage", "silent"]
"""process: the node's memory survived; node: one node lost its memory; nodes: several at once.
storage: the place of the checkpoints was gone. silent: the state was wrong before it was
noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """One interruption of the job, as one node met it, and its recovery times."""

    schema_version: int = 1
    wall: str
    """UTC, ISO 8601; for people."""
    kind: Literal["process", "node", "storage", "silent", "script"]
    """process: the memory of the node survived; node: it did not; script: an exception of the
    script began it, which is no evidence about machines."""
    what: str
    """trainer, keeper, trainers+keeper, launcher."""
    node: int
    step: int
    exposure_s: float
    """Training time since the previous interruption or the start; the posterior's exposure."""
    detect_s: float | None = None
    """Until the launcher decided to restart; 0 where `restart_s` includes it."""
    restart_s: float | None = None
    """From then on, without the restore."""
    restore_s: float | None = None
    source: str = ""
    """Where the state came back from: memory, disk, "" when unknown."""
    lost_steps: int = 0
    lost_s: float = 0.0
    term: int = 0
    """That went on after it, the same on all nodes; 0: not known."""
    nodes: tuple[int, ...] = ()
    """Of the job when it began; (): not known."""
    told_s: float | None = None
    """From its begin until the ranks could go on, which all nodes hear at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRecord:
    """One decision of a rank to go back to the last good checkpoint: a line of rollbacks.jsonl."""

    schema_version: int = 1
    step: int
    """Iterations trained when it went back."""
    began_step: int
    """Iterations with which that process had begun."""
    dropped: int = 0
    """Batches that that process had left out at its begin."""
    skips: bool = False
    """The next process leaves out the batches up to the spike."""
    reason: str


def interruptions(records: Iterable[FailureRecord]) -> tuple[FailureRecord, ...]:
    """One record for each interruption, of a log to which every node's keeper writes.

    Records without a term stand alone.
    """
    return tuple(map(_worst, _apart(records)))


def lost_nodes(records: Iterable[FailureRecord]) -> tuple[tuple[int, ...], ...]:
    """The nodes whose memory died in each of `interruptions(records)`."""
    return tuple(
        tuple(sorted({one.node for one in group if one.kind == "node"}))
        for group in _apart(records)
    )


FIRST_S = 0.1
"""The node that began an interruption was down longer than all others by this, in seconds.  Other
nodes notice a death later, and all nodes hear together that they go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """The nodes on which interruptions of the newest set of nodes began."""

    nodes: int = 0
    """Nodes of the job at its newest interruption; 0: not known."""
    began: tuple[int | None, ...] = ()
    """By interruption since the job has had these nodes, oldest first; None: it is not known."""
    earlier: int = 0
    """Interruptions before those."""

    def since(self, interruptions: int) -> tuple[int | None, ...]:
        """As `began`, without the first so many interruptions of the log."""
        return self.began[max(0, interruptions - self.earlier) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyNode:
    """A node that began more interruptions than chance explains."""

    node: int
    """Its number in the job."""
    began: int
    """Interruptions that it began,"""
    of: int
    """of so many whose node is known,"""
    nodes: int
    """on so many nodes."""
    chance: float
    """That any of them would have begun as many by accident, at any look so far at most."""

    @property
    def sentence(self) -> str:
        """The evidence, for a person."""
        return (
            f"node {self.node} began {self.began} of the newest {self.of} interruptions of "
            f"{self.nodes} nodes (by accident {self.chance:.1g})"
        )


def origins_of(records: Iterable[FailureRecord]) -> Origins:
    """Where the interruptions of a log began, to which every node's keeper writes."""
    groups = _apart(records)
    sets = [{node for record in group for node in record.nodes} for group in groups]
    newest: set[int] = next(filter(None, reversed(sets)), set())
    same = itertools.takewhile(lambda nodes: nodes in (newest, set()), reversed(sets))
    earlier = len(groups) - len(list(same))
    return Origins(
        nodes=len(newest),
        began=tuple(_began(group, newest) for group in groups[earlier:]),
        earlier=earlier,
    )


def _began(group: Sequence[FailureRecord], nodes: set[int]) -> int | None:
    """The node that lost its memory, else the one that was down longest.

    It is not known where a node has not written: that one may have begun it.
    """
    if any(one.kind in ("script", "storage", "silent") for one in group):
        return None
    if sorted(one.node for one in group) != sorted(nodes) or not any(one.nodes for one in group):
        return None
    died = {one.node for one in group if one.kind == "node"}
    if died:
        return died.pop() if len(died) == 1 else None
    down = sorted(((one.told_s, one.node) for one in group if one.told_s is not None), reverse=True)
    if len(down) < len(group) or (len(down) > 1 and down[0][0] <= down[1][0] + FIRST_S):
        return None
    return down[0][1]


def _apart(records: Iterable[FailureRecord]) -> list[list[FailureRecord]]:
    each = itertools.groupby(enumerate(records), lambda one: one[1].term or -one[0])
    return [[record for _, record in group] for _, group in each]


_RANKS = {"process": 0, "node": 1, "storage": 1, "silent": 1, "script": 2}
"""An exception of the script on one node hit all nodes: the others only saw their peer vanish."""


def _worst(records: Sequence[FailureRecord]) -> FailureRecord:
    """Return the record with the largest loss: memory before a process, then longest restore."""
    worst = max(records, key=lambda one: (_RANKS[one.kind], one.restore_s or 0.0))
    return replace(
        worst,
        what="+".join(sorted({part for one in records for part in one.what.split("+")})),
        step=max(one.step for one in records),
        exposure_s=max(one.exposure_s for one in records),
        detect_s=max((s for s in (one.detect_s for one in records) if s is not None), default=None),
        restart_s=max(
            (s for s in (one.restart_s for one in records) if s is not None), default=None
        ),
        lost_steps=max(one.lost_steps for one in records),
        lost_s=max(one.lost_s for one in records),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One stretch of training, from a start of the processes to the failure that ended it."""

    trained_s: float
    """Training time."""
    steps: int
    """Iterations that ended in it."""
    kept: bool
    """The next start went on from a newer step than this one had begun with."""


def lives_of(records: Sequence[FailureRecord]) -> tuple[Life, ...]:
    """The lives that the interruptions of one run ended, oldest first."""
    found, begin = [], 0
    for record in records:
        begin = begin if record.step >= begin else 0  # the run was begun anew
        resumed = max(0, record.step - record.lost_steps)
        found.append(
            Life(
                trained_s=record.exposure_s,
                steps=record.step - begin,
                kept=resumed > begin,
            )
        )
        begin = resumed
    return tuple(found)


def without_progress(lives: Sequence[Life]) -> tuple[Life, ...]:
    """The newest lives in a row of which nothing was kept, oldest first."""
    newest = itertools.takewhile(lambda life: not life.kept, reversed(lives))
    return tuple(newest)[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One interruption of a job, from an imported record."""

    at_s: float
    """Seconds since 1970 where the record has dates, else since its beginning."""
    kind: Kind
    nodes: tuple[str, ...] = ()
    """Names of the nodes, where the record has them.  A process that died with a named node counts
    against the node (its GPU failed), one without against the job."""
    what: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.at_s):
            raise ConfigError(f"an incident at {self.at_s} s: must be finite")

    @property
    def of_nodes(self) -> bool:
        """Whether it counts for the rate per node, which grows with the job."""
        return bool(self.nodes) or self.kind in ("node", "nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """A stretch of time in which an interruption would have been recorded."""

    begin_s: float
    end_s: float
    """As `Incident.at_s`."""
    node_s: float
    """Seconds of all nodes that were watched."""
    job_s: float
    """Seconds of all jobs; 0 where the record knows of nodes only."""

    def __post_init__(self) -> None:
        numbers = (self.begin_s, self.end_s, self.node_s, self.job_s)
        if not all(map(math.isfinite, numbers)) or not self.begin_s <= self.end_s:
            raise ConfigError(f"exposure from {self.begin_s} s to {self.end_s} s: must be in order")
        if self.node_s < 0 or self.job_s < 0:
            raise ConfigError(
                f"exposure of {self.node_s} node-seconds and {self.job_s} job-seconds: must not be "
                "negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHistory:
    """The record of a cluster: interruptions, and the time without any."""

    schema_version: int = 1
    source: str
    """Format and file, for people."""
    incidents: tuple[Incident, ...]
    """Oldest first."""
    exposures: tuple[Exposure, ...]
    notes: tuple[str, ...] = ()
    """Assumptions and omissions, in sentences."""

    @property
    def end_s(self) -> float:
        """The newest moment that the record knows of."""
        return max((exposure.end_s for exposure in self.exposures), default=0.0)
