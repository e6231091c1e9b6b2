"""The state of a process that a function finds when it is called, and finds again at a restart.

A restart within the process is to be like a new process that has just run the script's other code.
What libraries and the script's own modules keep is not known here: the function must not build on
what it left there.
"""

import contextlib
import gc
import logging
import multiprocessing
import operator
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.launch.standby import imports

LEFT_S = 2.0
"""Threads and processes of the function have so long to end after it."""
SHARED_THREADS = ("tqdm_monitor", "TMonitor", "pydevd", "autockpt-spare")
"""Beginnings of names or types of threads that a library has one of for the whole process."""
SHARED_PROCESSES = (
    ("resource_tracker", "_resource_tracker", "_pid"),
    ("forkserver", "_forkserver", "_forkserver_pid"),
)
"""Processes of `multiprocessing` that are there once for this one: module, variable, attribute."""
SWITCHES = {
    "_get_cudnn_enabled": "_set_cudnn_enabled",
    "_get_mkldnn_enabled": "_set_mkldnn_enabled",
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
}
"""Of torch._C: each with its setter."""
PRECISIONS = ("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul",
              "mkldnn.conv", "mkldnn.rnn")  # fmt: skip
"""Parts of torch.backends that may have a precision of their own, the general one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """State that is put back."""

    environment: dict[str, str | None]
    """The script's changes to the launcher's variables; None: the script has removed it."""
    directory: str
    path: tuple[str, ...]
    arguments: tuple[str, ...]
    streams: tuple[Any, Any]
    handlers: dict[int, Any]
    """Of signals, by number."""
    timers: frozenset[int]
    """Kinds of timers that were running; others are stopped."""
    loggers: dict[str, tuple[tuple[logging.Handler, ...], int]]
    """Handlers and level by name; "": the root."""
    threads: frozenset[threading.Thread]
    excepthook: Any
    children: frozenset[int]
    """Processes that this one has started."""
    hooks: dict[str, tuple[Any, ...]]
    """Of all modules and all optimizers, by name of torch's table."""
    random: Any
    numpy_random: Any
    torch: "TorchState | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchState:
    """Settings and random state of torch."""

    generator: Any
    dtype: Any
    device: Any
    threads: int
    has_gradients: bool
    precision: str | None
    """None: torch does not tell it, because the script has set precisions by backend."""
    precisions: dict[str, str]
    """By backend, the general one first."""
    deterministic: tuple[bool, bool]
    cudnn: tuple[bool, bool]
    anomaly: tuple[bool, bool]
    switches: dict[str, bool]
    """Of `SWITCHES`."""


def take() -> ProcessState:
    """The state now."""
    given, now = imports.environment_given(), dict(os.environ)
    numpy: Any = sys.modules.get("numpy")
    return ProcessState(
        environment={
            name: now.get(name)
            for name in given.keys() | now.keys()
            if given.get(name) != now.get(name)
        },
        directory=os.getcwd(),
        path=tuple(sys.path),
        arguments=tuple(sys.argv),
        streams=(sys.stdout, sys.stderr),
        handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
        timers=frozenset(
            timer
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
            if signal.getitimer(timer)[0]
        ),
        loggers={
            name: (tuple(logger.handlers), logger.level) for name, logger in _loggers().items()
        },
        threads=frozenset(threading.enumerate()),
        excepthook=sys.excepthook,
        children=frozenset(_children()),
        hooks=_hooks(),
        random=random.getstate(),
        numpy_random=numpy.random.get_state() if numpy is not None else None,
        torch=_take_torch(),
    )


def put_back(state: ProcessState, environment: Mapping[str, str]) -> None:
    """As the function found it, with a new environment of the launcher."""
    os.environ.clear()
    os.environ.update(environment)
    imports.script_begins()
    for name, value in state.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(state.directory)
    sys.path[:], sys.argv[:] = state.path, state.arguments
    sys.stdout, sys.stderr = state.streams
    sys.excepthook = state.excepthook
    for number, handler in state.handlers.items():
        # None: a handler that was not installed from Python
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    _put_back_loggers(state)
    random.setstate(state.random)
    numpy: Any = sys.modules.get("numpy")
    if state.numpy_random is not None:
        numpy.random.set_state(state.numpy_random)
    if state.torch is not None:
        _put_back_torch(state.torch)


