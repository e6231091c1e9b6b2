"""From a policy and a profile to the decision that a run starts with.

The profile is the named one.  On a resumed run it is the one in its directory.  Otherwise it is the
newest one under `runs/` of the same job (`values.same_job`) and machine.  Without any, the run
measures itself.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autockpt.job_directory import is_moved
from autockpt.launch.script import Script
from autockpt.run_directory import RUNS, RunDirectory, RunInfo, local_path
from autockpt.values.arguments import without_secrets
from autockpt.values.errors import AutockptError, ConfigError, StaleProfileError
from autockpt.values.goal import Goal
from autockpt.values.plan import Decision
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.profile import Fingerprint, Profile
from autockpt.values.record import from_json
from autockpt.values.same_job import Job, differences

POLICY = "builtin:auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the job is, as far as the launcher knows before it starts."""

    world_size: int
    nodes: int


def read_goal(
    policy: str | None,
    settings: Sequence[str],
    *,
    scale: Scale | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Goal:
    """The goal of a policy under the environment and --set.  Raises ConfigError for every fault."""
    from autockpt.policies.policy_file import load_policy

    facts = {"world_size": scale.world_size, "nodes": scale.nodes} if scale else None
    goal = load_policy(policy or POLICY, environment=environ, settings=settings, facts=facts).goal
    return placed(goal)


def changed_goal(kept: Goal, settings: Sequence[str]) -> Goal:
    """The goal of a run under --set.  Raises ConfigError for every fault."""
    from autockpt.policies.policy_file import with_settings

    goal = with_settings(kept, settings)
    # A relative path of the run's own is relative to where the run began.
    return goal if goal.storage_path == kept.storage_path else placed(goal)


def placed(goal: Goal) -> Goal:
    """With an absolute path of checkpoints; a URL is one.  Raises ConfigError where none can go."""
    if goal.storage_path is None or is_store_url(goal.storage_path):
        return goal
    path = os.path.abspath(os.path.expanduser(goal.storage_path))
    problem = unusable(path)
    if problem:
        raise ConfigError(f"disk.path: {problem}")
    return replace(goal, storage_path=path)


def unusable(path: str) -> str:
    """Why checkpoints cannot go to `path` from here, and what to do; "" where nothing is known.

    Nothing is made: the nearest directory that is there is looked at.
    """
    at = path
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    advice = "name a directory that this user may write on a mounted disk"
    if not os.path.isdir(at):
        return f"{path}: {at} is no directory; {advice}"
    if at.split(os.sep)[1] in _KERNELS:
        return f"{path}: {at} belongs to the kernel and keeps no files; {advice}"
    if os.statvfs(at).f_flag & os.ST_RDONLY:
        return f"{path}: {at} is on a read-only file system; {advice}"
    if not os.access(at, os.W_OK | os.X_OK):
        return f"{path}: this user may not write {at}; {advice}"
    return ""


_NO_PROFILES = {
    "run.json": "the record of a run",
    "plan.yaml": "a plan",
    "decision.json": "a decision",
    "status.json": "the status of a run",
    "goal.json": "the goal of a run",
}
"""Files of a run directory that are easily taken for its profile."""
_KERNELS = ("proc", "sys")
"""Directories at the root in which the kernel shows its own state."""


def read_profile(path: str) -> Profile:
    """The profile in a file or a run directory.  Raises ConfigError when there is none."""
    place = Path(local_path(path))
    if place.is_dir():
        place = place / "profile.json"
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{path}: no profile: {reason}; `autockpt profile SCRIPT` writes one"
        ) from None
    if place.name in _NO_PROFILES:
        raise ConfigError(
            f"{path}: {_NO_PROFILES[place.name]}, and no profile; pass profile.json beside it, "
            "or the directory"
        )
    if not text.lstrip().startswith("{"):
        raise ConfigError(
            f"{path}: is no profile; expected a run directory or its profile.json, which "
            "`autockpt profile SCRIPT` writes"
        )
    return from_json(Profile, text, where=str(place))


