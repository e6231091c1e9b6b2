"""A restore under an audit hook; in a process of its own, because a hook is never taken off."""

import json
import pickle
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import torch

from autockpt.executors.restore.apply_state import apply_state
from autockpt.executors.restore.shard_sources import ChunkSource
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_state, open_file, restore_shard
from tests.unit.executors.restore.test_reader import in_memory
from tests.unit.executors.states import Holder, trained

FORBIDDEN = (
    "pickle.find_class", "exec", "compile", "os.system", "os.exec", "os.fork", "os.forkpty",
    "os.posix_spawn", "os.spawn", "subprocess.Popen", "code.__new__", "marshal.loads",
)  # fmt: skip


def restore(out: str) -> None:
    """Saves a state and restores it from disk and memory, twice, the second time watched.

    What was seen goes to `out`/seen, and what is seen of things that a restore must not do.
    """
    model, optimizer = trained()
    holder = Holder({"best": torch.ones(3), "names": ("a", {1: 2.5}), "big": 2**70, "raw": b"x"})
    state = LiveState.of(model=model, optimizer=optimizer, other=holder)
    directory = CheckpointDirectory(str(Path(out) / "checkpoints"))
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    folder = commit_state(directory, run_id, Generation(term=1, step=1), state)

    def disk() -> ChunkSource:
        return open_file(folder)

    def memory() -> ChunkSource:
        return in_memory(state)

    for source in (disk, memory):
        _once(source)  # modules that are imported late are executed once
    seen: list[str] = []
    everything: list[str] = []

    def hook(event: str, arguments: object) -> None:
        everything.append(event)
        if event in FORBIDDEN:
            seen.append(f"{event} {str(arguments)[:200]}")

    stored = pickle.dumps(Fraction(1, 2))
    sys.addaudithook(hook)
    for source in (disk, memory):
        _once(source)
    found = {"forbidden": list(seen), "events": sorted(set(everything))}
    pickle.loads(stored)
    exec("stored")
    found["noticed"] = [event.split()[0] for event in seen]
    (Path(out) / "seen").write_text(json.dumps(found))


def _once(source: Callable[[], ChunkSource]) -> None:
    model, optimizer = trained()
    fresh = LiveState.of(model=model, optimizer=optimizer, other=Holder(None))
    apply_state(restore_shard(source(), fresh), fresh)
