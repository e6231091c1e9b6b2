"""What is known of a lossy generation's effect: judged, stored, and said by every restore."""

import dataclasses
from pathlib import Path

import pytest

from autockpt.integrations.formats.archive.quality import (
    Quality,
    middle_seed,
    store_quality,
    stored_quality,
)
from autockpt.integrations.formats.archive.reading import Archive
from autockpt.integrations.formats.archive.restoring import lossy_of
from autockpt.values.errors import ConfigError
from tests.unit.integrations.formats.archive.test_archive import archived, history, wide_job

MEASURED = Quality(
    generation="ckpt-t0001-step-00000008", codec="excp", steps=20, lossless=(2.0, 2.2, 2.1),
    seed=3, lossy=2.15, command="train.py --seed {seed}",
)  # fmt: skip


def test_inside_is_between_the_best_and_the_worst_order() -> None:
    """Better than all of them is as strange as worse; the difference is to the same order."""
    assert MEASURED.inside
    assert MEASURED.difference == pytest.approx(0.05)
    for lossy in (1.99, 2.21):
        outside = dataclasses.replace(MEASURED, lossy=lossy)
        assert not outside.inside
        assert "OUTSIDE the 2.0000 to 2.2000 of 3 lossless ones" in str(outside)


def test_the_lossy_resume_has_the_order_of_the_middle_one() -> None:
    """Of 1, 2, 3 by mean loss."""
    assert middle_seed([[2.0, 3.0], [1.0, 1.0], [9.0, 9.0]]) == 1
    assert middle_seed([[1.0]]) == 1


def test_a_result_is_kept_with_its_generation_and_said(tmp_path: Path) -> None:
    """A second one replaces it; a damaged file is an error that names it."""
    path = archived(tmp_path / "archive", history(tmp_path / "run", wide_job(), 2))
    archive = Archive(str(path))
    name = archive.newest()
    assert "was not measured" in lossy_of(str(path), name)
    assert stored_quality(archive, name) is None
    for lossy in (2.3, 2.15):
        store_quality(archive, dataclasses.replace(MEASURED, generation=name, lossy=lossy))
    found = stored_quality(archive, name)
    assert found is not None
    assert found.lossy == 2.15
    assert "inside the 2.0000 to 2.2000" in lossy_of(str(path), name)
    (path / f"{name}.quality.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"quality\.json"):
        stored_quality(archive, name)
    archive.close()


def test_a_seed_without_its_lossless_resume_is_refused() -> None:
    """The pair is the point."""
    with pytest.raises(ConfigError, match="no lossless resume of its seed"):
        dataclasses.replace(MEASURED, seed=4)
