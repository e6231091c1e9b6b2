"""The records of a checkpoint directory: their types, and how they are read and published.

No rule of the protocol lives here.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autockpt.executors.protocol.messages import REPLACES
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.place import MAX_RECORD_BYTES, always
from autockpt.values.errors import AutockptError, ConfigError, CorruptCheckpointError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.record import from_json, to_json

FORMAT = 2
COMES_BACK = "its optimizer state comes back with the next start, unless a run is just dropping it"
"""Of a checkpoint whose shards were being replaced when a run ended, or are now."""
_OURS = re.compile(
    r"(shard|idx)-\d{5}-[aw]\d+\.(safetensors|json)|VERIFIED|CORRUPT|SUSPECT|PINNED|COMMIT(\.\w+\.tmp)?"
)
"""Files of a generation that go with it, beside those its COMMIT lists."""
_TEMPORARY = re.compile(
    r"((RUN|JOB|EVER|heartbeat|t-\d{6,}(\.left)?|probe\.[0-9a-f]{12}\.tmp)\.|probe\.)[0-9a-f]{12}\.tmp"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """RUN: who the directory belongs to."""

    schema_version: int = 1
    run_id: str
    format: int
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFile:
    """COMMIT: the generation is complete."""

    schema_version: int = 1
    run_id: str
    generation: Generation
    step: int
    world_size: int
    parent: Generation | None
    records: tuple[dict[str, Any], ...]
    """Per rank: file, index, bytes, root, layout_digest."""
    health: str
    created_s: float
    digest: str = ""
    """sha256 of this record with an empty digest."""

    def sealed(self) -> "CommitFile":
        """This record with its digest."""
        plain = replace(self, digest="")
        return replace(plain, digest=hashlib.sha256(to_json(plain).encode()).hexdigest())


def require_format(directory: str) -> None:
    """Raise ConfigError where `directory` has a RUN of another format; nothing is changed there."""
    path = os.path.join(directory, "RUN")
    try:
        run = from_json(RunFile, read_small(path), where=path)
    except (OSError, AutockptError):
        return  # none yet, or damaged: reported where it is needed
    if run.format != FORMAT:
        raise ConfigError(
            f"{path}: written in format {run.format}, and this autockpt reads and writes format "
            f"{FORMAT}. Resume this run with the version that wrote it, or name a new directory"
        )


def publish(
    path: str, text: bytes, *, replace: bool, is_wanted: Callable[[], bool] = always
) -> bool:
    """Durable, whole, at once; False when it exists and may not be replaced.

    `is_wanted` is asked before it appears.  Raises GuardError when it is not, StorageError,
    OSError.
    """
    return place_of(path).publish(path, text, replace=replace, is_wanted=is_wanted)


def read_small(path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
    """A record.  Raises CorruptCheckpointError when it is none, or OSError."""
    return place_of(path).read(path, limit=limit)


def is_there(path: str) -> bool:
    """Whether a file is there: a mark that cannot be looked for is not missing.  Raises OSError."""
    return place_of(path).exists(path)


def exists(path: str) -> bool:
    """Whether a file is there, as far as the storage says."""
    with contextlib.suppress(OSError):
        return is_there(path)
    return False


def read_commit(path: str) -> CommitFile:
    """A COMMIT whose own digest matches.  Raises CorruptCheckpointError or OSError."""
    return parse_commit(read_small(path), where=path)


def parse_commit(text: bytes, *, where: str) -> CommitFile:
    """The record in a COMMIT.  Raises CorruptCheckpointError."""
    try:
        commit = from_json(CommitFile, text, where=where)
    except AutockptError as error:
        raise CorruptCheckpointError(str(error)) from None
    if commit.sealed().digest != commit.digest or to_json(commit).encode() != text:
        raise CorruptCheckpointError(f"{where}: its own digest does not match")
    if len(commit.records) != commit.world_size:
        raise CorruptCheckpointError(
            f"{where}: names {len(commit.records)} shards, expected {commit.world_size}"
        )
    numbers = ("bytes", "chunks", "chunk_bytes")
    if not all(isinstance(r.get(key, 0), int) for r in commit.records for key in numbers):
        raise CorruptCheckpointError(f"{where}: a shard's bytes or chunks are no number")
    return commit


def lossy_notice(what: str, lost: str) -> str:
    """Return the notice of every reader of a generation that has lost something."""
    return f"LOSSY: {what} is not what was trained, but close to it ({lost})"


def lossy_mark(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the losses that a COMMIT's shards record, before they were written; "" for none."""
    return next((str(record["lossy"]) for record in records if record.get("lossy")), "")


@contextlib.contextmanager
def storage_error(verb: str, path: str) -> Iterator[None]:
    """An error of the operating system is a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot {verb}: {error.strerror}") from error


def names_in(path: str) -> list[str]:
    """Return the names in a folder; none if there is no folder.  Raises StorageError."""
    with storage_error("list", path):
        return [name for name in place_of(path).names(path) if not name.endswith(".tmp")]


def generations_in(path: str) -> list[Generation]:
    """The generations that are listed, also damaged ones.  Raises StorageError."""
    found = []
    for name in names_in(path):
        with contextlib.suppress(ConfigError):
            found.append(Generation.from_name(name))
    return sorted(found)


def files_of(records: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the files that a commit lists, also of shards that may come back."""
    listed = [each for record in records for each in (record, record.get(REPLACES)) if each]
    return frozenset(str(record.get(key)) for record in listed for key in ("file", "index"))


def is_undecided(commit: CommitFile) -> bool:
    """Whether a commit names whole shards beside their possible replacements."""
    return any(REPLACES in record for record in commit.records)


def whole_records(commit: CommitFile) -> tuple[dict[str, Any], ...]:
    """Of the whole shards that an undecided commit names; else its records."""
    return tuple(record.get(REPLACES, record) for record in commit.records)


def comes_back(folder: str, commit: CommitFile) -> bool:
    """Whether dropped optimizer state is there, and counts again from the next start on.

    Raises OSError.
    """
    return is_undecided(commit) and files_of(whole_records(commit)) <= set(
        place_of(folder).names(folder)
    )


def is_temporary(name: str) -> bool:
    """Whether a file beside the generations is a record that we did not finish to publish."""
    return bool(_TEMPORARY.fullmatch(name))


def is_ours(name: str) -> bool:
    """Whether a file of a generation is one that we write."""
    return bool(_OURS.fullmatch(name))
