"""Runs the user's script so that it cannot tell.

`python -u -m autockpt.cli.script_runner [-m] SCRIPT ARGS`.

The script becomes a real `__main__` module that stays in `sys.modules` to the end of the process.
runpy takes its module away when the script ends.  Then an atexit function (a last save, for one)
can no longer pickle a class of the script.  sys.argv and sys.path[0] are what Python would set,
tracebacks show the user's frames only, and exit codes are the script's own.

In mode `profile` the probes are installed before the script starts, and end it when they are done.
In mode `run`, a script that never called `autockpt.attach` gets a message that shows how.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from autockpt import new_files
from autockpt.launch import environment, owner, startup_timing
from autockpt.launch.elastic import rank_output
from autockpt.launch.standby import imports
from autockpt.launch.termination import exit_now
from autockpt.values import exit_codes, script_errors

if TYPE_CHECKING:
    from autockpt.run_directory import RunDirectory

LEAVE_S = 10.0
"""How long exit functions may take before the process is ended under them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Compiled code with the module it runs in."""

    main: types.ModuleType
    code: types.CodeType
    argv0: str
    path0: str


def main() -> None:
    """The command `python -m autockpt.cli.script_runner`."""
    rank_output.survive_full_disks()
    descriptor = os.environ.pop("AUTOCKPT_STANDBY", "")
    if descriptor:
        from autockpt.launch.standby.parked import become_rank

        become_rank(int(descriptor))
    launcher = os.environ.get(environment.LAUNCHER_PID, "")
    if launcher.isdecimal():
        owner.end_with(int(launcher))
    arguments = sys.argv[1:]
    module = arguments[:1] == ["-m"]
    target, *args = arguments[1:] if module else arguments
    # This module gives up its own name; keep it alive for as long as its functions run.
    sys.modules.setdefault("autockpt.cli.script_runner", sys.modules["__main__"])
    execute(target, args, module=module)


def execute(
    target: str, args: Sequence[str], *, module: bool = False, requeues: bool = False
) -> None:
    """Run the script to its end.  Returns when it ended well; else raises SystemExit as it would.

    Does not return at all after a profile was taken.  `requeues`: a scheduler reads the exit code,
    and an announced end with all of it durable is the one that `autockpt run` has for that.
    """
    run, process = _run_directory(), os.getpid()
    mode = os.environ.get(environment.MODE, "run")
    try:
        program = load(target, module=module)
        sys.argv[:] = [program.argv0, *args]
        if not sys.flags.safe_path:
            sys.path[0] = program.path0
        sys.modules["__main__"] = program.main
        if mode == "profile" and run is not None:
            from autockpt.profiling.entry import install

            install(str(run.path))
        elif run is not None:
            startup_timing.script_begins()
            imports.script_begins()
        exec(program.code, program.main.__dict__)
    except SystemExit as ending:
        if os.getpid() != process:
            raise  # a child that the script forked; the run is its parent's
        code = _exit_status(ending)
        if requeues and code in exit_codes.ANNOUNCED and getattr(ending, "all_durable", False):
            code = exit_codes.SAVED_REQUEUE
        if not code:
            _after(run, mode, target)
            raise
        # Behind its training the script chooses an exit code, where it handles no exception.
        chosen = type(ending) is SystemExit and ending.__context__ is None and _is_over()
        _tell_launcher(ending, final=not _attached() or _is_final(ending) or chosen)
        if not _attached():
            raise
        sys.last_value = ending  # a failure like others: it makes no last checkpoint
        if not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
        _leave(code)
    except BaseException as error:
        if os.getpid() != process:
            raise
        if _is_stop(error):
            _leave(0)
        _fail(error)
    if os.getpid() == process:
        _after(run, mode, target)


def load(target: str, *, module: bool) -> Program:
    """Compile a script or find a module, and make the `__main__` it will run in.

    Raises what Python would: OSError, SyntaxError, ImportError.
    """
    return _load_module(target) if module else _load_script(target)


def _load_script(path: str) -> Program:
    full = os.path.abspath(path)
    with open(full, "rb") as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    main = _main_module(file=full, loader=loader, spec=None, package=None)
    return Program(main=main, code=code, argv0=path, path0=os.path.dirname(os.path.realpath(full)))


def _load_module(name: str) -> Program:
    working = os.getcwd()
    if not sys.flags.safe_path:
        sys.path[0] = working
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader = spec.loader if spec is not None else None
    get_code = getattr(loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or not isinstance(code, types.CodeType):
        raise ModuleNotFoundError(f"no module {name!r} that can be run as a script", name=name)
    origin = spec.origin or name
    main = _main_module(file=origin, loader=loader, spec=spec, package=spec.parent)
    return Program(main=main, code=code, argv0=origin, path0=working)


def _main_module(
    *, file: str, loader: object, spec: object, package: str | None
) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=file,
        __cached__=None,
        __loader__=loader,
        __spec__=spec,
        __package__=package,
        __builtins__=__builtins__,
        __annotations__={},
    )
    return main


def _exit_status(ending: SystemExit) -> int:
    """The status that Python gives for this SystemExit."""
    if ending.code is None:
        return 0
    return ending.code & 0xFF if isinstance(ending.code, int) else 1


def _fail(error: BaseException) -> NoReturn:
    """Print the traceback as Python would, tell the launcher why, and exit."""
    traceback, ours = error.__traceback__, execute.__code__.co_filename
    while traceback is not None and traceback.tb_frame.f_code.co_filename == ours:
        traceback = traceback.tb_next
    error = error.with_traceback(traceback)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    try:
        sys.excepthook(type(error), error, traceback)
    except Exception:
        sys.__excepthook__(type(error), error, traceback)
    ours_raised = isinstance(error, _our_errors())
    _tell_launcher(error, final=_is_final(error))
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    # An error of ours keeps its own exit code, so that a scheduler sees what it can do.
    code = getattr(error, "exit_code", 1) if ours_raised else 1
    if _attached():
        # Everybody waits for this process to start again; taking torch apart is 0.9 s of CPU.
        _leave(code)
    sys.exit(code)


def _is_final(error: BaseException) -> bool:
    """Whether another start would meet the same error: a mistake, or a refusal of ours."""
    if not isinstance(error, _our_errors()):
        return script_errors.origin_of(error) == "mistake"
    from autockpt.values import errors

    if isinstance(error, errors.RestartError):
        return False
    passing = (errors.StorageError, errors.DirectoryBusyError, errors.NoRoomError)
    return not (
        _attached() and isinstance(error, (*passing, errors.ProtocolError, errors.RollbackError))
    )


def _our_errors() -> tuple[type[BaseException], ...]:
    errors = sys.modules.get("autockpt.values.errors")
    return () if errors is None else (errors.AutockptError,)


def _attached() -> bool:
    """Whether the script called autockpt.attach; looks, but imports nothing."""
    session = sys.modules.get("autockpt.session")
    return session is not None and bool(session.attached())


def _is_over() -> bool:
    """Whether the script has trained, and all of it ended well."""
    attaches = sys.modules.get("autockpt.session.attaches")
    return attaches is not None and bool(attaches.of_this_process.are_over)


def _is_call_again() -> bool:
    """Whether `autockpt.restartable` has called a function again, and no boundary came since."""
    order = sys.modules.get("autockpt.launch.in_process.order")
    return order is not None and bool(order.of_this_process.is_again)


def _step() -> int | None:
    """Newest step of this process; None before it attached."""
    attaches = sys.modules.get("autockpt.session.attaches")
    step = None if attaches is None else attaches.of_this_process.newest_step
    return None if step is None else int(step)


def _tell_launcher(error: BaseException, *, final: bool) -> None:
    """Write torchelastic's error file: it dates the failure, and `final` says that a retry fails.

    `final` is our own addition: the script made a mistake, or decided to exit before it attached
    or behind its training.  `over` is one, too: all training is over.  In a call that is not the
    first in this process neither counts.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now, is_again = time.time(), _is_call_again()
    data = {
        "message": {
            "message": script_errors.text_of(error),
            "extraInfo": {"py_callstack": "", "timestamp": str(int(now))},
        },
        "autockpt": {
            "final": final and not is_again,
            "over": _is_over() and not is_again,
            "at": now,
            "origin": "call again" if is_again else script_errors.origin_of(error),
            "step": _step(),
        },
    }
    with contextlib.suppress(OSError):
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8", opener=new_files.private) as file:
            json.dump(data, file)
        os.replace(temporary, path)


