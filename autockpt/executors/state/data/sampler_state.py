"""The order of an epoch's samples, and how data-parallel ranks share it.

torch's DistributedSampler deals one order of the whole data set out like cards.  With N replicas,
replica r gets the samples r, r + N, r + 2N, ...  The order depends on seed and epoch, not on N.
Only its tail does: it is padded with the first samples of the order, or cut off.  So when every
replica has taken the same number of batches, the taken samples are a prefix of the order.  Any
other number of replicas can share the rest: dealt out in the same way, its tail treated in the same
way.  The epochs that follow are plain.

A loader without such a sampler gives all samples to every rank: an order with one replica.

The order of a sampler that is not known here is its own.  Only the sizes of a loader are kept then.
"""

import contextlib
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from autockpt.executors.state.data.loader_rng import is_streamed
from autockpt.values.errors import ConfigError
from autockpt.values.record import from_data

_SPECIAL = "special RandomSampler"
"""With replacement, another number of samples than the data set has, or its own generator."""
_DRAWN = {"RandomSampler", _SPECIAL, "SubsetRandomSampler", "WeightedRandomSampler"}
_TORCHDATA_DRAWN = "torchdata.RandomSampler"
_REBUILT = {"SequentialSampler", "RandomSampler", "DistributedSampler"}
"""Samplers whose order needs nothing that an `EpochOrder` and the generators do not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """The inputs of the order of an epoch's samples, before ranks share them."""

    sampler: str
    """Class of the sampler."""
    length: int
    """Samples of an epoch over all replicas, without padding."""
    seed: int | None = None
    """Seed of a DistributedSampler; None for others, and when it does not shuffle."""

    @property
    def drawn(self) -> bool:
        """It comes from generators whose states must be kept."""
        return self.sampler in _DRAWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How replicas share an order."""

    replicas: int
    """Data-parallel ranks, as the sampler says; 1: every rank sees all samples."""
    batch_size: int
    """Samples of a batch of one replica; 1 without batches."""
    drop_last: bool = False
    """The sampler cuts off what does not divide among replicas; else it pads."""

    def each(self, samples: int) -> int:
        """Samples that every replica gets out of `samples`."""
        return samples // self.replicas if self.drop_last else -(-samples // self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an epoch stands: `start` samples of the order, then `index` batches per replica."""

    order: EpochOrder
    share: Share
    start: int = 0
    """Samples taken under an earlier number of replicas or batch size; a prefix of the order."""
    index: int = 0
    """Batches that each replica has taken since."""

    @property
    def taken(self) -> int:
        """Number of samples of the order that replicas have taken; padding counts once."""
        left = self.order.length - self.start
        each = min(self.index * self.share.batch_size, self.share.each(left))
        return self.start + min(each * self.share.replicas, left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a loader whose sampler is not known."""

    samples: int | None = None
    """Of the data set; None where it does not say."""
    batch: int | None = None
    """Samples of a batch; None where the sampler of batches does not say."""
    grouped: int | None = None
    """Samples that the sampler orders as a group, as one by length does; None: it does not say."""


def sizes_of(loader: Any) -> Sizes:
    """Of a DataLoader as it is now."""
    samples = None
    with contextlib.suppress(Exception):  # the script's own, or none
        samples = len(loader.dataset)
    batches = loader.batch_sampler
    batch = 1 if batches is None else getattr(batches, "batch_size", None)
    grouped = getattr(_ordering(batches), "batch_size", None)
    return Sizes(
        samples=samples, batch=batch if type(batch) is int else None,
        grouped=grouped if type(grouped) is int else None,
    )  # fmt: skip


def recounted(index: int, old: Sizes, own: Sizes, loader: Any) -> int:
    """Batches of `loader` that have the samples of `index` batches of the loader that was saved.

    Raises ConfigError where that is no whole number, or the samples may come in another order.
    """
    if not index:
        return 0
    if None not in (old.samples, own.samples) and old.samples != own.samples:
        raise _other_length(old.samples, own.samples)
    if None not in (old.grouped, own.grouped) and old.grouped != own.grouped:
        raise ConfigError(
            f"data: the sampler of this epoch made groups of {old.grouped} samples, and this "
            f"loader's makes groups of {own.grouped}, in another order. Go on with the batch size "
            "and the accumulation of the checkpoint"
        )
    if old.batch is None or own.batch is None or old.batch == own.batch:
        return index
    batches, over = divmod(index * old.batch, own.batch)
    if over or not _is_order_of_samples(loader):
        reason = "these are no whole number of them" if over else "their order may be another one"
        raise ConfigError(
            f"data: {index} batches of {old.batch} samples of this epoch were trained. This loader "
            f"makes batches of {own.batch}, and {reason}. Go on with batches of {old.batch} samples"
        )
    return batches


def _is_order_of_samples(loader: Any) -> bool:
    """The order does not depend on the size of a batch."""
    batches = loader.batch_sampler
    if is_streamed(loader):
        return not loader.num_workers  # each worker makes batches of its own
    sampler = _ordering(batches)
    return sampler is not None and not hasattr(sampler, "batch_size")


def _ordering(batches: Any) -> Any:
    """The sampler of samples inside; None where a sampler of batches is not torch's."""
    if type(batches).__name__ == "BatchSamplerShard":  # Accelerate's deals out batches of another
        batches = batches.batch_sampler
    named = isinstance(batches, BatchSampler) and type(batches).__name__ == "BatchSampler"
    return batches.sampler if named else None


def place_of(loader: Any) -> Place | None:
    """The start of an epoch of a DataLoader, or None when nothing is known of its sampler."""
    sampler = sampler_of(loader)
    order = None if sampler is None else _order_of(sampler)
    if order is None:
        return None
    batch_size = 1 if loader.batch_sampler is None else loader.batch_sampler.batch_size
    if isinstance(sampler, DistributedSampler):
        share = Share(
            replicas=sampler.num_replicas, batch_size=batch_size, drop_last=sampler.drop_last
        )
    else:
        share = Share(replicas=1, batch_size=batch_size)
    return Place(order=order, share=share)


def place_in(state: dict[str, Any]) -> Place | None:
    """The place in a position's state; None when the one that saved it knew nothing of it."""
    if "order" not in state:
        return None
    order = from_data(EpochOrder, state["order"], where="data: order")
    share = from_data(Share, state["share"], where="data: share")
    return Place(order=order, share=share, start=state["start"], index=state["index"])


def sampler_of(loader: Any) -> Any:
    """Return a DataLoader's sampler; None when its batches are made otherwise."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    # By name: torchdata has a subclass of its own, which makes the same batches.
    known = isinstance(batches, BatchSampler) and type(batches).__name__ == "BatchSampler"
    return batches.sampler if known else None


def _order_of(sampler: Any) -> EpochOrder | None:
    kind = type(sampler)
    if isinstance(sampler, DistributedSampler):
        seed = sampler.seed if sampler.shuffle else None
        length = len(sampler.dataset)  # type: ignore[arg-type]  # it has taken the length itself
        return EpochOrder(sampler=kind.__name__, length=length, seed=seed)
    if kind is RandomSampler:
        plain = not sampler.replacement and sampler.generator is None
        plain = plain and len(sampler) == len(sampler.data_source)
        return EpochOrder(sampler=kind.__name__ if plain else _SPECIAL, length=len(sampler))
    if kind in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler):
        return EpochOrder(sampler=kind.__name__, length=len(sampler))
    if kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata."):
        return EpochOrder(sampler=_TORCHDATA_DRAWN, length=len(sampler))
    return None


def continued(old: Place, own: Place | None) -> Place:
    """`old` as a loader goes on from it whose epochs start at `own` (None: not known).

    Where both share alike, batches go on being counted, else the samples taken so far are.
    Raises ConfigError when the two do not have one order of the same samples.
    """
    if own is None:
        raise ConfigError(
            f"data: the epoch was begun with a {old.order.sampler}, and how this loader's sampler "
            "shares samples is not known. Attach a loader with the sampler of the checkpoint"
        )
    if (old.order, old.share) == (own.order, own.share):
        return old
    if not old.taken:
        return own
    _require_same_samples(old.order, own.order)
    if old.share == own.share:
        return old
    return Place(order=old.order, share=own.share, start=old.taken)


def _require_same_samples(old: EpochOrder, own: EpochOrder) -> None:
    if old.length != own.length:
        raise _other_length(old.length, own.length)
    if old.sampler == own.sampler and old.seed != own.seed:
        raise ConfigError(
            f"data: the {old.sampler} shuffled with seed {_shown(old.seed)}, this one shuffles "
            f"with {_shown(own.seed)}; set the same seed and shuffle, or the epoch's order is lost"
        )
    rebuilt = old.sampler in _REBUILT or (old.sampler == own.sampler != _TORCHDATA_DRAWN)
    if not rebuilt:
        raise ConfigError(
            f"data: the epoch was begun in the order of a {old.sampler}, which this loader (batch "
            "size, ranks or sampler differ) cannot go on with. Resume with the loader that wrote "
            "the checkpoint, or use torch's DistributedSampler"
        )


def _other_length(old: int | None, own: int | None) -> ConfigError:
    return ConfigError(
        f"data: the epoch had {old} samples, this loader's has {own}. Give it "
        "the data set of the checkpoint, or leave `data` out of attach. Each rank needs the "
        "whole data set: a DistributedSampler shares it out"
    )


def _shown(seed: int | None) -> str:
    return "none (no shuffle)" if seed is None else str(seed)


def whole_order(order: EpochOrder, epoch: int, loader: Any) -> Sequence[int]:
    """All samples of `order`; one that draws does it from the generators as they are now.

    Raises ConfigError for a DistributedSampler of another class that does not deal out one order.
    """
    live = sampler_of(loader)
    own = _order_of(live)
    if own is None or order.sampler != own.sampler:
        return list(_rebuilt(order, epoch))
    if not isinstance(live, DistributedSampler):
        return list(live)
    alone = copy.copy(live)
    alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
    alone.num_samples = alone.total_size = order.length
    samples = list(alone)
    if order.sampler not in _REBUILT:
        _require_dealt(samples, live)
    return samples


def _rebuilt(order: EpochOrder, epoch: int) -> Any:
    source: Any = range(order.length)
    if order.sampler == "RandomSampler":
        return RandomSampler(source)
    if order.sampler == "SequentialSampler":
        return SequentialSampler(source)
    sampler = DistributedSampler[int](
        source, num_replicas=1, rank=0, shuffle=order.seed is not None, seed=order.seed or 0
    )
    sampler.set_epoch(epoch)
    return sampler


def _require_dealt(samples: list[int], sampler: Any) -> None:
    share = Share(replicas=sampler.num_replicas, batch_size=1, drop_last=sampler.drop_last)
    if rest_of(samples, 0, share, sampler.rank) != list(copy.copy(sampler)):
        raise ConfigError(
            f"data: a {type(sampler).__qualname__} does not share one order out sample by sample, "
            "so other ranks cannot take up its epoch. Resume with the ranks and the batch size of "
            "the checkpoint, or give the loader state_dict, load_state_dict and reshard_state"
        )


def rest_of(samples: Sequence[int], start: int, share: Share, rank: int) -> list[int]:
    """Return replica `rank`'s part of `samples[start:]`, dealt as by DistributedSampler.

    Padding repeats the first samples of the epoch's order; at most `replicas` - 1 of them.
    """
    left = samples[start:]
    total = share.each(len(left)) * share.replicas
    padding = itertools.islice(itertools.cycle(samples), max(0, total - len(left)))
    return [*left, *padding][rank : total : share.replicas]


def rank_in(loader: Any) -> int:
    """The replica that a DataLoader's sampler draws for (under TP and PP not the global rank)."""
    sampler = sampler_of(loader)
    return sampler.rank if isinstance(sampler, DistributedSampler) else 0
