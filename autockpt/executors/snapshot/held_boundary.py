"""The state of a boundary that is not copied: it lies in the live tensors until they change.

The boundary group is in a record already.  Parameters and moments are copied only if another rank
dies, as a lazy snapshot would copy them: unchanged since the boundary, and proven to be.
"""

import json
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autockpt.executors.image.layout.plan import Entry, TensorSpec
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.copy_engine import copy_tensors, run_jobs
from autockpt.executors.snapshot.copy_plan import (
    CopyPlan,
    copy_jobs,
    elsewhere,
    is_host,
    slot_tensor,
    stored_of,
)
from autockpt.executors.snapshot.optimizer_hooks import StateProof
from autockpt.executors.snapshot.replica_shares import Agreement, take_shares
from autockpt.executors.snapshot.tensor_specs import describe
from autockpt.executors.state.live_state import LiveState
from autockpt.values.units import format_bytes

OWN_BYTES = 2**20
"""The most bytes of tensors that no other rank is known to hold, such as step counts: these are
recorded."""


class HoldPlan:
    """The plan of a boundary record: a rank's own state, and state that another rank also holds."""

    def __init__(self, recipe: CopyPlan) -> None:
        self.recipe = recipe
        found = recipe.inventory.locals
        self.lazy = {n: t for n, t in found.items() if n not in recipe.held and t.numel()}
        self.canaries = [one for group in recipe.shares.groups for one in group.canaries]
        self._own = [e for e in recipe.entries if e.spec.name not in recipe.shares.ranges]
        self.own_ranges = _joined([(entry.offset, entry.end) for entry in self._own])
        """Ranges of the image that are recorded beside the boundary group."""
        self._targets: weakref.WeakKeyDictionary[Arena, list[torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def obstacle(self) -> str:
        """Why boundaries are not held; "": all but a little is in host memory, and other ranks of
        this node hold it too."""
        groups = self.recipe.shares.groups
        if not all(is_host(tensor) for tensor in self.lazy.values()):
            return "the state is on a device"
        if not groups or any(len(group.members) < 2 for group in groups):
            return "no other rank of this node holds what this one holds"
        if not self.recipe.inventory.cacheable:
            return "the state of an optimizer holds more than tensors in plain dicts"
        if sum(stop - start for start, stop in self.own_ranges) > OWN_BYTES:
            return f"more than {format_bytes(OWN_BYTES)} of the state is on no other rank"
        return ""

    def record_own(self, record: Arena) -> None:
        """Copies what no other rank holds to its place in `record`."""
        if record not in self._targets:
            self._targets[record] = [slot_tensor(record, entry) for entry in self._own]
        sources = [self.recipe.sources[entry.spec.name].data for entry in self._own]
        if sources:
            copy_tensors(self._targets[record], sources)


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours in one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


class HeldBoundary:
    """One boundary; made there, and worthless from the next change of the state on."""

    def __init__(self, plan: HoldPlan, record: Arena, replicas: list[Agreement]) -> None:
        """`record` holds header and boundary group, and small tensors of this rank alone."""
        self.plan, self.recipe, self.replicas = plan, plan.recipe, replicas
        self._record = record
        self._proof = StateProof(plan.lazy, groups=plan.canaries)

    @property
    def digest(self) -> str:
        """Of what this rank shares; equal on all ranks that hold the same."""
        return "-".join(sorted(one.digest() for one in self.replicas))

    def copy_into(self, slot: Arena) -> None:
        """The whole image of this rank."""
        end = self.recipe.layout.boundary_end
        slot.view[:end] = self._record.view[:end]
        run_jobs(copy_jobs(self.recipe.layout, self.recipe.sources, slot), None)
        for start, stop in self.plan.own_ranges:
            slot.view[start:stop] = self._record.view[start:stop]

    def copy_for(self, rank: int, slot: Arena, state: LiveState) -> str:
        """Copy another rank's share of the tensors into its `slot`; the other bytes stand there.

        Returns why that is impossible; empty: it is done.
        """
        recipe = self.recipe
        if recipe.place is None or any(rank not in g.members for g in recipe.shares.groups):
            return f"rank {rank} holds other tensors"
        place = replace(recipe.place, rank=rank)
        lazy = {n: t for n, t in recipe.inventory.locals.items() if n not in recipe.held}
        shares = take_shares(place, lazy, recipe.inventory.holdings)
        theirs = {n: t for n, t in recipe.inventory.lazy.items()
                  if n in lazy and n not in elsewhere(shares)}  # fmt: skip
        specs, _ = describe(theirs, {}, state, None, recipe.inventory.holdings, shares.ranges)
        entries = _places(slot, [spec for spec in specs if spec.nbytes])
        if entries is None:
            return f"the image of rank {rank} has another form"
        entries = [entry for entry in entries if entry.spec.name in shares.ranges]
        named = [entry.spec.name for entry in entries]
        sources = [stored_of(name, lazy[name], shares).data for name in named]
        copy_tensors([slot_tensor(slot, entry) for entry in entries], sources)
        return ""

    def changed(self) -> list[str]:
        """Names of tensors that changed since the boundary, [] if none did."""
        if not self.recipe.inventory.holds():
            return ["(the structure of the state)"]
        return self._proof.changed()


def _places(slot: Arena, specs: list[TensorSpec]) -> list[Entry] | None:
    """Where these tensors stand in an image that has them and no other lazy ones; else None."""
    length = int.from_bytes(slot.view[:8], "little")
    if not 2 <= length <= slot.nbytes - 8:
        return None
    try:
        table: dict[str, Any] = json.loads(bytes(slot.view[8 : 8 + length]))
    except ValueError:
        return None
    meta = table.pop("__metadata__", {})
    entries = []
    for spec in specs:
        row = table.get(spec.name)
        if row is None or not _is_same(spec, row, meta):
            return None
        start, stop = row["data_offsets"]
        if stop - start != spec.nbytes or 8 + length + stop > slot.nbytes:
            return None
        entries.append(Entry(spec=spec, offset=8 + length + start))
    first = min((entry.offset for entry in entries), default=0)
    names = {entry.spec.name for entry in entries}
    behind = {
        name for name, row in table.items()
        if not name.startswith("__pad.") and 8 + length + row["data_offsets"][0] >= first
        and row["data_offsets"][1] > row["data_offsets"][0]
    }  # fmt: skip
    return entries if behind == names else None


def _is_same(spec: TensorSpec, row: Mapping[str, Any], meta: Mapping[str, str]) -> bool:
    """The same part of the same tensor, in the same form."""
    if (row["dtype"], tuple(row["shape"])) != (spec.dtype, spec.shape):
        return False
    part = meta.get(f"part:{spec.name}")
    if spec.global_shape is None or part is None:
        return spec.global_shape is None and part is None
    boxes = [[list(box.offset), list(box.shape)] for box in spec.boxes]
    return bool(json.loads(part) == {"of": list(spec.global_shape), "at": boxes})
