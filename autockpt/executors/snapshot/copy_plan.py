"""How a state is copied, for as long as its tensors stay where they are.

Places in the image, canaries and copy jobs follow from addresses, shapes, strides and types.
Working them out costs milliseconds, comparing those does not.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from autockpt.executors.image.dtypes import true_dtype, true_shape
from autockpt.executors.image.layout.plan import EXTRA, PAGE_BYTES, Entry, Layout
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.copy_engine import CopyJob
from autockpt.executors.snapshot.device import device_of
from autockpt.executors.snapshot.optimizer_hooks import CanaryGroup, canary_groups
from autockpt.executors.snapshot.replica_shares import Place, Shares
from autockpt.executors.state.tensor_index import Geometry, TensorIndex, addresses, local_part


@dataclass(slots=True)
class Part:
    """The tensors that one optimizer changes."""

    tensors: dict[str, torch.Tensor]
    places: list[int]
    """Their addresses."""
    end: int
    """Prefix of the image that holds it."""
    canaries: list[CanaryGroup]


@dataclass(slots=True)
class CopyPlan:
    """How a state is copied, for as long as its tensors stay where they are."""

    inventory: TensorIndex
    places: Geometry
    place: Place | None
    """Among which ranks `shares` were taken."""
    layout: Layout
    boundary: Any
    """Fingerprint of the boundary tensors."""
    extra: Entry
    """Where the rest of the state stands, as text."""
    at_once: list[tuple[Entry, int]]
    """Places and bytes of the boundary tensors."""
    held: frozenset[str]
    """Parameters and optimizer state that are copied at the boundary all the same."""
    tensors: dict[str, torch.Tensor]
    """Lazy tensors of which this rank stores something, local parts."""
    lazy_places: dict[int, None]
    """Addresses of all lazy tensors."""
    shares: Shares
    sources: dict[str, torch.Tensor]
    """The copied part of each: the tensor itself, or the range of it that this rank stores."""
    entries: list[Entry]
    """Their places, without empty ones."""
    parts: dict[str, Part]
    on_device: bool
    offsets: dict[str, tuple[int, int, int]]
    """By name of what this rank stores of shared tensors, as `replica_check.Offsets`."""
    jobs: weakref.WeakKeyDictionary[Arena, list[CopyJob]] = field(
        default_factory=weakref.WeakKeyDictionary
    )


def elsewhere(shares: Shares) -> frozenset[str]:
    """Names of tensors that other ranks store."""
    return frozenset(name for name, (start, stop) in shares.ranges.items() if start == stop)


def stored_of(name: str, local: torch.Tensor, shares: Shares) -> torch.Tensor:
    """Return this rank's stored part of a tensor; a part does not keep the tensor itself alive."""
    start, stop = shares.ranges.get(name, (0, local.numel()))
    if (start, stop) == (0, local.numel()):
        return local
    return local.data.view(-1).narrow(0, start, stop - start)


def offsets_of(
    layout: Layout, tensors: dict[str, torch.Tensor], shares: Shares
) -> dict[str, tuple[int, int, int]]:
    """By lazy tensor (offset in the image, first element there, bytes of an element)."""
    places = {entry.spec.name: entry.offset for entry in layout.entries}
    places |= {alias: places[name] for alias, name in layout.aliases if name in places}
    return {
        name: (places[name], shares.ranges.get(name, (0, 0))[0], tensor.element_size())
        for name, tensor in tensors.items()
        if name in places
    }


def boundary_key(boundary: dict[str, torch.Tensor], lazy_places: dict[int, None]) -> Any:
    """Return the inputs of the layout: forms, and the tensors that share memory.

    A tensor that stops sharing memory, or shares it with another one, must not stay an alias.
    """
    owners: dict[int, str] = {}
    key = []
    for name, tensor in boundary.items():
        local = local_part(tensor)
        place = local.data_ptr()
        shared = place if place in lazy_places else owners.setdefault(place, name)
        key.append((name, tensor.shape, local.stride(), tensor.dtype, shared))
    return key


