"""Commands for copies in an object store: bring them there and back, list them."""

import contextlib
import fcntl
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autockpt import new_files
from autockpt.console import Console, local_time
from autockpt.console.progress import Counted
from autockpt.launch.elastic.signals import told_to_end
from autockpt.launch.sidecars.sidecar import Sidecar
from autockpt.run_directory import RunDirectory, require_no_url
from autockpt.values.goal import Goal, RemoteWish
from autockpt.values.policy_keys.paths import is_store_url

if TYPE_CHECKING:
    from autockpt.executors.storage.directory.records import CommitFile
    from autockpt.executors.storage.remote import Copied, RemoteCopies
    from autockpt.executors.throttle.rate_limit import Throttle
    from autockpt.values.errors import AutockptError

NAME = "copier"
FOLLOW_EVERY_S = 5.0
"""Between two looks at a run that is followed: a listing of its directory."""
AGAIN_S = 30.0
"""After a store that failed."""


def is_url(path: str) -> bool:
    """Whether a path names an object store; imports nothing."""
    return "://" in path


def copies_at(url: str) -> "RemoteCopies":
    """Raises ConfigError."""
    from autockpt.executors.storage.remote import Objects, RemoteCopies

    return RemoteCopies(Objects(url))


# --- there ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request to copy: source, target, and the number of copies kept there."""

    source: str
    wish: RemoteWish
    follow: bool
    """Continue with new checkpoints of the run until SIGTERM; then copy a last time."""


def copiers(run: RunDirectory, wish: RemoteWish) -> list[Sidecar]:
    """Return the sidecar that copies the run's commits; none without a store."""
    if wish.url is None:
        return []
    command = ["push", str(run.path), wish.url, "--keep", str(wish.keep_last), "--follow"]
    if wish.rate_bytes_per_s is not None:
        command += ["--rate", f"{wish.rate_bytes_per_s:.0f} B/s"]
    return [Sidecar(name=NAME, command=tuple(command), tier="object store")]


def push(console: Console, request: Request) -> int:
    """Copies the newest good checkpoint; with `follow` each that becomes the newest; exit code."""
    from autockpt.values.errors import AutockptError, GuardError, NoCheckpointError

    new_files.forbid_writing_by_others()  # a store in a directory is written by a library
    ended = told_to_end() if request.follow else threading.Event()
    copier = _Copier(console, request)
    while True:
        last, pause_s = ended.is_set() or not request.follow, FOLLOW_EVERY_S
        try:
            copier.look(last=last)
        except NoCheckpointError:
            if not request.follow:
                raise
        except GuardError as error:  # it will not become better
            copier.failed(error)
            raise
        except AutockptError as error:
            copier.failed(error)
            if last:
                raise
            pause_s = AGAIN_S
        if last:
            break
        ended.wait(pause_s)
    copier.end()
    return 0


class _Copier:
    """Knows what is there already, and tells the run's telemetry."""

    def __init__(self, console: Console, request: Request) -> None:
        from autockpt.executors.storage.event_log import TelemetryWriter
        from autockpt.executors.throttle.rate_limit import RateLimiter, Unlimited

        rate, self._request, self._console = request.wish.rate_bytes_per_s, request, console
        # No cap on a wait, which would let a part pass unpaid: the copy delays no one.
        self._gate: Throttle = (
            Unlimited() if rate is None else RateLimiter(rate, longest_wait_s=math.inf)
        )
        self._copies = copies_at(str(request.wish.url))
        self._there = ""
        """Newest generation that was copied."""
        self._trouble = ""
        self._run = RunDirectory(request.source)
        path = str(self._run.telemetry / "remote.jsonl")
        self._telemetry = TelemetryWriter(path) if self._run.exists else None
        self._sent: list[dict[str, object]] = []

    def look(self, *, last: bool) -> None:
        """Copies the newest that was read back; the `last` time the newest, reading it back."""
        from autockpt.executors.storage.directory.directory import CheckpointDirectory
        from autockpt.integrations.places import find_place
        from autockpt.values.errors import NoCheckpointError
        from autockpt.values.generation import Generation

        path = self._run.checkpoints() if self._run.exists else ""
        if path and not is_store_url(path) and not os.path.isdir(path):
            raise NoCheckpointError(f"{self._request.source}: has no checkpoints yet")
        place = find_place(self._request.source)
        name = place.generation or _newest(place.directory, read=last)
        if name is None or name == self._there:
            return
        if place.generation:
            _require_good(place.directory, name)
        began_s = time.monotonic()
        try:
            with self._console.progress(f"push {name}") as progress:
                what = CheckpointDirectory(place.directory), Generation.from_name(name)
                gate = Counted(progress, total=self._copies.bytes_to_push(*what), gate=self._gate)
                copied = self._copies.push(*what, gate)
        except NoCheckpointError:
            if last:
                raise
            return  # retention was faster; there is a newer one
        self._there, self._trouble = name, ""
        self._tell(copied, time.monotonic() - began_s)
        self._copies.retire(self._request.wish.keep_last)

    def _tell(self, copied: "Copied", copy_s: float) -> None:
        from autockpt.values.telemetry import RemoteCopied
        from autockpt.values.units import format_bytes, format_duration

        name, url = copied.generation.name, self._copies.url
        self._sent.append({"generation": name, "step": copied.step, "bytes": copied.bytes})
        if not copied.bytes:
            self._console.say(f"{url}: has {name} already")
        else:
            self._console.result(
                f"{name} (step {copied.step}) -> {url}: {format_bytes(copied.bytes)} in "
                f"{format_duration(copy_s)}"
            )
        if self._telemetry is not None:
            self._telemetry.emit(
                RemoteCopied(
                    at_s=time.monotonic(), rank=-1, generation=str(copied.generation),
                    step=copied.step, bytes=copied.bytes, copy_s=copy_s,
                    latency_s=max(copy_s, time.time() - copied.created_s),
                )
            )  # fmt: skip

    def failed(self, error: Exception) -> None:
        """Said once for each reason, however long each attempt took."""
        from autockpt.values.telemetry import Degraded

        reason = re.sub(r"[\d.]+", "", str(error))
        if reason == self._trouble:
            return
        self._trouble = reason
        if self._request.follow:
            self._console.warn(f"not copied: {error}")
        if self._telemetry is not None:
            self._telemetry.emit(
                Degraded(
                    at_s=time.monotonic(), rank=-1, what="object store", reason=str(error)
                )
            )  # fmt: skip
            self._telemetry.flush()

    def end(self) -> None:
        """Says what is there."""
        if self._telemetry is not None:
            self._telemetry.close()
        self._console.object("push", {"url": self._copies.url, "copied": self._sent})
        self._console.next(["autockpt", "ls", self._copies.url])


