"""An archive's records: settings of the directory, index of a member."""

from dataclasses import dataclass
from typing import Literal

from autockpt.executors.image.codecs.lossy.coding import Method
from autockpt.executors.image.codecs.lossy.thresholds import BALANCED, PUBLISHED, Thresholds
from autockpt.executors.image.layout.boxes import Box
from autockpt.values.errors import ConfigError

FORMAT = "autockpt-archive-1"
MAX_CHAIN = 64
"""A restore decodes every member back to the last full one."""
Codec = Literal["none", "excp", "excp-published", "quantised"]
CODECS: tuple[Codec, ...] = ("none", "excp", "excp-published", "quantised")
METHODS: dict[Codec, Method] = {
    "none": "none", "excp": "excp", "excp-published": "excp", "quantised": "quantised",
}  # fmt: skip
THRESHOLDS: dict[Codec, Thresholds] = {"excp": BALANCED, "excp-published": PUBLISHED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """ARCHIVE: how its members are made."""

    schema_version: int = 1
    format: str = FORMAT
    run_id: str
    """The id of the run whose history it is."""
    codec: Codec
    full_every: int
    """Every so many members one is lossless and needs no other; 1: all are."""

    def __post_init__(self) -> None:
        if self.format != FORMAT or not 1 <= self.full_every <= MAX_CHAIN:
            raise ConfigError(
                f"archive of format {self.format!r} with a full member every {self.full_every}: "
                f"expected {FORMAT!r} and 1 to {MAX_CHAIN}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor, put together from all ranks, or one rank's own."""

    key: str
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlace:
    """In the member's file."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Rows [start, stop) of the first dimension, of all tensors of a group."""

    start: int
    stop: int
    frames: tuple[FramePlace, ...]
    """One for all tensors, or one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A parameter with its Adam moments, or one tensor."""

    tensors: tuple[StoredTensor, ...]
    blocks: tuple[StoredBlock, ...]
    lossy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """A tensor in the image of a rank, as its header had it."""

    name: str
    key: str
    dtype: str
    """safetensors name."""
    shape: tuple[int, ...]
    true_dtype: str
    global_shape: tuple[int, ...] | None
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The parts of a rank's image, beside the tensors."""

    aliases: dict[str, str]
    tensors: tuple[RankTensor, ...]
    skeleton: str
    """JSON text, verbatim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One generation in an archive."""

    schema_version: int = 1
    generation: str
    step: int
    codec: Codec
    """The codec of this member: "none" for a full one."""
    base: str
    """Generation that it needs, "" for none."""
    base_digest: str
    """The digest of that member's index, hex."""
    raw_bytes: int
    """Bytes of the original tensors."""
    created_s: float
    """Seconds since 1970, of the generation."""
    groups: tuple[StoredGroup, ...]
    ranks: tuple[RankPart, ...]
    lost_before: str = ""
    """The earlier loss, in words, of a generation that was lossy when it was archived."""

    @property
    def lossy(self) -> bool:
        """Some tensor does not come back as it was trained, to the bit."""
        return bool(self.lost_before) or self.coded_lossy

    @property
    def coded_lossy(self) -> bool:
        """Some tensor does not come back as it was archived."""
        return any(group.lossy for group in self.groups)
