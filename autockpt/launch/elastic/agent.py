"""How torchelastic's agent is made to ask us: is this failure worth another start?

The agent has no hook for it, so its class is replaced by a subclass in the one module that makes
it.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from autockpt.console import Console
from autockpt.executors.keeper.hangs.watch import place_of
from autockpt.executors.linux import own_group
from autockpt.executors.linux.oom_kills import OomWatch
from autockpt.job_directory import own_runs
from autockpt.launch import environment
from autockpt.launch.elastic.crash_loop import Attempt, CrashLoop
from autockpt.launch.elastic.incidents import Incidents
from autockpt.launch.elastic.news import News
from autockpt.launch.elastic.rank_output import OutputFiles
from autockpt.launch.elastic.rendezvous.node_numbers import Seated, hosts_rendezvous
from autockpt.launch.elastic.rendezvous.rank_store import RankStores
from autockpt.launch.elastic.request import Ending, Launch, Limit
from autockpt.launch.elastic.signals import Announced, install, kill_groups, signals_wait
from autockpt.launch.in_process.survivors import ALONE_S, ELSEWHERE_S, Survivors
from autockpt.launch.owner import is_alive
from autockpt.launch.rank_env import allocation_left_s
from autockpt.launch.standby.pool import StandbyPool
from autockpt.policies.restart.announced import LauncherTimes, grace_s, launcher_times
from autockpt.policies.restart.faulty_node import advice, faulty_node
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError, DirectoryBusyError
from autockpt.values.exit_codes import LEFT_OUT, NO_PROGRESS, REPLACED, WOULD_TRAIN_WRONGLY

if TYPE_CHECKING:
    from autockpt.launch.sidecars.keeper import KeeperBeside

LOOK_S = 0.1
"""How often the agent looks at its ranks while none of them ends."""
SHOWN_CHARS = 300
"""The most characters of an exception in a sentence about the failure."""


class Watch:
    """Answers the agent's question: is this failure worth another start?"""

    def __init__(
        self, request: Launch, console: Console, keeper: "KeeperBeside", news: News
    ) -> None:
        run = request.run
        self._news = news
        self.standbys = StandbyPool(run, request.standby, console)
        waits_s = ALONE_S if request.single_node else ELSEWHERE_S
        self.survivors = Survivors(
            console,
            alone_s=waits_s,
            place_of=lambda rank, pid: place_of(str(run.path), rank, pid),
        )
        self._incidents = Incidents(run, console)
        self.outputs = OutputFiles(run.logs, console.warn)
        self._request = request
        self._console = console
        self._keeper = keeper
        self._began_s = time.monotonic()
        self._reason = ""
        self._interruptions = _interruptions(run)
        """On record when this launcher began."""
        self._logged = run.log_ends()
        """Bytes of the event files when this launcher began."""
        self._left = False
        """This node leaves the job."""
        self._named: int | None = None
        """The node that was named as the one that ends the job."""
        self._decided_s: float | None = None
        """When the restart under way was decided."""
        self.restarts = 0
        self._oom_kills = OomWatch()
        self._seated: Seated | None = None
        self.limit: Limit | None = None
        """Of the command, once a signal has come."""
        self.keeper_by_s: float | None = None
        """CLOCK_MONOTONIC by which the keeper is to be done."""
        self._loop = CrashLoop(
            step=None if request.fresh or request.resume_from else _trained(run),
            generation=run.newest_generation(),
            insist=request.max_restarts is not None,
        )

    def seated(self, rendezvous: Any) -> Any:
        """The rendezvous in which this node keeps its number, where nodes have no fixed ones.

        A single node keeps the store of its ranks.
        """
        if self._request.rdzv_backend == "static":
            return rendezvous
        if self._request.single_node:
            return RankStores(rendezvous)
        self._seated = Seated(
            rendezvous, self._request.local_addr, self._keeper.seats(),
            lost_nodes=self._keeper.lost_nodes, say=self._console.say, idle=self.standbys.tick,
        )  # fmt: skip
        return self._seated

    def starting(self, node: int) -> None:
        """The agent is about to start the ranks of this node, which is `node` in their order."""
        # A restart that another node began was not decided here.
        os.environ.pop(environment.RESTART_DECIDED, None)
        if self._decided_s is not None:
            os.environ[environment.RESTART_DECIDED] = repr(self._decided_s)
            self._decided_s = None
        self._began_s = time.monotonic()
        self._oom_kills.begin()
        if self._seated is not None and self._seated.number is not None:
            node = self._seated.number
            os.environ[environment.NODE] = str(node)
        if self._request.mode == "run" and not self._keeper.started:
            self._keeper.start(node)

    def look(self, ranks: Iterable[int]) -> None:
        """At every tick of the agent, while the ranks run; `ranks`: their processes.

        When one has ended, the agent ends the others.
        """
        if any(_has_ended(pid) for pid in ranks):
            self._keeper.await_seal()
        else:
            self._oom_kills.tick()
        self.standbys.tick()
        self._incidents.look(self._keeper.node)
        self._news.look(self._keeper.node)

    def goes_on(self, failures: dict[int, Any], *, left: int) -> bool:
        """Whether to start again after these failures (by rank); says what happened."""
        run = self._request.run
        self._incidents.look(self._keeper.node, now=True)
        rank, failure = _root_cause(failures)
        # A rank that ended before attach was at no step; an earlier launch may have been.
        step = run.newest_step() if run.has_attached_since(self._logged) else None
        self._show_log(rank, failure)
        if self._request.mode == "profile":
            return False
        told, error = failure.error_file_data.get("autockpt", {}), _error(failure)
        verdict = self._loop.verdict(
            Attempt(
                signal=max(0, -failure.exitcode),
                # A rank that ends so at its exit has told us nothing more.
                final=bool(told.get("final")) or failure.exitcode == WOULD_TRAIN_WRONGLY,
                over=bool(told.get("over")),
                error=error if told.get("origin") in ("mistake", "script") else "",
                error_step=told.get("step"),
                attached=run.attached,
                lasted_s=time.monotonic() - self._began_s,
                step=_trained(run),
                generation=run.newest_generation(),
                # Between nodes it is how one launcher makes the others restart.
                replaced=failure.exitcode == REPLACED and self._request.single_node,
                refused=failure.exitcode == DirectoryBusyError.exit_code,
            )
        )
        goes_on = verdict is None and left > 0
        if self._is_left_out(began_here=goes_on and _is_first_death(failure.exitcode)):
            return False
        what = f"rank {rank} {_ended(failure.exitcode)}" + (f" at step {step}" if step else "")
        if failure.exitcode == -signal.SIGKILL and (want := self._oom_kills.killed()):
            what += f" ({want})"
        if error and failure.exitcode > 0:
            what += f" ({error.splitlines()[0][:SHOWN_CHARS]})"
        if goes_on:
            self.restarts += 1
            self._decided_s = time.monotonic()
            here = ", ".join(map(str, self.survivors.parked))
            how = f"; rank {here} in its own process" if here else ""
            self._console.say(
                f"{what}; restarting this node's ranks (restart {self.restarts}){how}"
            )
            return True
        self._reason = f"{what}: {verdict or f'{self.restarts} restarts used up'}"
        return False

    def _is_left_out(self, *, began_here: bool) -> bool:
        """Whether this node leaves, because it ends the job again and again.

        It leaves only if the policy says so and this failure began here.  Otherwise a sentence says
        which node does it and what to do.
        """
        seated = self._seated
        if seated is None or seated.number is None:
            return False
        with contextlib.suppress(OSError, AutockptError):
            origins = self._request.run.failure_origins()
            faulty = faulty_node(origins.began, origins.nodes)
            if faulty is None:
                return False
            # Its number may have been another machine's before this launcher began.
            mine = faulty_node(origins.since(self._interruptions), origins.nodes)
            least = int(self._request.nnodes.split(":")[0])
            elastic = seated.nodes > least
            hosts = hosts_rendezvous(self._request.rdzv_endpoint)
            leaves = self._request.faulty_node == "leave"
            may = leaves and elastic and not hosts and origins.nodes == seated.nodes
            if may and began_here and mine is not None and mine.node == seated.number:
                self._reason = f"{mine.sentence}: this is node {mine.node}, and it leaves the job"
                self._left = seated.leaves = True
                return True
            if faulty.node != self._named:
                self._named = faulty.node
                self._console.warn(
                    advice(faulty, here=seated.number, elastic=elastic, hosts=hosts, leaves=leaves)
                )
        return False

    def interrupted(self, number: int) -> float:
        """A signal is being forwarded to the ranks; seconds until they are killed."""
        name = signal.Signals(number).name
        times = times_now(self._request.notice_s)
        self.limit = Limit(by_s=time.monotonic() + times.over_s, exit_code=128 + number)
        self.keeper_by_s = time.monotonic() + times.keeper_s
        self._end_by(self.limit, times)
        told = "make a checkpoint and leave" if self._request.run.attached else "leave"
        self._console.say(
            f"{name}: told the ranks to {told}; this ends within {times.over_s:.0f} s, and at once "
            "with a second signal"
        )
        return times.ranks_s

    def _end_by(self, limit: Limit, times: LauncherTimes) -> None:
        """Limit the end: storage that hangs holds neither its waiting threads nor this process."""

        def leave() -> None:
            # A terminal that is gone must not keep us either.
            threading.Timer(0.5, os._exit, (limit.exit_code,)).start()
            self._console.warn(
                f"{times.over_s:.0f} s are over: no longer waiting for the write under way; it "
                "goes on by itself"
            )
            os._exit(limit.exit_code)

        watchdog = threading.Timer(times.over_s, leave)
        watchdog.daemon = True
        watchdog.start()

    def hurried(self) -> None:
        """A second signal: nothing is waited for any more."""
        self.keeper_by_s = time.monotonic()
        if self.limit is not None:
            self.limit.by_s = self.keeper_by_s

    def failed(self, failures: dict[int, Any]) -> Ending:
        """The ending after the last failure."""
        rank, failure = _root_cause(failures)
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        code = LEFT_OUT if self._left else NO_PROGRESS if self._loop.stuck else code
        reason = self._reason or f"rank {rank} {_ended(failure.exitcode)}"
        error = _error(failure) if failure.exitcode > 0 else ""
        over = bool(failure.error_file_data.get("autockpt", {}).get("over"))
        return Ending(
            state="failed",
            exit_code=code,
            restarts=self.restarts,
            reason=reason,
            error=error,
            over=over,
        )

    def _show_log(self, rank: int, failure: Any) -> None:
        """The end of the log of a rank whose output did not go to the terminal."""
        if failure.local_rank == 0 or failure.exitcode < 0:
            return
        path, text = self.outputs.end_of_errors(rank)
        if path:
            self._console.say(f"rank {rank} {_ended(failure.exitcode)}; its log ({path}) ends:")
            self._console.block(text)


