"""A parked process imports, waits, and becomes a rank that nobody can tell from a fresh one."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autockpt.launch.standby import imports, parked, twin
from autockpt.launch.standby.twin import Adopted

ROOT = str(Path(imports.__file__).parents[3])
LIBRARY = "import os\nprint('imported by', os.getpid())\n"
SCRIPT = """
import json, os, sys
import a_library
found = {
    "argv": sys.argv, "value": os.environ["TORCHELASTIC_RESTART_COUNT"], "pid": os.getpid(),
    "session": os.getsid(0), "cmdline": open("/proc/self/cmdline", "rb").read().hex(),
    "main": sys.modules["__main__"].__file__, "own": __name__, "path": sys.path[0],
    "standby": "AUTOCKPT_STANDBY" in os.environ, "set": os.environ.get("SET_BY_LIBRARY"),
}
print(json.dumps(found))
sys.exit(7)
"""


class Parked:
    """The launcher's end of one."""

    def __init__(self, folder: Path, library: str = LIBRARY, script: str = SCRIPT) -> None:
        self.site = folder / "site-packages"
        self.site.mkdir()
        (self.site / "a_library.py").write_text(library)
        self.script = folder / "job.py"
        self.script.write_text(script)
        self.out = folder / "out"
        self.environment = {
            "PYTHONPATH": f"{self.site}:{ROOT}", "PATH": os.environ["PATH"],
            "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "1", "OTHER": "1",
            "OMP_NUM_THREADS": "1", "AUTOCKPT_KEPT_STORE": "1:1",
        }  # fmt: skip
        self.command = [
            sys.executable, "-u", "-m", "autockpt.cli.script_runner", str(self.script), "a", "b c",
        ]  # fmt: skip
        self.sock, there = socket.socketpair()
        self.sock.settimeout(60)
        with there:
            variables = {**self.environment, parked.VARIABLE: str(there.fileno())}
            self.process = subprocess.Popen(
                self.command, env=variables, pass_fds=(there.fileno(),), start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
            )  # fmt: skip
        self.lines = self.sock.makefile("rb")

    def order(self, changed: tuple[str, ...] = ()) -> dict[str, Any]:
        """Tells it what to import; its answer."""
        modules = {"a_library": str(self.site / "a_library.py")}
        return self._ask({"modules": modules, "changed": changed, "path0": str(self.site.parent)})

    def take(self, **changes: str) -> dict[str, Any]:
        """Gives it the rank; its answer."""
        environment = {**self.environment, "TORCHELASTIC_RESTART_COUNT": "1", **changes}
        with open(self.out, "w") as out:
            message = {"environment": environment, "oom_score_adj": "0"}
            return self._ask(message, (out.fileno(), out.fileno()))

    def twin(self, **changes: str) -> "Twin | str":
        """Has one made; why there is none."""
        here, there = socket.socketpair()
        message = {"twin_of": os.getpid(), "environment": {**self.environment, **changes}}
        with twin.adopting():
            with there:
                reason: str = self._ask(message, (there.fileno(),))["no_twin"]
            if reason:
                here.close()
            return reason or Twin(self, here)

    def _ask(self, message: Any, descriptors: tuple[int, ...] = ()) -> dict[str, Any]:
        socket.send_fds(self.sock, [json.dumps(message).encode() + b"\n"], descriptors)
        answer: dict[str, Any] = json.loads(self.lines.readline())
        return answer

    def end(self) -> None:
        """Whatever happened."""
        self.lines.close()
        self.sock.close()
        self.process.kill()
        self.process.wait(60)


class Twin(Parked):
    """Another process, which has forked from the first one."""

    def __init__(self, first: Parked, sock: socket.socket) -> None:
        self.script, self.command = first.script, first.command
        self.environment, self.out = first.environment, first.out.with_name("twins-out")
        sock.settimeout(60)
        self.sock, self.lines = sock, sock.makefile("rb")
        told = json.loads(self.lines.readline())
        self.process: Any = Adopted(told["pid"], tuple(first.command))


