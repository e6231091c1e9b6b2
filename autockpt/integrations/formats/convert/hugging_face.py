"""A generation of ours as a directory that Trainer of Hugging Face resumes from.

    model.safetensors, optimizer.pt, scheduler.pt, scaler.pt, trainer_state.json

config.json and the tokenizer come from the script.  Trainer draws the shuffle of the epoch by its
seed and skips the batches of the epoch under way.  It begins with the random state that the script
has: ours is of each rank, and stays in the run.
"""

from collections.abc import Mapping
from typing import Any

from autockpt.integrations.formats.tree.checkpoint_tree import LEFT_OUT
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, Tree
from autockpt.values.errors import ConfigError

FILES = ("optimizer", "scheduler", "scaler")
"""Parts of the state that are a file of their own, `NAME.pt`."""
TRAINER_STATE = "trainer_state.json"


def hugging_face_part(tree: Tree) -> tuple[Tree, tuple[str, ...]]:
    """(the part of the state that Trainer reads, names of the rest).

    Raises ConfigError for a state without an optimizer and its scheduler: Trainer reads both or
    neither.
    """
    missing = [name for name in ("optimizer", "scheduler") if name not in tree]
    if missing:
        raise ConfigError(
            f"--to hf: the checkpoint has no {missing[0]}, and Trainer reads optimizer and "
            f"scheduler together; there are: {', '.join(sorted({*tree} - {'step'}))}. Attach it by "
            "that name, or convert the weights alone with --to safetensors"
        )
    weights = {n: leaf for n, leaf in tree["model"].items() if isinstance(leaf, LazyTensor)}
    taken = {"model": weights, **{name: tree[name] for name in FILES if name in tree}}
    extras = tuple(f"model.{name} (no tensor)" for name in tree["model"] if name not in weights)
    others = tuple(name for name in tree if name not in (*taken, "step"))
    return taken, (*extras, *others, *LEFT_OUT)


def trainer_state(step: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that `TrainerState` keeps.  Trainer computes the epoch from the step.

    `extra`: the counters of the checkpoint; the adapter for Trainer keeps the whole state there.
    """
    saved = extra.get("state")
    known = dict(saved) if isinstance(saved, dict) and "log_history" in saved else {}
    return {"log_history": [], "best_metric": None, "epoch": 0.0, **known, "global_step": step}
