"""From which size on the trainers' copies pass the caches by."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

from autockpt.cli.doctor import machine
from autockpt.executors.linux import memcpy_threshold
from autockpt.executors.linux.memcpy_threshold import (
    GAIN,
    THRESHOLD_BYTES,
    TUNABLE,
    VARIABLE,
    chosen,
    given_bytes,
    with_threshold,
)

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="a tunable of x86 only")
ASKS = (
    "from autockpt.executors.linux import memcpy_threshold; "
    "print(memcpy_threshold.threshold_bytes())"
)


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
def test_a_machine_that_gains_nothing_is_left_alone() -> None:
    """Stores past the caches take more of what cores share; so does who cannot be asked."""
    for gain in (1.0, GAIN - 0.01, None):
        assert chosen({}, lambda added, gain=gain: gain) == {}
    assert chosen({}, lambda added: GAIN) == with_threshold({})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", 0),
        ("glibc.malloc.check=1", 0),
        (f"{TUNABLE}=1048576", 2**20),
        (f"glibc.malloc.check=1:{TUNABLE}=0x200000:a=b", 2**21),
        (f"{TUNABLE}=many", 0),
    ],
)
def test_a_run_says_what_its_environment_sets(given: str, found: int) -> None:
    """Whoever set it, in either way that glibc reads numbers."""
    assert given_bytes({VARIABLE: given}) == found


def test_nobody_is_asked_where_nothing_would_change() -> None:
    """What the user set stands, and a start is not slower for it."""

    def asked(added: Mapping[str, str]) -> float:
        raise AssertionError(added)

    assert chosen({VARIABLE: f"{TUNABLE}=5"}, asked) == {}


@on_x86
def test_doctor_names_a_bound_beyond_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to export; nothing where copies pass the caches by already."""
    monkeypatch.setattr(memcpy_threshold, "threshold_bytes", lambda: 190 * 10**6)
    monkeypatch.setattr(machine, "copy_gain", lambda added, piece_bytes: 1.8)
    (found,) = machine._copies({})
    assert (found.status, "190 MB" in found.what) == ("note", True)
    assert found.fix.startswith(f"export {VARIABLE}={TUNABLE}={THRESHOLD_BYTES} ")
    assert machine._copies({VARIABLE: f"{TUNABLE}=1048576"}) == []
    monkeypatch.setattr(machine, "copy_gain", lambda added, piece_bytes: 1.0)
    assert machine._copies({}) == []
    monkeypatch.setattr(machine, "copy_gain", lambda added, piece_bytes: 1.8)
    for bound in (memcpy_threshold.PIECE_BYTES, None):
        monkeypatch.setattr(memcpy_threshold, "threshold_bytes", lambda bound=bound: bound)
        assert machine._copies({}) == []
