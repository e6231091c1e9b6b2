"""Whose code runs: the user's, ours, or a library's."""

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
