"""Workers of torch's loaders outlive a signal that asks the training for its last checkpoint.

torchrun, a terminal and `timeout` signal the whole group of processes.  The workers would end, and
torch raises at once in the training thread.  The iteration that ends with the last checkpoint may
be under way, and may need more batches.  So workers have groups of their own.  torch ends them by
their number, and they end by themselves when their trainer is gone.

`pkill -f train.py` reaches the workers all the same.  Then torch raises where a batch is missing.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from autockpt.executors.linux import own_group

_LOOPS = (
    ("torch.utils.data._utils.worker", "torch.utils.data._utils.worker"),
    ("torchdata.stateful_dataloader.stateful_dataloader", "torchdata.stateful_dataloader.worker"),
)
"""Modules in which loaders look up the function of a worker, and modules that define it."""


class LoaderWorkers:
    """The workers of all loaders whose iterators begin from now on."""

    def __init__(self, is_told: Callable[[], bool]) -> None:
        """`is_told`: whether a signal has asked this process for its end."""
        self._is_told = is_told
        self._former: Callable[[], None] | None = None

    def start(self) -> None:
        """Does nothing where this torch has other names for its parts."""
        for module, definition in _LOOPS:
            loop = getattr(sys.modules.get(module), own_group.LOOP, None)
            if callable(loop) and not isinstance(loop, functools.partial):
                own_group.loops[definition] = loop
                apart = functools.partial(own_group.work, definition)
                setattr(sys.modules[module], own_group.LOOP, apart)
        own_group.separate_fork_server()
        check = getattr(_signal_handling(), "_error_if_any_worker_fails", None)
        if callable(check) and self._former is None:
            self._former = check
            _signal_handling()._error_if_any_worker_fails = self._check

    def close(self) -> None:
        """A worker's death raises at once again.  Groups stay: no other part sees them."""
        handling = _signal_handling()
        if self._former is not None and handling._error_if_any_worker_fails == self._check:
            handling._error_if_any_worker_fails = self._former
        # A framework that has put this one back must not keep the session.
        self._is_told = bool

    def _check(self) -> None:
        """In torch's handler of SIGCHLD."""
        try:
            if self._former is not None:
                self._former()
        except RuntimeError:
            if not self._is_told():
                raise


def _signal_handling() -> Any:
    return sys.modules.get("torch.utils.data._utils.signal_handling")
