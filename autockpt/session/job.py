"""This process's place in the job: ranks, nodes, directories, goal and plan.

Read once from the environment that torchrun, Slurm, `autockpt run` or a plain `python` leaves.
"""

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autockpt.executors.keeper.launch import keeper_status, launches_here, other_trainers
from autockpt.executors.network.discovery import listen_host
from autockpt.executors.protocol import messages as p
from autockpt.executors.storage.catalogue import require_found
from autockpt.executors.storage.directory.claims import pid_start
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.job_directory import SAME_JOB, Placed, own_goal, own_runs
from autockpt.job_directory import place as put_in
from autockpt.launch import rendezvous
from autockpt.launch.given import given_launch
from autockpt.launch.rank_env import RankPlace, agent_of, place_of_rank, slurm_launch, under_srun
from autockpt.launch.rank_env import number as count_of
from autockpt.launch.rendezvous import agree, group_store, in_group_of_several
from autockpt.policies.default_plan import plan_while_measured, plan_without_profile
from autockpt.profiling.facts.start_decision import Start, decide_start, undecided
from autockpt.run_directory import RunDirectory, require_no_url
from autockpt.session.attaches import of_this_process, within
from autockpt.session.place.script.called_function import call_arguments
from autockpt.values import same_job
from autockpt.values.errors import AutockptError, ConfigError, DirectoryBusyError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal, RemoteWish
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains
from autockpt.values.plan import CheckpointPlan, Decision
from autockpt.values.profile import Profile
from autockpt.values.record import from_json, to_json

ATTACHES = 1000
"""The round of an incarnation counts restarts in steps of this, and between them the attaches of
one process to the same run."""
_calls = 0
"""The number of calls of `current_job`, which all ranks call equally often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank of one launch."""

    run_directory: str
    unnamed: bool
    """The run directory was not named: it is the one of the script's name."""
    name: str | None
    """The run directory that the script named in attach; None: it did not."""
    shared: bool
    """The launcher gave one directory for every run of this process."""
    number: int
    """Number of the run among the runs that this process has attached; from 1."""
    placed: str
    """A notice about the run directory: it is another than the named one, or of a run that had
    other arguments; "": none."""
    checkpoints: str
    rank: int
    world_size: int
    local_rank: int
    node: int
    nodes: tuple[int, ...]
    """Node of every rank, [world_size]."""
    incarnation: p.Incarnation
    """Equal on all ranks, with a higher round after every restart."""
    control_host: str
    """Where the keeper of this node listens for the keepers of other nodes; empty: there are
    none."""
    launcher_pid: int
    launcher_awaits: bool
    """The launcher starts ranks again, and ends with the job."""
    restart_count: int
    """By this node's launcher."""
    resume_from: Generation | None
    fresh: bool
    goal: Goal
    plan: CheckpointPlan
    decision: Decision | None
    profile: Profile | None
    domains: FailureDomains
    """Failure domains that nodes share.  Equal on all ranks."""
    profile_in_place: bool
    """No fitting profile exists: measure the first iterations."""
    start: Start | None = None
    """The input of this start's plan; rank 0 alone has it."""
    place: Placed | None = None
    """Where the job runs; rank 0 renews its record once the start is accepted."""

    @property
    def telemetry_path(self) -> str:
        """Event file of this rank."""
        return os.path.join(self.run_directory, "telemetry", f"rank-{self.rank:05d}.jsonl")

    def attach_event(self) -> p.TrainerAttached:
        """How this rank introduces itself."""
        return p.TrainerAttached(
            rank=self.rank,
            incarnation=self.incarnation,
            world_size=self.world_size,
            nodes=self.nodes,
            slots=0,
            resume_from=self.resume_from,
            fresh=self.fresh,
            plan_version=self.plan.version,
            redundancy=self.plan.redundancy,
            domains=self.domains,
        )


