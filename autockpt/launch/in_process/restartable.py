"""`autockpt.restartable`: a function that survivors of another rank's death run again.

A thread hears the launcher.  At its order the thread aborts the process groups, so that the
function leaves its collective by an exception.  Then the session ends as after a failure, and the
memory of the function is released.  The launcher hears of it, and answers with the variables of the
next start and the descriptors of its output.  Where something cannot be released this process ends,
and the rank starts in a new one, as without the decorator.
"""

import contextlib
import functools
import gc
import importlib
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from autockpt.launch import startup_timing
from autockpt.launch.in_process import kept_store, order, process_groups, process_state
from autockpt.launch.in_process.channel import connect
from autockpt.launch.in_process.inputs import Arguments, ScriptFiles
from autockpt.launch.in_process.standing import Standing
from autockpt.launch.rank_env import number
from autockpt.launch.standby.channel import Channel
from autockpt.values import script_errors
from autockpt.values.errors import RestartError

P = ParamSpec("P")
R = TypeVar("R")

ABORT_S = 0.05
"""The groups are aborted so often until the function is left: it may enter another collective."""
WORD_S = 10.0
"""The launcher says within this time whether another rank has died."""
PARKED_S = 120.0
"""The launcher needs so long at most to start the other ranks."""

IMPORTED_FIRST = ("torch._dynamo", "autockpt.session.job", "autockpt.executors.state.live_state")
"""Modules that the first optimizer and `attach` import.  They have 130,000 objects, at which a
collection would look where the function imports them.  Later calls find them imported anyway."""

_is_claimed = False


