"""Find the checkpoint directory and the generation that a path means."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autockpt.run_directory import RunDirectory
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.policy_keys.paths import is_store_url, url_problem

if TYPE_CHECKING:
    from autockpt.executors.protocol.messages import TermParent
    from autockpt.executors.storage.catalogue import GenerationRecord


T = TypeVar("T")

AGAIN = 5
"""Newest checkpoints that may be deleted one after the other while each is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A checkpoint directory, and the generation in it that the path named."""

    directory: str
    generation: str | None = None


def find_place(path: str, *, in_store: bool = False) -> Place:
    """From a run directory, a checkpoint directory or one generation in it.

    With `in_store` also from the URL of one in an object store.  Raises ConfigError for anything
    else, StorageError for a store that does not answer.
    """
    if in_store and "://" in path:
        return _place_in_store(path)
    folder = Path(os.path.abspath(path))
    if folder.is_file():
        raise _foreign(path, foreign_kind(path))
    if not folder.is_dir():
        raise ConfigError(f"{path}: no such directory; pass a run or a checkpoint directory")
    if _is_generation(folder.name):
        return Place(directory=str(folder.parent), generation=folder.name)
    run = RunDirectory(folder)
    if run.exists:
        directory = run.checkpoints()
        if is_store_url(directory):
            if not in_store:
                raise ConfigError(
                    f"{path}: its checkpoints are in {directory}, which this command does not "
                    f"read; `autockpt pull {directory} DIR` brings one to a directory first"
                )
            return _place_in_store(directory)
        if not os.path.isdir(directory):
            raise ConfigError(
                f"{path}: this run has no checkpoints yet, or their storage is not mounted "
                f"({directory} is not there)"
            )
        return Place(directory=directory)
    if _holds_generations(folder):
        return Place(directory=str(folder))
    if _is_pulled(folder):
        return Place(directory=str(folder / "checkpoints"))
    if kind := foreign_kind(path):
        raise _foreign(path, kind)
    advice = foreign_within(path) or "; pass the --run-dir of a run, or its checkpoints/"
    raise ConfigError(f"{path}: neither a run nor a checkpoint directory{advice}")


def _place_in_store(url: str) -> Place:
    from autockpt.executors.storage.places.choose import place_of

    if not is_store_url(url):  # not repeated: it may name a key
        raise ConfigError(f"{url.partition('://')[0]}://: {url_problem(url)}")
    url = url.rstrip("/")
    folder, _, name = url.rpartition("/")
    if _is_generation(name):
        return Place(directory=folder, generation=name)
    try:
        names = place_of(url).names(url)
    except OSError as error:
        raise StorageError(f"{url}: cannot list: {error.strerror}") from error
    if "RUN" not in names and not any(map(_is_generation, names)):
        above = folder if is_store_url(folder) else url
        raise ConfigError(f"{url}: holds no checkpoints; see `autockpt ls {above}`")
    return Place(directory=url)


_BRIDGES = (
    "`autockpt convert PATH RUN --to autockpt` makes a run of it, and `autockpt diff` compares it"
)
_OF_ZERO_WEIGHTS = (
    "`autockpt convert PATH RUN --to autockpt` makes a run of its weights; autockpt does not read "
    "ZeRO's partitions of the optimizer"
)
_OF_PARTITIONS = (
    "autockpt does not read its partitions: DeepSpeed's zero_to_fp32.py, which is beside them, "
    "makes weights that `autockpt convert` takes"
)
_OF_PEFT = (
    "autockpt imports whole models, and this has the weights of PEFT's adapter alone: let Trainer "
    "resume from it, or read it with PEFT"
)
_OF_PARTS = (
    "autockpt finds no weights of a whole model in it (model.safetensors, pytorch_model.bin), and "
    "does not read the parts of FSDP or DeepSpeed in such a directory"
)
_PEFT = " of a PEFT adapter"
DEEPSPEED_WEIGHTS = "mp_rank_00_model_states.pt"
"""A file with all weights, where neither ZeRO-3 nor tensor or pipeline parallelism divides them."""


def _foreign(path: str, kind: str) -> ConfigError:
    """Names it, and says what can be done with it."""
    return ConfigError(f"{path}: is {kind}, no run of autockpt; {_ways(path, kind)}")


def _ways(path: str, kind: str) -> str:
    if "DeepSpeed" in kind:
        return _OF_ZERO_WEIGHTS if deepspeed_weights(path) else _OF_PARTITIONS
    if _PEFT in kind:
        return _OF_PEFT
    of_trainer = "Hugging Face" in kind or "Accelerate" in kind
    return _OF_PARTS if of_trainer and not WEIGHTS.keys() & set(os.listdir(path)) else _BRIDGES


def foreign_kind(path: str) -> str:
    """The kind of a checkpoint of another system, by the names of its files; "": unknown."""
    folder = Path(path)
    if folder.is_file():
        kinds = {".safetensors": "a file of safetensors", ".ckpt": "a checkpoint of Lightning"}
        kinds |= dict.fromkeys((".pt", ".pth", ".bin"), "a file of torch.save")
        return kinds.get(folder.suffix, "a file")
    names = set(os.listdir(folder))
    peft = _PEFT if "adapter_model.safetensors" in names and not names & WEIGHTS.keys() else ""
    if "trainer_state.json" in names:
        return f"a checkpoint of Hugging Face Trainer{peft}{_trainer_step(folder)}"
    if "random_states_0.pkl" in names or "optimizer.bin" in names:
        return f"a checkpoint of Accelerate{peft}"
    if any(name.endswith("_model_states.pt") for name in names):
        return "a checkpoint of DeepSpeed"
    if "latest" in names and any(name.startswith("global_step") for name in names):
        return "a directory of DeepSpeed's checkpoints"
    if ".metadata" in names:
        return "a directory of torch.distributed.checkpoint"
    if names & WEIGHTS.keys():
        return f"a directory of {'/'.join(sorted({WEIGHTS[n] for n in names & WEIGHTS.keys()}))}"
    return f"a directory{peft}" if peft else ""


WEIGHTS = {
    "model.safetensors.index.json": "safetensors", "model.safetensors": "safetensors",
    "pytorch_model.bin.index.json": "pytorch_model.bin", "pytorch_model.bin": "pytorch_model.bin",
}  # fmt: skip
"""By name of a file with the weights of a model, or of their index: its format."""


def deepspeed_weights(path: str) -> str:
    """The directory with the one file that holds all weights of a checkpoint of DeepSpeed.

    "": they are divided.  `path`: its directory, or that of several, which names the newest.
    """
    folder = Path(path)
    if (folder / "latest").is_file():
        with contextlib.suppress(OSError, ValueError):
            folder /= Path((folder / "latest").read_text("utf-8").strip()[:255]).name
    try:
        names = [name for name in os.listdir(folder) if name.endswith("model_states.pt")]
    except OSError:
        return ""
    return str(folder) if names == [DEEPSPEED_WEIGHTS] else ""


def foreign_within(path: str) -> str:
    """Names a checkpoint of another system in a directory, the newest by its number; "": none."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_dir() and (kind := foreign_kind(entry.path)):
                number = re.findall(r"\d+", entry.name)
                found.append((int(number[-1]) if number else -1, entry.path, kind))
    return "; in it {1} is {2}".format(*max(found)) if found else ""