def _is_first_death(exit_code: int) -> bool:
    """Whether a rank that ended so began the failure on this node.

    Ranks whose peers are gone end with an error or by SIGTERM, or abort (NCCL's watchdog).
    """
    return exit_code < 0 and -exit_code not in (signal.SIGTERM, signal.SIGABRT, signal.SIGINT)


def _wait_for_end(pids: Iterable[int], most_s: float) -> None:
    """Waits until one of the processes ends, or has failed; signals interrupt it."""
    if any(map(_has_ended, pids)):
        return
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        for pid in pids:
            if _status(pid) is None:  # one that has ended well would end each wait
                # A Python that was built for old systems (conda's, uv's) lacks it: the time is up.
                with contextlib.suppress(OSError, AttributeError):
                    descriptor = os.pidfd_open(pid)
                    opened.callback(os.close, descriptor)
                    poll.register(descriptor, select.POLLIN)
        poll.poll(most_s * 1000)


def _has_ended(pid: int) -> bool:
    """The process has failed, and torchelastic has not looked yet."""
    return bool(_status(pid))


def _status(pid: int) -> int | None:
    """The exit code, or the signal, of a process at which torchelastic has not looked; None: it
    lives, or it is unknown."""
    try:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = os.waitid(os.P_PID, pid, options)
    except OSError:
        return None
    return None if ended is None else ended.si_status


