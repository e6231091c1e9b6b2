"""Steps before a job starts: goal, profile and directory are chosen, checked and written."""

import contextlib
import difflib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autockpt.cli.jobs.outcome import shown
from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.decision_text import verdict
from autockpt.cli.shared.plan_choice import FoundProfile, Scale
from autockpt.console import Console
from autockpt.executors.keeper.standing.status_file import METRICS_PORT, is_port
from autockpt.job_directory import is_moved, own_goal
from autockpt.launch import environment
from autockpt.launch.rank_env import place_of_rank
from autockpt.launch.script import Script
from autockpt.run_directory import (
    RunDirectory,
    RunInfo,
    control_path,
    default_path,
    new_run_id,
    require_no_url,
    utc_now,
)
from autockpt.values import same_job
from autockpt.values.arguments import without_secrets
from autockpt.values.errors import ConfigError, DirectoryBusyError, OptionError
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.record import to_json

LOOK_S = 5.0
"""A run on another machine beats twice in this time, and ranks without a launcher mostly end."""
WRITTEN_S = 5.0
"""A launcher writes run.json so soon after it has taken the directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of `autockpt run`."""

    script: Script
    policy: str | None
    settings: tuple[str, ...]
    profile: str | None
    use_profile: bool
    run_dir: str | None
    fresh: bool
    resume_from: str | None
    launching: dict[str, Any]
    same_job: bool = False
    suffix: str = ""
    """Of `run_dir` behind the one that the user named; "": it is that one."""

    @property
    def takes(self) -> bool:
        """Whether the user means the existing run, even of another job."""
        return self.same_job or self.fresh or self.resume_from is not None


def check_environment(environ: Mapping[str, str]) -> list[str]:
    """Warnings of a port that is none, and of unknown variables close to a known one.

    Kubernetes sets such a port for a Service of that name, so it ends no start.
    """
    from autockpt.policies.policy_file import variables

    port = environ.get(METRICS_PORT, "")
    found = []
    if port and not is_port(port):
        found.append(f"{METRICS_PORT}={port}: is no port; no metrics are served")
    known = {**environment.FOR_USERS, **environment.SET_BY_THE_LAUNCHER, **variables()}
    for name, value in environ.items():
        if name.startswith("AUTOCKPT_") and name not in known and "://" not in value:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            found += [f"{name} is no variable of autockpt; did you mean {c}?" for c in close]
    return found


def check(request: Request, *, same_job: bool = False) -> None:
    """Combinations that cannot be meant; `same_job`: as an option.  Raises OptionError."""
    if request.profile and not request.use_profile:
        raise OptionError("--profile and --no-profile contradict each other; drop one")
    if request.fresh and request.resume_from:
        raise OptionError("--fresh and --resume-from contradict each other; drop one")
    if same_job or request.resume_from is not None:
        request = in_control_directory(request)
    if request.run_dir is not None and os.path.isfile(request.run_dir):
        raise ConfigError(f"--run-dir {request.run_dir}: is a file, expected a directory")
    if same_job and request.run_dir is None:
        raise OptionError("--same-job: which run? add --run-dir DIR")
    if request.resume_from is not None and request.run_dir is None:
        raise OptionError(
            f"--resume-from {request.resume_from}: which run? add --run-dir DIR "
            "(`autockpt ls DIR` lists its checkpoints)"
        )


def goal_of(
    run_dir: str | None, policy: str | None, settings: tuple[str, ...], scale: Scale
) -> Goal:
    """The policy's goal; a run that is there, without --policy, keeps its own, under --set.

    Raises ConfigError for a URL.
    """
    require_no_url(run_dir or "")
    if run_dir and not policy:
        kept = RunDirectory(run_dir).read_goal()
        if kept is not None:
            return plan_choice.changed_goal(kept, settings) if settings else kept
    return plan_choice.read_goal(policy, settings, scale=scale)


def goal_for(request: Request, scale: Scale) -> Goal:
    """The goal of a request; in a run of the job's own the places that it names are its own."""
    goal = goal_of(request.run_dir, request.policy, request.settings, scale)
    if not request.suffix:
        return goal
    kept = RunDirectory(request.run_dir or "").read_goal()
    return own_goal(goal, request.suffix, kept=kept)


def job_of(script: Script) -> same_job.Job:
    """Return the job that this command line starts."""
    return same_job.job_of(script.target, script.args, os.environ)


