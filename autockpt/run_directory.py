"""A run on disk: every file that a run writes, where it stands, and how it is read back.

    run.json         what was started: script, arguments, versions, nodes   (RunInfo)
    job.json         the job that attached here first, whose run it is      (Job)
    goal.json        what the user wants                                    (Goal)
    profile.json     what was measured                                      (Profile)
    decision.json    what was decided, and why                              (Decision)
    plan.yaml        the part of it that executors follow                   (CheckpointPlan)
    telemetry/       what happened, one JSON event per line and rank        (Event)
    controller/      what the online controller was told and answered       (recordings)
    failures.jsonl   one line per interruption and node that met it         (FailureRecord)
    rollbacks.jsonl  one line per rollback after a spike                     (RollbackRecord)
    status.json      how it stands, or ended                                (RunStatus)
    trackers.json    what trackers have got of it                           (trackers.sent)
    standby/         for each rank's next process: what it had imported, what it copies early
    caches/          code that the ranks have compiled, by kind of machine
    incidents/       what was found when ranks made no progress
    report.html, logs/
    checkpoints/     unless the goal names another place
    node-000/        the keeper of a node: socket, pid, log

Only files live here: nothing is decided, nothing is measured.  Records are replaced as a whole
(temporary file, fsync, rename), logs only grow; a reader tolerates a last line that a crash tore.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autockpt import new_files
from autockpt.values.errors import ConfigError, DirectoryBusyError, StorageError
from autockpt.values.failure import (
    FailureRecord,
    Origins,
    RollbackRecord,
    interruptions,
    origins_of,
)
from autockpt.values.generation import Generation, Line
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Decision
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.profile import Profile
from autockpt.values.record import from_data, from_json, to_data, to_json
from autockpt.values.same_job import Job
from autockpt.values.status import RunStatus
from autockpt.values.telemetry import Event, event_from_data, newest_lines

if TYPE_CHECKING:
    from typing import Self

    from autockpt.yaml_text import Loader

R = TypeVar("R")

OWN_SUFFIX = re.compile(r"-(?:task[\w.]+-)?[0-9a-f]{8}(?:[0-9a-f]{8})?")
"""The end of the name of a run whose directory was named for several jobs."""
MAX_CONTROL_BYTES = 100
"""Longest name of a run directory that is made from a URL."""
RUNS = "runs"
"""Default parent of run directories, in the working directory."""
FAILURES = "failures"
"""Directory beside the runs with what `autockpt failures --save` has read: one history a file."""
TAIL_BYTES = 2**16
"""Enough of the end of a telemetry file to hold its newest step."""
LATE_BYTES = 2**24
"""Of all telemetry files together: at the end of a job so much is read in a second."""
REPORT_BYTES = 2**28
"""Of the logs of all ranks together: a report holds so much in a third of a gigabyte."""
LEAST_BYTES = 2**13
"""Of each file at least."""
_EVERY_LINE = Line(term=None)
SOUGHT_BYTES = 2**26
"""Of all files together that are searched for an event which their ends do not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The start of a run: script, arguments, versions, nodes.  Written as run.json."""

    schema_version: int = 1
    run_id: str
    """32 random hex digits, made with the directory."""
    created: str
    """UTC, ISO 8601; for people."""
    script: str
    """Absolute path of the script, or the name of a module."""
    module: bool = False
    args: tuple[str, ...] = ()
    """Of the script, without what looks like a secret."""
    array_task: str = ""
    """Number of the task in an array of jobs; "": there was none."""
    launch_id: str = ""
    """Of the newest launch of several nodes or ranks; "" where one launcher held the directory."""
    cwd: str = ""
    mode: Literal["run", "profile"] = "run"
    nodes: int = 1
    ranks_per_node: int = 1
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The script and its arguments as a shell would take them."""
        import shlex

        return shlex.join([*(["-m"] if self.module else []), self.script, *self.args])


def require_no_url(path: str) -> None:
    """Raises ConfigError where the name of a run directory is the URL of an object store."""
    if "://" in path:
        raise ConfigError(
            f"{path}: expected a directory of this machine for the run, got a URL. Checkpoints go "
            "to an object store with disk.path: --set disk.path=URL"
        )


