"""Whose code runs: the user's, ours, or a library's."""

import sys
from pathlib import Path

import pytest
import torch

import autockpt
from autockpt.session.place.script.frames import is_script_file

PACKAGE = Path(autockpt.__file__).parent


@pytest.mark.parametrize(
    "file",
    [*sorted(map(str, PACKAGE.rglob("*.py")))[::40], str(PACKAGE / "api.py"), torch.__file__],
)
def test_ours_and_a_librarys_are_not_the_users(file: str) -> None:
    """Wherever it stands in the package."""
    assert not is_script_file(file)


def test_a_file_beside_the_package_is_the_users(tmp_path: Path) -> None:
    """As an example is, and a script anywhere else."""
    assert is_script_file(str(PACKAGE.parent / "examples" / "train.py"))
    assert is_script_file(str(tmp_path / "train.py"))


@pytest.mark.parametrize("first", ["script", "libraries"])
def test_packages_of_another_folder_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """`pip install --target` fills it, and PYTHONPATH names it.  The script's own folder, or one
    of modules without packages, is the script's."""
    for name in ("script", "libraries/torchmetrics-1.0.dist-info", "modules/utils.egg-info"):
        (tmp_path / name).mkdir(parents=True)
    folders = {name: str(tmp_path / name) for name in ("script", "libraries", "modules")}
    monkeypatch.setattr(sys, "path", [folders[first], *folders.values()])
    is_library = first == "script"
    assert is_script_file(f"{folders['libraries']}/torchmetrics/metric.py") != is_library
    assert is_script_file(f"{folders['script']}/train.py")
    assert is_script_file(f"{folders['modules']}/utils/loops.py")
