"""Where the training stands, from the ranks that saved to the ranks that resume.

Step, loader position and random state are stored by each rank.  As many ranks on the same mesh take
back their own.  Others merge: the position is one for all data-parallel ranks, and the loader knows
its own share of it.  Random numbers are drawn anew where keeping them makes no sense.

Random states, for each generator by itself (Python's, numpy's, torch's on the CPU, on GPUs):

* All ranks had the same, or one rank resumes: rank 0's goes on.
* Else it is seeded with BLAKE2b(its name, rank 0's saved state, this rank's live torch state).

The live state is as the script seeded it before `attach`.  Ranks that the script seeds alike, as it
must in one tensor-parallel group, draw alike; other ranks differ.  The rank's number could not
tell.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autockpt.executors.state.data.sampler_state import place_in
from autockpt.executors.state.rng import rng_state
from autockpt.values.errors import ConfigError, CorruptCheckpointError

GENERATORS = {"python": "Python", "numpy": "numpy", "torch": "torch", "cuda": "GPU"}
"""Entries of a random state, and their names for a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The progress that one of the resuming ranks takes."""

    progress: dict[str, Any]
    """Step, and the position of the loader as `DataPosition.load` takes it (None: none saved)."""
    rng: dict[str, Any]
    """The random state for `set_rng_state`."""
    notices: tuple[str, ...] = ()
    """Differences from the saved state: sentences for the user."""


def merge_progress(
    progress_by_rank: Mapping[int, Mapping[str, Any]],
    rank: int,
    world: int,
    *,
    same_mesh: bool = True,
    live: Mapping[str, Any] | None = None,
) -> Merged:
    """The progress of `rank` out of `world` ranks, from that of all ranks that saved.

    `progress_by_rank`: of every rank {"progress": {"step", "data"}, "rng"}, as decoded from its
    image.  `same_mesh`: False if as many ranks split the model in another way than the saving
    ranks; then a rank's number means another part.  `live`: the random state of this process, as
    the script left it; None: as it is now.

    Raises CorruptCheckpointError if a rank is missing or steps differ, ConfigError if the loader's
    position cannot be shared.
    """
    saved = [progress_by_rank[r] for r in range(len(progress_by_rank)) if r in progress_by_rank]
    steps = {each["progress"]["step"] for each in saved}
    if len(saved) != len(progress_by_rank) or len(steps) != 1:
        raise CorruptCheckpointError(
            f"the ranks {sorted(progress_by_rank)} were saved at the steps {sorted(steps)}; "
            "expected every rank, at one step; restore an older generation"
        )
    if len(saved) == world and same_mesh:
        return Merged(progress=dict(saved[rank]["progress"]), rng=dict(saved[rank]["rng"]))
    positions = [each["progress"].get("data") for each in saved]
    data = merge_positions(positions, rank, world)
    rng, said = rng_for([each["rng"] for each in saved], world, live or rng_state())
    notices = [*(_position_notice(positions, data) if data else []), *said]
    progress = {**saved[0]["progress"], "data": data}
    return Merged(progress=progress, rng=rng, notices=tuple(notices))


def merge_positions(
    states: Sequence[Mapping[str, Any] | None], rank: int, world: int
) -> dict[str, Any] | None:
    """Merge the saved states into one for `DataPosition.load` on `rank` out of `world`.

    None among the states: that rank had no data; as the result: none had.  Raises ConfigError when
    the ranks stood at different places, or their way of sharing is unknown.
    """
    given = [state for state in states if state is not None]
    if not given:
        return None
    if "loaders" in given[0]:
        names = given[0]["loaders"]
        parts = {n: [s and s["loaders"].get(n) for s in states] for n in names}
        return {"loaders": {n: merge_positions(part, rank, world) for n, part in parts.items()}}
    merged = dict(given[0])
    for name in ("fetches", "fetches_drawing", "drawing"):  # under random numbers of one rank
        merged.pop(name, None)
    place = place_in(merged)
    if any((s["epoch"], place_in(s)) != (merged["epoch"], place) for s in map(dict, given)):
        raise ConfigError(
            "data: the ranks that saved stood at different places, or shared the samples in "
            "different ways; resume with as many ranks as saved"
        )
    if "loader" in merged:
        own = [None if state is None else state.get("loader") for state in states]
        merged["ranks"] = [own, rank, world]
    elif place is None and merged["index"]:
        raise ConfigError(
            "data: the checkpoint does not say how its ranks shared the samples (it is of an older "
            "version, or the sampler is none of torch's). Resume with as many ranks as saved, or "
            "give the loader state_dict, load_state_dict and reshard_state"
        )
    if place is not None and "shuffle" in merged:
        if not place.order.drawn:
            merged["shuffle"] = None  # it gave no order, only the seeds of one rank's workers
        elif len({_digest(_own_generators(state)) for state in given}) > 1:
            raise ConfigError(
                "data: each rank shuffled with a generator of its own, and that of one rank cannot "
                "serve all. Share samples with a DistributedSampler, or resume with as many ranks "
                "as saved"
            )
    return merged


def _own_generators(state: Mapping[str, Any]) -> Any:
    return [(state["shuffle"] or [])[1:], state.get("others", {}).get("own")]


def _position_notice(
    states: Sequence[Mapping[str, Any] | None], merged: Mapping[str, Any]
) -> list[str]:
    place, epoch = place_in(dict(merged)), merged.get("epoch")
    if place is None:
        return []
    if place.share.replicas > 1:
        left = place.order.length - place.taken
        return [
            f"data: {left} of {place.order.length} samples are left of epoch {epoch}; the ranks "
            "share them out anew"
        ]
    orders = {_digest(state.get("shuffle")) for state in states if state is not None}
    if place.order.drawn and len(orders) > 1:
        return [
            f"data: each rank shuffled on its own; in epoch {epoch} all go on in rank 0's order "
            "(share samples with a DistributedSampler to lose and repeat none)"
        ]
    return []


def rng_for(
    states: Sequence[Mapping[str, Any]], world: int, live: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """(random state of one of `world` ranks, notices), from the states of the ranks that saved.

    `live`: the random state that the script left on this rank.
    """
    first, seeded, rng = states[0], [], dict(states[0])
    for name in GENERATORS.keys() & first.keys():
        alike = len(states) > 1 and len({_digest(state.get(name)) for state in states}) == 1
        if world > 1 and not alike:
            seeded.append(name)
            seed = _digest([name, first[name], live["torch"]])
            rng[name] = _seeded(name, int.from_bytes(seed, "little"), first[name])
    said = []
    if len({_digest(state.get("script", {})) for state in states}) > 1:
        rng.pop("script", None)
        said.append(
            "random generators of the script: they differed between the ranks that saved, so "
            "each begins as the script builds it"
        )
    if not seeded:
        return rng, said
    names = ", ".join(text for name, text in GENERATORS.items() if name in seeded)
    return rng, [
        *said,
        f"random numbers ({names}): {len(states)} ranks saved and {world} resume, so each draws "
        "anew, seeded from rank 0's state and from what the script seeded torch with on that rank",
    ]


def _seeded(name: str, seed: int, like: Any) -> Any:
    """The state of a generator seeded with `seed` (64 bits), in the form of `rng_state`."""
    if name == "python":
        version, internal, gauss = random.Random(seed).getstate()
        return [version, np.array(internal, dtype=np.uint32), gauss]
    if name == "numpy":
        return np.random.RandomState(np.random.MT19937(seed)).get_state(legacy=False)
    if name == "torch":
        return torch.Generator().manual_seed(seed).get_state()
    # A GPU's state is its seed and its offset, both of 64 bits; every GPU gets the same seed, as
    # torch.manual_seed does it, because a rank may use any.
    state = np.array([seed, 0], dtype=np.uint64).view(np.uint8)
    return [torch.from_numpy(state.copy()) for _ in like]


def _digest(value: Any) -> bytes:
    """8 bytes that stand for nested values, arrays and tensors."""
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value)
    return hasher.digest()


def _feed(hasher: "hashlib.blake2b", value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    if isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        _feed(hasher, sorted(value.items()))
    elif isinstance(value, list | tuple):
        hasher.update(f"[{len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(f"{value!r},".encode())