def _trainer_step(folder: Path) -> str:
    """ " at step 300"; "" where it cannot be read."""
    try:
        step = json.loads((folder / "trainer_state.json").read_bytes())["global_step"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" at step {step}" if type(step) is int else ""


def runs_in(path: str) -> list[RunDirectory]:
    """The run directories in a folder, oldest first; none where it is no folder of runs."""
    folder = Path(os.path.abspath(path))
    if not folder.is_dir():
        return []
    found = []
    for each in folder.iterdir():
        with contextlib.suppress(OSError):  # it was removed meanwhile, or is somebody else's
            started_s = os.stat(each / "run.json").st_mtime
            found.append((started_s, each.name, RunDirectory(each)))
    return [run for _, _, run in sorted(found, key=lambda entry: entry[:2])]


def choose(place: Place, named: str | None) -> str:
    """The generation that is meant: named, or in the path, or the newest committed one.

    `named`: its own name, or that of a pin.  Raises ConfigError when there is none,
    CorruptCheckpointError where all are damaged.
    """
    name = place.generation if named is None else unpinned_name(place.directory, named)
    if name is not None:
        Generation.from_name(name)
        if not _is_folder(place.directory, name):
            raise ConfigError(f"{place.directory}: holds no {name}; see `autockpt ls`")
        return name
    from autockpt.executors.storage.catalogue import list_generations

    committed = [
        record.name
        for record in list_generations(place.directory)
        if record.state in ("committed", "verified")
    ]
    if not committed:
        for record in reversed(damaged_since(place.directory, None)):
            raise CorruptCheckpointError(
                f"{place.directory}: no checkpoint can be read; the newest, {record.name}, is "
                f"{record.state}: {record.detail or 'it is marked'}"
            )
        raise ConfigError(f"{place.directory}: holds no committed checkpoint; see `autockpt ls`")
    return committed[-1]


def damaged_since(directory: str, name: str | None) -> "list[GenerationRecord]":
    """Checkpoints after `name`, which is read because these cannot be; oldest first.

    Without a name all that cannot be read.
    """
    from autockpt.executors.storage.catalogue import list_generations

    meant = None if name is None else Generation.from_name(name)
    return [
        record
        for record in list_generations(directory)
        if record.state in ("corrupt", "unreadable")
        and (meant is None or Generation.from_name(record.name) > meant)
    ]


def _is_folder(directory: str, name: str) -> bool:
    """Whether a generation has a folder; raises StorageError for a store that does not answer."""
    from autockpt.executors.storage.places.choose import place_of

    folder = os.path.join(directory, name)
    if not is_store_url(folder):
        return os.path.isdir(folder)
    try:
        return bool(place_of(folder).names(folder))
    except OSError as error:
        raise StorageError(f"{folder}: cannot list: {error.strerror}") from error


def unpinned_name(directory: str, named: str) -> str:
    """The checkpoint that a name means: that of a pin, of a step, or its own.

    Raises ConfigError for a step that starts of several terms have, StorageError.
    """
    from autockpt.executors.storage.directory.directory import CheckpointDirectory

    if _is_generation(named):
        return named
    kept = CheckpointDirectory(directory).pins().get(named)
    if kept is not None:
        return kept.name
    return generation_of_step(directory, int(named)) if named.isdecimal() else named


def generation_of_step(directory: str, step: int) -> str:
    """The checkpoint of a step.  Raises ConfigError where there is none, or several are."""
    from autockpt.executors.storage.catalogue import list_generations

    names = [record.name for record in list_generations(directory)]
    steps = {name: Generation.from_name(name).step for name in names if _is_generation(name)}
    found = [name for name, its in steps.items() if its == step]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{directory}: {len(found)} checkpoints of step {step}; name one: "
                          f"{', '.join(found)}")  # fmt: skip
    known = ", ".join(str(its) for its in sorted(set(steps.values()))) or "none"
    raise ConfigError(f"{directory}: holds no checkpoint of step {step}; steps: {known}")