def release(weak: Sequence["weakref.ref[Any]"], state: ProcessState) -> str:
    """Lets go what the function held; why not all of it is, "" where it is.

    `weak`: models and optimizers, which hold the memory.
    """
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        if timer not in state.timers:
            signal.setitimer(timer, 0.0)
    torch: Any = sys.modules.get("torch")
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # each attempt compiles its own models; after eight torch gives up
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            return f"the CUDA context is of no use any more ({type(error).__name__})"
    gc.collect()
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    deadline = time.monotonic() + LEFT_S
    while (left := _left(weak, state)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _left(weak: Sequence["weakref.ref[Any]"], state: ProcessState) -> str:
    for thread in threading.enumerate():
        own = thread in state.threads or thread is threading.current_thread()
        kind = type(thread).__name__
        if not own and not thread.name.startswith(SHARED_THREADS) and kind not in SHARED_THREADS:
            return f"its function has left a thread, {thread.name}"
    multiprocessing.active_children()  # takes note of those that have ended
    for pid, name in _children().items():
        if pid not in state.children:
            return f"its function has left a process, {name}"
    for name, hooks in _hooks().items():
        if hooks != state.hooks.get(name, ()):
            return f"its function has left a hook of all modules or optimizers ({name})"
    for item in weak:
        if (alive := item()) is not None:
            return f"its function has left a {type(alive).__name__} that something refers to"
    return ""


def _children() -> dict[int, str]:
    """Name by process of each child that lives, but not of those in SHARED_PROCESSES."""
    shared = {
        getattr(getattr(sys.modules.get(f"multiprocessing.{module}"), variable, None), name, None)
        for module, variable, name in SHARED_PROCESSES
    }
    found = {child.pid or 0: child.name for child in multiprocessing.active_children()}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended, or this kernel does not tell
            pids = Path(f"/proc/self/task/{thread}/children").read_text().split()
            for pid in map(int, pids):
                with contextlib.suppress(OSError, ValueError):
                    name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                    if not rest.startswith(" Z"):
                        found.setdefault(pid, name.partition("(")[2])
    return {pid: name for pid, name in found.items() if pid not in shared}


def _hooks() -> dict[str, tuple[Any, ...]]:
    """A library that the function has imported may need its hook; the script's would come twice."""
    tables = {
        f"{module}.{name}": table
        for module in ("torch.nn.modules.module", "torch.optim.optimizer")
        for name, table in vars(sys.modules.get(module, None) or object).items()
        if name.startswith("_global_") and isinstance(table, dict)
    }
    return {name: tuple(table.values()) for name, table in tables.items()}


def _loggers() -> dict[str, logging.Logger]:
    known = logging.root.manager.loggerDict
    named = {name: one for name, one in known.items() if isinstance(one, logging.Logger)}
    return {"": logging.root, **named}


def _put_back_loggers(state: ProcessState) -> None:
    """A handler that the function has added would write each line once more."""
    for name, logger in _loggers().items():
        if name not in state.loggers:
            # Of a library that the function has imported: its handlers are there only once.
            continue
        handlers, level = state.loggers[name]
        for handler in [one for one in logger.handlers if one not in handlers]:
            logger.removeHandler(handler)
            with contextlib.suppress(Exception):
                handler.close()
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(level)


def _take_torch() -> TorchState | None:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    return TorchState(
        generator=torch.get_rng_state(),
        dtype=torch.get_default_dtype(),
        device=torch.get_default_device(),
        threads=torch.get_num_threads(),
        has_gradients=torch.is_grad_enabled(),
        precision=_precision(torch),
        precisions=_precisions(torch),
        deterministic=(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        cudnn=(torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        anomaly=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        switches={
            name: bool(getattr(torch._C, name)()) for name in SWITCHES if hasattr(torch._C, name)
        },
    )


def _put_back_torch(state: TorchState) -> None:
    torch: Any = sys.modules["torch"]
    if torch.get_default_device() != state.device:
        torch.set_default_device(state.device)
    torch.set_default_dtype(state.dtype)
    if torch.get_num_threads() != state.threads:
        torch.set_num_threads(state.threads)
    torch.set_grad_enabled(state.has_gradients)
    if state.precision is not None and state.precision != _precision(torch):
        torch.set_float32_matmul_precision(state.precision)
    for name, precision in state.precisions.items():
        if _precisions(torch)[name] != precision:
            _backend(torch, name).fp32_precision = precision
    enabled, warns = state.deterministic
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = state.cudnn
    enabled, checks = state.anomaly
    torch.autograd.set_detect_anomaly(enabled, checks)
    for name, is_on in state.switches.items():
        getattr(torch._C, SWITCHES[name])(is_on)
    torch.set_rng_state(state.generator)
    if torch.cuda.is_initialized():
        # A seed that a new process has been given reaches its devices when they are opened.
        torch.cuda.manual_seed_all(torch.initial_seed())


def _precision(torch: Any) -> str | None:
    with contextlib.suppress(RuntimeError):
        return str(torch.get_float32_matmul_precision())
    return None


def _precisions(torch: Any) -> dict[str, str]:
    found = {}
    for name in PRECISIONS:
        with contextlib.suppress(AttributeError, RuntimeError):  # another version of torch
            found[name] = str(_backend(torch, name).fp32_precision)
    return found


def _backend(torch: Any, name: str) -> Any:
    return operator.attrgetter(name)(torch.backends) if name else torch.backends
