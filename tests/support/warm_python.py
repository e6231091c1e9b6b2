"""Python processes that begin with torch and autockpt imported: a start in milliseconds.

    with warm_starts():
        subprocess.run([sys.executable, "-m", "autockpt", "run", ...])

A process without threads, the nursery, has imported everything and forks.  What it forks becomes
what the command asks for: arguments, environment, directory, descriptors, signals, session, name in
the process table.  It is a child of the process that asked, which waits for it as for any other.
The process of a launcher, `autockpt` for one, has a nursery of its own, so that its ranks begin
warm too.

A command that this cannot imitate starts cold, as do all commands when the nursery has ended.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from autockpt.executors.keeper import launch
from autockpt.launch.standby.parked import READ_BY_LIBRARIES
from tests.jobs.kill import forked_keepers

ROOT = Path(__file__).resolve().parents[2]
ROOM = 8192
"""Bytes that the command line of a nursery leaves for that of a process it forks."""
IMPORTED = (
    "torch._dynamo", "torch.distributed.run", "torch.utils.data", "autockpt.api",
    "autockpt.cli.app", "autockpt.cli.jobs.run", "autockpt.launch.elastic.agent",
    "autockpt.launch.elastic.torchelastic", "autockpt.session.job",
    "autockpt.session.tuning.autotuner", "autockpt.session.session", "autockpt.cli.jobs.outcome",
    "autockpt.policies.policy_file", "autockpt.reports.model", "autockpt.reports.html",
    "autockpt.executors.keeper.__main__",
)  # fmt: skip
LAUNCHERS = ("autockpt", "torch.distributed.run", "tests.campaigns")
"""Modules whose processes start Python processes themselves."""
THREADS = "OMP_NUM_THREADS"
"""Read when torch is loaded, and can be set later."""
UNBUFFERED = "PYTHONUNBUFFERED"
READ_LATER = (THREADS, UNBUFFERED, "TORCH_NCCL_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
"""Beginnings of variables that are read when something begins, not when a library is loaded."""
HELD = 990
"""Descriptor of the socket to the nursery of a process that has one."""
FIRST_SPARE = 1000
"""Descriptors from here on are used while others are put in place."""
_SET_CHILD_SUBREAPER, _SET_PDEATHSIG = 36, 1
_libc = ctypes.CDLL(None)
_Order = tuple[dict[str, Any], list[int]]
"""What is asked for, with the descriptors that go with it."""


# --- who asks ------------------------------------------------------------------------------------


class Nursery:
    """The end of a nursery that asks for processes; it belongs to one process."""

    def __init__(self, sock: socket.socket, environment: Mapping[str, str]) -> None:
        self._sock, self._read_once = sock, _read_once(environment)
        self._owner, self._lock = os.getpid(), threading.Lock()
        self.started = 0

    def start(self, settings: Mapping[str, Any]) -> int | None:
        """Process id of what these arguments of `Popen._execute_child` ask for; None: start it
        cold."""
        order = self._order(settings)
        if order is None:
            return None
        outputs = zip((0, 1, 2), ("p2cread", "c2pwrite", "errwrite"), strict=True)
        given = [settings[name] if settings[name] != -1 else number for number, name in outputs]
        given += settings["pass_fds"]
        with self._lock:
            # A process whose parent ends becomes a child of this one: that is how it gets here.
            _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                _send(self._sock, order, given)
                answer = _receive(self._sock)
            except OSError:
                answer = None
            except BaseException:
                self.close()  # an answer may still come
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if answer is None:
            self.close()
            return None
        self.started += 1
        return int(answer[0]["pid"])

    def _order(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        words = settings["args"]
        if isinstance(words, str | bytes | os.PathLike) or os.getpid() != self._owner:
            return None
        words = [os.fsdecode(word) for word in words]
        unusual = (
            settings["shell"], settings["preexec_fn"], settings["uid"], settings["gid"],
            settings["gids"], settings["executable"] not in (None, sys.executable),
            words[0] != sys.executable, settings["umask"] != -1,
            settings.get("process_group", -1) not in (-1, None), not settings["close_fds"],
            sum(map(len, words)) + len(words) > ROOM,
        )  # fmt: skip
        env = settings["env"]
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (env or os.environ).items()}
        if any(unusual) or _read_once(environment) != self._read_once:
            return None
        threads = environment.get(THREADS, "")
        if "AUTOCKPT_STANDBY" in environment or not (not threads or threads.isdecimal()):
            return None
        program = Program.of(words)
        cwd = os.path.abspath(os.fsdecode(settings["cwd"] or os.getcwd()))
        if program is None or not os.path.isdir(cwd):
            return None
        ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
        return {
            "words": words, "environment": environment, "cwd": cwd,
            "pass_fds": list(settings["pass_fds"]),
            "new_session": bool(settings["start_new_session"]),
            "group": os.getpgrp(), "ignored": [int(number) for number in ignored],
            "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "umask": _umask(),
        }  # fmt: skip

    def close(self) -> None:
        """The nursery ends; what it has started goes on."""
        self._sock.close()


@contextlib.contextmanager
def warm_starts(nursery: Nursery) -> Iterator[None]:
    """As long as it lasts, `subprocess` of this process starts Python from the nursery."""
    cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _warm_or(cold, nursery)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = cold  # type: ignore[attr-defined]


def _warm_or(cold: Callable[..., None], nursery: Nursery) -> Callable[..., None]:
    signature = inspect.signature(cold)

    @functools.wraps(cold)  # so that one within another finds the names of arguments
    def execute_child(popen: Any, *given: Any) -> None:
        settings = signature.bind(popen, *given).arguments
        pid = nursery.start(settings)
        if pid is None:
            return cold(popen, *given)
        popen.pid, popen._child_created = pid, True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(settings[name] for name in names))
        return None

    return execute_child


@contextlib.contextmanager
def nursery(environment: Mapping[str, str]) -> Iterator[Nursery]:
    """A nursery for this process; what it starts may have another environment, except for what
    libraries read when they are loaded."""
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "tests.support.warm_python", str(there.fileno()), " " * ROOM]
    with here, there:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environment, cwd=ROOT
        )
        there.close()
        asking = Nursery(here, environment)
        try:
            yield asking
        finally:
            asking.close()
            process.wait(timeout=60)


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that matter when libraries are loaded."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_BY_LIBRARIES) and not name.startswith(READ_LATER)
    }


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("the kernel tells no umask")


# --- what is started -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What follows `python` on a command line."""

    kind: str
    """module, code or script."""
    target: str
    arguments: list[str] = field(default_factory=list)
    unbuffered: bool = False

    @classmethod
    def of(cls, words: list[str]) -> "Program | None":
        """None for options of the interpreter that this does not imitate."""
        rest, unbuffered = words[1:], False
        if rest[:1] == ["-u"]:
            rest, unbuffered = rest[1:], True
        kind = {"-m": "module", "-c": "code"}.get(rest[0] if rest else "-", "script")
        if kind != "script":
            rest = rest[1:]
        if not rest or (kind == "script" and not os.path.basename(rest[0]).endswith(".py")):
            return None
        return cls(kind=kind, target=rest[0], arguments=rest[1:], unbuffered=unbuffered)

    def run(self) -> None:
        """As the interpreter would, in a new `__main__`."""
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=__builtins__, __annotations__={})
        _kept.append(sys.modules["__main__"])  # what runs now belongs to it
        sys.modules["__main__"] = main
        if self.kind == "module":
            sys.argv, sys.path[0] = ["-m", *self.arguments], os.getcwd()
            module = sys.modules.get(self.target)
            if module is not None and not hasattr(module, "__path__"):
                del sys.modules[self.target]
            runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]
        elif self.kind == "code":
            sys.argv, sys.path[0] = ["-c", *self.arguments], ""
            exec(compile(self.target, "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.argv = [self.target, *self.arguments]
            sys.path[0] = os.path.dirname(os.path.realpath(self.target))
            file = os.path.abspath(self.target)
            loader = SourceFileLoader("__main__", file)
            main.__dict__.update(__file__=file, __loader__=loader, __cached__=None)
            code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
            exec(code, main.__dict__)


_kept: list[Any] = []


def _join(order: dict[str, Any]) -> None:
    """Its session and process group."""
    if order["new_session"]:
        if os.getsid(0) != os.getpid():
            os.setsid()
    elif os.getpgrp() != order["group"]:
        with contextlib.suppress(OSError):
            os.setpgid(0, order["group"])


def _become(order: dict[str, Any], descriptors: list[int], more: list[int]) -> Program:
    """Makes this process, which was just forked, the one that the order describes.

    `more`: numbers of descriptors that are no part of the order.
    """
    _place(descriptors, [0, 1, 2, *order["pass_fds"], *more])
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # found in the environment, and remembered
    words = order["words"]
    _show(words)
    program = Program.of(words)
    assert program is not None
    sys.orig_argv = words
    _open_streams(unbuffered=program.unbuffered or bool(order["environment"].get(UNBUFFERED)))
    sys.modules["numpy"].random.seed()  # each process draws numbers of its own
    sys.modules["torch"].seed()
    threads = order["environment"].get(THREADS)
    if threads:
        sys.modules["torch"].set_num_threads(int(threads))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler: Any = signal.SIG_DFL
        if number in order["ignored"] or number in (signal.SIGPIPE, signal.SIGXFSZ):
            handler = signal.SIG_IGN
        elif number == signal.SIGINT:
            handler = signal.default_int_handler
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    return program


def _place(sources: list[int], targets: list[int]) -> None:
    """Gives descriptors their numbers and closes all others."""
    import fcntl

    spare = [fcntl.fcntl(source, fcntl.F_DUPFD, FIRST_SPARE) for source in sources]
    os.closerange(0, FIRST_SPARE)
    for source, target in zip(spare, targets, strict=True):
        os.dup2(source, target)
    os.closerange(FIRST_SPARE, max(spare) + 1)


def _open_streams(*, unbuffered: bool) -> None:
    """sys.stdin, stdout and stderr as the interpreter opens them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        if not number:
            raw: Any = open(number, "rb", closefd=False)  # noqa: SIM115
        else:
            raw = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw, encoding=before.encoding, errors=before.errors, write_through=unbuffered,
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
        )  # fmt: skip
        stream.mode = "r" if not number else "w"
        for whole in (name, f"__{name}__"):
            setattr(sys, whole, stream)


def _show(words: list[str]) -> None:
    """In the process table."""
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, stop = int(stat[45]), int(stat[46])
    text = b"\0".join(os.fsencode(word) for word in words) + b"\0"
    ctypes.memmove(start, text.ljust(stop - start, b"\0"), stop - start)


# --- the nursery itself --------------------------------------------------------------------------


def _serve(sock: socket.socket, keepers: "forked_keepers.Nursery | None" = None) -> _Order:
    """Forks on demand.  Returns in what it has forked; ends the process when nobody asks any
    more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    while True:
        ready = select.select([sock, *filter(None, [keepers])], [], [])[0]
        if keepers is not None and keepers in ready:
            keepers.serve()
        if sock not in ready:
            continue
        asked = _receive(sock)
        if asked is None:
            os._exit(0)
        descriptors = asked[1]
        told, go = os.pipe(), os.pipe()
        middle = os.fork()
        if not middle:
            child = os.fork()
            if child:
                os.write(told[1], str(child).encode())
                os._exit(0)
            os.close(go[1])
            os.read(go[0], 1)  # ends when the one in the middle has
            # Descriptors are closed by number soon.  An object that still holds one would close
            # the number once more when it goes, and by then a file of the program has it.
            sock.detach()
            if keepers is not None:
                keepers.forget()
            return asked
        os.close(told[1])
        os.waitpid(middle, 0)
        _send(sock, {"pid": int(os.read(told[0], 64))})
        for number in (told[0], *go, *descriptors):
            os.close(number)


def main() -> None:
    """Imports, then forks on demand; returns when what was forked has run its program."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    if not os.fork():  # OpenBLAS ends its threads before a fork, and begins them anew when used
        os._exit(0)
    os.wait()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    environment = dict(os.environ)
    keepers = forked_keepers.Nursery()
    path = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    launch.subprocess = forked_keepers.Forking(keepers.name, path)  # type: ignore[attr-defined, assignment]
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of what is here
    order, descriptors = _serve(sock, keepers)
    asking = None
    while asking is None and _is_launcher(order):
        _join(order)
        asking, there = socket.socketpair()
        if not os.fork():
            nothing = os.open(os.devnull, os.O_RDWR)
            _place([nothing] * 3 + [there.detach()], [0, 1, 2, HELD])
            asking, order, descriptors = None, *_serve(socket.socket(fileno=HELD))
    _join(order)
    held = [] if asking is None else [asking.detach()]
    program = _become(order, [*descriptors, *held], [HELD] * len(held))
    if held:
        nursery = Nursery(socket.socket(fileno=HELD), environment)
        cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        subprocess.Popen._execute_child = _warm_or(cold, nursery)  # type: ignore[attr-defined]
    try:
        program.run()
    except Exception as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)


def _is_launcher(order: dict[str, Any]) -> bool:
    program = Program.of(order["words"])
    return program is not None and program.kind == "module" and program.target in LAUNCHERS


def _send(sock: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    body = json.dumps(message).encode()
    socket.send_fds(sock, [len(body).to_bytes(4, "big")], descriptors)
    sock.sendall(body)


def _receive(sock: socket.socket) -> _Order | None:
    """One message with its descriptors; None: the other end has gone."""
    head, descriptors, _, _ = socket.recv_fds(sock, 4, 32)
    missing = int.from_bytes(head, "big")
    body = b""
    while missing and (part := sock.recv(missing)):
        body, missing = body + part, missing - len(part)
    return None if missing or not body else (json.loads(body), list(descriptors))


if __name__ == "__main__":
    main()