def require_fit(profile: Profile, scale: Scale, *, where: str, script: Script) -> None:
    """Raises StaleProfileError unless the profile is of this machine, scale and version.

    The state's layout and the storage are checked by the job itself, which knows them.
    """
    differences = machine_mismatches(profile.fingerprint, scale)
    if differences:
        raise StaleProfileError(
            f"{where} was measured at {'; at '.join(differences)}; "
            f"run: autockpt profile {launch_words(scale)}{command_line(script)}"
        )


def machine_mismatches(measured: Fingerprint, scale: Scale) -> list[str]:
    """Return a phrase for each differing field that the launcher can know."""
    from importlib import metadata

    from autockpt.executors.linux.cores import usable_cores
    from autockpt.profiles.freshness import mismatches
    from autockpt.profiles.probes import host

    now = replace(
        measured,
        host=host.host_identity(),
        cpu=host.cpu_name(),
        cores=usable_cores(),
        world_size=scale.world_size,
        nodes=scale.nodes,
        torch_version=metadata.version("torch"),
    )
    return mismatches(measured, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProfile:
    """A profile to decide from, or why there is none."""

    profile: Profile | None = None
    where: str = ""
    """Its path, as it was found."""
    why_not: str = ""
    """The profiles that were looked at, and what differs; "" where there is one."""


def find_profile(script: Script, scale: Scale) -> FoundProfile:
    """The newest profile under `runs/` that fits this job, or why none does."""
    fitting: list[tuple[str, str, Profile]] = []
    others: list[tuple[bool, str, str]] = []
    for path in Path(RUNS).glob("*/profile.json"):
        run = RunDirectory(path.parent)
        try:
            info, profile = run.read_info(), run.read_profile()
        except AutockptError as error:
            others.append((False, "", str(error)))
            continue
        if info is None or profile is None:
            continue
        differs = job_differences(info, script)
        differs = differs or machine_mismatches(profile.fingerprint, scale)
        if differs:
            others.append((is_of(info, script), profile.created, f"{path.parent}: {differs[0]}"))
        else:
            fitting.append((profile.created, str(path), profile))
    if fitting:
        _, where, found = max(fitting, key=lambda entry: entry[:2])
        return FoundProfile(profile=found, where=where)
    if not others:
        return FoundProfile(why_not=f"no profile under {RUNS}/")
    _, _, nearest = max(others)
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return FoundProfile(why_not=f"no profile fits ({nearest}{more})")


def job_differences(info: RunInfo, script: Script) -> list[str]:
    """Return the differences that make a script and its arguments another job than a run's.

    A task of an array is measured like its siblings.
    """
    there = Job(script=info.script, args=info.args)
    here = Job(script=script.target, args=without_secrets(script.args))
    same_script = is_of(info, script) or is_moved(info.script, script.target)
    return differences(there, here, same_script=same_script)


def require_job(path: str, script: Script, scale: Scale) -> list[str]:
    """Return the differences between the arguments of a profiled job and of this job.

    The profile lies in the directory of its run; without a run there are no differences.
    Raises StaleProfileError where it is of another script.
    """
    place = Path(path)
    info = RunDirectory(place if place.is_dir() else place.parent).read_info()
    if info is None:
        return []
    if not (is_of(info, script) or is_moved(info.script, script.target)):
        raise StaleProfileError(
            f"{path}: was measured with {info.script}, this job is {script.target}; "
            f"run: autockpt profile {launch_words(scale)}{command_line(script)}"
        )
    there = Job(script=script.target, args=info.args)
    here = Job(script=script.target, args=without_secrets(script.args))
    return differences(there, here, same_script=True)


def is_of(info: RunInfo, script: Script) -> bool:
    """Whether a run is of this script, however its path is spelled."""
    if info.module or script.module:
        return (info.script, info.module) == (script.target, script.module)
    return os.path.realpath(info.script) == os.path.realpath(script.target)


def decide(profile: Profile, goal: Goal) -> Decision:
    """The policies' decision."""
    from autockpt.policies.decide import decide as decide_

    return decide_(profile, goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decision that a run starts with."""

    decision: Decision
    new: bool
    """The run has none yet, or one from another profile or goal."""
    change: str = ""
    """The part of the run's own decision that is decided again, and the reason; "": nothing."""


def decide_now(
    run: RunDirectory, profile: Profile, goal: Goal, *, nodes: int, starting: bool = True
) -> Decided:
    """Decide from profile, goal and all logs, as rank 0 will before the first iteration.

    A run that has decided from this profile and goal continues with its re-tuned values.
    `starting`: no process of the run trains now.
    """
    from autockpt.policies.cost_model.inputs import decided_again
    from autockpt.profiling.facts.failure_history import failure_evidence
    from autockpt.profiling.facts.start_decision import decide_start, knows_more, with_evidence

    known = failure_evidence(os.fspath(run.path), nodes=nodes, starting=starting)
    basis, before = decide(profile, goal).plan.plan_id, run.read_decision()
    if before is None or before.plan.plan_id != basis:
        decision = decide(with_evidence(profile, known), goal)
        plan = replace(decision.plan, plan_id=basis)
        return Decided(decision=replace(decision, plan=plan), new=True)
    start = decide_start(run, goal, before.plan, profile, nodes=nodes, evidence=known)
    if start.proposal is None or not start.applies:
        if start.promise is not None and knows_more(start.memory.seen, before):
            before = decided_again(before, before.plan, before.choices, *start.promise, goal)
        return Decided(decision=before, new=False)
    offer, decision = start.proposal, replace(before, plan=start.plan)
    if offer.expected is not None and offer.inputs is not None:
        decision = decided_again(
            before, start.plan, before.choices, offer.expected, offer.inputs, goal
        )
    return Decided(decision=decision, new=False, change=start.proposal.reason)


def with_logs_beside(profile: Profile, path: str) -> Profile:
    """Return the profile in the file or directory `path`, updated by the runs beside it."""
    from autockpt.profiling.facts.failure_history import failure_evidence
    from autockpt.profiling.facts.start_decision import with_evidence

    run = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    known = failure_evidence(run, nodes=profile.fingerprint.nodes)
    return with_evidence(profile, known, starting=False)


def write(run: RunDirectory, decision: Decision) -> None:
    """decision.json, and plan.yaml with the reasons beside the values."""
    from autockpt.policies.policy_file import plan_to_yaml

    run.write_decision(decision, plan_text=plan_to_yaml(decision))


def command_line(script: Script) -> str:
    """The user's command line, as a shell takes it."""
    import shlex

    return shlex.join([*(["-m"] if script.module else []), script.shown, *script.args])


def next_run(words: Sequence[str], script: Script | None = None) -> str:
    """`autockpt run` with these options, as a shell takes it."""
    import shlex

    job = "SCRIPT" if script is None else command_line(script)
    return " ".join(["autockpt run", *map(shlex.quote, words), job])


def origin_of(goal: Goal, scale: Scale) -> tuple[str, dict[str, str]]:
    """A policy that can be read here, and the settings that make the goal of it.

    The policy is the one that the goal was read from, if that is still there.
    Raises ConfigError where a variable of the environment is wrong.
    """
    from autockpt.policies.policy_file import settings_between

    for source in (goal.policy, POLICY):
        try:
            base = read_goal(source, (), scale=scale)
        except ConfigError:
            if source == POLICY:
                raise  # by the environment alone
            continue
        return source, settings_between(base, goal)
    raise AssertionError(f"{POLICY} can be read")


def policy_words(goal: Goal, scale: Scale) -> list[str]:
    """--policy and --set for a run with this goal."""
    source, settings = origin_of(goal, scale)
    words = ["--policy", source] if source != POLICY else []
    return words + [word for key, text in settings.items() for word in ("--set", f"{key}={text}")]


def run_under(profile: str, policy: Sequence[str], launch: Sequence[str], script: Script) -> str:
    """The command that trains under the plan of the profile at a path."""
    return next_run(["--profile", profile, *policy, *launch], script)


def launch_words(scale: Scale) -> str:
    """The launch options that give this scale, with a blank behind them."""
    if scale.world_size == 1:
        return ""
    nodes = f"--nnodes {scale.nodes} " if scale.nodes > 1 else ""
    return f"{nodes}--nproc-per-node {scale.world_size // max(1, scale.nodes)} "