def parts_of(
    inventory: TensorIndex,
    layout: Layout,
    tensors: dict[str, torch.Tensor],
    sources: dict[str, torch.Tensor],
) -> dict[str, Part]:
    """Return each optimizer's part; `sources`: the stored part of each of the lazy `tensors`."""
    ends = {entry.spec.name: entry.end for entry in layout.entries}
    ends |= {alias: ends[name] for alias, name in layout.aliases if name in ends}
    parts = {}
    for part, all_names in inventory.parts.items():
        own = {name: tensors[name] for name in all_names if name in tensors}
        parts[part] = Part(
            tensors=own,
            places=addresses(own.values()),
            end=max((ends[name] for name in own), default=0),
            canaries=canary_groups({name: sources[name] for name in own}),
        )
    return parts


def tensors_now(
    recipe: CopyPlan, name: str, inventory: TensorIndex
) -> dict[str, torch.Tensor] | None:
    """Return the tensors now in the place of a part's tensors; None when they are the same ones.

    Of this part only: what came to another one (its optimizer's first step) is not its business.
    """
    if inventory is recipe.inventory:
        return None
    names = recipe.parts[name].tensors
    others = recipe.held | elsewhere(recipe.shares)
    now = [n for n in inventory.parts.get(name, ()) if n not in others]
    order = names if set(now) == names.keys() else now  # or: what came and what went
    return {n: inventory.locals[n] for n in order}


def copied_at_once(layout: Layout) -> list[tuple[Entry, int]]:
    """Places and bytes of the boundary tensors, without the skeleton text."""
    entries = [entry for entry in layout.entries if not entry.spec.lazy]
    return [(e, e.spec.nbytes) for e in entries if e.spec.nbytes and e.spec.name != EXTRA]


def copy_jobs(layout: Layout, tensors: dict[str, torch.Tensor], arena: Arena) -> list[CopyJob]:
    """The jobs that bring every lazy tensor to its place, in the order of the image."""
    jobs: list[CopyJob] = []
    batch: list[tuple[Entry, torch.Tensor]] = []
    for entry in layout.entries:
        if not entry.spec.lazy or not entry.spec.nbytes:
            continue
        source = tensors[entry.spec.name]
        if batch and device_of(batch[0][1]) != device_of(source):
            jobs, batch = jobs + _batched(batch, arena), []
        if entry.spec.nbytes < PAGE_BYTES and (is_host(source) or device_of(source) is not None):
            batch.append((entry, source))
            continue
        jobs, batch = jobs + _batched(batch, arena), []
        plain = is_host(source) and source.is_contiguous()
        jobs += [_plain_job(entry, source, arena)] if plain else _batched([(entry, source)], arena)
    return jobs + _batched(batch, arena)


def _plain_job(entry: Entry, source: torch.Tensor, arena: Arena) -> CopyJob:
    destination = arena.address + entry.offset
    return CopyJob(entry.end, destination, source.data_ptr(), entry.spec.nbytes)


def _batched(batch: list[tuple[Entry, torch.Tensor]], arena: Arena) -> list[CopyJob]:
    if not batch:
        return []
    targets = [slot_tensor(arena, entry) for entry, _ in batch]
    tensors = (targets, [source.data for _, source in batch])  # `.data`: see canary_groups
    nbytes = sum(entry.spec.nbytes for entry, _ in batch)
    return [CopyJob(batch[-1][0].end, 0, 0, nbytes, tensors)]


def is_device(job: CopyJob) -> bool:
    """A device copies it by itself."""
    return job.tensors is not None and device_of(job.tensors[1][0]) is not None


def is_host(tensor: torch.Tensor) -> bool:
    """The copy thread copies it."""
    return tensor.device.type == "cpu" and device_of(tensor) is None


def is_plain(tensor: torch.Tensor, nbytes: int) -> bool:
    """It is so many bytes of host memory, as they stand there."""
    return (
        is_host(tensor)
        and tensor.nbytes == nbytes
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    )


def slot_tensor(arena: Arena, entry: Entry) -> torch.Tensor:
    """A view of a slot with the true dtype and shape of an entry."""
    raw = torch.frombuffer(
        arena.view, dtype=torch.uint8, count=entry.spec.nbytes, offset=entry.offset
    )
    spec = entry.spec
    return raw.view(true_dtype(spec.true_dtype)).view(true_shape(spec.true_dtype, spec.shape))
