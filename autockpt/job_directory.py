"""Which directory does a job get, where the one that was named may hold another job?

    runs/train                 the first job that trained here
    runs/train-3f2a91bc        another one: other arguments, or another script
    runs/train-task4-90c1d2e3  another task of an array of jobs

A directory belongs to the job in its job.json, which is written once and in one step.  Of jobs that
start together one gets the directory, and the others get their own.  The name of a run of its own
follows from the job alone, so that every rank and every restart finds it again.  `values.same_job`
decides whether two jobs are the same; here are only the files.
"""

import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from autockpt.run_directory import OWN_SUFFIX, RunDirectory
from autockpt.values import same_job
from autockpt.values.errors import AutockptError, ConfigError
from autockpt.values.goal import Goal
from autockpt.values.same_job import Job

SAME_JOB = "AUTOCKPT_SAME_JOB"
"""Variable: with 1 the run in the named directory counts as this job's."""
_DIGITS = (8, 16, 32, 64)
"""Of the digest in a name: more where another job has the shorter one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a job runs."""

    path: str
    suffix: str = ""
    """Of the path behind the named one; "": it is the named one."""
    said: str = ""
    """A sentence for people; "": there is nothing to say."""
    renewal: Job | None = None
    """The record that job.json gets when the start is accepted; None: it stands there."""

    def renew(self) -> None:
        """Write the job down as it goes on; a refused start never does.

        A directory that takes nothing stays as it was: the same job by the rule.
        """
        if self.renewal is not None:
            with contextlib.suppress(AutockptError):
                RunDirectory(self.path).write_job(self.renewal)


def place(named: str, job: Job, *, take: bool = False) -> Placed:
    """The directory of a job that was given `named`; one without a job belongs to it now.

    Another record there is replaced by `Placed.renew`.

    `take` goes on with the run in `named`, also if another job made it.  A directory that cannot be
    read or written is taken as it is: the next write there reports the error.
    """
    try:
        there = _claimed(named, job)
    except AutockptError:
        return Placed(path=named)
    said = _other(there, job)
    if not said or take:
        said_now = _goes_on(named, there, job, said)
        return Placed(path=named, said=said_now, renewal=_renewal(there, job))
    for digits in _DIGITS:
        suffix = f"-{same_job.tag(job, digits)}"
        try:
            own = _claimed(named + suffix, job)
        except AutockptError:
            own = job
        if not _other(own, job):
            return Placed(
                path=named + suffix,
                suffix=suffix,
                renewal=_renewal(own, job),
                said=f"{shown(named)} holds another job: {'; '.join(said)}; this job has a run of "
                f"its own in {shown(named + suffix)} ({SAME_JOB}=1 goes on with the one in "
                f"{shown(named)})",
            )
    raise ConfigError(f"{named}: all names for a run of this job's own are taken; name a directory")


def differs(run: RunDirectory, job: Job) -> list[str]:
    """What makes a job another one than the run that is there; [] where it is the same, or none."""
    there = _of_run(run)
    return [] if there is None else _other(there, job)


def is_same_script(there: str, here: str) -> bool:
    """Whether two paths are one script: by every spelling, or moved with its checkout."""
    if there == here or os.path.realpath(there) == os.path.realpath(here):
        return True
    return is_moved(there, here)


def is_moved(there: str, here: str) -> bool:
    """Whether a script that is gone stands elsewhere now; a copy does not count."""
    if not os.path.isabs(there) or os.path.exists(there):
        return False
    return os.path.basename(there) == os.path.basename(here)


def own_runs(named: Path) -> list[Path]:
    """The runs of other jobs beside a directory that was named for all of them."""
    try:
        beside = sorted(named.parent.glob(f"{_glob_safe(named.name)}-*/job.json"))
    except OSError:
        return []
    return [p.parent for p in beside if OWN_SUFFIX.fullmatch(p.parent.name[len(named.name) :])]


def own_goal(goal: Goal, suffix: str, *, kept: Goal | None = None) -> Goal:
    """The goal for a run of a job's own: places that the goal names are its own as well.

    The places of `kept`, which the run has had so far, are its own already.
    """
    path, url = goal.storage_path, goal.remote.url
    if path is not None and (kept is None or path != kept.storage_path):
        path = path.rstrip("/") + suffix
    if url is not None and (kept is None or url != kept.remote.url):
        url = url.rstrip("/") + suffix
    return replace(goal, storage_path=path, remote=replace(goal.remote, url=url))


def shown(path: str) -> str:
    """A path as one would type it here: relative when it is inside the working directory."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return path
    return path if relative.startswith("..") else relative


def _of_run(run: RunDirectory) -> Job | None:
    """The job that `autockpt run` started there."""
    info = run.read_info()
    if info is None:
        return None
    return Job(script=info.script, args=info.args, array_task=info.array_task)


def _claimed(path: str, job: Job) -> Job:
    """The job that a directory belongs to; `job` where it belonged to none."""
    return RunDirectory.create(path).claim_job(job)


def _other(there: Job, here: Job) -> list[str]:
    same = is_same_script(there.script, here.script)
    return same_job.differences(there, here, same_script=same)


def _renewal(there: Job, here: Job) -> Job | None:
    return None if there == here else here


def _goes_on(path: str, there: Job, here: Job, said: list[str]) -> str:
    if said:
        changes = same_job.goes_on(there, here, said)
        return f"{shown(path)} holds another job, and goes on: {changes}"
    if is_moved(there.script, here.script):
        return f"{there.script} is gone: its run goes on with {here.script}"
    if changed := same_job.lengths(there, here):
        return f"{shown(path)} goes on with {'; '.join(changed)}"
    return ""


def _glob_safe(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
