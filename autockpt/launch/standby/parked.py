"""The parked process: it imports what a rank did, waits, and becomes the next rank.

It is started with the rank's own command line and environment, by the same launcher, so that
parent, session and exit code are a rank's.  Orders come over a socket, with the descriptors of the
output.  Before it becomes a rank it looks for differences from a fresh process.  If there are any
it refuses, and the launcher starts a fresh one.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from autockpt.launch import owner, startup_timing
from autockpt.launch.standby import imports, twin
from autockpt.launch.standby.channel import Channel

VARIABLE = "AUTOCKPT_STANDBY"
"""Descriptor of the socket on which a process with this variable is given its order."""
TITLE = "autockpt: standby for a restart"
IMPORTING = f"{TITLE}, importing"
REST_SHARE = 0.5
"""The share of its import time that it sleeps until it is wanted: the cores are the training's."""
PER_START = frozenset((
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
))  # fmt: skip
"""Variables that may differ from one start to the next, with all of ours and torchelastic's."""
READ_BY_LIBRARIES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "PYTORCH_", "TORCH_", "LD_", "MALLOC_",
    "PYTHON",
)  # fmt: skip
"""Beginnings of variables that are read in C, where no hook sees it."""


class Refusal(Exception):
    """Why this process cannot take a rank's place."""


