"""How far a run on disk has come, without a model to put it into."""

import json
import os
from typing import Any

from autockpt.integrations.convert.image_reader import Images, commit_of
from autockpt.integrations.places import generation_folder, is_ours, names_one, read_beside_run
from autockpt.values.errors import ConfigError, NoCheckpointError


def newest_progress(run_dir: str) -> tuple[str, int, dict[str, Any]] | None:
    """(name, step, extra) of the newest good checkpoint; None where there is none.

    Raises CorruptCheckpointError or StorageError for one that cannot be read.
    """
    if not os.path.exists(run_dir):
        return None
    named = names_one(run_dir, None)
    try:
        return read_beside_run(lambda: generation_folder(run_dir), _progress, named=named)
    except NoCheckpointError:
        return None
    except ConfigError:
        if is_ours(run_dir):
            return None  # a run that has not saved yet
        raise


def _progress(folder: str) -> tuple[str, int, dict[str, Any]]:
    """(name, step, extra) of a checkpoint."""
    commit = commit_of(folder)
    images = Images(folder, commit, (0,))
    try:
        extra = images.skeletons[0]["progress"].get("extra")
    finally:
        images.close()
    return os.path.basename(folder), commit.step, json.loads(extra or "{}")
