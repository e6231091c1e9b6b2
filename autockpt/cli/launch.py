"""Starts the ranks of this node through torchelastic, in this process, and restarts them.

torchelastic (torchrun's own agent) does the work: rendezvous, processes, monitoring, signals.  Ours
are the boot module as the entry point, the contract in the environment, one log file per rank, and
the verdict whether a failure is worth another start (`crash_loop`).
"""

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from autockpt.cli import environment
from autockpt.cli.console import Console
from autockpt.cli.crash_loop import MAX_RESTARTS, Attempt, CrashLoop
from autockpt.cli.options import Script
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import ConfigError

MONITOR_S = 0.1
"""How often the agent looks at its ranks."""
REPLACED = 75
"""Exit code of a rank that a newer incarnation has fenced off."""
SHOWN_LINES = 200
"""Of the log of a rank whose output did not go to the terminal, when it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start."""

    run: RunDirectory
    script: Script
    mode: Literal["run", "profile"]
    nproc_per_node: str = "1"
    nnodes: str = "1"
    node_rank: int = 0
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rdzv_conf: str = ""
    local_addr: str | None = None
    max_restarts: int | None = None
    resume_from: str | None = None
    fresh: bool = False
    profile_in_place: bool = True

    @property
    def single_node(self) -> bool:
        """Whether no other node takes part."""
        return self.nnodes in ("1", "1:1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the job ended."""

    state: Literal["finished", "failed", "interrupted"]
    exit_code: int
    restarts: int
    reason: str = ""


class Interrupted(BaseException):
    """A signal arrived while nothing of torchelastic was there to forward it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def launch(request: Launch, console: Console) -> Ending:
    """Run the job to its end, with a keeper beside it.  Raises ConfigError for bad settings."""
    keeper = _Keeper(request, console)
    with _signals_raise():
        try:
            if request.mode == "run" and request.single_node:
                keeper.start(0)  # boots while torch is imported here
            return _launch(request, console, keeper)
        except Interrupted as interrupted:
            return Ending(
                state="interrupted",
                exit_code=128 + interrupted.number,
                restarts=0,
                reason=f"{interrupted} before the training began",
            )
        finally:
            _install(_interrupt)
            keeper.release()


def _launch(request: Launch, console: Console, keeper: "_Keeper") -> Ending:
    os.environ.update(_variables(request))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    _log_torchelastic(request.run.logs / "launcher.log", console)
    config = _config(request)
    watch = _Watch(request, console, keeper)
    command = ["-u", "-m", "autockpt.cli.boot", *(["-m"] if request.script.module else [])]
    # torchelastic fills in ${local_rank}: what the user wrote must come out as it was written.
    users = [text.replace("$", "$$") for text in (request.script.target, *request.script.args)]
    with _agent_class(api, watch), _stdout_to_stderr(console.json):
        try:
            api.elastic_launch(config, sys.executable)(*command, *users)
        except ChildFailedError as failed:
            return watch.failed(failed.failures)
        except SignalException as ended:
            number = int(ended.sigval)
            return Ending(
                state="interrupted",
                exit_code=128 + number,
                restarts=watch.restarts,
                reason=f"the launcher received {signal.Signals(number).name}",
            )
    return Ending(state="finished", exit_code=0, restarts=watch.restarts)


def _variables(request: Launch) -> dict[str, str]:
    for name in environment.ALL:
        os.environ.pop(name, None)
    variables = environment.contract(
        run_dir=str(request.run.path),
        mode=request.mode,
        launch_id=secrets.token_hex(8),
        launcher_pid=os.getpid(),
        resume_from=request.resume_from,
        fresh=request.fresh,
        profile_in_place=request.profile_in_place,
    )
    # torch 2.13: restarted ranks read the dead attempt's addresses from the store they share with
    # the agent; 8 of 11 restarts failed with gloo, 0 of 10 with this.
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


def _config(request: Launch) -> Any:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        ranks = determine_local_world_size(request.nproc_per_node)
        low, high = parse_min_max_nnodes(request.nnodes)
        settings: dict[str, Any] = dict(_parse_rendezvous_config(request.rdzv_conf))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--nproc-per-node, --nnodes or --rdzv-conf: {error}") from None
    if ranks < 1 or not 1 <= low <= high:
        raise ConfigError(f"{ranks} ranks on {request.nnodes} nodes: both must be at least 1")
    if not request.single_node and not request.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {request.nnodes}: nodes need a place to meet; "
            "add --rdzv-endpoint HOST:PORT and the same --rdzv-id on every node"
        )
    if request.rdzv_backend == "static":
        settings["rank"] = request.node_rank
    if ranks > 1:
        # As torchrun does: without it every rank starts a thread per core.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=ranks,
        run_id=request.rdzv_id or secrets.token_hex(8),
        role="trainer",
        rdzv_endpoint=request.rdzv_endpoint or "localhost:0",
        rdzv_backend=request.rdzv_backend,
        rdzv_configs=settings,
        max_restarts=_max_restarts(request),
        monitor_interval=MONITOR_S,
        local_addr=request.local_addr,
        logs_specs=_logs(request.run.logs),
    )


def _max_restarts(request: Launch) -> int:
    if request.mode == "profile":
        return 0
    return MAX_RESTARTS if request.max_restarts is None else request.max_restarts


def _logs(directory: Path) -> Any:
    """Local rank 0 speaks on the terminal, every other rank into two files per attempt."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    started = time.strftime("%Y%m%d-%H%M%S")

    class RankLogs(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(directory)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            destination = LogsDest()
            for local, variables in envs.items():
                count = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
                attempt = directory / f"{started}-attempt-{int(count):03d}"
                attempt.mkdir(parents=True, exist_ok=True)
                name = attempt / f"rank-{int(variables['RANK']):05d}"
                destination.stdouts[local] = f"{name}.out" if local else ""
                destination.stderrs[local] = f"{name}.err" if local else ""
                destination.error_files[local] = f"{name}.error.json"
                variables["TORCHELASTIC_ERROR_FILE"] = f"{name}.error.json"
                # After a change of membership the same attempt number starts again.
                Path(f"{name}.error.json").unlink(missing_ok=True)
            return destination

    return RankLogs(log_dir=str(directory))


class _Watch:
    """What the agent asks us: is this failure worth another start?"""

    def __init__(self, request: Launch, console: Console, keeper: "_Keeper") -> None:
        run = request.run
        self._request = request
        self._console = console
        self._keeper = keeper
        self._began_s = time.monotonic()
        self._reason = ""
        self._told: int | None = None
        self.restarts = 0
        self._loop = CrashLoop(
            step=run.newest_step(),
            generation=run.newest_generation(),
            insist=request.max_restarts is not None,
        )

    def starting(self, node: int) -> None:
        """The agent is about to start the ranks of this node."""
        self._began_s = time.monotonic()
        if self._request.mode == "run" and not self._keeper.started:
            self._keeper.start(node)

    def goes_on(self, failures: dict[int, Any], *, left: int) -> bool:
        """Whether to start again after these failures (by rank); says what happened."""
        run = self._request.run
        rank, failure = _root_cause(failures)
        step = run.newest_step()
        self._show_log(rank, failure)
        if self._request.mode == "profile":
            return False
        verdict = self._loop.verdict(
            Attempt(
                signal=max(0, -failure.exitcode),
                final=bool(failure.error_file_data.get("autockpt", {}).get("final")),
                attached=run.attached,
                lasted_s=time.monotonic() - self._began_s,
                step=step,
                generation=run.newest_generation(),
                # Between nodes it is how one launcher makes the others restart.
                replaced=failure.exitcode == REPLACED and self._request.single_node,
            )
        )
        what = f"rank {rank} {_ended(failure.exitcode)}" + (f" at step {step}" if step else "")
        if verdict is None and left > 0:
            self.restarts += 1
            self._console.say(f"{what}; restarting this node's ranks (restart {self.restarts})")
            return True
        self._reason = f"{what}: {verdict or f'{self.restarts} restarts used up'}"
        return False

    def interrupted(self, number: int, timeout_s: int) -> None:
        """A signal is being forwarded to the ranks."""
        name = signal.Signals(number).name
        self._console.say(
            f"{name}: told the ranks to save and leave (up to {timeout_s} s; "
            "a second signal ends them at once)"
        )

    def failed(self, failures: dict[int, Any]) -> Ending:
        """The ending after the last failure."""
        rank, failure = _root_cause(failures)
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        reason = self._reason or f"rank {rank} {_ended(failure.exitcode)}"
        return Ending(state="failed", exit_code=code, restarts=self.restarts, reason=reason)

    def _show_log(self, rank: int, failure: Any) -> None:
        """The end of the log of a rank whose output did not go to the terminal."""
        if failure.local_rank == 0 or failure.exitcode < 0:
            return
        logs = sorted(self._request.run.logs.glob(f"*-attempt-*/rank-{rank:05d}.err"))
        if not logs:
            return
        lines = logs[-1].read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        self._console.say(f"rank {rank} {_ended(failure.exitcode)}; its log ({logs[-1]}) ends:")
        print("\n".join(lines), file=sys.stderr, flush=True)


def _root_cause(failures: dict[int, Any]) -> tuple[int, Any]:
    """(rank, failure) of what happened first: deaths by a signal take the other ranks with them.

    SIGTERM is what the agent itself sends to the rest.
    """

    def order(entry: tuple[int, Any]) -> tuple[int, float, int]:
        rank, failure = entry
        killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        stopped = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        at = failure.error_file_data.get("autockpt", {}).get("at", failure.timestamp)
        return (0 if killed else 2 if stopped else 1, float(at), rank)

    return min(failures.items(), key=order)


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


@contextlib.contextmanager
def _agent_class(api: Any, watch: _Watch) -> Iterator[None]:
    """Let `elastic_launch` use an agent that asks `watch` before it restarts.

    torchelastic has no hook for this; its agent class is replaced in the one module that makes it.
    """
    base = api.LocalElasticAgent

    class Agent(base):  # type: ignore[misc, valid-type]
        _remaining_restarts: int

        def _start_workers(self, worker_group: Any) -> Any:
            watch.starting(worker_group.group_rank)
            return super()._start_workers(worker_group)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            left = self._remaining_restarts
            if result.is_failed() and not watch.goes_on(result.failures, left=left):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = 30) -> None:
            if isinstance(sys.exc_info()[1], api.SignalException) and self._pcontext is not None:
                watch.interrupted(int(death_sig), timeout)
                _second_signal_kills(lambda: list(self._pcontext.pids().values()))
            super()._shutdown(death_sig, timeout)

    api.LocalElasticAgent = Agent
    try:
        yield
    finally:
        api.LocalElasticAgent = base


def _second_signal_kills(pids: Callable[[], list[int]]) -> None:
    """From now on a signal to the launcher kills the ranks instead of waiting for them."""

    def kill(number: int, frame: FrameType | None) -> None:
        for pid in pids():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    _install(kill)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def _install(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Handle the signals that end a job; returns what handled them before."""
    return {number: signal.signal(number, handler) for number in _SIGNALS}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Before torchelastic has its handlers and after it, signals raise Interrupted."""
    before = _install(_interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Keeper:
    """The keeper of this node, as far as the launcher goes; the training never fails for it."""

    def __init__(self, request: Launch, console: Console) -> None:
        self._run = request.run
        self._console = console
        self._node: int | None = None

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._node is not None

    def start(self, node: int) -> None:
        """Make sure a keeper runs."""
        self._node = node
        try:
            from autockpt.executors.keeper.launch import ensure_keeper

            checkpoints = str(self._run.checkpoints())
            ensure_keeper(str(self._run.path), node, checkpoints=checkpoints)
        except Exception as error:
            self._console.warn(
                f"the keeper did not start ({error}); attach tries again, and the training goes on "
                "without protection if that fails too"
            )

    def release(self) -> None:
        """Tell it to leave when everything is on disk, and wait for that."""
        if self._node is None:
            return
        try:
            from autockpt.executors.keeper.launch import release_keeper

            release_keeper(str(self._run.path), self._node)
        except Interrupted as interrupted:
            self._console.warn(f"{interrupted}: not waiting for the keeper; it finishes by itself")
        except Exception as error:
            self._console.warn(f"the keeper could not be told to leave: {error}")


@contextlib.contextmanager
def _stdout_to_stderr(wanted: bool) -> Iterator[None]:
    """With --json the ranks' output goes to stderr: stdout holds one object."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _log_torchelastic(path: Path, console: Console) -> None:
    """What torchelastic says goes to a file, and to the terminal with -v.

    Its loggers take their level from LOGLEVEL when imported; the ranks must not inherit ours.
    """
    handlers: list[logging.Handler] = []
    with contextlib.suppress(OSError):
        handlers.append(logging.FileHandler(path, delay=True))
    if console.verbosity >= 1:
        handlers.append(logging.StreamHandler())
    parent = logging.getLogger("torch.distributed")
    parent.propagate = False
    parent.handlers = handlers or [logging.NullHandler()]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logging.DEBUG if console.verbosity >= 2 else logging.INFO
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(level)
