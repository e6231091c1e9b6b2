"""How far a run on disk has come, without a model to put it into."""

import json
import os
from typing import Any

from autockpt.integrations.formats.convert.image_reader import Images, commit_of
from autockpt.integrations.places import generation_folder, is_ours, names_one, read_beside_run
from autockpt.values.errors import ConfigError, NoCheckpointError


def newest_progress(run_dir: str) -> tuple[str, int, dict[str, Any]] | None:
    """(name, step, extra) of the newest good checkpoint; None where there is none.

    Raises CorruptCheckpointError or StorageError for one that cannot be read.  A path that names
    one checkpoint raises ConfigError or NoCheckpointError where that is not there, or goes.
    """
    named = names_one(run_dir, None)
    if not named and not _has_any(run_dir):
        return None
    return read_beside_run(lambda: generation_folder(run_dir), _progress, named=named)


def _has_any(run_dir: str) -> bool:
    """Whether a run has a good checkpoint; raises ConfigError where it is no run."""
    if "://" not in run_dir and not os.path.exists(run_dir):
        return False
    try:
        generation_folder(run_dir)
    except NoCheckpointError:
        return False
    except ConfigError:
        if is_ours(run_dir):
            return False  # it has not saved yet
        raise
    return True


def _progress(folder: str) -> tuple[str, int, dict[str, Any]]:
    """(name, step, extra) of a checkpoint."""
    commit = commit_of(folder)
    images = Images(folder, commit, (0,))
    try:
        extra = images.skeletons[0]["progress"].get("extra")
    finally:
        images.close()
    return os.path.basename(folder), commit.step, json.loads(extra or "{}")
