"""The function's side, against a launcher that the test plays."""

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from autockpt.cli import script_runner
from autockpt.launch.in_process import order, process_state, restartable
from autockpt.launch.standby.channel import Channel


class Launcher:
    """Answers a function as it is told to."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.there, self._channel = Channel(there), Channel(here)
        here.settimeout(60)
        self._heard: list[dict[str, Any]] = []

    def hear(self) -> dict[str, Any]:
        """The next message."""
        while not self._heard:
            heard = self._channel.receive()
            assert heard is not None
            self._heard += heard[0]
        return self._heard.pop(0)

    def say(self, **message: Any) -> None:
        self._channel.send(message)

    def go_on(self, **variables: str) -> None:
        """The next start, with the output as it is."""
        self._channel.send({"environment": {**os.environ, **variables}}, (1, 2))

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """One that is connected."""
    made, before = Launcher(), dict(os.environ)
    yield made
    made.close()
    order.of_this_process.is_ordered = order.of_this_process.is_again = False
    os.environ.clear()
    os.environ.update(before)


def beside(launcher: Callable[[], None]) -> threading.Thread:
    """The launcher's part, on a thread."""
    thread = threading.Thread(target=launcher, daemon=True)
    thread.start()
    return thread


def test_a_survivor_finds_its_process_as_it_was(launcher: Launcher) -> None:
    """Random state, settings, log handlers and directory; variables are those of the new start."""
    torch.manual_seed(4)
    root, found = logging.getLogger(), []

    def function() -> str:
        found.append((torch.rand(3).tolist(), torch.get_default_dtype(), os.getcwd(),
                      len(root.handlers), sys.excepthook, torch.is_anomaly_enabled(),
                      torch.backends.mkldnn.enabled, os.environ.get("RANK")))  # fmt: skip
        if len(found) == 2:
            return "over"
        root.addHandler(logging.NullHandler())
        torch.set_default_dtype(torch.float64)
        sys.excepthook = lambda *_: None
        torch.autograd.set_detect_anomaly(True)
        torch._C._set_mkldnn_enabled(False)
        signal.setitimer(signal.ITIMER_VIRTUAL, 3600.0)
        os.chdir("/")
        order.of_this_process.require_none()
        raise ConnectionError("a collective of gloo")

    def play() -> None:
        assert launcher.hear() == {"restartable": True, "restarts": 0}
        assert "failed" in launcher.hear()
        launcher.say(unwind=True)
        assert launcher.hear() == {"parked": True}
        launcher.go_on(RANK="7")
        assert launcher.hear() == {"taken": True}
        assert launcher.hear() == {"restartable": True, "restarts": 1}

    playing = beside(play)
    assert restartable.Loop(launcher.there).run(function) == "over"
    playing.join(60)
    assert not playing.is_alive()
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert found[0][:-1] == found[1][:-1]
    assert found[1][-1] == "7"


def test_a_failure_of_its_own_is_raised(launcher: Launcher) -> None:
    """A mistake at once, and what another rank's death may cause when no rank has died."""

    def play() -> None:
        launcher.hear()
        assert "failed" in launcher.hear()
        launcher.say(alone=True)

    playing = beside(play)
    with pytest.raises(ConnectionError, match="of its own"):
        restartable.Loop(launcher.there).run(_raising(ConnectionError("of its own")))
    playing.join(60)
    other = Launcher()
    with pytest.raises(TypeError, match="a mistake"):
        restartable.Loop(other.there).run(_raising(TypeError("a mistake")))
    other.close()


def test_a_wait_that_begins_behind_the_order_ends_too(launcher: Launcher) -> None:
    """The function may be between two collectives when another rank dies."""
    waits = []

    def function() -> str:
        if waits:
            return "over"
        deadline = time.monotonic() + 60
        while not order.of_this_process.is_ordered:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.1)  # the first abort is over
        with socket.create_server(("127.0.0.1", 0)) as listening:
            peer = socket.create_connection(listening.getsockname())
            accepted, caller = listening.accept()
            while caller != peer.getsockname():  # it is called in the place of other ranks, too
                accepted.close()
                accepted, caller = listening.accept()
            accepted.settimeout(20)
            waits.append(accepted.recv(1))
            peer.close()
            accepted.close()
        raise ConnectionError("a collective of gloo")

    def play() -> None:
        launcher.hear()
        launcher.say(unwind=True)
        assert launcher.hear() == {"parked": True}
        launcher.go_on()

    playing = beside(play)
    assert restartable.Loop(launcher.there).run(function) == "over"
    playing.join(60)
    assert waits == [b""]