@pytest.fixture
def park(tmp_path: Path) -> Iterator[Callable[..., Parked]]:
    """Makes one."""
    made: list[Parked] = []

    def make(**settings: str) -> Parked:
        made.append(Parked(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_it_becomes_the_rank_that_a_fresh_process_would_be(park: Callable[..., Parked]) -> None:
    """Environment, arguments, output, session, `ps` and exit code are those of the rank."""
    one = park(library=f"{LIBRARY}os.environ['SET_BY_LIBRARY'] = 'yes'\n")
    assert one.order() == {"ready": True}
    shown = Path(f"/proc/{one.process.pid}/cmdline").read_bytes()
    assert shown.rstrip(b"\0").decode() == parked.TITLE
    assert one.take() == {"taken": True}
    assert one.process.wait(60) == 7

    command = b"".join(word.encode() + b"\0" for word in one.command)
    said, found = one.out.read_text().splitlines()
    assert said == f"imported by {one.process.pid}"
    assert json.loads(found) == {
        "argv": [str(one.script), "a", "b c"], "value": "1", "pid": one.process.pid,
        "session": one.process.pid, "cmdline": command.hex(),
        "main": str(one.script), "own": "__main__", "path": str(one.script.parent),
        "standby": False, "set": "yes",
    }  # fmt: skip


def test_a_rank_that_dies_meanwhile_ends_its_rests() -> None:
    """It imports without a pause once the order is there, and obeys orders that come together."""
    here, there = socket.socketpair()
    with here, there:
        orders = parked._Orders(parked.Channel(there))
        rest = parked._Rest(orders)
        here.sendall(b'{"modules": {}}\n{"environment": {}}\n')
        assert orders.next() == ({"modules": {}}, [])
        rest._used_s -= 30.0
        began_s = time.monotonic()
        rest.find_spec("module")
        assert time.monotonic() - began_s < 15.0
        assert orders.next() == ({"environment": {}}, [])
        rest._used_s -= 0.2
        began_s = time.monotonic()
        rest.find_spec("module")
        assert time.monotonic() - began_s >= 0.2


def test_a_twin_becomes_another_rank(park: Callable[..., Parked]) -> None:
    """A session of its own, a child of the launcher, random numbers of its own; the first stays."""
    draws = "import random\nimport numpy as np\n"
    first = park(
        library=draws, script=SCRIPT.replace("print(", "found['draws'] = [__import__('random')"
        ".random(), __import__('numpy').random.rand()]\nprint("),
    )  # fmt: skip
    assert first.order() == {"ready": True}
    other = first.twin(LOCAL_RANK="1")
    assert isinstance(other, Twin)
    assert first.process.poll() is None
    for one in (other, first):
        assert one.take() == {"taken": True}
        assert one.process.wait(60) == 7
        one.lines.close()
        one.sock.close()
    found = [json.loads(one.out.read_text()) for one in (first, other)]
    assert [one["pid"] for one in found] == [first.process.pid, other.process.pid]
    assert all(one["session"] == one["pid"] for one in found)
    assert found[0]["cmdline"] == found[1]["cmdline"]
    assert all(mine != its for mine, its in zip(*(one["draws"] for one in found), strict=True))


def test_a_twin_ends_with_its_launcher_alone(park: Callable[..., Parked]) -> None:
    """Not with the process that it has forked from."""
    first = park()
    assert first.order() == {"ready": True}
    other = first.twin()
    assert isinstance(other, Twin)
    first.process.kill()
    first.process.wait(60)
    assert other.process.poll() is None
    other.lines.close()
    other.sock.close()
    assert other.process.wait(60) == 0
    with pytest.raises(ChildProcessError, match="child"):
        os.waitpid(other.process.pid, 0)


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True)"
         ".start()", "thread"),
        ("import socket\nA = socket.socketpair()", "socket"),
        ("import select\nA = select.epoll()", "watch"),
        ("import os\nA = os.environ['MASTER_PORT']", "MASTER_PORT has changed"),
    ],
)  # fmt: skip
def test_what_a_fork_does_not_copy_whole_has_no_twin(
    park: Callable[..., Parked], library: str, reason: str
) -> None:
    """Nor has one whose imports read what differs; the first one is a rank all the same."""
    first = park(library=library)
    assert first.order() == {"ready": True}
    assert reason in str(first.twin(MASTER_PORT="2"))
    assert first.take() == {"taken": True}
    assert first.process.wait(60) == 7


def test_it_ends_with_its_launcher(park: Callable[..., Parked]) -> None:
    """Nobody is left who could give the order."""
    one = park()
    assert one.order() == {"ready": True}
    one.lines.close()
    one.sock.close()
    assert one.process.wait(60) == 0