def local_path(path: str) -> str:
    """The path; for the URL of a run's checkpoints its run directory.  Raises ConfigError."""
    return str(RunDirectory.open(path).path) if is_store_url(path) else path


def _require_no_generation(url: str) -> None:
    above, _, name = url.rstrip("/").rpartition("/")
    if is_store_url(above) and _generation(name) is not None:
        raise ConfigError(f"{url}: is one checkpoint, expected that of a run; pass {above}")


class RunDirectory:
    """The files of one run.  Every method is one file operation; OSErrors become StorageError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None = None, *, script: str = "run") -> "Self":
        """Make the directory (or take the one that exists at `path`) and its sub-directories.

        Without `path` it is `runs/<script>-<time>`, which is new.
        Raises StorageError when it cannot be written, ConfigError for a URL.
        """
        require_no_url(str(path))
        with _storage_errors("create the run directory", path or RUNS):
            if path is None:
                run = cls(_claim(default_path(script)))
            else:
                run = cls(path)
                new_files.make_directory(run.path)
            for folder in (run.telemetry, run.logs):
                new_files.make_directory(folder, new_files.PRIVATE_DIRECTORY)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Self":
        """An existing run directory, also that of a run whose checkpoints are at a URL.

        Raises ConfigError when `path` holds none.
        """
        url = str(path)
        _require_no_generation(url)
        run = cls(_control_path_here(url) if is_store_url(url) else path)
        if is_store_url(url) and not run.exists:
            raise ConfigError(
                f"{url}: its run directory {run.path} is not here. The events of a run stay on the "
                "machine that trains: ask there, in the directory where it was started, or name "
                "its --run-dir"
            )
        if run.path.is_file():
            raise ConfigError(
                f"{path}: is a file, expected the directory of a run; `autockpt ls {RUNS}` lists "
                "the runs here"
            )
        if not run.path.is_dir():
            raise ConfigError(
                f"{path}: no such run directory; `autockpt ls {RUNS}` lists the runs here"
            )
        if not run.exists and (run.path / "checkpoints").is_dir():
            raise ConfigError(
                f"{path}: holds checkpoints alone, as `autockpt pull` makes them, and no run to "
                f"tell of; `autockpt ls {path}` lists them, and `autockpt run --run-dir {path} "
                "SCRIPT` goes on"
            )
        if not run.exists and cls(run.path.parent).exists:
            above = Path(path).parent if Path(path).name else run.path.parent
            raise ConfigError(f"{path}: is within a run directory; pass {above}")
        if not run.exists and (inner := _runs_in(run.path)):
            raise ConfigError(
                f"{path}: holds {len(inner)} runs, expected one; the newest is "
                f"{Path(path) / inner[-1].name}, and "
                f"`autockpt ls {path}` lists all"
            )
        if not run.exists:
            raise ConfigError(
                f"{path}: not a run directory (it holds neither run.json, profile.json nor "
                "telemetry/); pass the directory that `autockpt run` or `autockpt profile` printed"
            )
        return run

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @contextlib.contextmanager
    def owned(self) -> "Iterator[Self]":
        """Held by the one launcher that may write here; given back by its death, too.

        Raises DirectoryBusyError when another one holds it.
        """
        path = self.path / "launcher.lock"
        with _storage_errors("open", path):
            file = open(path, "a+", encoding="utf-8", opener=new_files.private)  # noqa: SIM115 - open as long as it is held
        with file:
            # Without locks on this file system the lease of the checkpoints still protects.
            if not new_files.lock(file.fileno()):
                file.seek(0)
                raise DirectoryBusyError(
                    f"{self.path}: in use by another launcher (process {file.read().strip()}); "
                    "stop that one, or name another --run-dir"
                )
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield self

    @property
    def exists(self) -> bool:
        """Whether the directory holds a run."""
        marks = ("run.json", "profile.json", "telemetry", "decision.json")
        return any((self.path / mark).exists() for mark in marks)

    # --- where things stand

    @property
    def telemetry(self) -> Path:
        """Directory of the event files."""
        return self.path / "telemetry"

    @property
    def logs(self) -> Path:
        """Directory of the output of the ranks and the launcher."""
        return self.path / "logs"

    @property
    def caches(self) -> Path:
        """Directory of code that the ranks have compiled; made by the first that needs it."""
        return self.path / "caches"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    @property
    def profile_path(self) -> Path:
        """profile.json."""
        return self.path / "profile.json"

    @property
    def controller(self) -> Path:
        """Directory of the controller's recordings."""
        return self.path / "controller"

    def rank_telemetry(self, rank: int) -> Path:
        """Event file of one rank."""
        return self.telemetry / f"rank-{rank:05d}.jsonl"

    def node(self, node: int) -> Path:
        """Directory of one node's keeper; the keeper creates it, private to its user."""
        return self.path / f"node-{node:03d}"

    def checkpoints(self, goal: Goal | None = None) -> str:
        """Where generations go: the goal's storage path, else `checkpoints/` in here.

        A path, or the URL of a place in an object store.  A relative storage path is relative to
        the directory in which the job was started.  Without `goal`, the goal that is written here
        decides.
        """
        goal = goal or self.read_goal()
        if goal is None or goal.storage_path is None:
            return str(self.path / "checkpoints")
        if is_store_url(goal.storage_path):
            return goal.storage_path.rstrip("/")
        info = self.read_info()
        return os.path.abspath(os.path.join(info.cwd if info else "", goal.storage_path))

    # --- records

    def write_info(self, info: RunInfo) -> None:
        """Replace run.json."""
        self._write("run.json", info)

    def read_info(self) -> RunInfo | None:
        """The record in run.json, None when there is none.  Raises ConfigError when unreadable."""
        return self._read("run.json", RunInfo)

    def read_job(self) -> Job | None:
        """The record in job.json, or None."""
        return self._read("job.json", Job)

    def write_job(self, job: Job) -> None:
        """Replace job.json."""
        self._write("job.json", job)

    def claim_job(self, job: Job) -> Job:
        """The record in job.json, which is `job` where there was none: of two claims one wins.

        A record that cannot be understood gives way.
        """
        try:
            known = self.read_job()
        except ConfigError:
            self.write_job(job)
            return job
        if known is not None:
            return known
        temporary = f".job.json.{secrets.token_hex(8)}"
        self.write_text(temporary, to_json(job, indent=2) + "\n")
        try:
            os.link(self.path / temporary, self.path / "job.json")
        except FileExistsError:
            pass
        except OSError:  # no links on this file system: the last one wins
            self.write_job(job)
        finally:
            self._remove(temporary)
        return self.read_job() or job

    def forget_job(self) -> None:
        """Remove job.json: the job that attaches next owns this run."""
        self._remove("job.json")

    def write_goal(self, goal: Goal) -> None:
        """Replace goal.json."""
        self._replace("goal.json", to_json(goal, indent=2) + "\n", new_files.private)

    def read_goal(self) -> Goal | None:
        """The record in goal.json, or None."""
        return self._read("goal.json", Goal)

    def write_profile(self, profile: Profile) -> None:
        """Replace profile.json."""
        self._write("profile.json", profile)

    def read_profile(self) -> Profile | None:
        """The record in profile.json, or None."""
        return self._read("profile.json", Profile)

    def write_decision(self, decision: Decision, *, plan_text: str | None = None) -> None:
        """Replace decision.json, and plan.yaml by `plan_text` (the policies' commented form)."""
        self._write("decision.json", decision)
        if plan_text is None:
            self.write_plan(decision.plan)
        else:
            self.write_text("plan.yaml", plan_text)

    def read_decision(self) -> Decision | None:
        """The record in decision.json, or None."""
        return self._read("decision.json", Decision)

    def write_plan(self, plan: CheckpointPlan) -> None:
        """Replace plan.yaml by a bare plan: the safe defaults, without a decision."""
        import yaml

        text = yaml.safe_dump(to_data(plan), sort_keys=False, default_flow_style=False, width=100)
        self.write_text("plan.yaml", text)

    def read_plan(self) -> CheckpointPlan | None:
        """The plan in plan.yaml, bare or with its decision; None when there is none."""
        text = self._text("plan.yaml")
        if text is None:
            return None
        from autockpt import yaml_text

        where = str(self.path / "plan.yaml")
        data = yaml_text.load(text, where, _plan_loader())
        plan = data.get("plan", data) if isinstance(data, dict) else data
        return from_data(CheckpointPlan, plan, where=where)

    def plan_text(self) -> str:
        """plan.yaml as it stands, "" when there is none."""
        return self._text("plan.yaml") or ""

    def write_status(self, status: RunStatus) -> None:
        """Replace status.json."""
        self._write("status.json", status)

    def read_status(self) -> RunStatus | None:
        """The record in status.json, or None."""
        return self._read("status.json", RunStatus)

    def status_written_s(self) -> float | None:
        """When the status was written, Unix time; None: there is none."""
        try:
            return (self.path / "status.json").stat().st_mtime
        except OSError:
            return None

    def forget_decision(self) -> None:
        """Remove decision and plan: their inputs do not hold any more."""
        self._remove("decision.json")
        self._remove("plan.yaml")

    def forget_status(self) -> None:
        """Remove the status of an earlier start."""
        self._remove("status.json")

    def retire_profile(self) -> None:
        """Keep profile.json as profile-stale.json: it is of another machine or scale."""
        with contextlib.suppress(_Missing), _storage_errors("rename", self.profile_path):
            os.replace(self.profile_path, self.path / "profile-stale.json")

    # --- logs

    def events(self) -> list[Event]:
        """Every event of every rank and keeper, in the order in which they happened.

        Times are monotonic within a boot of the machine; a file whose clock jumps back has seen
        another boot.  Raises ConfigError for events of an unknown kind.
        """
        return self._ordered((path, _json_lines(path)) for path in self._event_files())

    def events_for_report(self, most_bytes: int = REPORT_BYTES) -> tuple[list[Event], int]:
        """As `events`, and the number of ranks whose routine events are left out.

        There are such ranks where the logs of all are larger than `most_bytes`.  The lowest rank is
        none of them, and the others that are whole lie evenly between them.
        """
        files = self._rank_files()
        with _storage_errors("read", self.telemetry):
            nbytes = sum(path.stat().st_size for path in files)
        count = max(1, len(files) * most_bytes // max(nbytes, 1))
        if count >= len(files):
            return self.events(), 0
        whole = {files[number * len(files) // count] for number in range(count)}
        thinned = set(files) - whole
        found = (
            (path, _json_lines(path, without=_ROUTINE, newest_of=_BEGAN))
            if path in thinned
            else (path, _json_lines(path))
            for path in self._event_files()
        )
        return self._ordered(found), len(thinned)

    def late_events(self) -> list[Event]:
        """As `events`, in bounded time: of long logs only the ends, without times of iterations.

        The newest start of rank 0 is among them, which tells the wall clock.
        """
        files = self._event_files()
        tail_bytes = max(LEAST_BYTES, LATE_BYTES // max(1, len(files)))
        starts = next(self._starts(self.rank_telemetry(0), 1), None)
        found = []
        for path in files:
            lines = list(_json_lines(path, tail_bytes=tail_bytes, without=(_TIMED,)))
            if path == self.rank_telemetry(0) and starts:
                known = any(data.get("event") == "RunStarted" for _, data in lines)
                lines = lines if known else [(0, starts), *lines]
            found.append((path, lines))
        return self._ordered(found)

    def _ordered(
        self, files: Iterable[tuple[Path, Iterable[tuple[int, dict[str, Any]]]]]
    ) -> list[Event]:
        of_boot: dict[int, list[Event]] = {}
        texts: dict[str, str] = {}
        for path, lines in files:
            boot, newest = 0, float("-inf")
            for number, data in lines:
                event = event_from_data(_sharing(data, texts), where=f"{path}:{number}")
                if event.at_s < newest - _CLOCK_SLACK_S:
                    boot, newest = boot + 1, event.at_s
                newest = max(newest, event.at_s)
                of_boot.setdefault(boot, []).append(event)
        for events in of_boot.values():
            events.sort(key=lambda event: event.at_s)
        return list(itertools.chain.from_iterable(of_boot[boot] for boot in sorted(of_boot)))

    def recent_events(self) -> list[Event]:
        """The events in the last part of every file, in the order of their times.

        Raises ConfigError for events of an unknown kind.
        """
        found = [
            event_from_data(data, where=str(path))
            for path in self._event_files()
            for _, data in _json_lines(path, tail_bytes=TAIL_BYTES)
        ]
        return sorted(found, key=lambda event: event.at_s)

    def recordings(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Name and whole lines of every recording of the controller, oldest first."""
        for path in sorted(self.controller.glob("*.jsonl")):
            yield f"{path.parent.name}/{path.name}", [data for _, data in _json_lines(path)]

    def failures(self) -> tuple[FailureRecord, ...]:
        """The interruptions in the failure log, oldest first."""
        return interruptions(self._failure_records())

    def failure_origins(self) -> Origins:
        """The nodes on which they began."""
        return origins_of(self._failure_records())

    def _failure_records(self) -> Iterator[FailureRecord]:
        path = self.path / "failures.jsonl"
        for number, data in _json_lines(path):
            record = from_data(FailureRecord, data, where=f"{path}:{number}")
            if 0.0 <= record.exposure_s < math.inf:  # others were damaged, and are no evidence
                yield record

    def rollbacks(self) -> tuple[RollbackRecord, ...]:
        """The rollbacks after spikes, oldest first."""
        path = self.path / "rollbacks.jsonl"
        return tuple(
            from_data(RollbackRecord, data, where=f"{path}:{number}")
            for number, data in _json_lines(path)
        )

    def append_rollback(self, record: RollbackRecord) -> None:
        """Add one line to the log of rollbacks, durable when this returns."""
        self._append("rollbacks.jsonl", record)

    def append_failure(self, record: FailureRecord) -> None:
        """Add one line to the failure log, durable when this returns."""
        self._append("failures.jsonl", record)

    def _append(self, name: str, record: FailureRecord | RollbackRecord) -> None:
        path = self.path / name
        with _storage_errors("append to", path):
            descriptor = new_files.private(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(descriptor, (to_json(record) + "\n").encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def line(self) -> Line:
        """The line of history that the newest start continues.  Cheap.

        A start is newer by the clock on the wall: terms begin again where checkpoints were removed.
        """
        found = [(path, start) for path in self._rank_files() for start in self._starts(path, 1)]
        if not found:
            return Line(term=None)
        path, _ = max(found, key=lambda one: (str(one[1].get("wall")), one[1].get("term", 0)))
        with contextlib.suppress(TypeError, KeyError, ValueError):  # a damaged record
            return Line.of(
                (int(one["term"]), str(one.get("resumed", ""))) for one in self._starts(path)
            )
        return Line(term=None)

    def newest_step(self) -> int | None:
        """Newest step of the newest start, by the tails of the event files; None: none.  Cheap."""
        line = self.line()
        steps = [parent.step for parent in line.parents[:1]]
        began_s = math.inf
        for path in self._rank_files():
            found, start = self._steps_since_start(path)
            if start is None or line.term is None or start.get("term") == line.term:
                steps += found
                began_s = min(began_s, float((start or {}).get("at_s", -math.inf)))
        for path in self._keeper_files():
            failures: list[int] = []
            newest_s = -math.inf
            for _, data in _json_lines(path, tail_bytes=TAIL_BYTES):
                at_s = float(data.get("at_s", newest_s))
                if at_s < newest_s - _CLOCK_SLACK_S:
                    failures.clear()  # of another boot, with a clock of its own
                newest_s = at_s
                generation = _generation(str(data.get("generation", "")))
                known = generation is not None and line.term in (None, generation.term)
                if isinstance(data.get("step"), int):
                    if data.get("event") == "FailureObserved" and at_s >= began_s:
                        failures.append(data["step"])
                    elif known or line.term is None:
                        steps.append(data["step"])
            if newest_s <= time.monotonic() or line.term is None:
                steps += failures
        return max(steps, default=None)

    def newest_generation(self) -> Generation | None:
        """Newest generation that the tails of the event files know as committed.  Cheap."""
        return self._newest(("MemoryCommitted", "CheckpointDurable"))

    def newest_durable(self) -> Generation | None:
        """Newest durable generation on the line of the newest start.  Cheap."""
        return self._newest(_DURABLE, line=self.line())

    def durable_step(self) -> int | None:
        """Newest durable step on the line of the newest start.  Cheap."""
        newest = self.newest_durable()
        return None if newest is None else newest.step

    def resumed_step(self) -> int:
        """Step that the newest start has resumed; 0: none."""
        resumed = self.line().resumed_step
        if resumed is not None:
            return resumed
        return max(self._tail_values("step", int, ("Restored", "Restored from disk")), default=0)

    def log_ends(self) -> dict[str, int]:
        """Bytes of each event file so far, by its name."""
        with _storage_errors("read", self.telemetry):
            return {path.name: path.stat().st_size for path in self._event_files()}

    def has_attached_since(self, ends: Mapping[str, int]) -> bool:
        """Whether a rank has written behind these ends (`log_ends`): it does so at once."""
        grown = {name for name, end in self.log_ends().items() if end > ends.get(name, 0)}
        return any(path.name in grown for path in self._rank_files())

    def has_committed_since(self, ends: Mapping[str, int]) -> bool:
        """Whether a generation became durable behind these ends (`log_ends`)."""
        names = ("CheckpointDurable",)
        return any(
            next(self._records(path, names, begin=ends.get(path.name, 0), most_bytes=None), None)
            for path in self._keeper_files()
        )

    def newest_remote(self) -> Generation | None:
        """Newest generation of the line that the log of copies knows in the store.  Cheap."""
        return self._newest(("RemoteCopied",), [self.telemetry / "remote.jsonl"], line=self.line())

    @property
    def attached(self) -> bool:
        """Whether a trainer ever attached: it writes its first event at once."""
        return any(path.stat().st_size for path in self.telemetry.glob("rank-*.jsonl"))

    # --- the mark of a script that never attached

    @property
    def unprotected(self) -> bool:
        """Whether the script ran to its end without calling autockpt.attach."""
        return (self.path / "unprotected").exists()

    def mark_unprotected(self, *, value: bool = True) -> None:
        """Leave or remove the mark."""
        if value:
            self.write_text("unprotected", "the script never called autockpt.attach\n")
        else:
            self._remove("unprotected")

    def write_text(self, name: str, text: str) -> None:
        """Replace the file `name` by `text`: readers see the old or the new one, never a part."""
        self._replace(name, text, new_files.readable)

    def _replace(self, name: str, text: str, opener: Callable[[str, int], int]) -> None:
        path = self.path / name
        with _storage_errors("write", path):
            temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            try:
                with open(temporary, "w", encoding="utf-8", opener=opener) as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def _remove(self, name: str) -> None:
        with _storage_errors("remove", self.path / name):
            (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, record: Any) -> None:
        self.write_text(name, to_json(record, indent=2) + "\n")

    def _read(self, name: str, kind: type[R]) -> R | None:
        text = self._text(name)
        return None if text is None else from_json(kind, text, where=str(self.path / name))

    def _text(self, name: str) -> str | None:
        try:
            with _storage_errors("read", self.path / name):
                return (self.path / name).read_text(encoding="utf-8")
        except _Missing:
            return None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path / name}: not UTF-8 text: {error}") from None

    def _event_files(self) -> list[Path]:
        return sorted(self.telemetry.glob("*.jsonl")) if self.telemetry.is_dir() else []

    def _keeper_files(self) -> list[Path]:
        return sorted(self.telemetry.glob("keeper-*.jsonl"))

    def _rank_files(self) -> list[Path]:
        return sorted(self.telemetry.glob("rank-*.jsonl"))

    def _starts(self, path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
        """The records of starts in a rank's file, the newest first."""
        return itertools.islice(self._records(path, ("RunStarted",)), most)

    def _steps_since_start(self, path: Path) -> tuple[list[int], dict[str, Any] | None]:
        """Return the steps in a rank's tail behind its newest start, and that start."""
        steps: list[int] = []
        with _storage_errors("read", path), open(path, "rb") as file:
            for line in newest_lines(file, most_bytes=TAIL_BYTES):
                data = _record(line)
                if data is not None and data.get("event") == "RunStarted":
                    return steps, data
                if data is not None and isinstance(data.get("step"), int):
                    steps.append(data["step"])
        return steps, next(self._starts(path, 1), None)

    def _newest(
        self,
        events: tuple[str, ...],
        files: Sequence[Path] | None = None,
        *,
        line: Line = _EVERY_LINE,
    ) -> Generation | None:
        """By the events of keepers, or those in `files`; on one line."""
        files = self._keeper_files() if files is None else files
        tails = map(_generation, self._tail_values("generation", str, events, files))
        names = [one for one in tails if one is not None and line.holds(one)]
        if not names:  # failures may have filled the tails
            share = max(LEAST_BYTES, SOUGHT_BYTES // max(1, len(files)))
            for path in files:
                for data in self._records(path, events, most_bytes=share):
                    found = _generation(str(data.get("generation")))
                    if found is not None and line.holds(found):
                        names.append(found)
                        break
        return max(names, default=None)

    def _records(
        self,
        path: Path,
        events: tuple[str, ...],
        *,
        begin: int = 0,
        most_bytes: int | None = SOUGHT_BYTES,
    ) -> Iterator[dict[str, Any]]:
        """These events in a file, the newest first; of its last `most_bytes` alone."""
        written = [name.partition(" ")[0] for name in events]
        try:
            with _storage_errors("read", path), open(path, "rb") as file:
                most = os.fstat(file.fileno()).st_size if most_bytes is None else most_bytes
                for line in newest_lines(file, most_bytes=most, begin=begin, naming=written):
                    data = _record(line)
                    if data is not None and _name(data) in events:
                        yield data
        except _Missing:
            pass

    def _tail_values(
        self,
        key: str,
        kind: type[R],
        events: tuple[str, ...] = (),
        files: Sequence[Path] | None = None,
    ) -> Iterator[R]:
        for path in self._event_files() if files is None else files:
            for _, data in _json_lines(path, tail_bytes=TAIL_BYTES):
                value = data.get(key)
                if isinstance(value, kind) and (not events or _name(data) in events):
                    yield value


_DURABLE = ("CheckpointDurable", "Restored from disk")
"""Events of checkpoints that are durable, also of a launch whose run directory was lost."""


def _sharing(data: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """An event's data with one copy of each text: each rank names each checkpoint twice."""
    return {
        key: texts.setdefault(value, value) if type(value) is str else value
        for key, value in data.items()
    }


def _name(data: Mapping[str, object]) -> object:
    """Of an event; one that a rank has read from storage has a name of its own."""
    name = data.get("event")
    return "Restored from disk" if name == "Restored" and data.get("source") == "disk" else name


_CLOCK_SLACK_S = 5.0
"""Threads of one process may write their events a little out of order."""


class _Missing(StorageError):
    """A file does not exist; callers turn it into None."""


def _generation(text: str) -> Generation | None:
    """From its name, or the text that people read; None when it is neither."""
    try:
        return Generation.from_text(text)
    except ConfigError:
        return None


def _plan_loader() -> "type[Loader]":
    """Also takes `1e-05` for a number, as YAML 1.2 does."""
    from autockpt import yaml_text

    class PlanLoader(yaml_text.Loader):
        pass

    number = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    PlanLoader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return PlanLoader


def new_run_id() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def utc_now() -> str:
    """The time in UTC, ISO 8601, for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def default_path(script: str) -> Path:
    """`runs/<script-stem>-<YYYYmmdd-HHMMSS>` in the working directory, in local time.

    A module is known by its last name; a package's `__main__` by the package.
    """
    stem = script.removesuffix(".__main__").rpartition(".")[2] if _is_module(script) else ""
    stem = stem or Path(script).stem or "run"
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem)
    return Path(RUNS) / f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"


def control_path(url: str) -> Path:
    """`runs/<scheme>-<bucket>-<prefix>-<digest>`: the directory of a run whose checkpoints are at
    `url`.

    It follows from the URL alone, so a restart finds it, and it may be lost.  The digest keeps
    `s3://b/a/b` and `s3://b/a-b` apart.
    """
    place = url.rstrip("/")
    digest = hashlib.sha256(place.encode()).hexdigest()[:8]
    safe = "".join(c if c.isalnum() or c in "._" else "-" for c in place.replace("://", "-"))
    short = safe.encode()[: MAX_CONTROL_BYTES - len(digest) - 1].decode(errors="ignore")
    return Path(RUNS) / f"{short}-{digest}"


def _control_path_here(url: str) -> Path:
    """The control path of a URL; if that is not here, the one of a job of its own that has it.

    Both the URL and the control path of such a job end as `OWN_SUFFIX` says.
    """
    path, place = control_path(url), url.rstrip("/")
    begins = [at for at, letter in enumerate(place) if letter == "-"]
    for at in begins if not path.is_dir() else ():
        own = Path(f"{control_path(place[:at])}{place[at:]}")
        if OWN_SUFFIX.fullmatch(place[at:]) and own.is_dir():
            return own
    return path


def _is_module(script: str) -> bool:
    return not script.endswith(".py") and all(part.isidentifier() for part in script.split("."))


def _claim(path: Path) -> Path:
    """Make a directory that did not exist: `path`, or `path` with a number behind it."""
    new_files.make_directory(path.parent)
    for number in range(1, 10_000):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir(new_files.READABLE_DIRECTORY)
            return candidate
    raise StorageError(f"{path}: 10,000 runs were started in this second; remove some of them")


_TIMED = b'"IterationsTimed"'
_ROUTINE = (_TIMED, b'"SnapshotSealed"')
_BEGAN = b'"SnapshotBegan"'
"""It tells that values which an earlier copy lacked may be there."""


def _json_lines(
    path: Path,
    *,
    tail_bytes: int | None = None,
    without: tuple[bytes, ...] = (),
    newest_of: bytes = b"\0",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every whole line; a torn one, or one of `without`, is skipped.

    Of lines of `newest_of` the newest before each other line stays.  A crash tears the last line.
    The next start of the process appends behind the fragment, so the object at the end of such a
    line is still good.
    """
    with contextlib.suppress(_Missing), _storage_errors("read", path), open(path, "rb") as file:
        if tail_bytes is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
        held: tuple[int, bytes] | None = None
        for number, line in enumerate(file, start=1):
            if any(kind in line for kind in without) and _is_one(line):
                continue
            earlier, held = held, None
            if newest_of in line and _is_one(line):
                held = number, line
                continue
            yield from _objects(earlier, (number, line))
        yield from _objects(held)


def _objects(*lines: tuple[int, bytes] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    for line in lines:
        if line is not None and (data := _record(line[1])) is not None:
            yield line[0], data


def _is_one(line: bytes) -> bool:
    """Whether no other event stands behind the fragment of one."""
    return line.count(b'{"event"') == 1


def _record(line: bytes) -> dict[str, Any] | None:
    """The object of a line, or the one at its end."""
    return _object(line) or next(filter(None, (_object(tail) for tail in _tails(line))), None)


def _tails(line: bytes) -> Iterator[bytes]:
    """The last record of a line that begins with the fragment of another one."""
    for key in (b'{"event"', b'{"schema_version"'):
        begin = line.rfind(key)
        if begin > 0:
            yield line[begin:]


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


@contextlib.contextmanager
def _storage_errors(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _Missing(f"cannot {doing} {path}: {error.strerror}") from error
    except OSError as error:
        raise StorageError(f"cannot {doing} {path}: {error.strerror}{_advice(error)}") from error


def _runs_in(folder: Path) -> list[Path]:
    """The run directories in a folder, the newest last."""
    with contextlib.suppress(OSError):
        runs = [path for path in folder.iterdir() if RunDirectory(path).exists]
        return sorted(runs, key=lambda path: path.stat().st_mtime)
    return []


def _advice(error: OSError) -> str:
    import errno

    return {
        errno.EFBIG: f"; {new_files.size_limit_advice()}",
        errno.ENOSPC: "; free some space or name another place with --run-dir",
        errno.EDQUOT: "; the quota is used up; name another place with --run-dir",
        errno.EROFS: "; the file system is read-only; name another place with --run-dir",
        errno.EACCES: "; name a place that this user may write with --run-dir",
        errno.EPERM: "; name a place that this user may write with --run-dir",
        errno.ENOENT: "; name a place that exists with --run-dir",
        errno.ENOTDIR: "; a file stands where a directory is needed",
        errno.EEXIST: "; a file stands where a directory is needed",
    }.get(error.errno or 0, "")
