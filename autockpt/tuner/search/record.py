"""The record of a search: one header and one line per write, enough to decide again."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autockpt.tuner.search.space import Candidate
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.profile import Profile
from autockpt.values.record import from_json, to_json

Stage = Literal["seed", "search", "final"]
"""seed: the default and the best predicted of each category; search: proposed by Optuna;
final: the best of them and the default, in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTry:
    """A candidate that an earlier search of the same job and machine has measured."""

    candidate: Candidate
    ratio: float
    """Its seconds over the default's of that search."""
    extra_cpu: float
    """CPU seconds beyond the default's, in seconds of the default's write."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0 and math.isfinite(self.extra_cpu)):
            raise ConfigError(
                f"an earlier try took {self.ratio:g} times as long and {self.extra_cpu:g} CPU "
                "seconds more: must be finite, the first more than 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Everything that a decision depends on beside the samples.  First line of trials.jsonl."""

    schema_version: int = 1
    profile: Profile
    goal: Goal
    budget: int
    """Most measurements."""
    seed: int
    sample_bytes: int
    """Of one write of one rank."""
    content: str
    """Where the bytes came from, in words."""
    directory: str
    """Where they were written."""
    created: str
    """UTC, ISO 8601; for people."""
    proposer: str = ""
    """The proposer of the trials of stage `search`, with its version."""
    earlier: tuple[EarlierTry, ...] = ()
    """Measurements of earlier searches: explored no more, and judged anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measured write.  A line of trials.jsonl."""

    number: int
    stage: Stage
    candidate: Candidate
    seconds: float
    """From the first byte offered to all ranks' files durable; 0 when it failed."""
    cpu_s: float = 0.0
    """CPU time of the process meanwhile."""
    stored_bytes: int = 0
    failure: str = ""
    """Why there is no figure."""

    def __post_init__(self) -> None:
        figures = math.isfinite(self.seconds) and math.isfinite(self.cpu_s) and self.cpu_s >= 0
        if not figures or (self.seconds <= 0 and not self.failure):
            raise ConfigError(
                f"trial {self.number} took {self.seconds:g} s and {self.cpu_s:g} CPU seconds: "
                "a write takes more than 0 s, and a failed one says why"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A whole search."""

    header: Header
    trials: tuple[Trial, ...]


def earlier_tries(records: Iterable[Record]) -> tuple[EarlierTry, ...]:
    """Return the measurements of `records` before their finals; the newest, last one counts."""
    found: dict[Candidate, EarlierTry] = {}
    for record in records:
        tried = [t for t in record.trials if t.stage != "final"]
        if not tried or tried[0].failure:
            continue
        first = tried[0]  # the default
        for trial in tried[1:]:
            if trial.failure:
                continue
            found[trial.candidate] = EarlierTry(
                candidate=trial.candidate,
                ratio=trial.seconds / first.seconds,
                extra_cpu=(trial.cpu_s - first.cpu_s) / first.seconds,
            )
    return tuple(found.values())


def header_line(header: Header) -> str:
    """The first line of trials.jsonl."""
    return to_json(header) + "\n"


def trial_line(trial: Trial) -> str:
    """A further one."""
    return to_json(trial) + "\n"


def parse(texts: Iterable[str], *, where: str) -> Record:
    """The record in the lines of a file.  Raises ConfigError naming the file and the line.

    A last line that was cut short, by a kill or a full disk, is left out.
    """
    numbered = [(n, text) for n, text in enumerate(texts, 1) if text.strip()]
    if not numbered:
        raise ConfigError(f"{where}: is empty; `autockpt tune` writes trials.jsonl")
    if not numbered[-1][1].endswith("\n"):
        numbered.pop()
    if not numbered:
        raise ConfigError(f"{where}: ends within its first line; tune again")
    header = from_json(Header, numbered[0][1], where=f"{where}:1")
    trials = tuple(from_json(Trial, text, where=f"{where}:{n}") for n, text in numbered[1:])
    return Record(header=header, trials=trials)
