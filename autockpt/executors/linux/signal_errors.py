"""Is an exception the script's own, raised by one of its signal handlers inside our code?

A handler runs between any two instructions of the training thread.  Code that catches its own
exceptions, so that the training goes on, must not take the script's for one of them.
"""

import signal
import threading
from types import CodeType
from typing import Any


def is_from_handler(error: BaseException) -> bool:
    """Whether a signal handler that is in force has raised `error`, or what it called."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {code for number in signal.valid_signals() if (code := _code_of(number))}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(number: int) -> CodeType | None:
    """Of a handler that is written in Python; None: there is none."""
    handler: Any = signal.getsignal(number)
    while hasattr(handler, "func"):  # functools.partial
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = vars(type(handler)).get("__call__")  # an object that can be called
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
