"""Loops in Ray Train (2.x, `TorchTrainer`), protected.

    def train_loop(config):
        ckpt = autockpt.integrations.ray.attach(
            model=model, optimizer=optimizer, scheduler=scheduler, data=loader
        )
        for step, batch in ckpt.batches(total):
            ...
            if (step + 1) % 100 == 0:
                ckpt.report({"loss": loss.item()})

Ray starts the workers anew after a failure: in other processes, maybe on other nodes, maybe fewer.
The keeper of a node is in a detached actor, which outlives them (`keeper_actor`), so that the new
workers go on from memory.  Ray does not say how often it
has started them: rank 0 writes that down in the directory of the run.  A preemption that Ray
announces makes a durable checkpoint; the training goes on until the node is taken, as Ray wants it.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint
from ray.train.collective import broadcast_from_rank_zero

import autockpt
from autockpt import new_files
from autockpt.executors.keeper.launch import start_keepers_by
from autockpt.integrations.adapters import OverSession
from autockpt.integrations.ray.keeper_actor import NODE_LETTERS, keepers_of, start_in_actor
from autockpt.launch.given import GivenLaunch, give_launch, numbered
from autockpt.run_directory import control_path
from autockpt.values.errors import ConfigError
from autockpt.values.policy_keys.paths import is_store_url

POLL_S = 5.0
"""Between two questions for a preemption; Ray looks for one as often.  Each is a barrier."""
POINTER = "autockpt.json"
"""File in a checkpoint of Ray's: which checkpoint of ours it stands for."""
NODES = "ray-nodes.json"
"""File in the run directory: numbers of nodes by Ray's ids."""
SCHEMES = {"s3": "s3", "gcs": "gs"}
"""Of object stores, by the names that Ray's file systems have."""
DISK_PATH = "AUTOCKPT_DISK_PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The checkpoint of autockpt behind a checkpoint of Ray's."""

    run_dir: str
    checkpoints: str
    """Their directory, or their place in an object store."""
    generation: str
    """Name of the checkpoint there."""
    step: int
    """Iterations trained."""


def join(*, run_dir: str | None = None) -> str:
    """Says what this worker is a start of, for every attach in it; the directory of the run.

    `attach` of this module does it.  Call it by itself, on all workers, where the loop is another
    framework's: then `huggingface.protect` and the others work inside of Ray Train.  `run_dir`: on
    storage that all nodes see; without it `autockpt` in the directory of Ray's experiment.  If that
    is in an object store, the checkpoints go there, and each node has a run directory of its own.

    Raises ConfigError outside of a train loop, or where Ray stores to something else.
    """
    return _joined(run_dir)[0]


def _joined(run_dir: str | None) -> tuple[str, str]:
    """The directory of the run, and the place of its checkpoints in a store; see `_places`."""
    context = _context()
    name = context.get_experiment_name()
    given = None
    if context.get_world_rank() == 0:
        path, store = _places(run_dir, context)
        path = os.path.abspath(path)
        launch = _launch_id(name)
        given = {"launch": launch, "run_dir": path, "store": store, "nodes": _numbers(path)}
    given = broadcast_from_rank_zero(given)
    if given["store"]:
        os.environ.setdefault(DISK_PATH, given["store"])
    node = given["nodes"].get(_short(ray.get_runtime_context().get_node_id()))
    give_launch(
        GivenLaunch(
            launch_id=given["launch"], job=f"ray:{name}", run_dir=given["run_dir"], node=node
        )
    )
    start_keepers_by(start_in_actor)
    return str(given["run_dir"]), str(given["store"])


def attach(*, data: Any = None, run_dir: str | None = None, **attached: Any) -> "RayLoop":
    """Protects a train loop, on all of its workers; restores what there is to restore.

    Takes what `autockpt.attach` does, models of `prepare_model` and loaders of
    `prepare_data_loader` too.  `run_dir` as of `join`.  Raises ConfigError as both do.
    """
    run_dir, store = _joined(run_dir)
    goal = attached.get("goal")
    if store and goal is not None and goal.storage_path is None:
        attached["goal"] = replace(goal, storage_path=store)
    if not hasattr(data, "_dataloader"):
        return RayLoop(autockpt.attach(data=data, run_dir=run_dir, **attached), run_dir)
    session: Any = autockpt.attach(run_dir=run_dir, restore="tensors", **attached)
    return RayLoop(session, run_dir, loader=data)


