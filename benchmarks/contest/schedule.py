"""Rounds of several contestants in turn, one process each, in groups that fit the memory.

Contestants of a group live at once and take their rounds one after another, so that what drifts
(host clock, foreign load, the disk) meets all of them alike; who waits sleeps in a read.  Each
round pairs its two segments within seconds and takes them in the order AB, BA, AB, ...; the order
of the contestants turns as well.  Every group has its own `none`.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contest.client import Client, Failed, Training, interpreter
from benchmarks.peers.processes import resident_bytes, shared_memory_sizes
from benchmarks.peers.registry import Entry

START_S, ROUND_S = 300.0, 300.0
TRAINING_STATES, PROCESS_BYTES = 1.4, 0.4e9
"""Memory of a process that trains: weights, moments and gradients in states, torch and a peer."""
COPIES = {"nothing": 0, "reference": 1, "ours": 3, "sync": 1, "async": 2}
"""States that a contestant holds beside them: slots, staging, clones, buffers."""
SHARE_OF_MEMORY = 0.8
MOST_AT_ONCE = 4
"""More only wait for one another, and drift comes between a contestant's rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How much is measured of a group."""

    rounds: int
    discarded: int = 1
    """Before them: the first round allocates what is allocated once, and does not count."""
    iterations: int
    """Of a segment."""
    every: bool = False
    """A checkpoint at every iteration, instead of one at the start of a segment."""
    check: bool = True
    """Loads the last checkpoint back and compares."""


@dataclass(slots=True)
class Taken:
    """What was measured of one contestant."""

    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By turn, so that contestants can be paired."""
    failed: str = ""
    check: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    """Checkpoints by tier, of all rounds."""
    asked: int = 0
    """Checkpoints asked for in all rounds."""
    resident_bytes: int = 0
    """Of the process, all that it started, and its helpers, after the rounds."""
    slots_bytes: list[int] = field(default_factory=list)
    state_bytes: int = 0

    def values(self, key: str) -> list[float]:
        """One figure over all rounds that have it."""
        return [float(one[key]) for one in self.rounds.values() if key in one]


def need_bytes(entry: Entry, state_bytes: float) -> float:
    """Memory that a contestant takes at most, about."""
    return (TRAINING_STATES + COPIES[entry.kind]) * state_bytes + PROCESS_BYTES


def groups(
    entries: Sequence[Entry], base: Sequence[Entry], state_bytes: float, available_bytes: float,
    most: int = MOST_AT_ONCE,
) -> Iterator[list[Entry]]:  # fmt: skip
    """`entries` in order, in groups that fit beside `base`; one that fits nowhere is alone."""
    room = SHARE_OF_MEMORY * available_bytes - sum(need_bytes(e, state_bytes) for e in base)
    group: list[Entry] = []
    for entry in entries:
        taken = sum(need_bytes(one, state_bytes) for one in [*group, entry])
        if group and (taken > room or len(base) + len(group) >= most):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def run_group(
    entries: Sequence[Entry], folder: Path, training: Training, plan: Rounds, *, install: bool
) -> dict[str, Taken]:
    """All rounds of a group; a contestant that fails drops out with its reason."""
    taken = {entry.name: Taken() for entry in entries}
    alive = _start(entries, folder, training, taken, install=install)
    try:
        for turn in range(plan.discarded + plan.rounds):
            _one_turn(alive, taken, turn, plan)
        for client in list(alive):
            _finish(client, taken[client.entry.name], plan)
    finally:
        tell("end", "", {})
        for client in alive:
            client.end()
        shutil.rmtree(folder, ignore_errors=True)
    return taken


def _start(
    entries: Sequence[Entry], folder: Path, training: Training, taken: dict[str, Taken],
    *, install: bool,
) -> list[Client]:  # fmt: skip
    """All at once: most of a start is waiting for imports."""
    begun: list[Client] = []
    tell("start", ", ".join(entry.name for entry in entries), {})
    for entry in entries:
        try:
            python = interpreter(entry, install=install)
        except Failed as error:
            taken[entry.name].failed = str(error)
            continue
        begun.append(Client(entry, python, folder / entry.name.replace(" ", "-"), training))
    alive = []
    for client in begun:
        mine = taken[client.entry.name]
        try:
            client.await_ready(START_S)
            mine.state_bytes = client.state_bytes
            mine.saved = client.ask({"do": "facts"}, ROUND_S)["saved"]
            alive.append(client)
        except Failed as error:
            mine.failed = str(error)
            client.end(graceful=False)
    return alive


def _one_turn(alive: list[Client], taken: dict[str, Taken], turn: int, plan: Rounds) -> None:
    order = list(alive) if turn % 2 else list(reversed(alive))
    for client in order:
        command = {
            "do": "round", "k": plan.iterations, "save_first": turn % 2 == 0, "every": plan.every,
        }  # fmt: skip
        try:
            figures = client.ask(command, ROUND_S)
        except Failed as error:
            _drop_out(client, alive, taken, f"round {turn}: {error}")
            continue
        if turn >= plan.discarded:
            taken[client.entry.name].rounds[turn] = figures
        tell(f"round {turn}", client.entry.name, figures)


def _drop_out(client: Client, alive: list[Client], taken: dict[str, Taken], reason: str) -> None:
    taken[client.entry.name].failed = reason
    print(f"{client.entry.name}: {reason}", file=sys.stderr, flush=True)
    alive.remove(client)
    client.end(graceful=False)


def _finish(client: Client, mine: Taken, plan: Rounds) -> None:
    """What is asked once, after the rounds."""
    try:
        facts = client.ask({"do": "facts"}, ROUND_S)
        turns = plan.discarded + plan.rounds
        mine.asked = turns * (plan.iterations if plan.every else 1)
        mine.saved = {key: facts["saved"][key] - mine.saved[key] for key in mine.saved}
        mine.resident_bytes = sum(resident_bytes(pid) for pid in client.pids(facts["helpers"]))
        for helper in facts["helpers"]:
            mine.slots_bytes += shared_memory_sizes(helper, "-s")
        if plan.check and client.entry.kind in ("sync", "async"):
            mine.check = client.ask({"do": "check", "k": 2}, ROUND_S)
    except Failed as error:
        mine.failed = f"after the rounds: {error}"


def tell(what: str, name: str, figures: dict[str, Any]) -> None:
    """Progress for whoever watches."""
    numbers = {key: value for key, value in figures.items() if not isinstance(value, list)}
    text = " ".join(f"{key}={value:.4g}" for key, value in numbers.items())
    print(f"{time.strftime('%H:%M:%S')} {what} {name:<24} {text}", file=sys.stderr, flush=True)