def generation_folder(path: str, generation: str | None = None) -> str:
    """Folder of the generation named by `path` or `generation`, else of the newest good one.

    Raises ConfigError for a path that is nothing of ours, NoCheckpointError when none is good.
    """
    place = find_place(path, in_store=True)
    if generation and place.generation and generation != place.generation:
        raise ConfigError(f"{path}: is one generation already, and {generation} is another")
    if generation or place.generation:
        return os.path.join(place.directory, choose(place, generation))
    return os.path.join(place.directory, good_generations(place.directory)[-1])


def read_beside_run(find: Callable[[], str], read: Callable[[str], T], *, named: bool) -> T:
    """Read the checkpoint in the folder that `find` returns, beside a run that deletes old ones.

    Where the newest is meant and goes meanwhile, the next newest is read.  Raises NoCheckpointError
    for a `named` one that goes, and the errors of `read` for one that stays, or was never whole.
    """
    from autockpt.executors.storage.catalogue import lacks_commit

    for left in reversed(range(AGAIN)):
        folder = find()
        if is_store_url(folder):
            return read(folder)
        unfinished = named and lacks_commit(folder)
        before = _commit_text(folder)
        try:
            return read(folder)
        except (AutockptError, OSError) as error:
            if left and before and _commit_text(folder) not in (before, b""):
                continue  # the run has written its shards again
            if unfinished or not lacks_commit(folder):
                raise
            if named or not left:
                raise NoCheckpointError(
                    f"{folder}: was deleted while it was read; `autockpt ls` shows what is there, "
                    "and `autockpt pin` keeps one"
                ) from error
    raise AssertionError("the last turn returns or raises")