def _newest(directory: str, *, read: bool) -> str | None:
    """Return the newest good checkpoint that was read back.

    With `read`, read back the newest here if that has not been done.  None: none was read back yet.

    Raises NoCheckpointError.
    """
    from autockpt.executors.storage.catalogue import verify_generation
    from autockpt.integrations.places import good_generations
    from autockpt.values.errors import NoCheckpointError

    for name in reversed(good_generations(directory)):
        if os.path.exists(os.path.join(directory, name, "VERIFIED")):
            return name
        if read:
            found = verify_generation(directory, name)
            if found.ok and not found.sick:
                return name
    if read:
        raise NoCheckpointError(f"{directory}: holds no good checkpoint")
    return None


def _require_good(directory: str, name: str) -> None:
    """One that is named is read back, too: in the store it is a good one, and older ones go for it.

    Raises NoCheckpointError, GuardError for a mark or a NaN, CorruptCheckpointError, StorageError.
    """
    from autockpt.executors.storage.catalogue import list_generations, verify_generation
    from autockpt.values.errors import (
        CorruptCheckpointError,
        GuardError,
        NoCheckpointError,
        StorageError,
    )

    record = next((one for one in list_generations(directory) if one.name == name), None)
    if record is None or record.state == "incomplete":
        raise NoCheckpointError(f"{directory}: holds no committed {name}")
    found = verify_generation(directory, name)
    if found.problems:
        kind = CorruptCheckpointError if found.damaged else StorageError
        raise kind(f"{name} is not copied: {'; '.join(found.problems[:3])}")
    marked = {
        "is marked CORRUPT; see `autockpt verify --quarantine`": record.state == "corrupt",
        found.sick or "its numbers are suspect": found.sick or record.health != "good",
        "a person set it aside": os.path.exists(os.path.join(directory, name, "QUARANTINE")),
    }
    for why in (why for why, is_so in marked.items() if is_so):
        raise GuardError(f"{name} is not copied: {why}")


# --- back -----------------------------------------------------------------------------------------


def bring_back(run: RunDirectory, goal: Goal, console: Console) -> None:
    """Before a run begins: what its store holds and its directory lacks.

    A store that does not answer ends the start only where there is nothing else to begin from.
    Raises ConfigError, StorageError, NoCheckpointError.
    """
    from autockpt.cli.jobs.outcome import shown
    from autockpt.values.errors import AutockptError, ConfigError, DirectoryBusyError

    if goal.remote.url is None:
        return
    copies, path = copies_at(goal.remote.url), run.checkpoints(goal)
    with _alone(run):
        try:
            missing = copies.missing(path)
            if missing is None:
                return
            console.say(f"{missing.name} is in {copies.url} and not in {shown(path)}: fetching it")
            with console.progress("pull") as progress:
                count = Counted(progress)
                copied, told = copies.pull(path, moved=count.moved, expect=count.expect)
        except DirectoryBusyError:
            return  # a live keeper holds a newer checkpoint
        except ConfigError:
            raise
        except AutockptError as error:
            _go_on_without(copies.url, path, error, console)
            return
    for line in told:
        console.warn(line)
    console.say(f"{copied.generation.name} (step {copied.step}) is back from {copies.url}")


