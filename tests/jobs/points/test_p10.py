"""Point 10: slots are faulted once (builtin:dlrover) or at every save (builtin:async)."""

import resource
from dataclasses import replace

import pytest

from tests.jobs.points.presets import preset_plan
from tests.support import trainings
from tests.support.live import Live, granted

PAGE_BYTES = resource.getpagesize()
SPEC = trainings.JobSpec(steps=13, width=512, optimizer="fused")
"""Weights and moments of about 6 MB."""
TOLERATED = 0.05
"""Faults of Python's own allocations, as a share of the image's pages."""


def faults() -> int:
    """Page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize(("preset", "preallocate"), [("dlrover", True), ("async", False)])
def test_a_save_faults_no_page_only_if_slots_are_preallocated(
    preset: str, preallocate: bool, live: Live
) -> None:
    """Page faults of whole saves, from the boundary to the fence, after each slot was used once."""
    plan = replace(preset_plan(preset, memory=2, disk=0), slots=2)
    job, ckpt = live.attach(SPEC, plan)
    source = iter(job.loader)
    counted = []
    while ckpt.step_count < SPEC.steps - 1:
        try:
            batch = next(source)
        except StopIteration:
            source = iter(job.loader)
            continue
        trainings.train_step(job, ckpt.step_count, batch)
        granted(ckpt)
        before = faults()
        ckpt.step()
        if ckpt.step_count % 2 == 0:
            counted.append(faults() - before)
    assert ckpt._rank.snapshotter is not None
    assert ckpt._rank.snapshotter.layout is not None
    pages = ckpt._rank.snapshotter.layout.image_bytes // PAGE_BYTES
    late = sorted(counted[2:])
    assert len(late) >= 3
    if preallocate:
        assert late[len(late) // 2] <= TOLERATED * pages, (counted, pages)
    else:
        assert late[0] >= 0.9 * pages, (counted, pages)
