"""install, adopt, finish: the one profile that a process can take."""

import atexit
import os
import sys
from typing import Any

from autockpt.profiles.schedule import ProfileSettings
from autockpt.profiling.conductor import Conductor
from autockpt.profiling.pass_through import PassThroughSession
from autockpt.values.errors import AutockptError

_current: Conductor | None = None


def install(run_dir: str, *, settings: ProfileSettings | None = None) -> None:
    """Puts the hooks in place; the script that runs next in this process is profiled.

    Rank 0 writes the profile to `run_dir`/profile.json.  `StopTraining` then ends the script,
    raised from its optimizer step on every rank at the same step.
    """
    global _current
    if _current is not None:
        _current.close()
    _current = Conductor(run_dir, settings or ProfileSettings())
    atexit.register(_finish_at_exit)
    os.register_at_fork(after_in_child=_forget)


def installed() -> bool:
    """Whether a profile is being taken in this process."""
    return _current is not None


def adopt(
    *, model: Any, optimizer: Any = None, data: Any = None, **others: Any
) -> PassThroughSession:
    """Serve `autockpt.attach` in mode `profile`: take the state, return a session.

    Raises ConfigError, as attach would, naming an entry that cannot be saved.
    """
    loader = None if isinstance(data, str) and data == "script" else data
    session = PassThroughSession(loader, _current.timer if _current is not None else None)
    if _current is not None:
        _current.adopt(session, model=model, optimizer=optimizer, **others)
    return session


def finish() -> None:
    """After the script ended by itself: writes what there is.  A second call does nothing.

    Raises ConfigError when nothing was seen that could be profiled.
    """
    if _current is not None:
        _current.finish()


def _forget() -> None:
    """In a forked child: the profile is its parent's."""
    global _current
    if _current is not None:
        _current.timer.close()
    _current = None
    atexit.unregister(_finish_at_exit)


def _finish_at_exit() -> None:
    """For scripts that leave in the middle; one that failed keeps its own error."""
    if getattr(sys, "last_value", None) is not None:
        return
    try:
        finish()
    except AutockptError as error:
        print(f"autockpt profile: error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(error.exit_code)
