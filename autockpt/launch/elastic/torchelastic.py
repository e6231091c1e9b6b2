"""Starts the ranks of this node through torchelastic, in this process, and restarts them.

torchelastic (torchrun's own agent) does the work: rendezvous, processes, monitoring, signals.  This
module adds the boot module as the entry point, the contract in the environment, and one log file
per rank.  It also decides whether a failure is worth another start (`crash_loop`).
"""

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from autockpt import new_files
from autockpt.console import Console
from autockpt.executors.linux import memcpy_threshold
from autockpt.launch import environment
from autockpt.launch.elastic import compiled_code
from autockpt.launch.elastic.agent import Watch, agent_class, times_now
from autockpt.launch.elastic.crash_loop import MAX_RESTARTS
from autockpt.launch.elastic.news import News
from autockpt.launch.elastic.rank_output import OutputFiles
from autockpt.launch.elastic.rendezvous.membership import NotNeeded
from autockpt.launch.elastic.rendezvous.polls import liveliness, quick_rendezvous
from autockpt.launch.elastic.request import Ending, Launch, Limit
from autockpt.launch.elastic.signals import Interrupted, heeded, install, interrupt, signals_raise
from autockpt.launch.sidecars.keeper import KeeperBeside
from autockpt.profiles.probes.copies import copy_gain
from autockpt.values.errors import ConfigError, LostNodesError

PAUSE_S = 0.001
"""Of torchelastic between two looks at the ranks: the agent itself waits until one has ended."""


def launch(request: Launch, console: Console) -> Ending:
    """Run the job to its end, with a keeper beside it.  Raises ConfigError for bad settings."""
    keeper, ending = KeeperBeside(request.run, console), None
    news = News(request.run, console)
    with signals_raise():
        try:
            if request.mode == "run" and request.single_node:
                keeper.start(0)  # boots while torch is imported here
            ending = _launch(request, console, keeper, news)
        except Interrupted as interrupted:
            times = times_now(request.notice_s)
            ending = Ending(
                state="interrupted",
                exit_code=128 + interrupted.number,
                restarts=0,
                reason=f"{interrupted} before the training began",
                limit=Limit(
                    by_s=time.monotonic() + times.over_s, exit_code=128 + interrupted.number
                ),
                keeper_by_s=time.monotonic() + times.keeper_s,
            )
        finally:
            install(interrupt)
            node = keeper.node
            # A signal that comes now ends only the waiting: how the job ended is known.
            with contextlib.suppress(Interrupted):
                keeper.release(None if ending is None else ending.keeper_by_s)
            if request.mode == "run":
                with contextlib.suppress(Interrupted):
                    news.look(node, last=True)
        return ending


def _launch(request: Launch, console: Console, keeper: KeeperBeside, news: News) -> Ending:
    os.environ.update(_variables(request))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher import api

    _log_torchelastic(request.run.logs / "launcher.log", console)
    watch = Watch(request, console, keeper, news)
    config = _config(request, watch.outputs)
    command = ["-u", "-m", "autockpt.cli.script_runner", *(["-m"] if request.script.module else [])]
    # torchelastic fills in ${local_rank}: what the user wrote must come out as it was written.
    users = [text.replace("$", "$$") for text in (request.script.target, *request.script.args)]
    polls = quick_rendezvous(config.max_nodes)
    with agent_class(api, watch), polls, _stdout_to_stderr(console.json):
        try:
            api.elastic_launch(config, sys.executable)(*command, *users)
        except ChildFailedError as failed:
            return watch.failed(failed.failures)
        except NotNeeded:
            return Ending(state="finished", exit_code=0, restarts=0, joined=False)
        except RendezvousError as error:
            raise LostNodesError(_not_met(config, error)) from error
        except SignalException as ended:
            number = int(ended.sigval)
            return Ending(
                state="interrupted",
                exit_code=128 + number,
                restarts=watch.restarts,
                reason=f"the launcher received {signal.Signals(number).name}",
                limit=watch.limit,
                keeper_by_s=watch.keeper_by_s,
            )
    return Ending(state="finished", exit_code=0, restarts=watch.restarts)


def _not_met(config: Any, error: Exception) -> str:
    """Which nodes did not meet where, and what to look at."""
    why = " ".join(f"{type(error).__name__} {error}".split()).rstrip(".")
    return (
        f"the nodes of this job did not meet, or meet no longer, at {config.rdzv_endpoint}: {why}"
        ".  A node never came; or the launcher there has ended, and its own output says why; or "
        "another program has that port: name a free one with --rdzv-endpoint"
    )


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
    if request.mode == "run":
        variables |= compiled_code.chosen(
            request.caches, request.run.caches, os.environ, single_node=request.single_node
        )
    gain = partial(copy_gain, piece_bytes=memcpy_threshold.PIECE_BYTES)
    return variables | memcpy_threshold.chosen(os.environ, gain)


def _config(request: Launch, outputs: OutputFiles) -> Any:
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
    elif request.rdzv_backend == "c10d":
        settings = {**liveliness(high), **settings}
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
        monitor_interval=PAUSE_S,
        local_addr=request.local_addr,
        signals_to_handle=",".join(signal.Signals(number).name for number in heeded()),
        logs_specs=outputs.specs(),
    )


def _max_restarts(request: Launch) -> int:
    if request.mode == "profile":
        return 0
    return MAX_RESTARTS if request.max_restarts is None else request.max_restarts


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


class _LogFile(logging.FileHandler):
    """A log that its owner alone reads; a disk that takes nothing loses lines, and ends nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        """As of a FileHandler."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for each line."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding="utf-8", opener=new_files.private)


def _log_torchelastic(path: Path, console: Console) -> None:
    """Send torchelastic's log to a file, and to the terminal with -vv, without its heartbeats.

    Its loggers take their level from LOGLEVEL when imported; the ranks must not inherit ours.
    """
    handlers: list[logging.Handler] = []
    with contextlib.suppress(OSError):
        handlers.append(_LogFile(path, delay=True))
    if console.verbosity >= 2:
        handlers.append(logging.StreamHandler())
        handlers[-1].setLevel(logging.INFO)
    parent = logging.getLogger("torch.distributed")
    parent.propagate = False
    parent.handlers = handlers or [logging.NullHandler()]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logging.DEBUG if console.verbosity >= 2 else logging.INFO
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(level)
