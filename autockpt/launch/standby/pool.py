"""The launcher's end: parks a process per rank while the job trains, hands it a rank at a restart.

Everything happens on the agent's thread, in its ticks: the kernel ends a parked process with the
thread that started it.  A standby that is missing, late or refuses costs only the time of a cold
start; the reason is logged once.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

from autockpt import new_files
from autockpt.console import Console
from autockpt.executors.linux.memory import headroom
from autockpt.launch.elastic.signals import signals_wait
from autockpt.launch.standby import imports, parked, twin
from autockpt.launch.standby.channel import Channel
from autockpt.launch.standby.twin import Adopted
from autockpt.run_directory import RunDirectory
from autockpt.values.units import format_bytes

ANSWER_S = 5.0
"""A parked process that does not answer an order by then is ended, and a fresh one started."""
LATE_S = 10.0
"""One that still imports gets so much longer: it is ahead of a fresh one.  Signals wait as long."""
IMPORTS_TAKEN_S = 60.0
"""A process that has not read its imports by then is stopped, or its Python does not start."""
BEGINS_S = 2.0
"""The Python of one that has just been started reads its imports within so long, or is not waited
for."""
END_S = 5.0
"""A process that is killed is waited for so long: one in a call of a file system may not end."""
MEMORY_LOOK_S = 5.0
"""How often the memory that is left is looked at."""
NEEDED_BYTES = 400 * 2**20
"""Memory that importing may take before it is measured."""
AFTER_S = 10.0
"""A job that ends, or fails, within so many seconds of its first iterations makes no standby.  It
would import beside the job for nothing.  A policy that insists does not wait, and neither does a
job that has been restarted: it may soon need the next one."""
KEPT_FREE = 3
"""A standby is made where so many times its memory is left, and dropped where it is not once."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """One local rank of this node."""

    rank: int
    arguments: tuple[str, ...]
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | Adopted | None" = None
    channel: Channel | None = None
    ready: bool = False
    restarted: bool = False
    """It is not the first start of this rank."""
    known_s: float | None = None
    """Since when its imports are known, CLOCK_MONOTONIC."""
    parked_s: float = 0.0
    """When the process was started, CLOCK_MONOTONIC."""
    bytes: int = NEEDED_BYTES
    refused: bool = False
    known: imports.Imports | None = None
    """The imports of the process."""
    no_twin: bool = False
    """It cannot be forked from another one."""


class StandbyPool:
    """The parked processes of one launcher."""

    def __init__(
        self, run: RunDirectory, wish: Literal["on", "off"] | None, console: Console
    ) -> None:
        """`wish`: restart.standby of the policy, None for auto."""
        self._run, self._console = run, console
        self._wanted = wish != "off"
        self._insists = wish == "on"
        self._places: dict[int, _Place] = {}
        self._looked_s = 0.0
        self._short = False
        self._said: set[str] = set()

    # ------------------------------------------------------------------ while the job trains

    def expect(self, spec: Any) -> None:
        """Ranks of a spare node, which may start later; `spec`: of torchelastic.

        Their numbers are not known.  A process whose imports read them refuses to be a rank.
        """
        asynchronous = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        for local in range(spec.local_world_size):
            words = (Template(str(word)).safe_substitute(local_rank=local) for word in spec.args)
            self._places[local] = _Place(
                rank=local,
                arguments=(spec.entrypoint, *words),
                environment={
                    **os.environ,
                    asynchronous: os.environ.get(asynchronous, "1"),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(spec.local_world_size),
                    "ROLE_NAME": spec.role,
                },
            )

    def tick(self) -> None:
        """Parks what is missing, one after another, and lets go what memory is too short for."""
        if not self._wanted:
            return
        try:
            self._look_at_memory()
            for place in self._places.values():
                if place.process is None and not place.refused and not self._short:
                    self._park(place)
                self._hear(place)
                if place.process is not None and not place.ready:
                    return
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends what is parked."""
        for place in self._places.values():
            self._end(place)

    def _park(self, place: _Place) -> None:
        record = imports.path_of(self._run.path, place.rank)
        if not record.exists():
            return
        if place.known_s is None:
            place.known_s = time.monotonic()
        at_once = self._insists or place.restarted
        if not at_once and time.monotonic() < place.known_s + AFTER_S:
            return
        known = imports.read(record)
        if known is None:
            place.refused = True
            return
        place.known = known
        if self._make_twin(place):
            return
        here, there = socket.socketpair()
        place.channel, place.ready = Channel(here), False
        with there:
            variables = {**place.environment, parked.VARIABLE: str(there.fileno())}
            place.process = subprocess.Popen(
                place.arguments, env=variables, pass_fds=(there.fileno(),), start_new_session=True
            )
        order = {
            "modules": known.modules, "changed": known.changed, "path0": _path0(place.arguments),
        }  # fmt: skip
        # It reads when its Python has started.  Signals and the other ranks are heard meanwhile.
        place.channel.post(order)
        place.parked_s = time.monotonic()

    def _make_twin(self, place: _Place) -> bool:
        """Whether the place has a process now that was forked from another rank's."""
        source = next((one for one in self._places.values() if _is_twin(one, place)), None)
        if source is None or source.channel is None or place.no_twin:
            return False
        place.no_twin = True  # one attempt
        here, there = socket.socketpair()
        channel, order = Channel(here), {"twin_of": os.getpid(), "environment": place.environment}
        with twin.adopting():
            with there:
                source.channel.send(order, (there.fileno(),))
            said = source.channel.next_message(ANSWER_S)
            if said is None:
                self._end(source)
            told = channel.next_message(ANSWER_S) if said == {"no_twin": ""} else None
        if told is None:
            channel.close()
            return False
        place.channel, place.ready = channel, True
        place.process = Adopted(told["pid"], place.arguments)
        place.bytes = _memory_of(told["pid"])
        return True

    def _hear(self, place: _Place) -> None:
        """Takes the next words of a parked process, if there are any."""
        if place.channel is None:
            return
        takes_none = not place.channel.flush() and not place.channel.is_ready(0.0)
        if takes_none and time.monotonic() > place.parked_s + IMPORTS_TAKEN_S:
            self._end(place)
            place.refused = True
            self._say(f"the standby has not read its imports within {IMPORTS_TAKEN_S:.0f} s")
            return
        if not place.channel.is_ready(0.0):
            return
        heard = place.channel.receive()
        if heard is None:
            self._end(place)
            place.refused = True
            self._say("the standby ended by itself while it imported")
            return
        for said in heard[0]:
            if "refused" in said:
                self._end(place)
                place.refused = True
                self._say(said["refused"])
            elif "ready" in said and place.process is not None:
                place.ready, place.bytes = True, _memory_of(place.process.pid)

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < MEMORY_LOOK_S:
            return
        self._looked_s = now
        left, one = headroom(), max([place.bytes for place in self._places.values()], default=0)
        parked_now = [place for place in self._places.values() if place.process is not None]
        if parked_now and left.available_bytes < one:
            self._short = True
            for place in parked_now:
                self._end(place)
        elif self._short or not parked_now:
            needed = one * (1 if self._insists else KEPT_FREE) * max(1, len(self._places))
            self._short = left.available_bytes < needed
        if self._short:
            self._say(
                f"the standby needs {format_bytes(one)} a rank, and there are "
                f"{format_bytes(left.available_bytes)} ({left.binding})",
                once="memory",
            )

    # ------------------------------------------------------------------ a restart

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """As long as it lasts, torchelastic's ranks come from here."""
        with ranks_from(self._rank) as served:
            if not served:
                self._give_up("this version of torch has no place for it")
            try:
                yield
            finally:
                self.close()

    def _rank(self, cold: Callable[..., Any], **settings: Any) -> Any:
        """A handler of torchelastic's for the rank that is to start: warm, or else `cold`."""
        if not self._wanted or settings.get("numa_options") is not None:
            return cold(**settings)
        local, environment = settings["local_rank_id"], {**os.environ, **settings["env"]}
        place, started = self._places.get(local), None
        if place is not None:
            with signals_wait():
                try:
                    started = self._hand_over(place, environment, settings)
                except Exception as error:
                    self._say(f"{type(error).__name__}: {error}", now=True)
                if started is None:
                    self._end(place)
        rank = int(environment["RANK"])
        with contextlib.suppress(OSError):
            imports.path_of(self._run.path, rank).unlink()
        self._places[local] = _Place(
            rank=rank, environment=environment, restarted=place is not None,
            arguments=(settings["entrypoint"], *map(str, settings["args"])),
        )  # fmt: skip
        return cold(**settings) if started is None else started

    def _hand_over(self, place: _Place, environment: dict[str, str], settings: Any) -> Any:
        if place.process is None or place.channel is None:
            return None
        self._hear(place)
        if place.refused:
            return None
        is_ahead = place.ready or self._is_last(place)
        if not is_ahead or not place.channel.flush(BEGINS_S):
            self._say("the standby was still being made", now=True)
            return None
        arguments = (settings["entrypoint"], *map(str, settings["args"]))
        if arguments != place.arguments:
            self._say("the command of the ranks has changed", now=True)
            return None
        warm = handler_of(place.process, settings)
        order = {
            "environment": environment,
            "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
        }
        until_s = time.monotonic() + (ANSWER_S if place.ready else ANSWER_S + LATE_S)
        place.channel.send(order, warm.outputs, wait_s=until_s - time.monotonic())
        said = _answer(place.channel, until_s)
        place.ready = False
        if "taken" not in said:
            warm.give_up()
            self._say(said.get("refused", "the standby ended, or was late"), now=True)
            return None
        place.channel.close()
        place.process = place.channel = None
        return warm

    def _is_last(self, place: _Place) -> bool:
        """Whether every other rank of this node has its standby: nothing else waits behind it."""
        return all(other.ready for other in self._places.values() if other is not place)

    # ------------------------------------------------------------------ ends

    def _end(self, place: _Place) -> None:
        if place.channel is not None:
            place.channel.close()
        if place.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(place.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                place.process.wait(END_S)
        place.process, place.channel, place.ready = None, None, False

    def _give_up(self, reason: str) -> None:
        self._wanted = False
        self.close()
        self._say(reason)

    def _say(self, reason: str, *, now: bool = False, once: str = "") -> None:
        """Say why the next restart, or with `now` this one, is a cold one; every reason once.

        `once`: the reason without its figures, where it has some.
        """
        if (once or reason) not in self._said:
            self._said.add(once or reason)
            which = "this" if now else "the next"
            self._console.say(f"{which} restart is a cold one: {reason}")


def _is_twin(one: _Place, other: _Place) -> bool:
    """Whether one process waits that could be either rank's."""
    return one.ready and (one.arguments, one.known) == (other.arguments, other.known)


@contextlib.contextmanager
def ranks_from(start: Callable[..., Any]) -> Iterator[bool]:
    """As long as it lasts, torchelastic's ranks are what `start` returns, a handler for each.

    `start` gets the function that was asked before, and the settings of the rank.  False: this
    version of torch has no place for it.
    """
    from torch.distributed.elastic.multiprocessing import api as torchelastic

    api: Any = torchelastic
    before = getattr(api, "get_subprocess_handler", None)
    if before is None:
        yield False
        return
    api.get_subprocess_handler = lambda **settings: start(before, **settings)
    try:
        yield True
    finally:
        api.get_subprocess_handler = before


def handler_of(process: "subprocess.Popen[bytes] | Adopted", settings: Any) -> Any:
    """Return torchelastic's handle of a rank, for a process that is there already."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class WarmHandler(SubprocessHandler):
        def __init__(self) -> None:
            stdout, stderr = settings["stdout"], settings["stderr"]
            self._stdout = open(stdout, "w", opener=new_files.private) if stdout else None  # noqa: SIM115
            self._stderr = open(stderr, "w", opener=new_files.private) if stderr else None  # noqa: SIM115
            self.local_rank_id = settings["local_rank_id"]
            self.proc: Any = process

        @property
        def outputs(self) -> tuple[int, int]:
            """Descriptors of the rank's stdout and stderr."""
            return (
                self._stdout.fileno() if self._stdout else 1,
                self._stderr.fileno() if self._stderr else 2,
            )

        def give_up(self) -> None:
            """Another process takes the rank."""
            for file in filter(None, (self._stdout, self._stderr)):
                file.close()

    return WarmHandler()


def _answer(channel: Channel, until_s: float) -> dict[str, Any]:
    """The answer to an order, behind the news that the imports are done; {}: there is none."""
    while (said := channel.next_message(max(0.0, until_s - time.monotonic()))) is not None:
        if "ready" not in said:
            return said
    return {}


def _path0(arguments: tuple[str, ...]) -> str:
    """Where Python looks for modules first when it runs the script of a rank's command."""
    words = arguments[arguments.index("autockpt.cli.script_runner") + 1 :]
    return os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))


def _memory_of(pid: int) -> int:
    """Bytes that libraries do not map from files; what twins share is divided among them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        rows = dict(line.split(":") for line in text.splitlines()[1:])
        return int(rows.get("Pss_Anon", rows["Anonymous"]).split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return NEEDED_BYTES
