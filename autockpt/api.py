"""The public functions; loaded on first use."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autockpt.executors.sharding.fqns import Assembled as Assembled
from autockpt.executors.sharding.rules.rules import Expert as Expert
from autockpt.executors.sharding.rules.rules import PaddedVocabulary as PaddedVocabulary
from autockpt.executors.sharding.rules.rules import Rule as Rule
from autockpt.executors.sharding.rules.rules import Rules as Rules
from autockpt.executors.sharding.rules.rules import Sharded as Sharded
from autockpt.launch import startup_timing
from autockpt.launch.in_process.restartable import restartable as restartable
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import Decision
from autockpt.values.profile import Profile

if TYPE_CHECKING:
    import pandas as pd
    from torch.distributed.device_mesh import DeviceMesh

    from autockpt.profiling.pass_through import PassThroughSession
    from autockpt.session import Session


def attach(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    data: Any = None,
    *,
    run_dir: str | None = None,
    goal: Goal | None = None,
    fresh: bool = False,
    rules: "Rules | Mapping[str, Any] | str | os.PathLike[str] | None" = None,
    axes: "Mapping[str, int] | DeviceMesh | None" = None,
    extra: Callable[[], Mapping[str, Any]] | None = None,
    restore: str = "all",
    load: Mapping[str, str] | None = None,
    missing: str = "error",
    exclude: Sequence[str] = (),
    **others: Any,
) -> "Session | PassThroughSession":
    """Protects a training job: restores what there is to restore, then checkpoints it.

    `data` is a DataLoader, anything with state_dict/load_state_dict, or "script": the script puts
    its loop and its data at `ckpt.step_count` by itself.  Where nothing does, a resume ends with
    exit code 91 (SystemExit) in front of the first iteration.  `others` are named objects with both
    (scheduler, scaler, ema, a TrainState, ...).  `rules` say how plain tensors that differ by rank
    make the whole model.  `axes` is their grid of ranks ({"dp": 2, "tp": 4}, the last one fastest).
    DTensors, DDP, FSDP and DeepSpeed need none.

    `load` gives a training that begins its weights: by the name of a model a run, a checkpoint, or
    a file of weights.  `exclude` lists patterns of names that stay as they are, such as `head.*`.
    With `missing="ok"` so does each tensor that one side lacks.  A restart goes on from its own
    checkpoint and does not look at the source.

    For adapters of frameworks (docs/howto/frameworks/adapters.md): `extra()` gives counters as JSON
    can hold them, which a restart finds in `ckpt.restored.extra`.  With `restore="tensors"`
    `ckpt.finish_restore()` puts the random state back, and the adapter sees to the place of loop
    and data.

    `run_dir` is the directory of the run, without it `runs/<name of the script>` where the job is
    started.  The run that is there is resumed if it is of the same job (docs/howto/launch/jobs.md).
    Another job gets a run of its own beside it and prints that.  With `fresh` a new one begins
    beside the run's checkpoints.  `run_dir` and `goal` matter without `autockpt run`, which brings
    its own.  Every further attach of a process is a run of its own, in `attach-2`, `attach-3`, ...
    within that directory; with a `run_dir` that it had before it goes on with that run.  A session
    without a name that is still open ends there.

    Raises ConfigError for anything that cannot be saved safely, naming it, and DirectoryBusyError
    when another live run owns the directory.  Under `autockpt profile`, and in a worker process
    that imports the script of its parent, the session only passes batches through.  Under
    `autockpt restore --dry-run` the script ends here (SystemExit).
    """
    from autockpt.launch.rank_env import rank_and_world
    from autockpt.launch.rendezvous import spawned_rank
    from autockpt.session.attaches import is_helper, of_this_process
    from autockpt.session.job import current_job
    from autockpt.session.sharding_rules import rank_rules

    _require_goal(goal, others.get("policy"))
    if restore not in ("all", "tensors"):
        raise ConfigError(f'attach(restore=...): got {restore!r}; expected "all" or "tensors"')
    weights = None
    if load is not None or exclude or missing != "error":
        from autockpt.session.place.initial_weights import InitialWeights

        weights = InitialWeights.checked(load, missing, exclude)
    if is_helper():
        from autockpt.profiling.pass_through import PassThroughSession

        return PassThroughSession(data, None)
    os.environ.update(spawned_rank(os.environ))
    rank, world_size = rank_and_world(os.environ)
    ruled = rank_rules(rules, axes, rank=rank, world_size=world_size)
    mode = os.environ.get("AUTOCKPT_MODE")
    if mode == "profile":
        from autockpt.profiling.entry import adopt

        return adopt(model=model, optimizer=optimizer, data=data, ruled=ruled, **others)
    startup_timing.attach_begins()
    from autockpt.executors.state.live_state import LiveState
    from autockpt.session import Session

    state = LiveState.of(model=model, optimizer=optimizer, ruled=ruled, **others)
    if mode == "restore-plan":
        from autockpt.executors.restore import reader, shard_sources
        from autockpt.executors.restore.plan.load_plan import PlanMade

        folder = os.environ["AUTOCKPT_PLAN_FOR"]
        sources = shard_sources.shards_on_disk(folder, rank, world_size)
        raise PlanMade(reader.plan_restore(sources, state))
    job = current_job(run_dir=run_dir, policy=goal, fresh=fresh)
    of_this_process.end_former(
        job.run_directory, job.incarnation.launch_id, named=run_dir is not None,
        objects=[*state.models.values(), *state.optimizers.values()],
    )  # fmt: skip
    return Session(job, state, data, extra=extra, deferred=restore == "tensors", weights=weights)


def _require_goal(goal: Any, policy: Any) -> None:
    """Raises ConfigError for a policy file, or a goal by another name.  A net may be a policy."""
    said = "; attach(goal=...) takes a Goal (autockpt.values.goal), `autockpt run --policy` a file"
    if isinstance(policy, str | os.PathLike | Goal):
        raise ConfigError(f"attach(policy=...): {policy!s:.80} is no object to be saved{said}")
    if not isinstance(goal, Goal | None):
        raise ConfigError(f"attach(goal=...): got {type(goal).__qualname__}{said}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peeked:
    """The newest good checkpoint on disk, as far as it is known without a model."""

    generation: str
    """Name of the checkpoint."""
    step: int
    """Iterations trained."""
    extra: Mapping[str, Any]
    """What `attach(extra=...)` gave at that step; empty where it gave nothing."""


def peek(run_dir: str) -> Peeked | None:
    """Where a restart of this run goes on at the earliest; None: there is no checkpoint on disk.

    Needs neither model nor optimizer.  A restart may find a newer checkpoint in memory: after
    `attach`, `ckpt.restored` says which one it was.  Raises CorruptCheckpointError for damage, and
    ConfigError or NoCheckpointError where the path names one checkpoint that is not there.
    """
    from autockpt.integrations.formats.convert.peeking import newest_progress

    found = newest_progress(run_dir)
    return None if found is None else Peeked(generation=found[0], step=found[1], extra=found[2])


def profile_of(run_dir: str) -> Profile | None:
    """The profile in a run directory, None when there is none."""
    from autockpt.run_directory import RunDirectory

    return RunDirectory.open(run_dir).read_profile()


def decide(profile: Profile, goal: Goal | None = None) -> Decision:
    """The plan for a measured job, with a reason for every choice."""
    from autockpt.policies.decide import decide as decide_plan

    return decide_plan(profile, goal or Goal())


def telemetry(run_dir: str) -> "pd.DataFrame":
    """All events of a run, one row each, in the order in which they happened."""
    from autockpt.reports.formats.frames import telemetry_frame
    from autockpt.run_directory import RunDirectory

    return telemetry_frame(RunDirectory.open(run_dir).events())


def load(path: str, *, generation: str | None = None, rank: int | None = None) -> dict[str, Any]:
    """A checkpoint as nested dicts of CPU tensors; its weights are under "model".

    `path` is a run, a checkpoint directory (then `generation`, or the newest good one), or one
    generation.  It may also be a safetensors file, directory or index, a file of torch.save (read
    with weights_only=True), or a directory of torch.distributed.checkpoint.  Of a generation the
    images of all ranks are put together, or (`rank`) one is taken as it is.  Never runs code of a
    file.  Warns (UserWarning) of a generation that came back from a lossy archive.  Raises
    ConfigError if `path` is no checkpoint, CorruptCheckpointError for damage.
    """
    from autockpt.executors.storage.directory.records import lossy_notice
    from autockpt.integrations.formats.tree.lazy_tree import materialised
    from autockpt.integrations.formats.tree.loading import Source, read_from

    def whole(source: Source) -> tuple[dict[str, Any], str]:
        return materialised(source.tree), source.lossy

    state, lossy = read_from(path, whole, generation=generation, rank=rank)
    if lossy:
        warnings.warn(lossy_notice(path, lossy), stacklevel=2)
    return state