def current_job(
    *, run_dir: str | None = None, policy: Goal | None = None, fresh: bool = False
) -> Job:
    """The job as torchrun, `autockpt run` or a plain `python` started it."""
    environment = os.environ
    given_by = given_launch()
    named, given = _named(run_dir)
    shared = "AUTOCKPT_RUN_DIR" in environment
    launch_id, launcher_pid = _launcher()
    number = of_this_process.number(run_dir, launch_id, shared=shared)
    place = place_of_rank(environment)
    placed = _agreed_directory(given, place)
    path = within(placed.path, number)
    files = RunDirectory.create(path)
    kept, first = files.read_goal(), RunDirectory(placed.path)
    if number == 1 and kept is None and placed.suffix:
        of_all = RunDirectory(given).read_goal()
        if of_all is not None:
            kept = _goal_of_own_run(of_all, given, placed.suffix, None)
            files.write_goal(kept)
    of_first = kept if number == 1 else first.read_goal()
    if policy is None and not shared:
        policy = _goal_of_environment(of_first)
    policy = policy and _goal_of_own_run(policy, given, placed.suffix, of_first)
    if number > 1:
        policy = _goal_within(first, policy, number)
    goal = policy or kept or Goal()
    launch_is_fresh = environment.get("AUTOCKPT_FRESH") == "1"
    goes_on = not (fresh or launch_is_fresh or "AUTOCKPT_RESUME_FROM" in environment)
    if policy is not None and kept is not None and goes_on:
        require_found(os.fspath(files.path), files.checkpoints(kept), files.checkpoints(policy))
    decision, profile = files.read_decision(), files.read_profile()
    in_place = decision is None and environment.get("AUTOCKPT_NO_PROFILE") != "1"
    rank, world_size = place.rank, place.world_size
    restart_count = count_of(environment, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT") or 0
    again = of_this_process.again(path, launch_id)
    restart_round = restart_count * ATTACHES + again
    checkpoints = files.checkpoints(goal)
    if goal.is_in_store and not shared:
        takes = fresh or launch_is_fresh or "AUTOCKPT_RESUME_FROM" in environment
        _require_own_store(path, checkpoints, place, launch_id, takes=takes)
    nodes = (0,) * world_size
    incarnation = p.Incarnation(launch_id=launch_id, restart_round=restart_round)
    control_host, domains = "", UNKNOWN_DOMAINS
    agrees = place.nodes > 1 or given_by is not None
    if agrees:
        node = given_by.node if given_by else count_of(environment, "AUTOCKPT_NODE")
        agreed = agree(checkpoints, launch_id, place, _own_labels(), node)
        nodes, incarnation, domains = agreed.nodes, agreed.incarnation, agreed.domains
    if place.nodes > 1:
        control_host = listen_host(environment, one_host=agreed.one_host)
    # A start that is refused, because another one trains here, changes no goal.  A restart finds it
    # there, and needs no disk that takes it again.  Ranks of several nodes know now who they are.
    is_new = policy is not None and policy != kept
    if is_new and not other_trainers(path, incarnation.launch_id, within_s=0.0):
        files.write_goal(goal)
    node = nodes[rank] if rank < world_size else 0
    resume_from = environment.get("AUTOCKPT_RESUME_FROM")
    begins = first_start = False
    if fresh or launch_is_fresh or resume_from:
        # What the launch asked for is done once; its restarts go on from what they have by then.
        claimed = _claimed_by(path, node, checkpoints)
        first_start = claimed is None or claimed.launch_id != incarnation.launch_id
        # Of several attaches to one run, each fresh, a restart goes on with the last of them.
        other_turn = claimed is not None and claimed.restart_round % ATTACHES != again
        begins = first_start or (other_turn and not agrees)
        if not first_start or number > 1 or placed.suffix:
            resume_from = None
    plan = _first_plan(goal, decision, files.read_plan(), in_place=in_place)
    start, plan = _started(files, goal, plan, profile, place, nodes)
    # The launcher has told how its directory goes on.
    is_told = "AUTOCKPT_LAUNCH_ID" in environment and not placed.suffix
    return Job(
        run_directory=path,
        unnamed=not named,
        name=run_dir,
        shared=shared,
        number=number,
        placed="" if is_told or rank or number > 1 else placed.said,
        checkpoints=checkpoints,
        rank=rank,
        world_size=world_size,
        local_rank=place.local_rank,
        node=node,
        nodes=nodes,
        incarnation=incarnation,
        control_host=control_host,
        launcher_pid=launcher_pid,
        launcher_awaits=given_by is None
        and (shared or environment.get("TORCHELASTIC_RUN_ID", "none") != "none"),
        restart_count=restart_count,
        resume_from=Generation.from_name(resume_from) if resume_from else None,
        fresh=(fresh and begins) or (launch_is_fresh and first_start),
        goal=goal,
        plan=plan,
        decision=decision,
        profile=profile,
        domains=_domains_of(profile, nodes) or domains,
        profile_in_place=in_place,
        start=start,
        place=placed,
    )


def may_have_checkpoint(run_dir: str | None, goal: Goal | None) -> bool:
    """Whether the coming attach may restore a checkpoint; changes nothing.

    False is certain: no trainer has attached to such a run before, and no checkpoints lie there.
    """
    environment = os.environ
    if "AUTOCKPT_RESUME_FROM" in environment or environment.get("AUTOCKPT_MODE") == "restore-plan":
        return True
    _, given = _named(run_dir)
    shared = "AUTOCKPT_RUN_DIR" in environment
    number = of_this_process.number(run_dir, _launcher()[0], shared=shared)
    try:
        runs = [Path(given), *own_runs(Path(given))]
        return any(_may_hold(RunDirectory(within(str(run), number)), goal) for run in runs)
    except (AutockptError, OSError):
        return True


def _may_hold(files: RunDirectory, goal: Goal | None) -> bool:
    kept = files.read_goal()
    goal = goal or _goal_of_environment(kept) or kept or Goal()
    checkpoints = files.checkpoints(goal)
    if files.attached or goal.is_in_store:
        return True
    return os.path.isdir(checkpoints) and bool(os.listdir(checkpoints))


def _named(run_dir: str | None) -> tuple[str | None, str]:
    """(the name that was given to the run directory, its path or that of the script's name).

    Raises ConfigError for a URL.
    """
    script = os.path.splitext(os.path.basename("".join(sys.argv[:1]) or "run"))[0] or "run"
    given_by = given_launch()
    named = os.environ.get("AUTOCKPT_RUN_DIR") or run_dir or (given_by and given_by.run_dir)
    path = _as_text(named or os.path.join("runs", script))
    require_no_url(path)
    return named or None, path


def begin_anew() -> None:
    """This process counts as a new one: the ranks that start with it count from the beginning."""
    global _calls
    _calls = 0
    rendezvous.begin_anew()
    of_this_process.begin_anew()


def _claimed_by(path: str, node: int, checkpoints: str) -> p.Incarnation | None:
    """The start that has the checkpoints, as the keeper says, else as the directory does.

    The directory may be on storage that hangs.
    """
    status = keeper_status(path, node)
    if status is not None and status.claimed_by is not None:
        return status.claimed_by
    claimed = CheckpointDirectory(checkpoints).highest_term()
    if claimed is None:
        return None
    return p.Incarnation(launch_id=claimed.launch_id, restart_round=claimed.restart_round)


def _started(
    files: RunDirectory,
    goal: Goal,
    plan: CheckpointPlan,
    profile: Profile | None,
    place: RankPlace,
    nodes: tuple[int, ...],
) -> tuple[Start | None, CheckpointPlan]:
    """(how rank 0 has decided, the plan of all ranks), of a start whose newest plan is `plan`.

    Ranks without a store to tell it by begin with `plan`; rank 0 offers them the other one then.
    """
    start, store = None, None
    if place.world_size > 1:
        with contextlib.suppress(ConfigError):
            store = group_store()
    name = f"autockpt/start/{_calls}"
    if place.rank == 0:
        try:
            start = decide_start(files, goal, plan, profile, nodes=len(set(nodes)))
        except Exception as error:  # the plan that is there is good, the training goes on
            with contextlib.suppress(OSError, ValueError):
                print(f"autockpt: the plan is not decided anew: {error!r}", file=sys.stderr)
            start = undecided(plan, nodes=len(set(nodes)))
        if store is not None:
            store.set(name, to_json(start.plan))
    if store is not None:
        return start, from_json(CheckpointPlan, bytes(store.get(name)), where="plan of rank 0")
    return start, start.plan if start is not None and place.world_size == 1 else plan


def _goal_of_environment(kept: Goal | None) -> Goal | None:
    """Of AUTOCKPT_DISK_WRITERS and the like, which `autockpt run` reads where it launches."""
    if not any(name.startswith("AUTOCKPT_") for name in os.environ):
        return None
    from autockpt.policies.policy_file import goal_of_environment

    return goal_of_environment(os.environ, kept)


def _goal_within(first: RunDirectory, goal: Goal | None, number: int) -> Goal | None:
    """The goal of a numbered run: that of the first, with storage of its own."""
    goal = goal or first.read_goal()
    if goal is None:
        return None
    path = goal.storage_path and within(first.checkpoints(goal), number)
    return replace(goal, storage_path=path, remote=RemoteWish())


def current_identity(ranks: int = 0, *, alone: bool = False) -> same_job.Job:
    """Return the identity of this start, by its script and its arguments; see `job_of`.

    `alone`: this process is no rank of several, so that what it was called with tells trainings
    apart, and not ranks.
    """
    if (given := given_launch()) is not None and given.job:
        return same_job.Job(script=given.job)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    first = sys.argv[0] if sys.argv else ""
    script = main or ("" if first in ("", "-", "-c") else first)
    path = os.path.abspath(script) if script else ""
    called = call_arguments() if alone else ()
    words = [*sys.argv[1:], *called] if script else [*_typed_code(), *sys.argv[1:], *called]
    return same_job.job_of(path, words, os.environ, ranks=ranks)


def _typed_code() -> list[str]:
    """The code of `python -c CODE`, as an option; its digest alone, since it may hold a secret."""
    if sys.argv[:1] != ["-c"] or "--multiprocessing-fork" in sys.orig_argv:
        return []
    count = len(sys.argv)
    before, code = ["", "", *sys.orig_argv][-count - 1 :][:2]
    if not re.fullmatch("-[A-Za-z]*c", before):
        return []
    return [f"-c={hashlib.sha256(' '.join(code.split()).encode()).hexdigest()[:16]}"]


def _as_text(path: Any) -> str:
    """The absolute path.  Raises ConfigError for one that messages and files cannot hold."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigError(
            f"attach(run_dir=...): got {path!r:.80} ({type(path).__qualname__}); expected a path "
            "as text"
        )
    whole = os.path.abspath(path)
    try:
        whole.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"attach(run_dir=...): {whole!r:.300} is no UTF-8 text; give the directory, or those "
            "above it, another name"
        ) from error
    return whole


def _agreed_directory(path: str, place: RankPlace) -> Placed:
    """The directory of this job; that of rank 0 where ranks have a store to tell it by.

    Ranks without one find the same by the same rule.
    """
    global _calls
    take = os.environ.get(SAME_JOB) == "1"
    store = None
    with contextlib.suppress(ConfigError):
        store = group_store()
    _calls += 1
    name = f"autockpt/place/{_calls}"
    if store is None or place.rank == 0:
        placed = put_in(path, _identity(place, hears=store is not None), take=take)
        if store is not None:
            store.set(name, placed.suffix or "-")
        return placed
    suffix = bytes(store.get(name)).decode()
    suffix = "" if suffix == "-" else suffix
    return Placed(path=path + suffix, suffix=suffix)


def _identity(place: RankPlace, *, hears: bool) -> same_job.Job:
    """Of this start; the same on all ranks, where these cannot hear what rank 0 has found."""
    several = place.world_size > 1
    unheard = place.world_size if several and not hears else 0
    return current_identity(unheard, alone=not (several or in_group_of_several()))


_REFUSALS = {kind.__name__: kind for kind in (ConfigError, DirectoryBusyError, StorageError)}
"""By its name, the error that rank 0 tells the others."""


def _require_own_store(
    path: str, checkpoints: str, place: RankPlace, launch_id: str, *, takes: bool
) -> None:
    """Raises ConfigError where a store has the checkpoints of another job; on all ranks alike.

    The run directory, which else says so, may be that of a new machine.  Raises DirectoryBusyError
    where that job still trains, StorageError for a store that does not answer.
    """
    store, said = None, "-"
    with contextlib.suppress(ConfigError):
        store = group_store()
    name = f"autockpt/job/{_calls}"
    if store is None or place.rank == 0:
        try:
            identity = _identity(place, hears=store is not None)
            _own_store(path, checkpoints, identity, launch_id, takes)
        except (AutockptError, OSError) as error:
            said = f"{type(error).__name__} {error}"
        if store is not None:
            store.set(name, said)
    else:
        said = bytes(store.get(name)).decode()
    if said != "-":
        kind, _, why = said.partition(" ")
        raise _REFUSALS.get(kind, StorageError)(why)


def _own_store(path: str, checkpoints: str, job: same_job.Job, launch_id: str, takes: bool) -> None:
    """The store is this job's now.  Raises ConfigError, DirectoryBusyError, StorageError.

    Where a keeper has a checkpoint of this run, a store that may hang is not asked.
    """
    takes = takes or os.environ.get(SAME_JOB) == "1"
    in_memory = launches_here(path, in_memory=True)
    if launch_id in in_memory or (in_memory and not takes):
        return
    directory = CheckpointDirectory(checkpoints)
    if takes:
        directory.take_job(job, own_launches=launches_here(path))
        return
    if directory.claim_job(to_json(job).encode(), replace=False):
        return
    if found := directory.differences(job):
        raise ConfigError(
            f"{checkpoints}: holds checkpoints of another job: {'; '.join(found)}; name another "
            f"place with disk.path, or go on with these: {SAME_JOB}=1"
        )


def _goal_of_own_run(goal: Goal, named: str, suffix: str, kept: Goal | None) -> Goal:
    """The goal that was given for the named directory, in a run of the job's own.

    `kept`: the goal that the run has had so far, whose places are its own already.
    """
    if not suffix:
        return goal
    if goal.storage_path is not None and (kept is None or goal.storage_path != kept.storage_path):
        goal = replace(goal, storage_path=RunDirectory(named).checkpoints(goal))
    return own_goal(goal, suffix, kept=kept)


def _domains_of(profile: Profile | None, nodes: tuple[int, ...]) -> FailureDomains | None:
    """Of the table that the profile was taken with; None where that says nothing of these nodes."""
    known = UNKNOWN_DOMAINS if profile is None else profile.domains
    return known if known.labels and set(nodes) == set(range(len(known.labels))) else None


def _own_labels() -> Mapping[str, str]:
    """Return the failure domains this node knows of itself; a mistake never ends the training."""
    from autockpt.profiling.facts.failure_domains import own_labels

    try:
        return own_labels(os.environ)
    except ConfigError as error:
        with contextlib.suppress(OSError, ValueError):
            print(f"autockpt: failure domains are not known: {error}", file=sys.stderr)
        return {}


def _first_plan(
    goal: Goal, decision: Decision | None, newest: CheckpointPlan | None, *, in_place: bool
) -> CheckpointPlan:
    """The newest plan of this run: re-tuned, decided, or the one it starts with."""
    if newest is not None and newest.version > (decision.plan.version if decision else 0):
        return newest
    if decision is not None:
        return decision.plan
    return plan_while_measured(goal) if in_place else plan_without_profile(goal)


def _launcher() -> tuple[str, int]:
    """(launch id, process): equal on all ranks of a launch, kept over its restarts."""
    environment = os.environ
    if (given := given_launch()) is not None:
        return given.launch_id, os.getppid()
    if "AUTOCKPT_LAUNCH_ID" in environment:
        pid = environment.get("AUTOCKPT_LAUNCHER_PID", "")
        return environment["AUTOCKPT_LAUNCH_ID"], int(pid) if pid.isdigit() else os.getppid()
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":  # which a user may give to every launch of a job
        agent = agent_of(environment, os.getppid())
        return f"torchrun-{run_id}-{agent}-{pid_start(agent)}", agent
    if under_srun(environment):
        return slurm_launch(environment), os.getppid()
    if "RANK" in environment:
        agent = agent_of(environment, os.getppid())
        return f"agent-{agent}-{pid_start(agent)}", agent
    own = os.getpid()
    return f"process-{own}-{pid_start(own)}", own
