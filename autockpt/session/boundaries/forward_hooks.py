"""Calls something ahead of every call of a module, also where that is compiled.

A hook of a compiled module is traced into its graph, where our code cannot run.  A call of the hook
breaks the graph, and `fullgraph=True` refuses that.  A module that was compiled in place is
therefore called through a function that does it before the graph begins.  The module may be part of
a graph that others call (`torch.compile(module)` after attach).  That graph is broken if it may be
and the count of iterations needs it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from autockpt.executors.state import own_hooks


class Forwards:
    """Watches modules, each by a hook and, when it is compiled in place, from outside."""

    def __init__(
        self,
        before: Callable[[torch.nn.Module], None],
        unseen: Callable[[], None],
        needed: Callable[[], bool],
    ) -> None:
        """`before(module)` is called ahead of a call; `unseen()` when calls will not be seen.

        `needed()`: whether seeing the calls is worth a break of a graph.
        """
        self._before = before
        self._unseen = unseen
        self._needed = needed
        self._outside: dict[int, Any] = {}
        """By id of a module what calls its graph."""
        self._inside: dict[int, tuple[torch.nn.Module, Any]] = {}
        """The same module, and its graph."""
        self._handles: list[Any] = []
        self._watched: set[int] = set()
        """Ids of the modules that have a hook."""
        self._finder: Any = None
        """The hook that looks for a part that is called, while it looks."""

    def watch(self, module: torch.nn.Module) -> None:
        """From now on."""
        self._watched.add(id(module))
        self._wrap(module)
        before, broken = self._before, torch.compiler.disable(self._before)

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def is_left_out() -> bool:
            return self._is_left_out(module)

        def hook(module: torch.nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():
                before(module)
            elif not is_left_out():
                broken(module)

        # First of all: FSDP2's hook gathers the parameters, and they must be what they were.
        self._handles.append(own_hooks.before_call(module, hook))

    def watch_part(self, modules: Iterable[torch.nn.Module]) -> None:
        """From now on, the first of these modules that is called in training.

        For a model whose methods are called instead of the model itself.
        """
        parts = {id(module) for module in modules}

        def find(module: torch.nn.Module, _: Any) -> None:
            trains = module.training and torch.is_grad_enabled()
            if id(module) in parts and trains and not torch.compiler.is_compiling():
                self._end_search()
                if id(module) not in self._watched:
                    self.watch(module)
                    self._before(module)  # the new hook is called from the next call on

        if self._finder is None:
            self._finder = torch.nn.modules.module.register_module_forward_pre_hook(find)

    def _end_search(self) -> None:
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.remove()

    def remove(self) -> None:
        """No call is watched any more."""
        self._end_search()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for key, (module, graph) in self._inside.items():
            if module._compiled_call_impl is self._outside[key]:
                module._compiled_call_impl = graph

    def _is_left_out(self, module: torch.nn.Module) -> bool:
        """Asked while a graph is traced, which is made without a call of ours then."""
        if self._wrap(module):
            return True
        if not self._needed() or _is_one_graph():
            self._unseen()
            return True
        return False

    def _wrap(self, module: torch.nn.Module) -> bool:
        """False when the module has no graph of its own."""
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is None:
            return False
        if compiled is not self._outside.get(id(module)):

            def call(*args: Any, **kwargs: Any) -> Any:
                if not torch.compiler.is_compiling():
                    self._before(module)
                return compiled(*args, **kwargs)

            self._outside[id(module)] = module._compiled_call_impl = call
            self._inside[id(module)] = module, compiled
        return True


def _is_one_graph() -> bool:
    """The graph that is being traced may not be broken; False where torch does not tell."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx()
        return bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except Exception:
        return False
