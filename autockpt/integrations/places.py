"""Which generation a path means."""

import os

from autockpt.cli.places import choose, find_place
from autockpt.executors.catalogue import list_generations
from autockpt.values.errors import ConfigError, NoCheckpointError


def generation_folder(path: str, generation: str | None = None) -> str:
    """Folder of the generation named by `path` or `generation`, else of the newest good one.

    Raises ConfigError for a path that is nothing of ours, NoCheckpointError when none is good.
    """
    place = find_place(path)
    if generation and place.generation and generation != place.generation:
        raise ConfigError(f"{path}: is one generation already, and {generation} is another")
    if generation or place.generation:
        return os.path.join(place.directory, choose(place, generation))
    good = [
        record.name
        for record in list_generations(place.directory)
        if record.state in ("committed", "verified")
        and record.health == "good"
        and not os.path.exists(os.path.join(place.directory, record.name, "QUARANTINE"))
    ]
    if not good:
        raise NoCheckpointError(
            f"{place.directory}: holds no good checkpoint; `autockpt ls {path}` shows what is "
            "there, and --generation takes one of them"
        )
    return os.path.join(place.directory, good[-1])


def is_ours(path: str) -> bool:
    """Whether a path is a run, a checkpoint directory or a generation."""
    try:
        find_place(path)
    except ConfigError:
        return False
    return True
