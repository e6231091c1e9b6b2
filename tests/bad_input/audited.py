"""A restore under an audit hook; in a process of its own, because a hook is never taken off."""

import json
import sys
from pathlib import Path

import torch

from autockpt.executors.applying import apply_state
from autockpt.executors.directory import CheckpointDirectory, read_commit
from autockpt.executors.restore import restore_tensors
from autockpt.executors.shards import open_disk
from autockpt.executors.state import LiveState
from autockpt.values.generation import Generation
from tests.executors.checkpoints import commit_state
from tests.executors.states import Holder, trained

FORBIDDEN = (
    "pickle.find_class", "exec", "compile", "os.system", "os.exec", "os.posix_spawn",
    "subprocess.Popen", "code.__new__", "marshal.loads",
)  # fmt: skip


def restore(out: str) -> None:
    """Saves a state and restores it twice, the second time watched; what was seen to `out`/seen."""
    model, optimizer = trained()
    holder = Holder({"best": torch.ones(3), "names": ("a", {1: 2.5}), "big": 2**70, "raw": b"x"})
    state = LiveState.of(model=model, optimizer=optimizer, other=holder)
    directory = CheckpointDirectory(str(Path(out) / "checkpoints"))
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    folder = commit_state(directory, run_id, Generation(epoch=1, seq=1), state)
    _once(folder)  # modules that are imported late are executed once
    seen: list[str] = []
    everything: list[str] = []

    def hook(event: str, arguments: object) -> None:
        everything.append(event)
        if event in FORBIDDEN:
            seen.append(f"{event} {str(arguments)[:200]}")

    sys.addaudithook(hook)
    _once(folder)
    found = {"forbidden": seen, "events": sorted(set(everything))}
    (Path(out) / "seen").write_text(json.dumps(found))


def _once(folder: str) -> None:
    model, optimizer = trained()
    fresh = LiveState.of(model=model, optimizer=optimizer, other=Holder(None))
    record = read_commit(f"{folder}/COMMIT").records[0]
    apply_state(restore_tensors(open_disk(folder, record), fresh), fresh)
