"""Restores in fresh processes, through `attach`: from the keeper's memory, and cold from the disk.

A trainer saves, says what its state was, and is killed.  Then processes come back one after the
other: while the keeper lives, from its slots; when it was killed as well, from the file, which
stands in no page cache.  Each is held against a plain read or copy of the same bytes that it made
itself just before, and must come back with the state that was saved, to the bit.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contest.client import Client, Failed, Training, surroundings
from benchmarks.contest.schedule import ROUND_S, START_S, tell
from benchmarks.harness import Row, row
from benchmarks.peers.processes import settle
from benchmarks.peers.registry import BY_NAME

COLD_TARGET, MEMORY_TARGET = 1.2, 1.3
PROBE_S = 120.0


def restore_rows(folder: Path, training: Training, trials: int) -> list[Row]:
    """The rows, or one with the reason why there are none."""
    try:
        taken = restores(folder, training, trials)
    except (Failed, OSError, ValueError, subprocess.SubprocessError) as error:
        return [row("autockpt", "cold restore/plain read", [], "x", at_most=COLD_TARGET,
                    note=str(error)[:300])]  # fmt: skip
    return [
        *_rows("cold restore", taken["disk"], "read", COLD_TARGET),
        *_rows("memory restore", taken["memory"], "copy", MEMORY_TARGET),
    ]


def _rows(figure: str, taken: list[dict[str, Any]], plain: str, limit: float) -> list[Row]:
    def over(what: str, base: str) -> list[float]:
        return [one[what] / one[base] for one in taken]

    exact = "" if all(one["exact"] for one in taken) else "NOT the state that was saved"
    return [
        row("autockpt", figure, [one["restore_s"] for one in taken], "s", note=exact),
        row("autockpt", f"{figure}/plain {plain}", over("restore_s", f"{plain}_faulted_s"), "x",
            at_most=limit, note=f"plain {plain} into memory that is faulted already"),
        row("autockpt", f"{figure}/plain {plain} into new memory",
            over("restore_s", f"{plain}_new_s"), "x"),
        row("autockpt", f"{figure}, whole attach", [one["attach_s"] for one in taken], "s"),
    ]  # fmt: skip


def restores(folder: Path, training: Training, trials: int) -> dict[str, list[dict[str, Any]]]:
    """Samples by source."""
    client = Client(BY_NAME["autockpt"], sys.executable, folder, training)
    keepers: set[int] = set()
    try:
        client.await_ready(START_S)
        keepers.update(client.ask({"do": "facts"}, ROUND_S)["helpers"])
        digests = client.ask({"do": "hold"}, ROUND_S)["digests"]
        settle(keepers, ROUND_S)
        client.kill()
        run = folder / "work" / "run"
        taken: dict[str, list[dict[str, Any]]] = {"memory": [], "disk": []}
        for source in taken:
            for _ in range(trials):
                if source == "disk":
                    _kill(keepers)
                taken[source].append(_trial(run, training, digests, source))
                keepers.add(_keeper(run))
        return taken
    finally:
        _kill(keepers)
        client.end(graceful=False)


def _trial(run: Path, training: Training, digests: dict[str, str], source: str) -> dict[str, Any]:
    shard = max(run.glob("checkpoints/ckpt-*/shard-*"))
    command = [
        sys.executable, "-m", "benchmarks.contest.resume_probe", str(run), str(shard),
        training.size, str(training.tokens), str(training.threads),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROBE_S, cwd=run,
        env=surroundings(training.threads), check=False,
    )  # fmt: skip
    if not done.stdout.strip():
        raise Failed(f"restore: {done.stderr.strip()[-300:] or 'no answer'}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if answer.get("source") != source:
        raise Failed(f"restore: came back from {answer.get('source')!r}, wanted {source}")
    answer["exact"] = answer["digests"] == digests
    tell("restore", source, {k: v for k, v in answer.items() if isinstance(v, float)})
    return answer


def _keeper(run: Path) -> int:
    """The keeper that serves a run now."""
    from autockpt.executors.keeper.launch import keeper_status

    status = keeper_status(str(run), 0)
    if status is None:
        raise Failed("restore: the keeper is gone")
    return status.pid


def _kill(pids: set[int]) -> None:
    """At once, and waits until they are gone: they are nobody's children any more."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    pids.clear()