def require_back(run: RunDirectory, goal: Goal, console: Console) -> None:
    """Require the store's checkpoints locally: a foreign launcher has no time to fetch or copy.

    A store that does not answer ends the start only where there is nothing else to begin from.
    Raises ConfigError where the store holds what the directory lacks, StorageError.
    """
    from autockpt.values.errors import AutockptError, ConfigError

    if goal.remote.url is None:
        return
    copies, path, missing = copies_at(goal.remote.url), run.checkpoints(goal), None
    try:
        missing = copies.missing(path)
    except ConfigError:
        raise
    except AutockptError as error:
        _go_on_without(copies.url, path, error, console)
    if missing is not None:
        raise ConfigError(
            f"{missing.name} is in {goal.remote.url} and not in {run.path}; bring it back first: "
            f"autockpt pull {goal.remote.url} {run.path}   (or --fresh to begin anew without it)"
        )
    console.say(f"to copy checkpoints: autockpt push {run.path} {goal.remote.url} --follow")


def _go_on_without(url: str, path: str, error: "AutockptError", console: Console) -> None:
    """Says so; raises the error where the directory has nothing to begin from."""
    from autockpt.cli.jobs.outcome import shown

    if not _has_some(path):
        raise type(error)(f"{error}; --fresh begins anew without it") from error
    console.warn(f"going on from {shown(path)} without what {url} holds: {error}")


def _has_some(path: str) -> bool:
    from autockpt.integrations.places import good_generations
    from autockpt.values.errors import AutockptError

    try:
        return bool(good_generations(path))
    except AutockptError:
        return False


@contextlib.contextmanager
def _alone(run: RunDirectory) -> Iterator[None]:
    """Launchers of several nodes wait for the first; the others find everything there."""
    fd = os.open(run.logs / "pull.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def pull(console: Console, url: str, destination: str, generation: str | None) -> int:
    """One checkpoint as a run, or into the run or checkpoint directory that is there; exit code."""
    from autockpt.values.generation import Generation
    from autockpt.values.units import format_bytes

    copies = copies_at(url)
    path = _target(destination)
    named = None if generation is None else Generation.from_name(generation)
    with console.progress("pull") as progress:
        count = Counted(progress)
        copied, told = copies.pull(path, named, moved=count.moved, expect=count.expect)
    for line in told:
        console.warn(line)
    name = copied.generation.name
    console.object(
        "pull",
        {"url": url, "directory": path, "generation": name, "bytes": copied.bytes, "aside": told},
    )
    console.result(f"{name} (step {copied.step}) -> {path}: {format_bytes(copied.bytes)}, verified")
    console.next(["autockpt", "run", "--run-dir", destination, "SCRIPT"])
    return 0


def _target(destination: str) -> str:
    """A checkpoint directory that is there, else that of a run."""
    require_no_url(destination)
    if os.path.exists(os.path.join(destination, "RUN")):
        return os.path.abspath(destination)
    return RunDirectory(destination).checkpoints()


# --- what is there --------------------------------------------------------------------------------


def ls(console: Console, url: str) -> None:
    """The copies, oldest first."""
    from autockpt.executors.storage.directory.records import lossy_mark
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes

    copies = copies_at(url)
    commits = copies.commits()
    offered = set(copies.eligible(commits))
    console.object(
        "ls",
        {
            "url": url,
            "run_id": copies.run_id(),
            "generations": [
                {
                    "name": commit.generation.name, "step": commit.step,
                    "world_size": commit.world_size, "created_s": commit.created_s,
                    "bytes": sum(int(r.get("bytes", 0)) for r in commit.records),
                    "health": commit.health, "offered": commit.generation in offered,
                    "parent": to_data(commit.parent), "lossy": lossy_mark(commit.records),
                }
                for commit in commits
            ],
        },
    )  # fmt: skip
    if not commits:
        console.say(f"{url}: no checkpoints")
        return
    console.table(
        ("checkpoint", "step", "ranks", "size", "written", "health", "note"),
        (
            (
                commit.generation.name,
                str(commit.step),
                str(commit.world_size),
                format_bytes(sum(int(r.get("bytes", 0)) for r in commit.records)),
                local_time(commit.created_s),
                commit.health,
                "; ".join(_notes(url, commit, offered=commit.generation in offered)),
            )
            for commit in commits
        ),
    )
    console.next(["autockpt", "pull", url, "RUN_DIR"])


def _notes(url: str, commit: "CommitFile", *, offered: bool) -> Iterator[str]:
    from autockpt.executors.protocol.messages import holds_weights_only
    from autockpt.executors.storage.directory.marks import pin_of
    from autockpt.executors.storage.directory.records import COMES_BACK, comes_back, lossy_mark

    if pinned := pin_of(f"{url}/{commit.generation.name}"):
        yield f"pinned as {pinned}"
    if holds_weights_only(commit.records):
        yield "weights only"
        with contextlib.suppress(OSError):
            if comes_back(f"{url}/{commit.generation.name}", commit):
                yield COMES_BACK
    elif not offered:
        yield "left behind by an older one"
    if lossy := lossy_mark(commit.records):
        yield f"LOSSY: {lossy}"