def test_the_order_ends_a_wait_for_keepers() -> None:
    """Given during the wait, or before it."""
    unwinding, ended = order.Unwinding(), []
    with unwinding.ends(lambda: ended.append("during")):
        assert not ended
        unwinding.give()
    with unwinding.ends(lambda: ended.append("before")):
        pass
    unwinding.give()
    assert ended == ["during", "before"]


def test_a_release_looks_at_the_objects_of_the_function_alone(launcher: Launcher) -> None:
    """What was imported before takes ten times as long as the rest of a restart."""
    before = Launcher  # an object with a dictionary, which the collector knows
    own: list[Any] = []

    def function() -> tuple[bool, bool]:
        own.append([own])
        seen = {id(one) for one in gc.get_objects()}
        return id(before) in seen, id(own[0]) in seen

    try:
        assert restartable.Loop(launcher.there).run(function) == (False, True)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("leaves", ["thread", "model", "process", "hook"])
def test_what_cannot_be_released_is_named(
    launcher: Launcher, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends by the exception of the function."""
    monkeypatch.setattr(process_state, "LEFT_S", 0.05)
    gate, kept, said = threading.Event(), [], []
    processes, hooks = [], []

    def function() -> None:
        if leaves == "thread":
            threading.Thread(target=gate.wait, name="loads-data", daemon=True).start()
        elif leaves == "process":
            processes.append(subprocess.Popen(["sleep", "600"]))
        elif leaves == "hook":
            hooks.append(register_module_forward_hook(lambda *_: None))
        else:
            kept.append(torch.nn.Linear(2, 2))
            loop._weak = [weakref.ref(kept[0])]
            monkeypatch.setattr(loop, "_leave", lambda error: "")
        raise ConnectionError("a collective of gloo")

    def play() -> None:
        launcher.hear()
        launcher.hear()
        launcher.say(unwind=True)
        said.append(launcher.hear())

    playing, loop = beside(play), restartable.Loop(launcher.there)
    with pytest.raises(ConnectionError, match="a collective"):
        loop.run(function)
    playing.join(60)
    gate.set()
    for process in processes:
        process.kill()
        process.wait()
    for hook in hooks:
        hook.remove()
    [answer] = said
    named = {"thread": "loads-data", "model": "Linear", "process": "a process, ",
             "hook": "_global_forward_hooks"}  # fmt: skip
    assert named[leaves] in answer["refused"]


def test_changed_arguments_are_not_called_with_again(launcher: Launcher) -> None:
    """A survivor would divide its batch size a second time."""
    arguments, said = {"batch_size": 8}, []

    def function() -> None:
        arguments["batch_size"] //= 2
        raise ConnectionError("a collective of gloo")

    def play() -> None:
        launcher.hear()
        launcher.hear()
        launcher.say(unwind=True)
        said.append(launcher.hear())

    playing = beside(play)
    with pytest.raises(ConnectionError, match="a collective"):
        restartable.Loop(launcher.there, arguments).run(function)
    playing.join(60)
    assert said == [{"refused": "its function has changed its arguments"}]


def test_a_failure_of_the_next_call_asks_for_new_processes(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only until it is at a boundary; its error file says that another start may do better."""
    calls, said = [], []

    def function() -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise ConnectionError("a collective of gloo")
        raise ValueError("Duplicated timeseries in CollectorRegistry")

    def play() -> None:
        for _ in range(2):
            launcher.hear()
            launcher.hear()
            launcher.say(unwind=True)
            launcher.hear()
            launcher.go_on()
            launcher.hear()
        launcher.hear()
        said.append(launcher.hear())

    playing = beside(play)
    with pytest.raises(ValueError, match="Duplicated") as caught:
        restartable.Loop(launcher.there).run(function)
    playing.join(60)
    assert said == [{"unfit": "ValueError: Duplicated timeseries in CollectorRegistry"}]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    told = []
    for _ in range(2):
        script_runner._tell_launcher(caught.value, final=True)
        told.append(json.loads((tmp_path / "error.json").read_text())["autockpt"])
        order.of_this_process.require_none()
    assert [one["final"] for one in told] == [False, True]
    assert [one["origin"] == "mistake" for one in told] == [False, True]


def test_a_function_that_ends_well_after_the_order_is_called_again(launcher: Launcher) -> None:
    """It has caught the exception of its collective."""
    calls = []

    def function() -> int:
        calls.append(len(calls))
        deadline = time.monotonic() + 60
        while len(calls) == 1 and not order.of_this_process.is_ordered:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return len(calls)

    def play() -> None:
        launcher.hear()
        launcher.say(unwind=True)
        assert launcher.hear() == {"parked": True}
        launcher.go_on()

    playing = beside(play)
    assert restartable.Loop(launcher.there).run(function) == 2
    playing.join(60)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="an older torch")