def placed(request: Request, console: Console | None) -> Request:
    """The request with the directory that its job gets: another job keeps the one that it has.

    `--same-job`, `--fresh` and `--resume-from` mean the existing run, of any job.  `console` gets a
    note, where there is one (ranks agree, and one of them reports).
    Raises ConfigError where the run that is there is of another script.
    """
    say: Callable[[str], None] = console.say if console else _say_nothing
    request = _with_generation(in_control_directory(request))
    info = None if request.run_dir is None else RunDirectory(request.run_dir).read_info()
    if info is None or request.run_dir is None or request.fresh:
        return request
    _require_its_script(info, request, say)
    if info.mode == "profile" or request.resume_from is not None:
        return request
    job = job_of(request.script)
    there = replace(job, args=info.args, array_task=info.array_task)
    found = same_job.differences(there, job, same_script=True)
    if not found:
        if changed := same_job.lengths(there, job):
            say(f"{request.run_dir} goes on with {'; '.join(changed)}")
        return request
    if request.same_job:
        changes = same_job.goes_on(there, job, found)
        say(f"{request.run_dir} holds another job, and goes on: {changes}")
        return request
    suffix = f"-{same_job.tag(job)}"
    own = request.run_dir.rstrip("/") + suffix
    if console is not None:
        console.warn(
            f"{request.run_dir} holds another job: {'; '.join(found)}; this job has a run of its "
            f"own in {own} (--same-job goes on with the one in {request.run_dir})"
        )
    return placed(replace(request, run_dir=own, suffix=request.suffix + suffix), console)


def in_control_directory(request: Request) -> Request:
    """Without `--run-dir`, a run in an object store has the directory that its URL names."""
    if request.run_dir is not None:
        return request
    goal = goal_of(None, request.policy, request.settings, scale_of(request.launching))
    if goal.storage_path is None or not goal.is_in_store:
        return request
    return replace(request, run_dir=str(control_path(goal.storage_path)))


def _with_generation(request: Request) -> Request:
    """The request with the checkpoint that `--resume-from` names by its pin or its step.

    Raises ConfigError where no checkpoint has them.
    """
    from autockpt.executors.storage.catalogue import list_generations
    from autockpt.integrations.places import generation_of_step

    wanted, run_dir = request.resume_from, request.run_dir
    if wanted is None or run_dir is None:
        return request
    with contextlib.suppress(ConfigError):
        Generation.from_name(wanted)
        return request
    goal = goal_of(run_dir, request.policy, request.settings, scale_of(request.launching))
    folder = RunDirectory(run_dir).checkpoints(goal)
    is_there = is_store_url(folder) or os.path.isdir(folder)
    records = list_generations(folder) if is_there else []
    pins = {record.pinned: record.name for record in records if record.pinned}
    if wanted not in pins and wanted.isdecimal():
        return replace(request, resume_from=generation_of_step(folder, int(wanted)))
    if wanted not in pins:
        known = ", ".join(sorted(pins)) or "none"
        raise ConfigError(
            f"--resume-from {wanted}: expected a step, or the name of a checkpoint "
            "or of a pin; pins in "
            f"{folder}: {known} (`autockpt ls {run_dir}`)"
        )
    return replace(request, resume_from=pins[wanted])


def _say_nothing(text: str) -> None:
    """Another rank says it."""


def beside_a_live_job(request: Request, console: Console) -> Request | None:
    """The request with a directory of its own, where another job has just taken the named one.

    None: it is this job that runs there already.
    """
    if request.run_dir is None:
        return None
    deadline = time.monotonic() + WRITTEN_S
    while RunDirectory(request.run_dir).read_info() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    elsewhere = placed(request, console)
    return None if elsewhere.run_dir == request.run_dir else elsewhere


def _require_whole(directory: str, name: str) -> None:
    """Raises ConfigError for a checkpoint that holds weights only."""
    from autockpt.executors.protocol.selection import weights_only_refusal
    from autockpt.executors.storage.catalogue import list_generations
    from autockpt.executors.storage.directory.records import COMES_BACK

    is_there = is_store_url(directory) or os.path.isdir(directory)
    records = list_generations(directory) if is_there else []
    for record in records:
        if record.weights_only and record.name == name and COMES_BACK in record.detail:
            raise ConfigError(
                f"--resume-from {name}: holds weights only now; {COMES_BACK}. Start without "
                "--resume-from first, and then with it"
            )
        if record.weights_only and record.name == name:
            raise ConfigError(weights_only_refusal(f"--resume-from {name}"))