def located(checkpoint: Any) -> str:
    """Path of the checkpoint that one of Ray's points to, for `autockpt.load` and the commands.

    Raises ConfigError for a checkpoint that `report` of this module did not make.
    """
    pointer = pointer_of(checkpoint)
    if pointer is None:
        raise ConfigError(f"{checkpoint}: holds no {POINTER}; expected one of ckpt.report(...)")
    return os.path.join(pointer.checkpoints, pointer.generation)


def pointer_of(checkpoint: Any) -> Pointer | None:
    """Its pointer; None: it is a checkpoint of the script's own."""
    with checkpoint.as_directory() as folder:
        try:
            with open(os.path.join(folder, POINTER), encoding="utf-8") as file:
                data = json.load(file)
        except FileNotFoundError:
            return None
    return Pointer(**data)


class RayLoop(OverSession):
    """The session of one worker's train loop.

    Has all that a session has; `batches`, `steps` and `step` listen to Ray as well.
    """

    def __init__(self, session: Any, run_dir: str, *, loader: Any = None) -> None:
        """`loader`: of `prepare_data_loader`; it fetches a batch ahead."""
        self.session = session
        """The session that `autockpt.attach` returned."""
        self._run_dir, self._loader, self._place = run_dir, loader, None
        if loader is not None:
            self._place = loader._dataloader = session.loader(loader._dataloader, ahead=1)
            session.own_boundary()
        self._every = self._left = 1
        """Iterations between two questions, and until the next one; equal on all ranks."""
        self._asked_s = time.monotonic()
        self._preempted: frozenset[str] = frozenset()
        """Nodes whose preemption has been answered with a checkpoint."""
        self._reported: Any = None
        """The newest generation that a report has pointed to."""

    def batches(self, total: int, *, until: int | None = None) -> Iterator[tuple[int, Any]]:
        """(step, batch) for the steps not yet trained; as of a session."""
        if self._place is None:
            for pair in self.session.batches(total, until=until):
                yield pair
                self._heed_preemption()
            return
        batches = self._of_all_epochs()
        for step in self.steps(total, until=until):
            yield step, next(batches)

    def _of_all_epochs(self) -> Iterator[Any]:
        while True:
            if hasattr(self._loader.sampler, "set_epoch"):
                self._loader.sampler.set_epoch(self.epoch)
            yield from self._loader

    @property
    def epoch(self) -> int:
        """The epoch that the loader of `prepare_data_loader` goes on with, or begins."""
        if self._place is None:
            raise ConfigError(
                "ckpt.epoch: no loader of prepare_data_loader was attached; use ckpt.step_count"
            )
        return int(self._place.epoch)

    @property
    def first_batch(self) -> int:
        """The number of the batch that the next pass over that loader begins with.

        For a loop that counts: `enumerate(loader, ckpt.first_batch)`.
        """
        return 0 if self._place is None else int(self._place.first_batch)

    def steps(self, total: int, *, until: int | None = None) -> Iterator[int]:
        """The steps not yet trained; as of a session."""
        for step in self.session.steps(total, until=until):
            yield step
            self._heed_preemption()

    def step(self) -> int:
        """Marks the end of an iteration, in a loop of the script's own; the new step count."""
        self._heed_preemption()
        return int(self.session.step())

    def report(self, metrics: Mapping[str, Any] | None = None, **values: float) -> None:
        """`ray.train.report`, with a checkpoint that points to our newest durable one.

        With values by name it is `report` of a session: the values stand beside checkpoints.

        Ray's checkpoint holds a few bytes: which run, which checkpoint.  Where no newer one has
        become durable since the last report, only the metrics are reported.  Call it on all
        workers, equally often.
        """
        if metrics is None:
            self.session.report(**values)
            return
        durable = self._durable() if ray.train.get_context().get_world_rank() == 0 else None
        if durable is None or durable == self._reported:
            ray.train.report(dict(metrics))
            return
        self._reported = durable
        with tempfile.TemporaryDirectory() as folder:
            pointer = Pointer(
                run_dir=self._run_dir, checkpoints=self.session._job.checkpoints,
                generation=durable.name, step=durable.step,
            )  # fmt: skip
            path = os.path.join(folder, POINTER)
            with open(path, "w", encoding="utf-8", opener=new_files.readable) as file:
                json.dump(asdict(pointer), file)
            ray.train.report(dict(metrics), checkpoint=Checkpoint.from_directory(folder))

    def _durable(self) -> Any:
        client = getattr(self.session, "_client", None)  # None: a profile is taken
        return None if client is None else client.saves.durable

    def _heed_preemption(self) -> None:
        """Once in `POLL_S`: a node that is to be taken makes a durable checkpoint."""
        self._left -= 1
        if self._left > 0:
            return
        info = ray.train.get_preemption_info()
        now = time.monotonic()
        iteration_s = max(1e-6, (now - self._asked_s) / self._every)
        # As often as rank 0 finds right: every question is a barrier.
        every = min(max(1, round(POLL_S / iteration_s)), 8 * self._every)
        self._every = self._left = broadcast_from_rank_zero(every)
        self._asked_s = now
        nodes = frozenset() if info is None else frozenset(info.preempted_node_ids)
        if nodes - self._preempted:
            self._preempted |= nodes
            self.session.save()
            if ray.train.get_context().get_world_rank() == 0:
                print(
                    f"autockpt: Ray announces the preemption of {len(nodes)} node(s): a durable "
                    f"checkpoint begins at step {self.session.step_count + 1}",
                    flush=True,
                )


