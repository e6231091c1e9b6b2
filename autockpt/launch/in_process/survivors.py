"""The launcher's end: survivors leave their functions, and are the ranks of the next start.

torchelastic ends all ranks when one has died.  Before it looks, the survivors are asked to leave
their functions.  torchelastic then sees a process that has ended well.  When it starts the ranks
again, the survivor is handed out as the process of its local rank.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autockpt.console import Console
from autockpt.launch.environment import NEW_PROCESS
from autockpt.launch.in_process.channel import accept, listen
from autockpt.launch.in_process.decision import UNWIND_S, Survivor, judge, obstacle
from autockpt.launch.standby.channel import Channel
from autockpt.launch.standby.pool import handler_of, ranks_from

ALONE_S = 1.0
"""A function that fails so long before any rank has died has failed by itself."""
ELSEWHERE_S = 3.0
"""So long in a job of several nodes: the launcher of a dead rank first frees its own survivors."""
DYING_S = 8.0
"""So long where the function of another rank has ended: that rank may be about to die."""
ENDED = "its function had ended"
STANDS = "it stood in a collective that nothing ends, as where a rank dies within a message"
SHOWN_CHARS = 200
"""Of an exception."""
TAKEN_S = 5.0
"""A survivor that does not answer the next start by then is ended."""
LOOK_S = 0.05
"""Signals to the launcher are waited for no longer."""
END_S = 5.0
"""Survivors that are no longer wanted print their exceptions within this time."""


@dataclass(slots=True)
class _Function:
    """The function under way in one process."""

    channel: Channel
    pid: int
    is_restartable: bool = False
    restarts: int = 0
    failed_s: float | None = None
    """CLOCK_MONOTONIC when it has told of a failure that another rank's death may have caused."""
    answer: str | None = None
    """As of `Survivor`."""
    place: str = ""
    """As of `Survivor`."""
    is_taken: bool = False


class _Parked:
    """A process as torchelastic sees it between two starts: it has ended well."""

    def __init__(self, handler: Any) -> None:
        self.proc = self
        self.pid: int = handler.proc.pid
        self.returncode = 0

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def close(self, death_sig: Any = None) -> None:
        """Nothing: it lives."""


