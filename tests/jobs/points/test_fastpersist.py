"""builtin:fastpersist: four writers past the page cache; builtin:sync: one through it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autockpt.run_directory import RunDirectory
from autockpt.values.telemetry import CheckpointDurable, Degraded
from tests.jobs.points.presets import preset_plan
from tests.support import trainings
from tests.support.live import Live

STORE = Path(__file__).parent / "watched_store"
SPEC = trainings.JobSpec(steps=6, width=256, optimizer="fused")
"""Weights and moments of many more chunks than there are writers."""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the keeper notes its writes."""
    try:
        os.close(os.open(tmp_path / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct I/O here")
    notes = tmp_path / "written"
    monkeypatch.setenv("WATCHED_STORE", str(notes))
    monkeypatch.setenv("WATCHED_WRITERS", "4")
    monkeypatch.setenv("PYTHONPATH", f"{STORE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return notes


def trained(live: Live, preset: str, written: Path) -> list[dict[str, Any]]:
    """Writes to the shards of a training under this preset; all of its checkpoints are durable."""
    whole = trainings.bare(trainings.build(SPEC))
    assert live.train(SPEC, preset_plan(preset, memory=0, disk=2)) == whole
    assert len(live.events(CheckpointDurable)) >= 2
    notes = [json.loads(line) for line in written.read_text().splitlines()]
    return [note for note in notes if "/shard-" in note["path"]]


@pytest.mark.parametrize(
    ("preset", "writers", "direct"), [("fastpersist", 4, True), ("sync", 1, False)], ids=str
)
def test_as_many_writers_as_the_plan_says_write_the_way_it_says(
    preset: str, writers: int, direct: bool, live: Live, written: Path
) -> None:
    """What stands in the plan is what the keeper does: so many threads are in a write together."""
    notes = trained(live, preset, written)
    decision = RunDirectory.open(live.run_dir).read_decision()
    assert decision is not None
    staging = decision.plan.staging
    assert (staging.writers, staging.direct_io) == (writers, direct)
    assert max(note["together"] for note in notes) == writers
    assert {note["direct"] for note in notes} == {direct}
    assert {note["bytes"] for note in notes} >= {staging.chunk_bytes}


def test_a_stated_objection_to_direct_io_is_obeyed_and_said_once(
    live: Live, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sectors of 64 KiB: the same writers go through the page cache, and telemetry says why."""
    monkeypatch.setenv("STATED_ALIGNMENT", str(2**16))
    notes = trained(live, "fastpersist", written)
    assert {note["direct"] for note in notes} == {False}
    assert max(note["together"] for note in notes) == 4
    (said,) = live.events(Degraded)
    assert said.what == "direct I/O"
    assert "an alignment of 65536 B" in said.reason
    assert "through the page cache" in said.reason