# ---------------------------------------------------------------------- what Ray knows


def _context() -> Any:
    try:
        context = ray.train.get_context()
        context.get_world_rank()
    except Exception as error:
        raise ConfigError(
            "autockpt.integrations.ray.attach: this is no worker of Ray Train; call it in the "
            f"train loop that TorchTrainer is given ({type(error).__name__}: {error!s:.120})"
        ) from error
    if not hasattr(ray.train, "get_preemption_info"):
        raise ConfigError(
            f"autockpt.integrations.ray: ray {ray.__version__} has no get_preemption_info; "
            "expected 2.60 or newer, with Ray Train v2 (RAY_TRAIN_V2_ENABLED=1)"
        )
    return context


def _launch_id(experiment: str) -> str:
    """One controller's; a driver that is started again is another launch."""
    try:
        from ray.train.v2._internal.execution.context import get_train_context

        return f"ray-{get_train_context().train_run_context.run_id}"
    except (ImportError, AttributeError, RuntimeError):
        return f"ray-{ray.get_runtime_context().get_job_id()}-{experiment}"


def _places(run_dir: str | None, context: Any) -> tuple[str, str]:
    """(directory of the run, place of its checkpoints in a store; "": they are in the directory).

    A checkpoint that this start is to go on from names the run, where it points to one.
    """
    launched = os.environ.get("AUTOCKPT_RUN_DIR")  # `autockpt run` has started the driver
    if path := launched or run_dir:
        return path, ""
    checkpoint = ray.train.get_checkpoint()
    pointer = None if checkpoint is None else pointer_of(checkpoint)
    if pointer is None:
        return _beside(context.get_storage())
    return pointer.run_dir, pointer.checkpoints if is_store_url(pointer.checkpoints) else ""


def _beside(storage: Any) -> tuple[str, str]:
    """Both, of the experiment."""
    kind = getattr(storage.storage_filesystem, "type_name", "")
    path = os.path.join(storage.experiment_fs_path, "autockpt")
    if kind == "local":
        return path, ""
    if kind in SCHEMES:
        url = f"{SCHEMES[kind]}://{path}"
        return os.path.join(os.path.expanduser("~"), control_path(url)), url
    raise ConfigError(
        f"autockpt.integrations.ray.attach: Ray stores to {kind or 'an unknown file system'}, and "
        f"checkpoints need a directory or a store: {', '.join(SCHEMES)}. Give attach(run_dir=...) "
        "a directory that all nodes see, or set AUTOCKPT_DISK_PATH to the URL of a store as well"
    )


def _short(node_id: str) -> str:
    return node_id[:NODE_LETTERS]


def _numbers(run_dir: str) -> dict[str, int]:
    """Numbers of the nodes that are alive: each keeps its own, a new one takes a lost one's."""
    alive = sorted(_short(node["NodeID"]) for node in ray.nodes() if node["Alive"])
    path = os.path.join(run_dir, NODES)
    known: dict[str, int] = {}
    try:
        with open(path, encoding="utf-8") as file:
            known = {str(k): int(v) for k, v in json.load(file).items()}
    except (OSError, ValueError, AttributeError):
        pass  # the first start
    living = keepers_of(run_dir)  # the file may be that of another node
    known = {node: n for node, n in known.items() if n not in living.values()} | living
    numbers = numbered(alive, known)
    new_files.make_directory(run_dir)
    with open(f"{path}.new", "w", encoding="utf-8", opener=new_files.private) as file:
        json.dump(numbers, file)
    os.replace(f"{path}.new", path)
    return numbers
