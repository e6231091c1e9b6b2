"""Shared fixtures: markers that depend on the machine, and runs that leave no keeper behind."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure.  `make test` tries the same examples every time, so that it says
# something of the change alone, and fewer; `make test-all` tries new ones.
_PATIENT: dict[str, Any] = {
    "deadline": None, "suppress_health_check": [HealthCheck.too_slow]
}  # fmt: skip
settings.register_profile("same", derandomize=True, max_examples=40, **_PATIENT)
settings.register_profile("new", **_PATIENT)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run: `root` without root, `gpu` without a GPU."""
    marked = {name for item in items for name in ("gpu", "root") if item.get_closest_marker(name)}
    missing = {}
    if "root" in marked and os.geteuid() != 0:
        missing["root"] = "needs root"
    if "gpu" in marked and not _gpu():
        missing["gpu"] = "needs a CUDA device"
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def heard_by_children() -> Iterator[None]:
    """Programs that are started in it hear SIGINT and SIGHUP, whoever ignores them here.

    `nohup` and a background job ignore them for all that they start.  A handler that does nothing
    is none in a program that is started, and this process goes on ignoring them.
    """
    ignored = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda number, frame: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def _signals() -> Iterator[None]:
    with heard_by_children():
        yield


@pytest.fixture(scope="session")
def _nursery() -> Iterator[Any]:
    from tests.jobs.kill.forked_keepers import nursery

    with nursery() as forking:
        yield forking


@pytest.fixture
def warm_starts() -> Iterator[None]:
    """Python processes that this test starts begin with torch and autockpt imported."""
    from tests.unit.cli.scripts import warm

    with warm():
        yield


@pytest.fixture
def forked_keepers(_nursery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that this process asks for are there in milliseconds: their imports are done."""
    from autockpt.executors.keeper import launch

    monkeypatch.setattr(launch, "subprocess", _nursery)


@pytest.fixture
def attach(
    new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, forked_keepers: None
) -> Iterator[Callable[..., Any]]:
    """`autockpt.attach` in this process, as a launch of its own; ended before its keeper is."""
    import autockpt
    from autockpt.session import saving as sessions

    for name in [n for n in os.environ if n.startswith(("AUTOCKPT_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTOCKPT_NO_PROFILE", "1")
    monkeypatch.setenv("AUTOCKPT_SAME_JOB", "1")  # runs of other processes are resumed here
    # A machine under test answers late; a save that is skipped for that would prove nothing.
    monkeypatch.setattr(sessions, "GRANT_WAIT_S", 20.0)
    handler = signal.getsignal(signal.SIGTERM)
    made: list[Any] = []

    def make(*objects: Any, **arguments: Any) -> Any:
        monkeypatch.setenv("AUTOCKPT_LAUNCH_ID", f"test-{os.getpid()}-{next(_launches)}")
        session = autockpt.attach(*objects, **arguments)
        made.append(session)
        return session

    yield make
    for session in made:
        session.close(final_checkpoint=False)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, handler)


_launches = itertools.count()


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Makes run directories; whatever keeper serves them is gone when the test ends."""
    made: list[str] = []

    def make(name: str = "run") -> str:
        path = tmp_path / name
        path.mkdir(parents=True, exist_ok=True)
        made.append(str(path))
        return str(path)

    yield make
    for path in made:
        end_keeper(path)


def end_keeper(run_dir: str, *, nodes: int = 1) -> None:
    """Ends the keepers of a run directory; by pid, because they ignore SIGTERM."""
    for node in range(nodes):
        for pid in keeper_pids(run_dir, node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while _alive(pid) and time.monotonic() < deadline:
                time.sleep(0.002)


def _alive(pid: int) -> bool:
    """False for a zombie too: whoever adopted it takes its time."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def keeper_pids(run_dir: str, node: int = 0) -> list[int]:
    """Live processes that serve this run directory as keeper, found by their command line."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            wanted = [b"--run-directory", os.fsencode(run_dir), b"--node", str(node).encode()]
            if b"autockpt.executors.keeper" in words and _alive(int(name)):
                start = words.index(b"--run-directory")
                if words[start : start + 4] == wanted:
                    found.append(int(name))
    return found