@pytest.mark.parametrize(
    ("library", "changed", "change", "reason"),
    [
        pytest.param(
            "import os\nX = os.environ['MASTER_PORT']", (), {"MASTER_PORT": "2"},
            "MASTER_PORT has changed", id="a variable that was read",
        ),
        pytest.param("", (), {"OTHER": "2"}, "OTHER has changed", id="a variable of the machine"),
        pytest.param(
            "import os\nX = os.getenv('MINE')", ("MINE",), {}, "the script sets MINE",
            id="a variable that the script sets",
        ),
        pytest.param(
            "", ("OMP_NUM_THREADS",), {}, "the script sets OMP_NUM_THREADS",
            id="a variable that is read in C",
        ),
        pytest.param(
            "import job", (), {}, "a library imports the script's own job", id="the user's module"
        ),
    ],
)  # fmt: skip
def test_it_refuses_where_a_fresh_process_would_import_something_else(
    park: Callable[..., Parked], library: str, changed: tuple[str, ...], change: Any, reason: str
) -> None:
    """With the reason; it then ends by itself."""
    one = park(library=library, script="" if library == "import job" else SCRIPT)
    answer = one.order(changed)
    if "ready" in answer:
        answer = one.take(**change)
    assert reason in answer["refused"]
    assert one.process.wait(60) == 0


@pytest.mark.parametrize(
    ("copy", "changed", "is_taken"),
    [
        ("dict(os.environ)", "AUTOCKPT_KEPT_STORE", True),
        ("os.environ.copy()", "MASTER_PORT", True),
        ("[os.environ[name] for name in os.environ]", "MASTER_PORT", True),
        ("dict(os.environ)", "OTHER", False),
        ("dict(os.environ), os.environ['MASTER_PORT']", "MASTER_PORT", False),
    ],
)
def test_a_library_that_copies_the_environment_has_not_read_what_differs_at_each_start(
    park: Callable[..., Parked], copy: str, changed: str, is_taken: bool
) -> None:
    """As fsspec does, which many frameworks import."""
    one = park(library=f"{LIBRARY}copied = {copy}\n")
    assert one.order() == {"ready": True}
    answer = one.take(**{changed: "2"})
    assert ("taken" in answer) == is_taken
    if not is_taken:
        assert answer["refused"].startswith(f"{changed} has changed")


def test_it_refuses_when_a_library_was_edited(park: Callable[..., Parked]) -> None:
    """The file is named."""
    one = park()
    assert one.order() == {"ready": True}
    (one.site / "a_library.py").write_text("X = 2\n")
    assert one.take()["refused"] == f"{one.site}/a_library.py has changed since it was imported"


def test_it_refuses_when_an_import_has_initialised_a_device(park: Callable[..., Parked]) -> None:
    """The context would hold memory of the device while it waits."""
    torch = (
        "import types, sys\nt = sys.modules['torch'] = types.ModuleType('torch')\n"
        "t.cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
        "state = types.SimpleNamespace(tobytes=lambda: b'1')\n"
        "t.get_rng_state = lambda: types.SimpleNamespace(numpy=lambda: state)\n"
    )
    assert park(library=torch).order()["refused"] == "an import has initialised CUDA"


def test_a_process_that_the_script_starts_writes_nothing_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts none like it, and does not know the environment that it began in."""
    monkeypatch.setattr(imports, "_environment", {})
    imports.write(str(tmp_path), 0)
    assert imports.read(imports.path_of(tmp_path, 0)) is None


def test_only_libraries_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own modules run anew in every incarnation; what it sets is known."""
    (tmp_path / "tests_without_init" / "part").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("tests_without_init.part")
    monkeypatch.setenv("KEPT", "1")
    imports.script_begins()
    monkeypatch.setenv("SET_LATER", "1")
    monkeypatch.delenv("KEPT")
    imports.write(str(tmp_path), 3)
    found = imports.read(imports.path_of(tmp_path, 3))
    assert found is not None
    assert found.changed == ("KEPT", "SET_LATER")
    assert found.modules["json"] == json.__spec__.origin
    assert found.modules["autockpt.launch.standby.imports"] == imports.__file__
    assert not any(name.startswith("tests") for name in found.modules)


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    """The next restart is a cold one then."""
    path = imports.path_of(tmp_path, 0)
    path.parent.mkdir()
    for text in ("", "{", '{"modules": 3}', "[]"):
        path.write_text(text)
        assert imports.read(path) is None


def test_ended_by_a_signal_it_has_the_status_of_a_rank(park: Callable[..., Parked]) -> None:
    """SIGTERM does what it does to a fresh process."""
    one = park(script="import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert one.order() == {"ready": True}
    assert one.take() == {"taken": True}
    assert one.process.wait(60) == -signal.SIGTERM
