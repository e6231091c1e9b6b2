"""Keepers that are forked instead of started: the same command, found and killed as others are."""

from pathlib import Path

import pytest

from tests.conftest import keeper_pids
from tests.jobs.kill.forked_keepers import FORKED_KEEPERS
from tests.jobs.kill.ordeal import Ordeal
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

SPEC = trainings.JobSpec(steps=10_000, pace_s=0.004, seed=5)


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "started"])
def test_a_keeper_is_found_by_its_command_line(
    forked: bool, zygote: Zygote, tmp_path: Path
) -> None:
    """What tells a forked one from a started one is torch, which that never loads."""
    run_dir = trainings.prepare(tmp_path / "run", trainings.plan(memory=2, disk=2))
    environment = FORKED_KEEPERS if forked else {}
    ordeal = Ordeal(zygote, SPEC, run_dir, tmp_path, environment=environment)
    cell = trainings.StepCell(tmp_path / "step")
    try:
        ordeal.pid = ordeal.start_trainer()
        while cell.get() < 8:
            assert zygote.status(ordeal.pid, wait_s=0.002) is None, ordeal.tale()
        (keeper,) = keeper_pids(run_dir)
        assert ("libtorch" in Path(f"/proc/{keeper}/maps").read_text()) == forked
    finally:
        ordeal.end()
    assert not keeper_pids(run_dir)
