"""The sessions of this process: the run of each attach, and the limits of a forked child.

Every attach is a training of its own, as in a k-fold, a sweep or a notebook.  The first has the
directory of the run, the later ones have `attach-2`, `attach-3`, ... in it; a script that attaches
in the same order again resumes each.  A name (`attach(run_dir=...)`) says which one is meant: the
same name again goes on with that run.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attached:
    """A session as one among others, and the requests that it answers."""

    directory: str
    """Its run directory."""
    launch_id: str
    """Launch that it is of."""
    named: bool
    """The script named its run directory."""
    objects: Sequence[Any]
    """Its models and optimizers."""
    reached_step: Callable[[], int]
    """Iterations trained so far."""
    supersede: Callable[[str], None]
    """Ends it, its last checkpoint included, in favour of a run in that directory."""
    fail: Callable[[BaseException], None]
    """Ends it as after this exception: its checkpoints in memory stay for the next start."""
    disown: Callable[[], None]
    """In a forked child: forgets all of it, and leaves what it shares with the parent."""


class Attaches:
    """Counts the attaches of a process and knows its sessions."""

    def __init__(self) -> None:
        self._runs: dict[str, list[str | None]] = {}
        """By launch the names of its runs in their order; None: without a name, one more each."""
        self._again: dict[str, int] = {}
        """Attaches by directory of the run and launch."""
        self._sessions: list[Attached] = []
        self._followers: list[Callable[[], None]] = []
        self._any = False
        self._has_failed = False

    def number(self, name: str | None, launch_id: str, *, shared: bool) -> int:
        """Number of the run that the coming attach is of, from 1.

        `shared`: the launcher gave one directory for all, so that named runs are numbered too.
        """
        if name is not None and not shared:
            return 1
        key, runs = _key(name), self._runs.get(launch_id, [])
        return runs.index(key) + 1 if key is not None and key in runs else len(runs) + 1

    def again(self, directory: str, launch_id: str) -> int:
        """How often this process has attached to a run before; counts this one, also in vain."""
        key = f"{launch_id} {os.path.realpath(directory)}"
        earlier = self._again.get(key, 0)
        self._again[key] = earlier + 1
        return earlier

    def end_former(
        self, directory: str, launch_id: str, *, named: bool, objects: Sequence[Any]
    ) -> None:
        """Ends the sessions that a coming one takes the place of.

        These are sessions of the same directory or of the same objects.  If neither has a name, the
        session before it ends too.  A loop over folds or a notebook has left that one, and its
        memory is needed.
        """
        where, mine = os.path.realpath(directory), {id(item) for item in objects}
        for session in list(self._sessions):
            same = os.path.realpath(session.directory) == where
            shares = any(id(item) in mine for item in session.objects)
            replaced = same or shares or not (named or session.named)
            if replaced and session.launch_id == launch_id:
                session.supersede(directory)

    def began(self, session: Attached, name: str | None, *, shared: bool) -> None:
        """A session is in force."""
        self._any = True
        self._sessions.append(session)
        key, runs = _key(name), self._runs.setdefault(session.launch_id, [])
        if key is None or (shared and key not in runs):
            runs.append(key)

    def withdraw(self, launch_id: str) -> None:
        """The newest attach has trained nothing: the coming one is of its run."""
        runs = self._runs.get(launch_id)
        if runs and runs[-1] is None:
            runs.pop()

    def ended(self, session: Attached, *, failed: bool) -> None:
        """It is no more."""
        self._sessions = [other for other in self._sessions if other is not session]
        self._has_failed |= failed

    @property
    def are_over(self) -> bool:
        """Whether this process has attached, and each of its trainings ended well."""
        return self._any and not self._sessions and not self._has_failed

    @property
    def any(self) -> bool:
        """Whether this process has attached."""
        return self._any

    @property
    def newest_step(self) -> int | None:
        """Iterations that the newest session has trained; None: there is no session."""
        return self._sessions[-1].reached_step() if self._sessions else None

    def ends_with(self, follower: Callable[[], None]) -> None:
        """`follower` is called behind the sessions' end where the process goes on without them."""
        self._followers.append(follower)

    def fail(self, error: BaseException) -> list[Any]:
        """Ends all sessions, as after this exception; their models and optimizers."""
        sessions = list(self._sessions)
        for session in sessions:
            session.fail(error)
        while self._followers:
            self._followers.pop()()
        return [item for session in sessions for item in session.objects]

    def begin_anew(self) -> None:
        """Nothing was attached: the script's function is called again, as in a new process."""
        self._runs, self._again, self._any, self._has_failed = {}, {}, False, False

    def in_child(self) -> None:
        """A forked child has attached nothing: its parent goes on with all of it."""
        sessions, self._sessions = self._sessions, []
        self._runs, self._again, self._any, self._has_failed = {}, {}, False, False
        self._followers.clear()
        for session in sessions:
            session.disown()


def within(path: str, number: int) -> str:
    """The directory of a numbered run, where `path` is that of the first."""
    return path if number == 1 else os.path.join(path, f"attach-{number}")


def _key(name: str | None) -> str | None:
    """None: without a name each attach is of one run more."""
    return None if name is None else os.path.abspath(name)


def is_helper() -> bool:
    """Whether this process loads or computes for another one, and trains nothing.

    That is a worker of a DataLoader, or a spawned process that imports the script of its parent.
    An attach at the top of that script then runs again there.
    """
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return bool(importing) or get_worker_info() is not None


def in_forked_children(call: Callable[[], None]) -> None:
    """Calls it in every child that this process forks from now on."""
    os.register_at_fork(after_in_child=call)


of_this_process = Attaches()
in_forked_children(of_this_process.in_child)
