"""Arguments and files that differ from those of the first call."""

import importlib.util
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from autockpt.launch.in_process import inputs
from autockpt.launch.in_process.inputs import Arguments, ScriptFiles
from autockpt.launch.standby import imports


def test_arguments_that_the_function_has_changed_are_noticed() -> None:
    """Also deep inside; arguments that stay as they were are the same."""
    settings: dict[str, Any] = {"batch_size": 8, "layers": [1, 2]}
    given = Arguments((settings, "name"), {"rate": 0.1})
    assert given.obstacle() == ""
    settings["layers"].append(3)
    assert given.obstacle() == "its function has changed its arguments"


def test_arguments_that_cannot_be_compared_are_an_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pickle, or too large."""
    assert "cannot be compared: TypeError" in Arguments(threading.Lock()).obstacle()
    monkeypatch.setattr(inputs, "LARGEST_BYTES", 1000)
    assert "OverflowError" in Arguments(bytes(2000)).obstacle()


def test_a_changed_file_of_the_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a module that was imported before, and of one that the function has imported."""
    early, late = tmp_path / "early_part.py", tmp_path / "late_part.py"
    for path in (early, late):
        path.write_text("rate = 1\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
    monkeypatch.setitem(sys.modules, "early_part", _module(early))
    files = ScriptFiles()
    monkeypatch.setitem(sys.modules, "late_part", _module(late))
    assert files.obstacle() == ""
    late.write_text("rate = 2\n")
    os.utime(late, (9_000_000_000, 9_000_000_000))
    assert files.obstacle() == "late_part.py has changed"
    os.utime(late, (1_000_000_000, 1_000_000_000))
    early.write_text("rate = 20\n")
    assert files.obstacle() == "early_part.py has changed"


def test_a_file_that_was_changed_behind_the_start_of_the_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function begins later than the script, which has read the file before."""
    part = tmp_path / "early_part.py"
    part.write_text("rate = 1\n")
    monkeypatch.setitem(sys.modules, "early_part", _module(part))
    monkeypatch.setattr(imports, "_script_began_ns", part.stat().st_mtime_ns)
    assert "early_part.py" not in ScriptFiles().obstacle()
    monkeypatch.setattr(imports, "_script_began_ns", part.stat().st_mtime_ns - 1)
    assert ScriptFiles().obstacle() == "early_part.py has changed"


def _module(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)