def test_precisions_of_torch_are_put_back() -> None:
    """By either interface; torch does not tell the old one where the new one is used."""
    backends: Any = torch.backends
    found = process_state._precisions(torch)
    try:
        torch.set_float32_matmul_precision("high")
        before = process_state._take_torch()
        assert before is not None
        torch.set_float32_matmul_precision("highest")
        process_state._put_back_torch(before)
        assert torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")
        backends.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32"
        assert process_state._precision(torch) is None
        before = process_state._take_torch()
        assert before is not None
        backends.fp32_precision = backends.cuda.matmul.fp32_precision = "ieee"
        assert process_state._precisions(torch) != before.precisions
        process_state._put_back_torch(before)
        assert process_state._precisions(torch) == before.precisions
    finally:
        torch.set_float32_matmul_precision("highest")
        for name, precision in found.items():
            process_state._backend(torch, name).fp32_precision = precision


def test_a_process_that_cannot_be_put_back_calls_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake of ours is said, and the training begins."""
    made = Launcher()
    monkeypatch.setattr(restartable, "_launcher", lambda: made.there)
    monkeypatch.setattr(process_state, "take", _raising(RuntimeError("no precision")))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert restartable.restartable(lambda: "trained")() == "trained"
    assert "restarts need new processes: RuntimeError: no precision" in capsys.readouterr().err
    made.close()


def test_a_second_call_in_one_script_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new process begins with the first one, and would not meet it."""
    variables = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "AUTOCKPT_MODE": "run",
                 "LOCAL_RANK": "0"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(restartable, "_is_claimed", False)
    made = []
    monkeypatch.setattr(restartable, "connect", lambda variables: made.append(variables))
    for _ in range(2):
        assert restartable.restartable(lambda: "trained")() == "trained"
    assert len(made) == 1
    assert "one restartable function" in capsys.readouterr().err


def test_variables_of_the_function_are_freed(launcher: Launcher) -> None:
    """A model in the frames of an exception would be held for ever."""
    freed = []

    class Model(torch.nn.Linear):
        def __del__(self) -> None:
            freed.append(True)

    def deep(model: Model) -> None:
        try:
            raise ConnectionError("a collective of gloo")
        except ConnectionError as error:
            raise RuntimeError("the connection is gone") from error

    def function() -> None:
        if not freed:
            deep(Model(2, 2))

    def play() -> None:
        launcher.hear()
        launcher.hear()
        launcher.say(unwind=True)
        launcher.hear()
        launcher.go_on()

    playing = beside(play)
    restartable.Loop(launcher.there).run(function)
    playing.join(60)
    assert freed


def test_a_boundary_behind_the_order_is_none() -> None:
    """A collective on a device may return without a result after its group was aborted."""
    unwinding = order.Unwinding()
    unwinding.require_none()
    unwinding.is_ordered = True
    with pytest.raises(order.Unwound, match="another rank has died"):
        unwinding.require_none()


def test_without_a_launcher_it_is_an_ordinary_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and result are its own."""
    monkeypatch.delenv("AUTOCKPT_LAUNCHER_PID", raising=False)

    @restartable.restartable
    def add(one: int, *, two: int) -> int:
        """Adds."""
        return one + two

    assert add(1, two=2) == 3
    assert add.__doc__ == "Adds."


def _raising(error: Exception) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function
