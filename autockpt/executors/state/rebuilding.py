"""A structure that changed in training is filled when the script has built it again.

Scripts add parameter groups, modules and pruning masks at some step.  One that is resumed behind
that step attaches what it had at first and builds the rest in its loop.  Until then optimizers and
the missing tensors wait in host memory; the first optimizer step without them is refused.
"""

from collections.abc import Callable
from typing import Any

import torch

from autockpt.executors.restore.apply_state import RestoredState, apply_structure
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.values.errors import ConfigError


class Rebuilding:
    """Parts that a checkpoint has and the script has not built yet.

    Building draws initial values, which the undisturbed run drew before the checkpoint.  So each
    registration, and each added group, puts the random state back to its value when the first new
    parameter was registered.
    """

    def __init__(self, restored: RestoredState, state: LiveState, done: Callable[[], None]) -> None:
        """`done`: called once, when all is there and filled."""
        self._restored, self._state, self._done = restored, state, done
        self._awaited = restored.awaited or {}
        self._before: dict[str, Any] | None = None
        """Random state when building began."""
        self._filling = False
        self._filled: set[str] = set()
        """Buffers that had their saved values from the moment when they came."""
        on = torch.nn.modules.module
        self._hooks = [
            on.register_module_parameter_registration_hook(self._registering),
            on.register_module_buffer_registration_hook(self._registering_buffer),  # type: ignore[arg-type]
            on.register_module_module_registration_hook(self._registering),
        ]
        self._wrapped = []
        for optimizer in state.attached_optimizers.values():
            optimizer.__dict__["add_param_group"] = self._around(optimizer)
            self._wrapped.append(optimizer)

    def begin(self) -> None:
        """Note that an iteration or a loop begins: the draws until now stand."""
        self._before = None

    def _registering(self, *_: Any) -> None:
        if self._before is None:
            self._before = rng_state()
        else:
            set_rng_state(self._before)

    def _registering_buffer(
        self, module: torch.nn.Module, name: str, buffer: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The saved value in place of one that comes within a forward, which may use it at once."""
        for full in self._names_of(module, name) if buffer is not None else ():
            saved = self._restored.tensors.get(full)
            if saved is None or full not in self._awaited or self._filling:
                continue
            if buffer is not None and (saved.shape, saved.dtype) == (buffer.shape, buffer.dtype):
                self._filled.add(full)
                return saved.detach().to(buffer.device, copy=True)
        self._registering()
        return None

    def _names_of(self, module: torch.nn.Module, name: str) -> list[str]:
        paths = (
            (prefix, path)
            for prefix, model in self._state.models.items()
            for path, part in model.named_modules()
            if part is module
        )
        return [".".join(filter(None, (prefix, path, name))) for prefix, path in paths]

    def _around(self, optimizer: torch.optim.Optimizer) -> Callable[[dict[str, Any]], None]:
        add = type(optimizer).add_param_group

        def add_and_look(group: dict[str, Any]) -> None:
            add(optimizer, group)
            if self._before is not None:
                set_rng_state(self._before)
            self.look()

        return add_and_look

    def lacking(self) -> str:
        """The first thing that is not as it was saved, in words; "": all is there."""
        state = self._state
        state.inventory()  # looks at names again
        tensors = {**state.parameters(), **state.buffers()}
        passing = state.passing_buffers()
        live = {n: (tuple(t.shape), t.dtype) for n, t in tensors.items() if n not in passing}
        for name in sorted(self._awaited.keys() - live.keys()):
            return f"{name} is not there"
        for name, form in sorted(live.items()):
            if self._awaited.get(name) != form and name in self._of_models():
                return f"{name} is {form}, the checkpoint has {self._awaited.get(name)}"
        for prefix, saved in self._restored.optimizers.items():
            groups = state.optimizers[prefix].param_groups
            named = [tuple(map(state.name_of, group["params"])) for group in groups]
            if named != [group.names for group in saved.groups]:
                return f"{prefix} has other parameter groups"
        return ""

    def _of_models(self) -> set[str]:
        prefixes = tuple(f"{prefix}." for prefix in self._state.models)
        return {name for name in self._state.parameters() if name.startswith(prefixes)}

    def look(self) -> bool:
        """Fills what is there if all is; True when nothing is awaited any more."""
        if self._filling:
            return True
        if self.lacking():
            return False
        self._filling = True
        self.end()
        live = {**self._state.parameters(), **self._state.buffers()}
        with torch.no_grad():
            for name in self._awaited:
                if name in self._restored.tensors and name not in self._filled:
                    live[name].copy_(self._restored.tensors[name])
        apply_structure(self._restored, self._state)
        self._done()
        return True

    def require(self) -> None:
        """Raises ConfigError when an optimizer is about to step without what is awaited."""
        lacking = self.lacking()
        missing = self._awaited.keys() & self._restored.tensors.keys()
        if not lacking and missing <= self._filled and self.look():
            return  # the forward has used them
        self.end()
        raise ConfigError(
            "state: the structure that the checkpoint has was not built before the first step: "
            f"{lacking or 'it came within the forward'}. Build it by ckpt.step_count, before the "
            "loop or at the start of its first iteration, or use --fresh to start over"
        )

    def end(self) -> None:
        """Takes its hooks off."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._wrapped:
            optimizer.__dict__.pop("add_param_group", None)
        self._wrapped.clear()
