"""`autockpt run` as one rank of a launcher that is not ours."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autockpt.cli.jobs import worker
from autockpt.cli.jobs.preparation import Request
from autockpt.cli.jobs.worker import as_worker, first
from autockpt.cli.shared.plan_choice import Scale
from autockpt.console import Console
from autockpt.job_directory import own_runs
from autockpt.launch.elastic.compiled_code import FOLDERS
from autockpt.launch.script import Script
from autockpt.run_directory import OWN_SUFFIX, RunDirectory
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.goal import Goal, OnOff, RestartWish

RANK = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize("wish", ["on", "off", None])
def test_a_rank_keeps_compiled_code_where_the_policy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: OnOff | None
) -> None:
    """The script begins behind it.  By itself so where a restart may be on another machine."""
    run = RunDirectory.create(str(tmp_path / "run"))
    run.write_goal(Goal(restart=RestartWish(caches=wish)))
    monkeypatch.setattr(os, "environ", {**RANK, "TRITON_CACHE_DIR": "/mine"})
    script = Script(target=str(tmp_path / "train.py"), module=False, args=(), shown="train.py")
    request = Request(
        script=script, policy=None, settings=(), profile=None, use_profile=False,
        run_dir=str(run.path), fresh=False, resume_from=None, launching={},
    )  # fmt: skip
    as_worker(request, "torchrun", Console())
    found = {name: os.environ.get(name) for name in FOLDERS}
    assert found.pop("TRITON_CACHE_DIR") == "/mine"
    if wish == "on":
        assert all(
            path and Path(path).is_relative_to(run.path / "caches") for path in found.values()
        )
    else:
        assert set(found.values()) == {None}


@pytest.mark.parametrize("in_store", [True, False])
def test_a_rank_waits_longer_for_a_first_rank_that_asks_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_store: bool
) -> None:
    """And blames the first rank of its own node; without a store, the storage of the directory."""
    monkeypatch.setattr(os, "environ", {**RANK, "TORCHELASTIC_RESTART_COUNT": "0"})
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    )
    monkeypatch.setattr(worker, "time", clock)
    kind, why = (
        (StorageError, "first rank of this node .* 600 s; .* object store")
        if in_store
        else (ConfigError, "rank 0 did not prepare .* 60 s; is it on storage that all ranks share")
    )
    with pytest.raises(kind, match=why):
        first(str(tmp_path / "run"), Scale(world_size=2, nodes=2), print, on_each_node=in_store)


def test_a_step_of_the_clock_changes_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted rank finds the directory of its launch; another launch has its own."""
    pslinux = psutil._pslinux  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "environ", RANK)
    script = Script(target=str(tmp_path / "train.py"), module=False, args=(), shown="train.py")
    one_node = Scale(world_size=2, nodes=1)
    named = worker._shared_path(script, one_node)
    booted_s = pslinux.boot_time()
    monkeypatch.setattr(pslinux, "boot_time", lambda: booted_s + 3600)
    monkeypatch.setitem(RANK, "TORCHELASTIC_RESTART_COUNT", "2")
    assert worker._shared_path(script, one_node) == named
    assert own_runs(Path(named)) == []
    assert not OWN_SUFFIX.fullmatch(Path(named).name.removeprefix("train"))
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert worker._shared_path(script, one_node) != named