class Loop:
    """The calls of one function in this process."""

    def __init__(self, launcher: Channel, *given: Any) -> None:
        """`given`: the arguments of the function."""
        self._launcher = launcher
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._descriptors: list[int] = []
        self._aborts, self._lock = False, threading.Lock()
        """Whether the thread aborts groups; held while it does."""
        self._ports = process_groups.own_ports()
        self._abort = process_groups.Abort(self._ports)
        self._standing: Standing | None = None
        """Of the function, since the order to leave it."""
        self._restarts = 0
        self._weak: list[weakref.ref[Any]] = []
        """Models and optimizers of the call that has ended."""
        self._arguments, self._files = Arguments(*given), ScriptFiles()
        threading.Thread(target=self._listen, name="autockpt-restarts", daemon=True).start()
        self._began = process_state.take()

    def run(self, call: Callable[[], R]) -> R:
        """Call it until it ends by itself."""
        try:
            while True:
                self._launcher.send({"restartable": True, "restarts": self._restarts})
                # A collection at a restart then looks at the objects of the function alone: 0.03 s
                # in place of 0.4 s.
                gc.freeze()
                try:
                    result = call()
                    order.of_this_process.raise_if_ordered()  # the function has caught it
                    return result
                except BaseException as error:
                    if not self._is_of_peers(error):
                        self._tell_unfit(error)
                        raise
                    failure, left = error, self._leave(error)
                left = left or self._release()
                self._go_on(failure, left)
                del failure
        finally:
            self._stop_aborts()
            self._launcher.close()

    def _listen(self) -> None:
        """On a thread of its own."""
        while (heard := self._next_messages()) is not None:
            messages, descriptors = heard
            self._descriptors += descriptors
            for message in messages:
                if "unwind" in message:
                    self._abort, self._aborts = process_groups.Abort(self._ports), True
                    self._standing = Standing()
                    order.of_this_process.give()
                    self._abort_groups()
                self._orders.put(message)
        self._orders.put({"end": "the launcher has gone"})

    def _next_messages(self) -> tuple[list[dict[str, Any]], list[int]] | None:
        """As of `Channel.receive`; aborts groups while it waits, where that is wanted."""
        while self._aborts and not self._launcher.is_ready(ABORT_S):
            self._abort_groups()
            self._tell_if_it_stands()
        return self._launcher.receive()

    def _tell_if_it_stands(self) -> None:
        with self._lock:
            place = self._standing.place() if self._aborts and self._standing else ""
            if place:
                self._aborts = False
                self._launcher.send({"stands": place})

    def _abort_groups(self) -> None:
        with self._lock, contextlib.suppress(Exception):
            if self._aborts:
                self._abort.again()

    def _stop_aborts(self) -> None:
        with self._lock:
            self._aborts = False

    def _is_of_peers(self, error: BaseException) -> bool:
        """Whether the function was left because another rank has died, as the launcher says."""
        if not isinstance(error, (Exception, order.Unwound)):
            return False
        if order.of_this_process.is_ordered:
            return True
        # While it attaches the keepers are the first to say that a rank is lost.
        if script_errors.origin_of(error) != "machine" and not isinstance(error, RestartError):
            return False
        self._launcher.send({"failed": script_errors.text_of(error)})
        return "unwind" in self._next_order(WORD_S)

    def _tell_unfit(self, error: BaseException) -> None:
        """The next start is not in this process: a new one may not fail so."""
        if order.of_this_process.is_again:
            self._launcher.send({"unfit": script_errors.text_of(error)})

    def _leave(self, error: BaseException) -> str:
        """Ends the sessions as after a failure, and frees the stack; why that failed, or ""."""
        order.of_this_process.is_ordered = True  # it may have come by itself
        self._stop_aborts()
        try:
            cause = ConnectionAbortedError(f"another rank has died: {error}")
            attaches = sys.modules.get("autockpt.session.attaches")
            objects = [] if attaches is None else attaches.of_this_process.fail(cause)
            self._weak = [weakref.ref(item) for item in objects]
            del objects
            self._abort.end()
            process_groups.forget()
            _clear(error)
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"
        return ""

    def _release(self) -> str:
        try:
            left = process_state.release(self._weak, self._began)
            return left or self._arguments.obstacle() or self._files.obstacle()
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"

    def _go_on(self, failure: BaseException, left: str) -> None:
        """Waits for the other ranks to start.  Raises `failure` where this process must end."""
        if left:
            self._launcher.send({"refused": left})
            raise failure
        self._launcher.send({"parked": True})
        while "environment" not in (given := self._next_order(PARKED_S)):
            if "unwind" not in given:
                raise failure
        startup_timing.begin_anew()
        self._take_outputs()
        process_state.put_back(self._began, given["environment"])
        job = sys.modules.get("autockpt.session.job")
        if job is not None:
            job.begin_anew()
        self._restarts += 1
        kept_store.begin_anew()
        order.of_this_process.begin_anew()
        self._launcher.send({"taken": True})

    def _take_outputs(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for source, target in zip(self._descriptors, (1, 2), strict=True):
            os.dup2(source, target)
            os.close(source)
        self._descriptors.clear()

    def _next_order(self, wait_s: float) -> dict[str, Any]:
        try:
            return self._orders.get(timeout=wait_s)
        except queue.Empty:
            return {}


def restartable(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a rank that survives another one's death run the function again, in the same process.

    `function` does the whole training: it makes the process group, the model and the data, calls
    `attach`, and trains.  When another rank has died, `autockpt run` has it called again with the
    same arguments.  It must not build on values that an earlier call has left in global variables.
    With one rank or another launcher it is an ordinary function.  So is each further call in one
    script.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        with kept_store.in_use():
            return called(*arguments, **named)

    def called(*arguments: P.args, **named: P.kwargs) -> R:
        launcher = _launcher()
        if launcher is None:
            return function(*arguments, **named)
        _import_first()
        call = functools.partial(function, *arguments, **named)
        given = arguments, named, getattr(function, "__defaults__", None)
        try:
            loop = Loop(launcher, *given)
        except Exception as problem:
            launcher.close()
            _say_once(f"{type(problem).__name__}: {problem}")
            return call()
        return loop.run(call)

    return run


def _launcher() -> Channel | None:
    """The connection to a launcher that restarts so; None: there is none, or it could not."""
    ranks = number(os.environ, "WORLD_SIZE") or 1
    on_main = threading.current_thread() is threading.main_thread()
    if ranks < 2 or not on_main or os.environ.get("AUTOCKPT_MODE") != "run":
        return None
    if not _claim():
        _say_once("a script has one restartable function, which is called once")
        return None
    attaches = sys.modules.get("autockpt.session.attaches")
    if attaches is not None and attaches.of_this_process.any:
        _say_once("the script called autockpt.attach before the function began; call it inside")
        return None
    if process_groups.are_there():
        _say_once("the process group was made before the function began; make it inside")
        return None
    if not process_groups.can_be_aborted():
        _say_once("this version of torch cannot abort process groups")
        return None
    return connect(os.environ)


def _import_first() -> None:
    for name in IMPORTED_FIRST if "torch" in sys.modules else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _claim() -> bool:
    """Whether this call is the first in this process.

    A new process begins with the first one.  It would never meet survivors that are in another.
    """
    global _is_claimed
    first, _is_claimed = not _is_claimed, True
    return first


def _say_once(reason: str) -> None:
    if os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError, ValueError):
            print(f"autockpt: restarts need new processes: {reason}", file=sys.stderr, flush=True)


def _clear(error: BaseException) -> None:
    """Frees the variables of functions that exceptions have left; the tracebacks stay."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            # Until Python 3.13 a frame keeps the dictionary that its last reader was given, and
            # brings it up to date for the next one.
            frame.f_locals  # noqa: B018


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
