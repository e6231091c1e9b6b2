"""The keeper's look at its ranks: marks in, an incident bundle out when they stand still.

A bundle, such as `incidents/20261126-193000-node-000/`, has:

* `incident.json`: the findings, one record a rank
* `rank-00003.txt`: its stacks, its state and the kernel function that it waits in
* `machine.txt`: load, memory, mounts that hang
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from autockpt import new_files
from autockpt.executors.keeper.hangs import stack_dumps
from autockpt.executors.keeper.hangs.activity import Activities, text_of
from autockpt.executors.keeper.hangs.evidence import RankState, culprit, sentence
from autockpt.executors.keeper.hangs.pace import DOINGS, Mark, Pace, Stillness
from autockpt.executors.keeper.slots import (
    CELL_BEAT_NS,
    CELL_BEATS,
    CELL_DOING,
    CELL_STEP,
    RankMemory,
)

FOLDER = "incidents"
LOOKED_AT_S = 2.0
"""A rank is looked at more closely when it has marked nothing for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A rank of this node."""

    pid: int
    memory: RankMemory


class HangWatch:
    """Of one node.  `look` is called at every tick; evidence is gathered on a thread of its own."""

    def __init__(self, run_directory: str, node: int, told: Callable[[str, str], None]) -> None:
        """`told(sentence, directory)` is called on that thread."""
        self._run_directory, self._node, self._told = run_directory, node, told
        self._pace = Pace()
        self._activities = Activities()

    def look(
        self,
        now_s: float,
        ranks: Mapping[int, Watched],
        *,
        alone: bool,
        kill: Callable[[], bool],
    ) -> Stillness | None:
        """Takes the marks; begins to gather evidence when the ranks have become stuck.

        `alone`: these are all ranks of the job.  `kill()`: whether the rank that is named is to be
        ended.
        """
        marks: dict[int, Mark] = {}
        for rank, one in ranks.items():
            count = one.memory.cell(CELL_BEATS)
            if not count:
                return None  # of a version that marks nothing, or not attached yet
            doing = DOINGS[min(one.memory.cell(CELL_DOING), len(DOINGS) - 1)]
            at_s = one.memory.cell(CELL_BEAT_NS) / 1e9
            marks[rank] = Mark(pid=one.pid, count=count, at_s=at_s, doing=doing)
        if any(self._is_debugged(one.pid) or is_suspended(one.pid) for one in ranks.values()):
            return None
        self._activities.forget(
            mark.pid for mark in marks.values() if now_s < mark.at_s + LOOKED_AT_S
        )
        doing_now = {
            rank: self._activities.look(now_s, mark.pid)
            for rank, mark in marks.items()
            if now_s >= mark.at_s + LOOKED_AT_S
        }
        still = self._pace.look(now_s, marks, doing_now)
        if still is not None:
            found = {
                rank: RankState(
                    rank=rank, pid=one.pid, step=one.memory.cell(CELL_STEP),
                    marks=marks[rank].count, doing=marks[rank].doing,
                    still_s=now_s - marks[rank].at_s, process="", stacks="",
                    activity=doing_now.get(rank, ""),
                )
                for rank, one in ranks.items()
            }  # fmt: skip
            threading.Thread(
                target=self._gather, args=(found, still, now_s, alone, kill),
                name="autockpt-incident", daemon=True,
            ).start()  # fmt: skip
        return still

    def _gather(
        self,
        found: dict[int, RankState],
        still: Stillness,
        now_s: float,
        alone: bool,
        ends: Callable[[], bool],
    ) -> None:
        pids = {rank: one.pid for rank, one in found.items()}
        states = {
            rank: stack_dumps.status_of(pid).get("State", "gone") for rank, pid in pids.items()
        }
        answering = {r: pid for r, pid in pids.items() if not states[r].startswith(("T", "t"))}
        stacks = stack_dumps.ask(self._run_directory, answering)
        ranks = {
            rank: replace(one, process=states[rank], stacks=stacks.get(rank, ""))
            for rank, one in found.items()
        }
        named = culprit(ranks, alone=alone)
        if named is None and still.is_late:
            return
        if named is None and not alone and now_s - still.since_s < 60.0:
            return  # every rank here waits for other nodes, whose keepers see which
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-node-{self._node:03d}"
        where = os.path.join(self._run_directory, FOLDER, name)
        text = sentence(ranks, named, now_s, still, where)
        kill = named is not None and not still.is_late and ends()
        with contextlib.suppress(OSError):
            self._write(where, ranks, named, still, text, kill)
        self._told(text + ("; it is ended" if kill else ""), where)
        if kill and named is not None:
            with contextlib.suppress(OSError):
                os.kill(ranks[named].pid, signal.SIGKILL)

    def _write(
        self, where: str, ranks: Mapping[int, RankState], named: int | None, still: Stillness,
        text: str, kill: bool,
    ) -> None:  # fmt: skip
        new_files.make_directory(os.path.dirname(where), new_files.PRIVATE_DIRECTORY)
        new_files.make_directory(where, new_files.PRIVATE_DIRECTORY)
        for rank, one in ranks.items():
            kernel = "\n".join(
                f"{name}: {_proc(one.pid, name)}" for name in ("wchan", "syscall", "stack")
            )
            state = f"rank {rank}, pid {one.pid}, state {one.process}, {one.place}\n{kernel}\n\n"
            _write(os.path.join(where, f"rank-{rank:05d}.txt"), state + one.stacks)
        machine = "".join(
            f"--- {path}\n{text_of(path)}\n"
            for path in (
                "/proc/loadavg",
                "/proc/meminfo",
                "/proc/pressure/io",
                "/proc/pressure/cpu",
            )
        )
        _write(os.path.join(where, "machine.txt"), machine)
        action: Literal["restart", "warn"] = "restart" if kill else "warn"
        record = {
            "schema_version": 1, "node": self._node, "rank": named, "sentence": text,
            "since_monotonic_s": still.since_s, "allowed_s": still.allowed_s,
            "learned": still.learned, "is_late": still.is_late, "action": action,
            "ranks": [
                {**asdict(one), "stacks": f"rank-{rank:05d}.txt", "place": one.place,
                 "waits_for_others": one.waits_for_others}
                for rank, one in ranks.items()
            ],
        }  # fmt: skip
        # Last, and whole: who waits for an incident waits for this file.
        _write(os.path.join(where, "incident.json.part"), json.dumps(record, indent=2) + "\n")
        path = os.path.join(where, "incident.json")
        os.replace(f"{path}.part", path)

    def _is_debugged(self, pid: int) -> bool:
        return stack_dumps.status_of(pid).get("TracerPid", "0") != "0"


def is_suspended(pid: int) -> bool:
    """Whether a signal has stopped a rank and its launcher: a person has stopped the job."""
    status = stack_dumps.status_of(pid)
    if not _is_stopped(status):
        return False
    return _is_stopped(stack_dumps.status_of(int(status["PPid"])))


def _is_stopped(status: Mapping[str, str]) -> bool:
    return status.get("State", "").startswith("T")


def place_of(run_directory: str, rank: int, pid: int) -> str:
    """Where a rank stands now, for a person."""
    state = stack_dumps.status_of(pid).get("State", "gone")
    stacks = stack_dumps.ask(run_directory, {rank: pid}).get(rank, "")
    return RankState(
        rank=rank, pid=pid, step=0, marks=0, doing="", still_s=0.0, process=state, stacks=stacks
    ).place


def _proc(pid: int, name: str) -> str:
    return text_of(f"/proc/{pid}/{name}").strip() or "not told"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", opener=new_files.private) as file:
        file.write(text)
