"""Ray Train, protected: `attach` in the train loop, `join` in front of another adapter.

    ckpt = autockpt.integrations.ray.attach(model=model, optimizer=optimizer, data=loader)

`located` says where the checkpoint behind one of Ray's is.  The actor of a keeper imports this
package too, and not Ray Train: what stands in `training` is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from autockpt.integrations.adapters import import_adapter

if TYPE_CHECKING:
    from autockpt.integrations.ray.training import Pointer as Pointer
    from autockpt.integrations.ray.training import RayLoop as RayLoop
    from autockpt.integrations.ray.training import attach as attach
    from autockpt.integrations.ray.training import join as join
    from autockpt.integrations.ray.training import located as located
    from autockpt.integrations.ray.training import pointer_of as pointer_of

_OF_TRAINING = ("Pointer", "RayLoop", "attach", "join", "located", "pointer_of")


def __getattr__(name: str) -> Any:
    if name not in _OF_TRAINING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_adapter("ray", "training"), name)