def become_rank(descriptor: int) -> None:
    """Imports, waits for the order, and returns as the process that the order describes.

    Ends the process when the launcher has gone, or after a refusal.
    """
    parent = os.environ.get("AUTOCKPT_LAUNCHER_PID", "")
    if parent.isdecimal():
        owner.end_with(int(parent), signal.SIGKILL)
    with contextlib.suppress(OSError):  # the first to go when memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    launcher = Channel(socket.socket(fileno=descriptor))
    title, environment = _Title(), _given_environment()
    title.show(IMPORTING)
    orders = _Orders(launcher)
    known, path0 = orders.next()[0], sys.path[0]
    captured, world = _Captured(), _World(environment)
    try:
        with captured, world.watched(orders):
            sys.path[0] = known["path0"]
            world.load(known["modules"])
            sys.path[0] = path0
        world.require_clean(known["changed"])
        title.show(TITLE)
        launcher.send({"ready": True})
        order, descriptors = orders.next()
        while "twin_of" in order:
            launcher = _make_twin(launcher, world, order, descriptors)
            orders = _Orders(launcher)
            order, descriptors = orders.next()
        world.require_same(order["environment"])
    except Refusal as refusal:
        launcher.send({"refused": str(refusal)})
        _leave()
    except OSError:
        _leave()
    launcher.send({"taken": True})
    launcher.close()
    world.restore(order["environment"])
    for source, target in zip(descriptors, (1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    captured.replay()
    title.restore()
    gc.unfreeze()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(order["oom_score_adj"])
    startup_timing.reborn()


def _make_twin(
    launcher: Channel, world: "_World", order: Mapping[str, Any], descriptors: list[int]
) -> Channel:
    """Forks a twin for another rank; each of the two returns with its own connection."""
    its = Channel(socket.socket(fileno=descriptors[0]))
    try:
        world.require_same(order["environment"])
        reason = twin.obstacle({launcher.fileno(), its.fileno()})
    except Refusal as refusal:
        reason = str(refusal)
    if not reason and twin.fork(order["twin_of"]):
        launcher.leave()
        its.send({"ready": True, "pid": os.getpid()})
        return its
    its.leave()
    launcher.send({"no_twin": reason})
    return launcher


def _is_per_start(name: str) -> bool:
    """Whether a variable may differ from one start to the next."""
    return name in PER_START or name.startswith(("AUTOCKPT_", "TORCHELASTIC_"))


class _World:
    """The environment that importing has read and changed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._before = environment
        self._read: set[str] = set()
        self._set: dict[str, str | None] = {}
        self._files: dict[str, imports.Stamp | None] = {}
        self._problem = ""
        self._random: bytes | None = None
        """State of torch's generator, which every process seeds anew."""

    @contextlib.contextmanager
    def watched(self, orders: "_Orders") -> Iterator[None]:
        """Notes which variables are read, and rests between modules until the order comes."""
        read, kind, names = self._read, type(os.environ), deque[str]()

        class Watched(kind):  # type: ignore[misc, valid-type]
            def __getitem__(self, key: Any) -> Any:
                # A copy of everything (fsspec makes one) has names that are no library's, too.
                is_copied = bool(names) and names.popleft() == key
                if not is_copied:
                    names.clear()
                if not (is_copied and _is_per_start(key)):
                    read.add(key)
                return super().__getitem__(key)

            def __iter__(self) -> Iterator[str]:
                names.clear()
                for name in super().__iter__():
                    names.append(name)
                    yield name

            def items(self) -> Any:
                # Looked through for names with a prefix (tqdm does), which are the library's own.
                return dict(zip(self, map(super().__getitem__, self), strict=True)).items()

        rest = _Rest(orders)
        os.environ.__class__ = Watched
        sys.meta_path.insert(0, rest)
        try:
            yield
        finally:
            sys.meta_path.remove(rest)
            os.environ.__class__ = kind
        now = dict(os.environ)
        for name in self._before.keys() | now.keys():
            if self._before.get(name) != now.get(name):
                self._set[name] = now.get(name)

    def load(self, modules: Mapping[str, str]) -> None:
        """Imports the modules; one that cannot be imported alone is left to the script."""
        startup_timing.watch()
        for name in modules:
            if name in sys.modules:
                continue
            before = _devices()
            with contextlib.suppress(Exception):
                importlib.import_module(name)
            if _devices() - before and not self._problem:
                self._problem = f"importing {name} opens a device"
            if self._random is None and "torch" in sys.modules:
                self._random = _torch_random()
        for name, module in list(sys.modules.items()):
            file = imports.file_of(module)
            if not file or name == "__main__":
                continue
            if not imports.is_library(file):
                raise Refusal(f"a library imports the script's own {name} ({file})")
            if modules.get(name, file) != file:
                raise Refusal(f"{name} was {modules[name]}, and is {file} without the script")
            self._files[file] = imports.stamp(file)

    def require_clean(self, changed: list[str]) -> None:
        """Raises Refusal for any difference from a fresh process."""
        self._require_unread(changed)
        torch: Any = sys.modules.get("torch")
        if self._problem:
            raise Refusal(self._problem)
        if torch is not None:
            if torch.cuda.is_initialized():
                raise Refusal("an import has initialised CUDA")
            if self._random != _torch_random():
                raise Refusal("an import draws or seeds torch's random numbers")
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def _require_unread(self, changed: list[str]) -> None:
        """Raises Refusal for a variable that the script sets, where imports may read it."""
        for name in changed:
            if name in self._set:
                continue  # an import sets it
            if name in self._read or name.startswith(READ_BY_LIBRARIES):
                raise Refusal(f"the script sets {name}, which is read when libraries are imported")

    def require_same(self, environment: Mapping[str, str]) -> None:
        """Raises Refusal where a fresh process would import something else."""
        for name in sorted(self._before.keys() | environment.keys()):
            if self._before.get(name) == environment.get(name):
                continue
            if name in self._read or not _is_per_start(name):
                raise Refusal(f"{name} has changed, which libraries may read when imported")
        for file, stamp in self._files.items():
            if imports.stamp(file) != stamp:
                raise Refusal(f"{file} has changed since it was imported")

    def restore(self, environment: Mapping[str, str]) -> None:
        """Set the environment of the order, with the imports' changes."""
        os.environ.clear()
        os.environ.update(environment)
        for name, value in self._set.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Orders:
    """The messages of the launcher, one by one."""

    def __init__(self, launcher: Channel) -> None:
        self._launcher = launcher
        self._heard: list[dict[str, Any]] = []
        self._descriptors: list[int] = []

    def next(self) -> tuple[dict[str, Any], list[int]]:
        """One message and its descriptors; ends the process where the launcher has gone."""
        while not self._heard:
            heard = self._launcher.receive()
            if heard is None:
                _leave()
            self._heard, self._descriptors = heard
        message = self._heard.pop(0)
        return message, [] if self._heard else self._descriptors

    def is_next_there(self, wait_s: float) -> bool:
        """Whether there is a message, now or within so long."""
        return bool(self._heard) or self._launcher.is_ready(wait_s)


class _Rest:
    """A finder that finds nothing: it sleeps for a share of the time since it was asked last.

    The launcher's order ends the sleep, and there is none behind it.
    """

    def __init__(self, orders: "_Orders") -> None:
        self._orders = orders
        self._used_s = time.process_time()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Nothing; later."""
        used_s = time.process_time() - self._used_s
        self._orders.is_next_there(used_s * REST_SHARE / (1.0 - REST_SHARE))
        self._used_s += used_s


def _memory_file(name: str) -> int:
    """A file without a name; in memory, but for a Python that was built for old systems."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix=f"autockpt-{name}-")
    os.unlink(path)
    return descriptor


class _Captured:
    """Output of the imports, kept to be shown where and when a rank's would be."""

    def __init__(self) -> None:
        self._kept = [_memory_file(f"output-{number}") for number in (1, 2)]
        self._real = [os.dup(1), os.dup(2)]

    def __enter__(self) -> None:
        for number, descriptor in enumerate(self._kept, start=1):
            os.dup2(descriptor, number)

    def __exit__(self, *failure: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for number, descriptor in enumerate(self._real, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)

    def replay(self) -> None:
        """Writes it out."""
        for number, descriptor in enumerate(self._kept, start=1):
            place = 0  # twins have the descriptor in common
            with contextlib.suppress(OSError):
                while data := os.pread(descriptor, 65536, place):
                    place += os.write(number, data)
                os.close(descriptor)


class _Title:
    """The command line that `ps` shows."""

    def __init__(self) -> None:
        self._address, self._before = 0, b""
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
            begin, end = int(stat[45]), int(stat[46])
            shown = Path("/proc/self/cmdline").read_bytes()
            if begin and end - begin == len(shown):
                self._address, self._before = begin, shown

    def show(self, text: str) -> None:
        """Shows `text` instead."""
        room = len(self._before) - 1
        if room > 0:
            ctypes.memmove(self._address, text.encode()[:room].ljust(room + 1, b"\0"), room + 1)

    def restore(self) -> None:
        """Shows what it was started with."""
        if self._before:
            ctypes.memmove(self._address, self._before, len(self._before))


def _torch_random() -> bytes:
    torch: Any = sys.modules["torch"]
    return bytes(torch.get_rng_state().numpy().tobytes())


def _given_environment() -> dict[str, str]:
    """Return the environment at process start; the interpreter may have set its locale since."""
    rows = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(row).partition("=") for row in rows if row)
    return {name: value for name, _, value in pairs if name != VARIABLE}


def _devices() -> set[str]:
    """Files of accelerators that this process holds open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {path for path in found if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/"))}


def _leave() -> NoReturn:
    os._exit(0)
