"""From which size on the trainers' copies pass the caches by."""

import os
import platform
import subprocess
import sys

import pytest

from autockpt.cli.checkup import machine
from autockpt.executors import non_temporal
from autockpt.executors.non_temporal import THRESHOLD_BYTES, TUNABLE, VARIABLE, with_threshold

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="a tunable of x86 only")
ASKS = "from autockpt.executors import non_temporal; print(non_temporal.threshold_bytes())"


def bound_in_a_process(environ: dict[str, str]) -> str:
    """What a process with this environment is told by its glibc."""
    asked = [sys.executable, "-c", ASKS]
    return subprocess.run(asked, env=environ, capture_output=True, text=True, check=True).stdout


@on_x86
def test_glibc_takes_the_bound() -> None:
    """The name is one it knows, alone and behind another one."""
    bare = {k: v for k, v in os.environ.items() if k != VARIABLE}
    another = {**bare, VARIABLE: "glibc.malloc.arena_max=2"}
    if bound_in_a_process(bare).strip() == "None":
        pytest.skip("this loader does not list its tunables")
    for environ in (bare, another):
        told = bound_in_a_process(environ | with_threshold(environ))
        assert told.strip() == str(THRESHOLD_BYTES)


@on_x86
def test_what_somebody_set_stays() -> None:
    """Another tunable stands beside ours, and ours gives way to the same one."""
    assert with_threshold({}) == {VARIABLE: f"{TUNABLE}={THRESHOLD_BYTES}"}
    assert with_threshold({VARIABLE: "a.b=1"}) == {VARIABLE: f"a.b=1:{TUNABLE}={THRESHOLD_BYTES}"}
    assert with_threshold({VARIABLE: f"{TUNABLE}=5"}) == {}


def test_other_machines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tunable is x86's."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert with_threshold({}) == {}


@on_x86
def test_doctor_names_a_bound_beyond_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to export; nothing where copies pass the caches by already."""
    monkeypatch.setattr(non_temporal, "threshold_bytes", lambda: 190 * 10**6)
    (found,) = machine._copies({})
    assert (found.status, "190 MB" in found.what) == ("note", True)
    assert found.fix.startswith(f"export {VARIABLE}={TUNABLE}={THRESHOLD_BYTES} ")
    assert machine._copies({VARIABLE: f"{TUNABLE}=1048576"}) == []
    for bound in (non_temporal.PIECE_BYTES, None):
        monkeypatch.setattr(non_temporal, "threshold_bytes", lambda bound=bound: bound)
        assert machine._copies({}) == []