def _is_stop(error: BaseException) -> bool:
    conductor = sys.modules.get("autockpt.profiling.conductor")
    return conductor is not None and isinstance(error, conductor.StopTraining)


def _leave(code: int) -> NoReturn:
    """End the process: exit functions, flush, and no interpreter shutdown.

    With a process group alive a normal shutdown aborts now and then (4 of 12 trials), this never.
    """
    import atexit
    import threading

    watchdog = threading.Timer(LEAVE_S, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    exit_now(code)


def _run_directory() -> "RunDirectory | None":
    path = os.environ.get(environment.RUN_DIR)
    if not path:
        return None
    from autockpt.run_directory import RunDirectory

    return RunDirectory(path)


def _after(run: "RunDirectory | None", mode: str, target: str) -> None:
    """The script ended well by itself."""
    if mode == "profile" and run is not None:
        _finish_profile()
    else:
        _mark_unprotected(run, target)


def _finish_profile() -> None:
    """Too few iterations for a whole profile: write what there is, or say why there is none."""
    from autockpt.profiling.entry import finish
    from autockpt.values.errors import AutockptError

    try:
        finish()
    except AutockptError as error:
        _tell_launcher(error, final=True)
        if environment.rank(os.environ) == 0:
            print(f"autockpt: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _mark_unprotected(run: "RunDirectory | None", target: str) -> None:
    """After a script that never attached: leave a mark for the report, say once what to add.

    Under `autockpt run` the launcher says it, when everything is over.
    """
    if run is None or environment.rank(os.environ) != 0 or _attached() or run.unprotected:
        return
    if run.attached:  # a process that the script started
        return
    from autockpt.cli.jobs.script_hints import advice
    from autockpt.values.errors import AutockptError

    with contextlib.suppress(AutockptError):
        run.mark_unprotected()
    if environment.LAUNCHER_PID not in os.environ:
        print(advice(sys.modules["__main__"].__dict__.get("__file__") or target), file=sys.stderr)


if __name__ == "__main__":
    main()
