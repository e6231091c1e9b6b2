"""A committed generation as groups of tensors: parameters with their Adam moments, and the rest.

State that the optimizers name is put together from all ranks, and copies of it must be equal.
Everything else (buffers, random states, attached objects) is each rank's own.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from autockpt.executors.image.container import ImageHeader
from autockpt.executors.image.dtypes import dtype_name, true_form
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.integrations.formats.archive.records import RankPart, RankTensor
from autockpt.integrations.formats.convert.image_reader import Images, commit_of
from autockpt.integrations.formats.tree.checkpoint_tree import optimizers_of, read_from, replicated
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor
from autockpt.integrations.formats.tree.replicas import require_same
from autockpt.values.errors import ConfigError

FIRST, SECOND = "exp_avg", "exp_avg_sq"
"""Names of the moments in torch's Adam family; no other state is taken for one."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are coded together, by key; three: parameter, first and second moment."""

    tensors: tuple[tuple[str, LazyTensor], ...]


class Source:
    """A generation, open; close it when done."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError, CorruptCheckpointError or StorageError."""
        self.commit = commit_of(folder)
        self.images = Images(folder, self.commit, range(len(self.commit.records)))
        try:
            if any("tree" in skeleton for skeleton in self.images.skeletons.values()):
                raise ConfigError(
                    f"{folder}: was written by torch.distributed.checkpoint and does not say what "
                    "its optimizer is; archives take what `attach` wrote"
                )
            self._shared = set(replicated(self.images))
            require_same(self.images, sorted(self._shared), folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets the files go."""
        self.images.close()

    def ranks(self) -> tuple[RankPart, ...]:
        """Return the parts of each rank's image."""
        return tuple(self._rank(rank) for rank in self.images.ranks)

    def _rank(self, rank: int) -> RankPart:
        header = self.images.headers[rank]
        return RankPart(
            aliases=dict(header.aliases),
            tensors=tuple(
                self._tensor(rank, name, header) for name in header.tensors if name != EXTRA
            ),
            skeleton=json.dumps(self.images.skeletons[rank], separators=(",", ":")),
        )

    def _tensor(self, rank: int, name: str, header: ImageHeader) -> RankTensor:
        place, part = header.tensors[name], header.parts.get(name)
        dtype, _ = true_form(header, name)
        return RankTensor(
            name=name, key=self._key(rank, name), dtype=place.dtype, shape=place.shape,
            true_dtype=dtype_name(dtype), global_shape=part.global_shape if part else None,
            boxes=part.boxes if part else (),
        )  # fmt: skip

    def _key(self, rank: int, name: str) -> str:
        return name if name in self._shared else f"{rank}:{name}"

    def groups(self) -> Iterator[Group]:
        """Every tensor once."""
        tensors = self._tensors()
        taken: set[str] = set()
        for names in self._triples():
            known = [tensors[name] for name in names if name in tensors and name not in taken]
            if len(known) == 3 and len({tensor.shape for tensor in known}) == 1:
                taken.update(names)
                yield Group(tuple((name, tensors[name]) for name in names))
        for key, tensor in tensors.items():
            if key not in taken:
                yield Group(((key, tensor),))

    def _tensors(self) -> dict[str, LazyTensor]:
        found: dict[str, LazyTensor] = {}
        for rank in self.images.ranks:
            for name in self.images.headers[rank].tensors:
                key = self._key(rank, name)
                if name == EXTRA or key in found:
                    continue
                pieces = self.images.stored.pieces(name)
                if key == name:
                    chosen = read_from(pieces, apart=False)
                else:
                    own = [piece for piece in pieces if piece.shard == rank]
                    chosen = read_from(own, apart=True)
                found[key] = self.images.lazy(name, chosen)
        return found

    def _triples(self) -> Iterator[tuple[str, str, str]]:
        """Names of parameters and their two moments, where an optimizer has such."""
        stored: dict[str, str] = {}
        for header in self.images.headers.values():
            stored |= header.aliases
        skeletons = [self.images.skeletons[rank] for rank in self.images.ranks]
        for prefix in dict.fromkeys(p for one in skeletons for p in one["optimizers"]):
            for part in optimizers_of(skeletons, prefix):
                for name in (name for group in part.groups for name in group.names):
                    own = f"{prefix}.{name}"
                    yield stored.get(name, name), f"{own}.{FIRST}", f"{own}.{SECOND}"