def check_directory(request: Request, goal: Goal) -> None:
    """Raises ConfigError where resuming, or not resuming, cannot be what is wanted."""
    run = RunDirectory(request.run_dir or default_path(request.script.target))
    info = run.read_info()
    committed = _committed(run.checkpoints(goal))
    if request.resume_from is not None and request.resume_from not in committed:
        _require_whole(run.checkpoints(goal), request.resume_from)
        known = ", ".join(committed[-3:]) or "none"
        raise ConfigError(
            f"--resume-from {request.resume_from}: no such committed checkpoint in "
            f"{run.checkpoints(goal)}; newest: {known} (`autockpt ls {request.run_dir}`)"
        )
    # A run directory without a run has only the files of `attach` or `autockpt convert`.
    place = Path(run.checkpoints(goal))
    elsewhere = not goal.is_in_store and not place.is_relative_to(run.path)
    stored = _committed(run.checkpoints(goal), with_weights=True)
    if stored and info is None and elsewhere and not request.fresh:
        raise ConfigError(
            f"{run.checkpoints(goal)}: already holds {len(stored)} checkpoints of another run; "
            "pass that run's --run-dir to resume it, or --fresh to begin a new lineage beside them"
        )
    if not request.fresh and request.resume_from is None:
        require_found(run, goal)
    if goal.is_in_store and not request.takes:
        _require_same_job(run.checkpoints(goal), request.script)


def _require_same_job(place: str, script: Script) -> None:
    """Raises ConfigError where a store has the checkpoints of another job.

    The run directory, which else says so, may be that of a new machine.
    """
    from autockpt.executors.storage.directory.directory import CheckpointDirectory

    if found := CheckpointDirectory(place).differences(job_of(script)):
        raise ConfigError(
            f"{place}: holds checkpoints of another job: {'; '.join(found)}; name another place "
            "with disk.path, or go on with these: --same-job"
        )


def _require_its_script(info: RunInfo, request: Request, say: Callable[[str], None]) -> None:
    """The script that the run is of; one that has moved with its checkout is taken for it."""
    script = request.script
    if plan_choice.is_of(info, script):
        return
    if not (info.module or script.module) and is_moved(info.script, script.target):
        say(f"{info.script} is gone: its run goes on with {script.target}")
        return
    raise ConfigError(
        f"{request.run_dir}: holds a run of {info.script}, not of {script.target}; resume it with "
        "that script, or name another --run-dir. --fresh would give up its training"
    )


def require_found(run: RunDirectory, goal: Goal) -> None:
    """Raises ConfigError where the run has checkpoints elsewhere than it would look for them."""
    from autockpt.executors.storage import catalogue

    kept = run.read_goal()
    if kept is not None:
        catalogue.require_found(os.fspath(run.path), run.checkpoints(kept), run.checkpoints(goal))


def _committed(directory: str, *, with_weights: bool = False) -> list[str]:
    from autockpt.executors.storage.catalogue import committed_names

    return committed_names(directory, with_weights=with_weights)


def profile_of(request: Request, scale: Scale, console: Console) -> FoundProfile:
    """The profile to decide from, or why there is none.

    Raises ConfigError, StaleProfileError for one that was named and is of another job.
    """
    if request.profile is not None:
        profile = plan_choice.read_profile(request.profile)
        plan_choice.require_fit(profile, scale, where=request.profile, script=request.script)
        if changed := plan_choice.require_job(request.profile, request.script, scale):
            console.warn(
                f"{request.profile} was measured with other arguments: {'; '.join(changed)}; if "
                "these change the model or the batch, measure again"
            )
        return FoundProfile(profile=profile, where=request.profile)
    if not request.use_profile:
        return FoundProfile()
    if request.run_dir is not None:
        profile_here = RunDirectory(request.run_dir).read_profile()
        if profile_here is not None:
            differences = plan_choice.machine_mismatches(profile_here.fingerprint, scale)
            if not differences:
                where = str(RunDirectory(request.run_dir).profile_path)
                return FoundProfile(profile=profile_here, where=where)
            console.say(
                f"the profile in {request.run_dir} was measured at {'; at '.join(differences)}; "
                "measuring anew"
            )
    return plan_choice.find_profile(request.script, scale)


@contextlib.contextmanager
def own(script: Script, path: str | None, launching: dict[str, Any]) -> Iterator[RunDirectory]:
    """Create or take the run directory, for this launcher alone.

    Launchers of several nodes share it.  Raises DirectoryBusyError, StorageError.
    """
    run = RunDirectory.create(path, script=script.target)
    if launching["nnodes"] not in ("1", "1:1"):
        yield run
        return
    with run.owned():
        yield run


