"""The process of one contestant: builds the job, then does what the parent says, line by line.

    python -m benchmarks.peers.worker ADAPTER FOLDER SIZE TOKENS THREADS

A line on stdin is a JSON command, a line on what was stdout its JSON answer; whatever a peer prints
goes to stderr.  Between commands the process sleeps in a read: contestants that wait for their turn
cost nothing.  See `benchmarks.engine` for what a round is and why.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.job import Job
from benchmarks.peers import cuda_stub  # noqa: F401 - see there
from benchmarks.peers.contract import Peer
from benchmarks.peers.processes import descendants, settle
from benchmarks.peers.rounds import SETTLE_S, check, one_round

WARM_ITERATIONS = 3


def main() -> None:
    """Serves until told to close."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    adapter, folder, size, tokens, threads = sys.argv[1:]
    helpers: list[int] = []
    try:
        peer = start(adapter, Path(folder), size, int(tokens), int(threads))
        helpers = peer.helpers()
        serve(peer, answers)
    except BaseException as error:
        traceback.print_exc()
        tell(answers, {"failed": f"{type(error).__name__}: {error}"[:300]})
    leave(helpers)


def serve(peer: Peer, answers: TextIO) -> None:
    """Says that it is ready, then answers until it is told to close or the parent is gone."""
    state_bytes = sum(tensor.nbytes for tensor in peer.job.tensors())
    tell(answers, {"ready": True, "pid": os.getpid(), "state_bytes": state_bytes})
    for line in sys.stdin:
        command = json.loads(line)
        tell(answers, answer(peer, command))
        if command["do"] == "close":
            return


def leave(helpers: list[int]) -> None:
    """Not sys.exit: background threads, processes and exit handlers of some peers never end."""
    sys.stderr.flush()
    for pid in [*descendants(os.getpid()), *helpers]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def tell(answers: TextIO, message: dict[str, Any]) -> None:
    """One line to the parent."""
    print(json.dumps(message), file=answers, flush=True)


def start(adapter: str, folder: Path, size: str, tokens: int, threads: int) -> Peer:
    """The contestant on a job that has its optimizer state already."""
    torch.set_num_threads(threads)
    module, name = adapter.split(":")
    kind = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)
    job = Job(size, tokens)
    for _ in range(WARM_ITERATIONS):
        job.iterate()
    folder.mkdir(parents=True, exist_ok=True)
    peer: Peer = kind(job, folder)
    peer.setup()
    settle(peer.helpers(), SETTLE_S)
    return peer


def answer(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    """Carries out one command."""
    match command["do"]:
        case "round":
            return one_round(
                peer, command["k"], save_first=command["save_first"], every=command["every"]
            )
        case "check":
            return check(peer, command["k"])
        case "facts":
            return {"helpers": peer.helpers(), "saved": peer.saved()}
        case "hold":
            return hold(peer)
        case "close":
            peer.close()
            return {"closed": True}
    raise ValueError(f"unknown command {command}")


def hold(peer: Peer) -> dict[str, Any]:
    """Saves once more and says what the state was: the parent kills this process next."""
    peer.job.iterate()
    digests = peer.job.digests()
    peer.save()
    peer.job.iterate()
    peer.wait()
    return {"digests": digests}


if __name__ == "__main__":
    main()
