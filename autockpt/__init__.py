"""autockpt: measures a training job, decides how to checkpoint it, does it, and shows why.

import autockpt

ckpt = autockpt.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
for step, batch in ckpt.batches(total):
    ...
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autockpt.api import (
        Assembled,
        Expert,
        PaddedVocabulary,
        Rule,
        Rules,
        Sharded,
        attach,
        decide,
        load,
        peek,
        profile_of,
        restartable,
        telemetry,
    )
    from autockpt.session.place.train_state import TrainState

__version__ = "0.1.0"
__all__ = [
    "Assembled",
    "Expert",
    "PaddedVocabulary",
    "Rule",
    "Rules",
    "Sharded",
    "TrainState",
    "__version__",
    "attach",
    "decide",
    "load",
    "peek",
    "profile_of",
    "restartable",
    "telemetry",
]


def __getattr__(name: str) -> Any:
    """Loads torch and pandas only when they are used: `autockpt --help` does not."""
    if name == "TrainState":
        from autockpt.session.place.train_state import TrainState

        return TrainState
    if name in __all__:
        from autockpt import api

        return getattr(api, name)
    if name == "integrations":
        from importlib import import_module

        return import_module("autockpt.integrations")
    raise AttributeError(f"module 'autockpt' has no attribute {name!r}")