def _trained(run: RunDirectory) -> int | None:
    """Return the steps of the run and of its processes' own runs: a sweep's progress."""
    every = [run, *(RunDirectory(path) for path in own_runs(run.path))]
    steps = [step for step in (one.newest_step() for one in every) if step is not None]
    return sum(steps) if steps else None


def _interruptions(run: RunDirectory) -> int:
    """Number of them on record."""
    with contextlib.suppress(OSError, AutockptError):
        return len(run.failures())
    return 0


def times_now(notice_s: float | None) -> LauncherTimes:
    """Return the time left for each part of an end now; `notice_s`: from the policy."""
    left_s = allocation_left_s(os.environ, time.time())
    grace = grace_s(notice_s=notice_s, allocation_left_s=left_s, launcher_s=None)
    return launcher_times(grace)


def _root_cause(failures: dict[int, Any]) -> tuple[int, Any]:
    """(rank, failure) of what happened first: deaths by a signal take the other ranks with them.

    The agent itself sends SIGTERM to the others.
    """

    def order(entry: tuple[int, Any]) -> tuple[int, float, int]:
        rank, failure = entry
        killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        stopped = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        at = failure.error_file_data.get("autockpt", {}).get("at", failure.timestamp)
        return (0 if killed else 2 if stopped else 1, float(at), rank)

    return min(failures.items(), key=order)


_NO_MESSAGE = "<NONE>"
"""What torchelastic writes for a rank that left no error file."""


def _error(failure: Any) -> str:
    """The exception that a rank has told us of; "" for another death."""
    message = failure.error_file_data.get("message")
    text = message.get("message", "") if isinstance(message, dict) else message
    return text if isinstance(text, str) and text != _NO_MESSAGE else ""


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


