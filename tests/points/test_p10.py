"""Point 10, preallocated memory: no page of a slot is faulted in by a save."""

import resource
from collections.abc import Callable
from typing import Any

import pytest

from tests.points.loops import Loop, prepared

STATE_BYTES = 32 * 2**20
PAGES = STATE_BYTES // 4096


def faults_of_a_save(loop: Loop) -> int:
    """Minor faults of this process from a boundary to its fence; the least of a few saves."""
    counts = []
    for _ in range(4):
        loop.train()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loop.ckpt.step()
        loop.ckpt.fence()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        loop.durable()
        loop.train()
        loop.ckpt.step()
    assert len(loop.events("SnapshotSealed")) == len(counts)
    return min(counts)


@pytest.mark.parametrize("preallocate", [True, False])
def test_a_save_faults_no_page_only_when_slots_are_preallocated(
    preallocate: bool, attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """Without, the slot's pages are given back and faulted in again, in blocks if not one by one:
    the kernel maps up to 16 neighbours (or a huge page) with one fault."""
    loop = Loop(attach, prepared(new_run, preallocate=preallocate), STATE_BYTES)
    loop.warm_up()
    faults = faults_of_a_save(loop)
    if preallocate:
        assert faults < PAGES / 64
    else:
        assert faults >= PAGES / 16
