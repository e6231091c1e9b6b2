"""Lightning's Trainer and Fabric, protected: `Autockpt` is a callback, `attach` is for Fabric.

    trainer = L.Trainer(..., callbacks=[autockpt.integrations.lightning.Autockpt()])

    ckpt = autockpt.integrations.lightning.attach(fabric, {"model": model, "optimizer": optimizer})

Neither is imported before it is asked for: Lightning is an extra (`autockpt[lightning]`).
"""

from typing import TYPE_CHECKING, Any

from autockpt.integrations.adapters import import_adapter

if TYPE_CHECKING:
    from autockpt.integrations.lightning.callback import Autockpt as Autockpt
    from autockpt.integrations.lightning.fabric import attach as attach

_PLACES = {"Autockpt": "callback", "attach": "fabric"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_adapter("lightning", _PLACES[name]), name)
