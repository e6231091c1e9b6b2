"""What the ranks of a job of 405 billion parameters hold, without its bytes.

Llama 3.1 405B under tensor parallelism 8 (within a node) x pipeline 16 x data parallelism, weights
in bf16, Adam in fp32 behind a flat ZeRO-1 partition: the optimizer of a rank owns one range of the
weights of its stage, laid end to end.  Fewer than 128 ranks have fewer stages.
"""

import functools
from dataclasses import dataclass

import torch

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.image.layout.boxes import Box, overlaps, whole
from autockpt.executors.image.layout.plan import Layout, TensorSpec, plan_layout
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.snapshot.replica_shares import Place, Shares, take_shares
from autockpt.values.generation import Generation
from autockpt.values.record import to_json

WIDTH, INNER, LAYERS, KEYS, VOCABULARY = 16384, 53248, 126, 1024, 128256
CHUNK_BYTES = 8 * 2**20
EXTRA_BYTES = 2**16
LAYER = (
    ("attention.q", (WIDTH, WIDTH), 0), ("attention.k", (KEYS, WIDTH), 0),
    ("attention.v", (KEYS, WIDTH), 0), ("attention.out", (WIDTH, WIDTH), 1),
    ("mlp.gate", (INNER, WIDTH), 0), ("mlp.up", (INNER, WIDTH), 0),
    ("mlp.down", (WIDTH, INNER), 1), ("norm1", (WIDTH,), None), ("norm2", (WIDTH,), None),
)  # fmt: skip
"""(name, shape, dimension that tensor parallelism cuts or None)."""
STATE = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How many ranks, and how they are arranged: ranks of a node differ in `tensor` only."""

    tensor: int
    stages: int
    copies: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor * self.stages * self.copies

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tensor, copy, stage) of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        stage, copy = divmod(rest, self.copies)
        return tensor, copy, stage

    def rank(self, tensor: int, copy: int, stage: int) -> int:
        """The rank at a place."""
        return (stage * self.copies + copy) * self.tensor + tensor


def mesh_of(ranks: int) -> Mesh:
    """As many stages as there may be, up to 16; the rest are copies.  `ranks`: a multiple of 8."""
    stages = min(16, ranks // 8)
    return Mesh(tensor=8, stages=stages, copies=ranks // 8 // stages)


@functools.cache
def stage_tensors(stages: int, stage: int) -> tuple[tuple[str, tuple[int, ...], int | None], ...]:
    """Weights of one stage, in the order in which its optimizer has them."""
    layers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
    found = [(f"layers.{i}.{n}", shape, cut) for i in layers for n, shape, cut in LAYER]
    if stage == 0:
        found.insert(0, ("embedding", (VOCABULARY, WIDTH), 0))
    if stage == stages - 1:
        found += [("norm", (WIDTH,), None), ("head", (VOCABULARY, WIDTH), 0)]
    return tuple(found)


def own_box(shape: tuple[int, ...], cut: int | None, tensor: int, parts: int) -> Box:
    """What tensor parallelism leaves to one of `parts` ranks."""
    if cut is None:
        return whole(shape)
    size = shape[cut] // parts
    offset = tuple(tensor * size if d == cut else 0 for d in range(len(shape)))
    return Box(offset=offset, shape=(*shape[:cut], size, *shape[cut + 1 :]))


class SyntheticRank:
    """What one rank of a mesh holds: parts by name, as collectors would say it."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.number = mesh, rank
        self.weights: dict[str, LocalShard] = {}
        self.state: dict[str, LocalShard] = {}
        tensor, copy, stage = mesh.place(rank)
        boxes = {}
        for name, shape, cut in stage_tensors(mesh.stages, stage):
            box = boxes[name] = own_box(shape, cut, tensor, mesh.tensor)
            alike = [tensor] if cut is not None else range(mesh.tensor)
            holders = sorted(
                mesh.rank(t, c, stage) for c in range(mesh.copies) for t in alike
            )  # fmt: skip
            self.weights[f"model.{name}"] = LocalShard(
                global_shape=shape, boxes=(box,), holders=tuple(holders)
            )
        self._partition(copy, boxes)

    def _partition(self, copy: int, boxes: dict[str, Box]) -> None:
        """The range of the flat weights that this copy's optimizer owns."""
        total = sum(box.count for box in boxes.values())
        low, high = (total * k // self.mesh.copies for k in (copy, copy + 1))
        base = 0
        for name, box in boxes.items():
            start, stop = max(low - base, 0), min(high - base, box.count)
            base += box.count
            if start < stop:
                parts = tuple(part.box for part in overlaps([box], start, stop))
                shape = self.weights[f"model.{name}"].global_shape
                for key in STATE:
                    self.state[f"optimizer.{name}.{key}"] = LocalShard(
                        global_shape=shape, boxes=parts
                    )

    def shares(self, nodes: tuple[int, ...]) -> Shares:
        """What it stores of what its node holds alike: only that has memory here."""
        tensors = {}
        for name, holding in self.weights.items():
            shape, alike = holding.boxes[0].shape, holding.boxes == (whole(holding.global_shape),)
            device = "cpu" if alike else "meta"
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return take_shares(Place(rank=self.number, nodes=nodes), tensors, self.weights)

    def layout(self, shares: Shares) -> Layout:
        """The image of the rank, planned."""
        specs = []
        for name, holding in self.weights.items():
            start, stop = shares.ranges.get(name, (0, holding.count))
            boxes = holding.boxes
            if (start, stop) != (0, holding.count):
                boxes = tuple(part.box for part in overlaps(boxes, start, stop))
            if boxes:
                specs.append(_spec(name, "BF16", "bfloat16", holding.global_shape, boxes))
        specs += [
            _spec(name, "F32", "float32", h.global_shape, h.boxes) for name, h in self.state.items()
        ]
        return plan_layout(specs, aliases={}, extra_bytes=EXTRA_BYTES)


def _spec(
    name: str, dtype: str, true: str, of: tuple[int, ...], boxes: tuple[Box, ...]
) -> TensorSpec:
    flat = (sum(box.count for box in boxes),)
    return TensorSpec(
        name=name, dtype=dtype, true_dtype=true, lazy=True, tensor_class="other",
        shape=boxes[0].shape if len(boxes) == 1 else flat, global_shape=of, boxes=boxes,
    )  # fmt: skip


def index_bytes(layout: Layout, rank: int, ranks: int) -> int:
    """Length of the index of a shard."""
    chunks = -(-layout.image_bytes // CHUNK_BYTES)
    index = ImageIndex(
        run_id="0" * 32, generation=Generation(term=1, step=1), step=1, rank=rank,
        world_size=ranks, layout_digest=layout.digest, image_bytes=layout.image_bytes,
        chunk_bytes=CHUNK_BYTES, digests=("0" * 32,) * chunks,
    )  # fmt: skip
    return len(to_json(index))