@contextlib.contextmanager
def _without_handlers() -> Iterator[None]:
    """As long as it lasts torchelastic installs no handlers of signals when it starts ranks."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    before = os.environ.get(name)
    os.environ[name] = "none"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _closing_within(timeout_s: float, close: Callable[..., None]) -> Callable[..., None]:
    """`close` of the ranks, with this time for them in place of another."""
    return lambda death_sig=None, timeout=0: close(death_sig, timeout_s)


@contextlib.contextmanager
def agent_class(api: Any, watch: Watch) -> Iterator[None]:
    """Let `elastic_launch` use an agent that asks `watch` before it restarts.

    torchelastic has no hook for this; its agent class is replaced in the one module that makes it.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

    base = api.LocalElasticAgent

    class Agent(base):  # type: ignore[misc, valid-type]
        _remaining_restarts: int

        def __init__(self, spec: Any, *arguments: Any, **more: Any) -> None:
            watch.standbys.expect(spec)
            spec.rdzv_handler = watch.seated(spec.rdzv_handler)
            super().__init__(spec, *arguments, **more)

        def _start_workers(self, worker_group: Any) -> Any:
            with signals_wait():
                watch.starting(worker_group.group_rank)
                watch.survivors.first_rank = worker_group.workers[0].global_rank
            # A signal while a rank is started would leave it without a launcher: torchelastic
            # knows its ranks, and ends them, only behind this.
            with signals_wait(), _without_handlers():
                started = super()._start_workers(worker_group)
            self._heed()
            return started

        def _monitor_workers(self, worker_group: Any) -> Any:
            pids = self._pcontext.pids().values() if self._pcontext else ()
            _wait_for_end(pids, LOOK_S)
            ended = any(_status(pid) is not None for pid in pids)
            with signals_wait():
                watch.look(pids)
            self._ask_survivors(lambda handlers: watch.survivors.look(handlers, _has_ended))
            if watch.survivors.any and not ended:
                # A rank that dies now is met at the next tick: torchelastic would end the others.
                return self._stuck_in_kernel(worker_group) or RunResult(state=WorkerState.HEALTHY)
            result = super()._monitor_workers(worker_group)
            left = self._remaining_restarts
            with signals_wait():
                if result.is_failed() and not watch.goes_on(result.failures, left=left):
                    self._remaining_restarts = 0
                    watch.survivors.release()
                elif result.is_failed():
                    watch.survivors.say_reasons()
            return result

        def _stuck_in_kernel(self, worker_group: Any) -> Any:
            """torchelastic's own look at ranks that live (torch 2.13); None: it has found none."""
            check = getattr(self, "_check_uninterruptible_state_timeout", None)
            timeout_s = getattr(self, "_uninterruptible_state_timeout", 0)
            return check(worker_group, timeout_s) if check is not None and timeout_s > 0 else None

        def _restart_workers(self, worker_group: Any) -> None:
            if worker_group.state == WorkerState.HEALTHY:  # it begins on another node
                self._ask_survivors(watch.survivors.leave)
                watch.survivors.say_reasons()
            super()._restart_workers(worker_group)

        def _ask_survivors(self, ask: Callable[[dict[int, Any]], None]) -> None:
            """Signals are not held back: a survivor may need seconds."""
            handlers = getattr(self._pcontext, "subprocess_handlers", None)
            if not isinstance(handlers, dict):
                return  # there are no processes yet, or another version of torch
            try:
                ask(handlers)
            except api.SignalException:
                raise
            except Exception as error:
                watch.survivors.give_up(error)

        def _shutdown(self, death_sig: Any = signal.SIGTERM, **more: Any) -> None:
            ranks = self._pcontext
            if isinstance(sys.exc_info()[1], api.SignalException) and ranks is not None:
                # Here, as torch 2.11 hands no time on.
                ranks.close = _closing_within(watch.interrupted(int(death_sig)), ranks.close)
                watch.survivors.signal(int(death_sig))
            pids = () if ranks is None else tuple(ranks.pids().values())
            try:
                super()._shutdown(death_sig, **more)
            finally:
                own_group.end_workers(sessions=[pid for pid in pids if not is_alive(pid)])

        def _heed(self) -> None:
            """In place of torchelastic's handlers, which raise at every signal."""

            def raised(number: int) -> BaseException:
                text = f"process {os.getpid()} got signal {number}"
                return api.SignalException(text, sigval=signal.Signals(number))  # type: ignore[no-any-return]

            def kill() -> None:
                watch.hurried()
                kill_groups([*self._pcontext.pids().values(), *watch.survivors.pids])

            install(Announced(raised, kill).handle)

    api.LocalElasticAgent = Agent
    try:
        with watch.standbys.serving(), watch.survivors.serving():
            yield
    finally:
        api.LocalElasticAgent = base
