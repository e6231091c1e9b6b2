"""The probe of copies under other settings of the C library."""

import ctypes
import sys
from pathlib import Path

import pytest

from autockpt.profiles.probes.copies import copy, copy_gain

SETTING = "AUTOCKPT_TEST_SETTING"
"""Known to nobody but the programs below."""


def program(folder: Path, said: str) -> str:
    """A program that answers in the place of Python."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{said}\n")
    file.chmod(0o755)
    return str(file)


def test_the_gain_is_how_much_faster_the_other_process_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of them has what is added, and both are told the piece."""
    said = f'test "$4" = 4096 || exit 1; test -z "${SETTING}" && echo 0.03 || echo 0.02'
    monkeypatch.setattr(sys, "executable", program(tmp_path, said))
    assert copy_gain({SETTING: "1"}, piece_bytes=4096) == pytest.approx(1.5)


@pytest.mark.parametrize("said", ["exit 3", "echo no number", "echo 0"])
def test_what_cannot_be_measured_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """No start of a training depends on it."""
    monkeypatch.setattr(sys, "executable", program(tmp_path, said))
    assert copy_gain({}, piece_bytes=4096) is None
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert copy_gain({}, piece_bytes=4096) is None


def test_the_same_settings_gain_nothing() -> None:
    """Real processes; wide bounds, because machines are shared."""
    gain = copy_gain({}, piece_bytes=4 * 2**20)
    assert gain is not None
    assert 0.2 < gain < 5


def test_a_copy_in_pieces_is_whole() -> None:
    """The last piece is shorter, and nothing beyond it is touched."""
    source, target = (ctypes.create_string_buffer(20_000) for _ in range(2))
    source.raw = bytes(n % 251 for n in range(20_000))
    copy(ctypes.addressof(source), ctypes.addressof(target), 10_000, 4096)
    assert target.raw == source.raw[:10_000] + bytes(10_000)