def require_free(run: RunDirectory, goal: Goal, launch_id: str) -> None:
    """Raises DirectoryBusyError where another launch trains in the directory: nothing is changed.

    Launchers of several nodes hold no lock of it, and neither do ranks of torchrun: their keepers
    would refuse the start later.  A launch that is not seen then is still refused by these.
    """
    from autockpt.executors.keeper.launch import other_trainers
    from autockpt.executors.storage.directory.directory import CheckpointDirectory

    info = run.read_info()
    if info is None or (launch_id and info.launch_id == launch_id):
        return  # another node, or another rank, of this launch may have begun to train
    other = other_trainers(str(run.path), launch_id, within_s=LOOK_S)
    elsewhere = False
    if not other and not goal.is_in_store:
        directory = CheckpointDirectory(run.checkpoints(run.read_goal() or goal))
        elsewhere = directory.is_held_elsewhere(LOOK_S)
    if other or elsewhere:
        where = f"here (launch {other})" if other else "on another machine"
        raise DirectoryBusyError(
            f"{run.path}: another launch of this run trains {where}; stop that one first, or name "
            "another --run-dir"
        )


def launch_of_nodes(launching: dict[str, Any]) -> str:
    """Return an id that all launchers of a job of several nodes have in common."""
    names = ("rdzv_backend", "rdzv_endpoint", "rdzv_id")
    facts = "\n".join(str(launching[name]) for name in names)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def prepare(
    run: RunDirectory,
    script: Script,
    mode: Literal["run", "profile"],
    goal: Goal,
    scale: Scale,
    launch_id: str = "",
    *,
    anew: bool = False,
) -> None:
    """Write the facts known before the job starts; remove leftovers of an earlier start.

    With `anew` the run belongs to the job that attaches first, even if it was of another job.
    Raises ConfigError where a store has the checkpoints of another job, DirectoryBusyError where
    that job still trains, StorageError.
    """
    from autockpt.cli.shared.versions import versions

    if goal.is_in_store and mode == "run":
        from autockpt.executors.keeper.launch import launches_here
        from autockpt.executors.storage.directory.directory import CheckpointDirectory

        place, mine = run.checkpoints(goal), job_of(script)
        directory = CheckpointDirectory(place)
        if anew:
            directory.take_job(mine, own_launches=launches_here(str(run.path)))
        elif not directory.claim_job(to_json(mine).encode(), replace=False):
            _require_same_job(place, script)  # another first launch may have been faster
    before = run.read_info()
    run.mark_unprotected(value=False)
    run.forget_status()
    run.write_goal(goal)
    if anew:
        run.forget_job()
    run.write_info(
        RunInfo(
            run_id=before.run_id if before else new_run_id(),
            created=before.created if before else utc_now(),
            script=script.target,
            module=script.module,
            args=without_secrets(script.args),
            array_task=same_job.array_task(os.environ),
            launch_id=launch_id,
            cwd=os.getcwd(),
            mode=mode,
            nodes=scale.nodes,
            ranks_per_node=max(1, scale.world_size // max(1, scale.nodes)),
            versions=versions(),
        )
    )


def write_decision(
    run: RunDirectory, request: Request, goal: Goal, found: FoundProfile, nodes: int = 1
) -> str:
    """Write profile.json, decision.json and plan.yaml; a sentence about them.

    Without a profile there is a plan only when none shall be measured.  A job that finds no plan
    measures its first iterations at an interval of its own, and decides then.
    """
    if found.profile is None:
        run.forget_decision()
        run.retire_profile()
        if request.use_profile:
            return f"{found.why_not}: the first iterations are measured"
        from autockpt.policies.default_plan import plan_without_profile

        run.write_plan(plan_without_profile(goal))
        return "safe defaults, nothing is measured"
    profile, where = found.profile, found.where
    decided = plan_choice.decide_now(run, profile, goal, nodes=nodes)
    if decided.new:
        run.write_profile(profile)
        plan_choice.write(run, decided.decision)
    # Else a resumed run goes on where it was; rank 0 writes down what it decides again.
    # A change at the start is told by the session, with its plan.
    return f"{verdict(decided.decision)} (from {shown(where)})"


def scale_of(launching: dict[str, Any]) -> Scale:
    """Ranks and nodes of the launch options, or of the launcher that started us."""
    if environment.foreign_launcher(os.environ) is not None:
        return _foreign_scale()
    nodes = launching["nnodes"].split(":")[-1]
    ranks = launching["nproc_per_node"]
    if not ranks.isdigit():
        from torch.distributed.run import determine_local_world_size

        try:
            ranks = str(determine_local_world_size(ranks))
        except ValueError as error:
            raise ConfigError(f"--nproc-per-node {ranks}: {error}") from None
    if not nodes.isdigit() or int(nodes) < 1 or int(ranks) < 1:
        raise OptionError(
            f"--nnodes {launching['nnodes']} --nproc-per-node {ranks}: expected numbers of at "
            "least 1 (MIN:MAX for nodes)"
        )
    return Scale(world_size=int(ranks) * int(nodes), nodes=int(nodes))


def _foreign_scale() -> Scale:
    place = place_of_rank(os.environ)
    return Scale(world_size=place.world_size, nodes=place.nodes)