class Survivors:
    """The functions of one launcher's ranks."""

    def __init__(
        self,
        console: Console,
        *,
        alone_s: float = ALONE_S,
        place_of: Callable[[int, int], str] = lambda rank, pid: "",
    ) -> None:
        """`alone_s`: as ALONE_S and ELSEWHERE_S.  `place_of`: where a rank and process stands."""
        self._console, self._alone_s, self._place_of = console, alone_s, place_of
        self._listener: socket.socket | None = None
        self._functions: dict[int, _Function] = {}
        """By process."""
        self._parked: dict[int, tuple[_Function, subprocess.Popen[bytes]]] = {}
        """By local rank, between two starts."""
        self._reasons: dict[int, str] = {}
        """By local rank: why it has a new process in the next start."""
        self._pids: set[int] = set()
        """Processes of the ranks: functions of other ones are not heard."""
        self._unfit = ""
        """As of `Survivor`."""
        self._said: set[str] = set()
        self.first_rank = 0
        """The rank of local rank 0, as the user knows it."""

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """As long as it lasts functions may connect, and torchelastic is handed survivors."""
        with ranks_from(self._rank) as served:
            if served:
                with contextlib.suppress(OSError):
                    self._listener = listen(os.environ)
            try:
                yield
            finally:
                self.close()

    # ------------------------------------------------------------------ while the job trains

    def look(self, handlers: dict[int, Any], ended: Callable[[int], bool]) -> None:
        """At every tick; `handlers`: of torchelastic, by local rank, in which survivors of a death
        are replaced.  `ended`: whether a process has failed.
        """
        if self._listener is None:
            return
        self._pids = {handler.proc.pid for handler in handlers.values()}
        self._hear(0.0)
        dead = {local for local, handler in handlers.items() if ended(handler.proc.pid)}
        if dead:
            self._park(handlers, dead)
            return
        wait_s = self._alone_s if self._pids <= self._functions.keys() else DYING_S
        for function in self._functions.values():
            if function.failed_s is not None and time.monotonic() > function.failed_s + wait_s:
                function.failed_s = None
                function.channel.send({"alone": True})

    def leave(self, handlers: dict[int, Any]) -> None:
        """The ranks of all nodes start again, because of another node: all of these survive."""
        if self._listener is not None:
            self._park(handlers, set())

    @property
    def any(self) -> bool:
        """Whether a function that can be called again is under way."""
        return any(function.is_restartable for function in self._functions.values())

    def _hear(self, wait_s: float) -> None:
        """Takes new connections and messages."""
        if self._listener is None:
            return
        by_channel = {one.channel: one for one in self._functions.values()}
        sources: list[socket.socket | Channel] = [self._listener, *by_channel]
        ready, _, _ = select.select(sources, [], [], wait_s)
        for source in ready:
            if isinstance(source, Channel):
                self._listen_to(by_channel[source])
                continue
            while (channel := accept(source)) is not None:
                pid = channel.peer()
                if pid not in self._pids:  # no rank of ours
                    channel.close()
                    continue
                self._functions[pid] = _Function(channel, pid)
                self._listen_to(self._functions[pid])

    def _listen_to(self, function: _Function) -> None:
        heard = function.channel.receive()
        if heard is None:
            function.channel.close()
            if self._functions.get(function.pid) is function:
                del self._functions[function.pid]
            function.answer = function.answer or ENDED
            return
        for message in heard[0]:
            if "restartable" in message:
                function.is_restartable, function.restarts = True, int(message["restarts"])
                function.answer, function.failed_s = None, None
            elif "failed" in message:
                function.failed_s = time.monotonic()
            elif "parked" in message:
                function.answer = ""
            elif "stands" in message:
                function.answer = f"{STANDS}: {message['stands']}"
            elif "refused" in message:
                function.answer = str(message["refused"])
            elif "unfit" in message:
                self._unfit = str(message["unfit"]).splitlines()[0][:SHOWN_CHARS]
            elif "taken" in message:
                function.is_taken = True

    # ------------------------------------------------------------------ a death

    def _park(self, handlers: dict[int, Any], dead: set[int]) -> None:
        """Asks the survivors to leave their functions, and keeps each one that does."""
        self._hear(0.0)  # what the dead ranks have told
        known = dead | self._parked.keys()
        living = {local: one for local, one in handlers.items() if local not in known}
        asked: dict[int, _Function] = {}
        until_s = time.monotonic() + UNWIND_S
        while self._ask(living, asked) and time.monotonic() < until_s:
            self._hear(LOOK_S)
        for local, function in asked.items():
            is_late = function.answer is None and self._may_go_on(local, function)
            if is_late:
                function.place = self._place_of(self.first_rank + local, function.pid)
            verdict = judge(self._survivor(local, function))
            if verdict.in_process:
                handler = living[local]
                self._parked[local] = function, handler.proc
                handlers[local] = _Parked(handler)
                _close_outputs(handler)
            elif verdict.reason:
                self._reasons[local] = verdict.reason
                if is_late or (function.answer or "").startswith(STANDS):
                    # It hears no signal; torchelastic would wait half a minute for it.
                    handlers[local] = _Parked(living[local])
                    _close_outputs(living[local])
                    _kill(living[local].proc)

    def _ask(self, living: dict[int, Any], asked: dict[int, _Function]) -> bool:
        """Asks functions that were not asked yet, also one that has begun meanwhile.

        One whose rank will have a new process is asked, too: its connections hold others in
        collectives.  Returns whether an answer is waited for.
        """
        for local, handler in living.items():
            function = self._functions.get(handler.proc.pid)
            if function is not None and function.is_restartable and local not in asked:
                function.channel.send({"unwind": True})
                asked[local] = function
        return any(
            one.answer is None and self._may_go_on(local, one) for local, one in asked.items()
        )

    def _may_go_on(self, local: int, function: _Function) -> bool:
        return obstacle(self._survivor(local, function)) is None

    def say_reasons(self) -> None:
        """The job goes on: why survivors of the death have new processes."""
        for local, reason in sorted(self._reasons.items()):
            self._say_reason(local, reason)

    @property
    def parked(self) -> tuple[int, ...]:
        """Ranks whose processes wait for the next start."""
        return tuple(self.first_rank + local for local in sorted(self._parked))

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [process.pid for _, process in self._parked.values()]

    def _survivor(self, local: int, function: _Function) -> Survivor:
        return Survivor(
            rank=local, is_restartable=function.is_restartable, restarts=function.restarts,
            unfit=self._unfit, answer=function.answer, place=function.place,
        )  # fmt: skip

    # ------------------------------------------------------------------ the next start

    def _rank(self, new: Callable[..., Any], **settings: Any) -> Any:
        """A handler of torchelastic's for the rank that is to start: a survivor, or else `new`."""
        local = settings["local_rank_id"]
        entry = self._parked.pop(local, None)
        if entry is not None:
            function, process = entry
            handler = self._hand_over(function, process, settings)
            if handler is not None:
                return handler
            self._reasons[local] = f"it did not begin anew within {TAKEN_S:.0f} s"
            self._say_reason(local, self._reasons[local])
            _kill(process)
        reason = self._reasons.pop(local, "")
        if reason:
            settings["env"] = {**settings["env"], NEW_PROCESS: reason}
        handler = new(**settings)
        self._pids.add(handler.proc.pid)
        return handler

    def _hand_over(
        self, function: _Function, process: "subprocess.Popen[bytes]", settings: Any
    ) -> Any:
        handler = handler_of(process, settings)
        function.is_taken = False
        environment = {**os.environ, **settings["env"]}
        if function.channel.send({"environment": environment}, handler.outputs):
            until_s = time.monotonic() + TAKEN_S
            while time.monotonic() < until_s and process.pid in self._functions:
                if function.is_taken:
                    function.answer = None
                    return handler
                self._hear(LOOK_S)
        handler.give_up()
        return None

    # ------------------------------------------------------------------ ends

    def release(self) -> None:
        """The job is over: survivors fail with the exceptions by which they left."""
        for function, _ in self._parked.values():
            function.channel.send({"end": True})
        until_s = time.monotonic() + END_S
        for _, process in self._parked.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        self._kill_parked()

    def signal(self, number: int) -> None:
        """The launcher hands a signal on."""
        for pid in self.pids:
            with contextlib.suppress(OSError):
                os.killpg(pid, number)

    def give_up(self, error: Exception) -> None:
        """An error of ours: from now on all restarts need new processes."""
        self._say(f"restarts need new processes: {type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Ends what waits, and no function may connect any more."""
        self._kill_parked()
        for function in self._functions.values():
            function.channel.close()
        self._functions.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _kill_parked(self) -> None:
        while self._parked:
            _kill(self._parked.popitem()[1][1])

    def _say_reason(self, local: int, reason: str) -> None:
        self._say(f"rank {self.first_rank + local} goes on in a new process: {reason}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._console.say(text)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a call of a file system
        process.wait(END_S)


def _close_outputs(handler: Any) -> None:
    """The launcher's own descriptors of the files of the attempt that is over."""
    files: Iterable[Any] = (getattr(handler, "_stdout", None), getattr(handler, "_stderr", None))
    for file in filter(None, files):
        file.close()
