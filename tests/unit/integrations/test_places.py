"""Which paths mean a checkpoint directory."""

from pathlib import Path

import pytest

import autockpt
from autockpt.integrations.places import find_place, is_ours
from autockpt.values.errors import ConfigError
from tests.unit.integrations.trained import saved, trained_job


def test_a_run_directory_of_checkpoints_alone_is_one(tmp_path: Path) -> None:
    """`pull` and a copy by hand bring no run.json: the checkpoints in it are found all the same."""
    folder = saved(tmp_path / "again" / "checkpoints", trained_job())
    assert is_ours(str(tmp_path / "again"))
    assert find_place(str(tmp_path / "again")).directory == str(Path(folder).parent)
    assert autockpt.load(str(tmp_path / "again"))["step"] == 7


def test_a_folder_of_other_things_is_none(tmp_path: Path) -> None:
    """A folder called `checkpoints` with something else in it says nothing."""
    (tmp_path / "checkpoints" / "epoch-3").mkdir(parents=True)
    assert not is_ours(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a run nor a checkpoint directory"):
        find_place(str(tmp_path))
