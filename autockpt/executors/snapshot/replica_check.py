"""Reads what replicas are compared by, beside the training, and how much of it at a checkpoint.

On the host the copy thread reads shares of others from the live tensors.  It begins behind the copy
and ends before the training changes them.  A device copies a few sections at the boundary.  The
share that this rank stores is read from its slot.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from autockpt.executors.snapshot.device import DeviceCopier, device_of
from autockpt.executors.snapshot.replica_shares import Agreement, ReplicaGroup, Section

PIECE_BYTES = 2**20
"""Digested between two questions whether the training waits."""
WAITED_SHARE = 0.001
"""The fraction of its time that the training waits for a comparison."""
LEAST_WAIT_S, MOST_WAIT_S = 0.0003, 0.05
BUSY_SHARE = 0.005
"""The fraction of its time that the copy thread reads shares of others."""
DEVICE_BYTES = 64 * 2**20
"""That a device copies for it at one checkpoint; one section at least."""

Offsets = Mapping[str, tuple[int, int, int]]
"""By tensor (offset in the image, first element there, bytes of an element)."""


@dataclass(slots=True)
class _DeviceSection:
    """A section on its way from a device."""

    readings: list[str]
    section: int
    host: list[torch.Tensor]
    event: object


class ReplicaReader:
    """Fills the readings of the agreements of a snapshot."""

    def __init__(self) -> None:
        self._turn = 0
        """Checkpoints at which shares of others were read."""
        self._next: dict[tuple[str, int], int] = {}
        """By group and share the section that is read next."""
        self._resume_s = 0.0
        self._waited_s = time.monotonic()

    def patience_s(self) -> float:
        """How long the training may wait now for a reading under way."""
        now = time.monotonic()
        allowed, self._waited_s = WAITED_SHARE * (now - self._waited_s), now
        return min(MOST_WAIT_S, max(LEAST_WAIT_S, allowed))

    def read_others(
        self,
        groups: Sequence[ReplicaGroup],
        agreements: Sequence[Agreement],
        tensors: Mapping[str, torch.Tensor],
        go_on: Callable[[], bool],
    ) -> None:
        """Shares that others store, from host memory; ends soon after `go_on()` became false."""
        began_s = time.monotonic()
        if began_s < self._resume_s or not go_on():
            return
        for sections, found, at in self._due(groups, agreements):
            found[at] = digest_of_live(sections[at], tensors, go_on)
            if not found[at]:
                break
        now = time.monotonic()
        self._resume_s = now + (now - began_s) / BUSY_SHARE

    def _due(
        self, groups: Sequence[ReplicaGroup], agreements: Sequence[Agreement]
    ) -> Iterable[tuple[list[Section], list[str], int]]:
        """Sections of others that are read now: (sections of a share, their digests, which)."""
        turn, self._turn = self._turn, self._turn + 1
        for group, agreement in zip(groups, agreements, strict=True):
            for share in shares_to_read(group.own, len(group.members), turn):
                sections = group.shares[share]
                found = agreement.readings.setdefault(share, [""] * len(sections))
                first = self._next.get((group.name, share), 0)
                for step in range(len(sections)):
                    at = (first + step) % len(sections)
                    yield sections, found, at
                    self._next[group.name, share] = (at + 1) % len(sections)

    def copy_from_device(
        self,
        groups: Sequence[ReplicaGroup],
        agreements: Sequence[Agreement],
        tensors: Mapping[str, torch.Tensor],
        device: DeviceCopier,
    ) -> list[_DeviceSection]:
        """Has a device copy sections of others at the boundary, without a wait."""
        given: list[_DeviceSection] = []
        left = DEVICE_BYTES
        for sections, found, at in self._due(groups, agreements):
            parts = [tensors[piece.name].data for piece in sections[at]]
            if any(device_of(part) is None or not part.is_contiguous() for part in parts):
                continue
            views = [
                part.view(-1).narrow(0, piece.start, piece.stop - piece.start)
                for part, piece in zip(parts, sections[at], strict=True)
            ]
            nbytes = sum(view.nbytes for view in views)
            if (given and nbytes > left) or not device.has_room(nbytes):
                break
            left -= nbytes
            clones = device.clone(views)
            device.follow()
            host = [torch.empty_like(view, device="cpu") for view in views]
            given.append(_DeviceSection(found, at, host, device.copy(host, clones)))
        return given

    def read_own(
        self,
        groups: Sequence[ReplicaGroup],
        agreements: Sequence[Agreement],
        address: int,
        offsets: Offsets,
    ) -> None:
        """The shares that this rank stores, from the slot at `address`."""
        for group, agreement in zip(groups, agreements, strict=True):
            agreement.readings[group.own] = [
                _digest_of_slot(section, address, offsets) for section in group.shares[group.own]
            ]


def finish_device(given: Sequence[_DeviceSection]) -> None:
    """Digests what a device has copied; waits for it, so never on the training thread."""
    for one in given:
        one.event.synchronize()  # type: ignore[attr-defined]  # an event of the device
        digest = xxhash.xxh3_64()
        for part in one.host:
            _feed(digest, part.data_ptr(), part.nbytes, lambda: True)
        one.readings[one.section] = digest.hexdigest()


def shares_to_read(own: int, members: int, turn: int) -> list[int]:
    """Return the shares of others that a rank reads at a checkpoint; all within members - 1.

    Two where there are so many: with the owner three ranks have read each share, and can vote.
    """
    others = members - 1
    steps = dict.fromkeys((2 * turn + i) % others for i in range(2)) if others else {}
    return [(own + 1 + step) % members for step in steps]


def digest_of_live(
    section: Section, tensors: Mapping[str, torch.Tensor], go_on: Callable[[], bool]
) -> str:
    """Of the section as it stands in host memory; empty where `go_on` became false."""
    digest = xxhash.xxh3_64()
    for piece in section:
        local = tensors[piece.name].data
        if local.is_contiguous() and not (local.is_neg() or local.is_conj()):
            flat = local.view(-1)
        else:
            flat = local.resolve_conj().resolve_neg().contiguous().view(-1)
        size = flat.element_size()
        if not _feed(
            digest, flat.data_ptr() + piece.start * size, (piece.stop - piece.start) * size, go_on
        ):
            return ""
    return digest.hexdigest()


def _digest_of_slot(section: Section, address: int, offsets: Offsets) -> str:
    digest = xxhash.xxh3_64()
    for piece in section:
        offset, first, size = offsets[piece.name]
        start, stop = ((at - first) * size + offset for at in (piece.start, piece.stop))
        _feed(digest, address + start, stop - start, lambda: True)
    return digest.hexdigest()


def _feed(digest: xxhash.xxh3_64, address: int, nbytes: int, go_on: Callable[[], bool]) -> bool:
    for done in range(0, nbytes, PIECE_BYTES):
        if not go_on():
            return False
        count = min(PIECE_BYTES, nbytes - done)
        digest.update((ctypes.c_char * count).from_address(address + done))
    return go_on()