def _commit_text(folder: str) -> bytes:
    from autockpt.executors.storage.directory.records import read_small

    with contextlib.suppress(AutockptError, OSError):
        return read_small(os.path.join(folder, "COMMIT"))
    return b""


def good_generations(directory: str) -> list[str]:
    """Return the generations that a restore would take, oldest first, without abandoned ones.

    Raises NoCheckpointError when there is none, StorageError when the lineage cannot be read.
    """
    from autockpt.executors.protocol.selection import on_lineage
    from autockpt.executors.storage.catalogue import list_generations
    from autockpt.executors.storage.places.choose import place_of

    records = [r for r in list_generations(directory) if r.state in ("committed", "verified")]
    chain = _chain(directory, records)
    good = [
        record.name
        for record in records
        if record.health == "good"
        and on_lineage(Generation.from_name(record.name), chain)
        and not place_of(directory).exists(os.path.join(directory, record.name, "QUARANTINE"))
    ]
    if not good:
        raise NoCheckpointError(
            f"{directory}: holds no good checkpoint that a restart would take; `autockpt ls "
            f"{directory}` shows what is there, and --generation takes one of them"
        )
    return good


def _chain(directory: str, committed: "Iterable[GenerationRecord]") -> "tuple[TermParent, ...]":
    """Return the newest start's parent, and so on back."""
    from autockpt.executors.protocol.selection import newest_chain
    from autockpt.executors.storage.directory.directory import CheckpointDirectory

    parents = {
        Generation.from_name(record.name).term: (
            Generation.from_name(record.parent) if record.parent else None
        )
        for record in committed
    }
    decided = CheckpointDirectory(directory).parents()
    return newest_chain(parents | {decision.term: decision.parent for decision in decided})


def is_ours(path: str) -> bool:
    """Whether a path is a run, a checkpoint directory or a generation, usable or not.

    So is each URL of an object store.
    """
    if is_store_url(path):
        return True
    folder = Path(os.path.abspath(path))
    if not folder.is_dir():
        return False
    ours = _is_generation(folder.name) or RunDirectory(folder).exists
    return ours or _holds_generations(folder) or _is_pulled(folder)


def _is_pulled(folder: Path) -> bool:
    """Whether it is a run directory of which only the checkpoints are there, as `pull` makes it."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and _holds_generations(checkpoints)


def _holds_generations(folder: Path) -> bool:
    return (folder / "RUN").exists() or any(_is_generation(name) for name in os.listdir(folder))


def names_one(path: str, generation: str | None) -> bool:
    """Whether a path, or a name beside it, means one checkpoint and no other."""
    return bool(generation) or _is_generation(os.path.basename(os.path.abspath(path)))


def _is_generation(name: str) -> bool:
    try:
        Generation.from_name(name)
    except ConfigError:
        return False
    return True
