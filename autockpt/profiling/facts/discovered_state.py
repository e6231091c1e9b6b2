"""The state of a script that does not mention autockpt, collected by the hooks."""

from collections.abc import Sequence
from typing import Any

import torch

from autockpt.profiles.probes.iteration import unwrap


def seen_state(
    roots: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """The `model` and `optimizer` that the script would hand to `autockpt.attach`.

    Models are the called roots that own a trained parameter and stand in no other such root.  A
    frozen teacher or a loss network does not count.
    """
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    models: list[torch.nn.Module] = []
    for module in map(unwrap, roots):
        known = any(module is other for other in models)
        if not known and any(id(p) in trained for p in module.parameters()):
            models.append(module)
    inner = {id(m) for module in models for m in module.modules() if m is not module}
    outer = [module for module in models if id(module) not in inner]
    return {"model": _numbered(outer), "optimizer": _numbered(optimizers)}


def _numbered(found: Sequence[Any]) -> Any:
    """One object as it is, several by number: the names that `attach` would give."""
    if len(found) == 1:
        return found[0]
    return {str(number): value for number, value in enumerate(found)}


def device_of(optimizers: Sequence[torch.optim.Optimizer]) -> torch.device:
    """Where the first trained parameter lives."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return torch.device(parameter.device)
    return torch.device("cpu")


def describe_seen(roots: Sequence[torch.nn.Module], steps: int, step_wanted: int) -> str:
    """Return the actions of a script that cannot be profiled, for the error."""
    if steps:
        return (
            f"it ended after {steps} optimizer step{'s' if steps > 1 else ''}; a profile needs at "
            f"least {step_wanted}: give the script more steps"
        )
    called = ", ".join(sorted({type(module).__name__ for module in roots})) or "no module"
    return (
        f"no torch.optim.Optimizer made a step; called were: {called}.  A profile needs a script "
        "that trains: pass its training options, or derive its optimizer from torch.optim.Optimizer"
    )
