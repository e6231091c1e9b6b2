"""`autockpt tune`: search the best way to write this job's checkpoints, by writing them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autockpt import new_files
from autockpt.cli.shared.options import Command, Whole, common, policy_options, require_local
from autockpt.cli.shared.quantities import Options, positive
from autockpt.console import Console
from autockpt.values.errors import ConfigError, OptionError, StaleProfileError, StorageError
from autockpt.values.policy_keys.paths import is_store_url

if TYPE_CHECKING:
    from autockpt.cli.jobs.tune_text import Found
    from autockpt.cli.shared.plan_choice import Scale
    from autockpt.profiling.measure.sample_data import Content
    from autockpt.tuner.search.outcome import Outcome
    from autockpt.tuner.search.record import EarlierTry, Header
    from autockpt.values.goal import Goal
    from autockpt.values.profile import Profile

EXAMPLES = """
autockpt tune runs/train-20260101-120000
autockpt tune --profile profile.json --policy policy.yaml --budget 40 --time '2 min'
autockpt tune --replay runs/train-20260101-120000/tune-20260101-130000/trials.jsonl
"""


BUDGET = 48
"""Most writes unless told: 16 of them are the final, and about 20 go into the search."""
DEFAULTS: Options = {
    "run_dir": None, "profile": None, "policy": None, "settings": (),
    "budget": BUDGET, "time": None, "seed": 0, "out": None,
}  # fmt: skip
"""The options of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The tuning task, checked."""

    place: str
    """The profile, as the user named it."""
    folder: Path
    """Where it lies."""
    profile: "Profile"
    goal: "Goal"
    scale: "Scale"
    budget: int
    seed: int
    limit_s: float

    @property
    def checkpoints(self) -> str:
        """Where a run of this job writes."""
        from autockpt.run_directory import RunDirectory

        goal = self.goal if self.goal.storage_path else None
        return RunDirectory(self.folder).checkpoints(goal)

    @property
    def ranks(self) -> int:
        """That write at once on this node."""
        from autockpt.policies.cost_model.costs import ranks_per_node

        return ranks_per_node(self.profile)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("run_dir", required=False)
@click.option("--profile", metavar="FILE", help="A profile, or its directory.")
@policy_options
@click.option("--budget", type=int, default=BUDGET, show_default=True, help="Most measured writes.")
@click.option("--time", metavar="DURATION", help="About how long to measure (60 s).")
@click.option("--seed", type=Whole(min=0), default=0, show_default=True, help="Of Optuna.")
@click.option("--out", metavar="DIR", help="Where to write (default: tune-TIME by the profile).")
@click.option("--replay", metavar="FILE", help="Decide again from a trials.jsonl; measure nothing.")
@common
def tune(console: Console, **options: Any) -> None:
    """Measure writers, chunk, O_DIRECT and codec on the job's bytes in its own directory.

    The cost model ranks all candidates, and the best of each kind are measured.  Optuna continues
    from there.  The best candidate must beat the default in interleaved writes beyond their spread.
    Writes trials.jsonl (every sample), study.journal (for optuna-dashboard) and tuned.yaml.
    """
    from autockpt.cli.jobs import tune_text
    from autockpt.cli.shared import plan_choice

    if options["replay"] is not None:
        tune_text.show(console, *_replay(options), {})
        return
    header, outcome, files = search(console, options)
    tune_text.show(console, header, outcome, files)
    _renew_report(Path(files["trials.jsonl"]))
    place = options["run_dir"] or options["profile"]
    console.next(plan_choice.next_run(["--profile", place, "--policy", files["tuned.yaml"]]))


def _renew_report(trials: Path) -> None:
    """Where the profile has a report, it shows this search from now on."""
    from autockpt.cli.shared.gather import try_report
    from autockpt.run_directory import RunDirectory

    run = RunDirectory(trials.parent.parent)
    if run.report.exists():
        try_report(run)


def search(console: Console, options: Options) -> "Found":
    """Reads, measures and writes as the options say, which are `DEFAULTS` where not given."""
    header, outcome, out = _search(console, _read(options), options["out"])
    names = ("tuned.yaml", "trials.jsonl", "study.journal")
    return header, outcome, {name: str(out / name) for name in names}


def _replay(options: Options) -> "tuple[Header, Outcome]":
    from autockpt.tuner.search.outcome import replay
    from autockpt.tuner.search.record import parse

    path = options["replay"]
    for name in ("run_dir", "profile", "policy", "settings", "out"):
        if options[name]:
            raise OptionError(f"--replay decides from {path} alone; drop the other input")
    try:
        with open(path, encoding="utf-8") as file:
            record = parse(file, where=path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return record.header, replay(record, where=path)


def _read(options: Options) -> Task:
    """Everything that can be wrong without a measurement is found here."""
    from autockpt.cli.jobs.preparation import goal_of
    from autockpt.cli.shared import plan_choice
    from autockpt.run_directory import local_path
    from autockpt.tuner.search.outcome import model_of
    from autockpt.tuner.search.search import require_budget
    from autockpt.values.units import parse_duration_s

    place = options["run_dir"] or options["profile"]
    if place is None or (options["run_dir"] and options["profile"]):
        raise OptionError("nothing is named to tune. Name a RUN_DIR, or --profile FILE")
    limit_s = positive(options, "time", parse_duration_s, 60.0)
    try:
        require_budget(options["budget"])
    except ConfigError as error:
        raise OptionError(f"--budget {options['budget']}: {error}") from None
    place = local_path(place)
    profile = plan_choice.read_profile(place)
    scale = plan_choice.Scale(
        world_size=profile.fingerprint.world_size, nodes=profile.fingerprint.nodes
    )
    is_run = options["run_dir"] and os.path.isdir(place)  # which may be a profile's file
    run = place if is_run else None
    goal = goal_of(run, options["policy"], options["settings"], scale)
    model_of(profile, goal, sample_bytes=profile.state.total_bytes).space.allowed()
    differences = plan_choice.machine_mismatches(profile.fingerprint, scale)
    if differences:
        raise StaleProfileError(
            f"{place} was measured at {'; at '.join(differences)}; its fastest setting may be slow "
            "here; run `autockpt profile SCRIPT` here first"
        )
    return Task(
        place=place,
        folder=Path(place) if os.path.isdir(place) else Path(place).absolute().parent,
        profile=profile,
        goal=goal,
        scale=scale,
        budget=options["budget"],
        seed=options["seed"],
        limit_s=limit_s,
    )


def _search(console: Console, task: Task, out: str | None) -> "tuple[Header, Outcome, Path]":
    """Measures in the job's directory, and writes what was found beside the profile."""
    from autockpt.cli.jobs import tune_text
    from autockpt.cli.shared import plan_choice
    from autockpt.profiling.measure.sample_data import content
    from autockpt.profiling.measure.timed_write import target_directory
    from autockpt.profiling.tuning import largest_sample
    from autockpt.run_directory import RunDirectory

    if is_store_url(task.checkpoints):
        raise ConfigError(
            f"{task.checkpoints}: an object store is written in one way, so there is nothing to "
            "tune. `autockpt run` decides from the profile alone, and --set disk.path=DIR tunes "
            "the writes to a directory"
        )
    folder = _claim(out, task.folder)
    with target_directory(task.checkpoints) as directory:
        largest = largest_sample(directory, task.profile.state.total_bytes, task.ranks)
        bytes_of = content(task.checkpoints, task.profile.state, nbytes=largest * task.ranks)
        console.say(f"tune: writes {bytes_of.source} to {directory}")
        header, outcome = _measure(console, task, bytes_of, directory, largest, folder)
    extends, settings = plan_choice.origin_of(task.goal, task.scale)
    if not extends.startswith("builtin:"):
        extends = os.path.relpath(extends, folder)
    fragment = tune_text.policy_fragment(outcome, extends=extends, settings=settings)
    RunDirectory(folder).write_text("tuned.yaml", fragment)
    return header, outcome, folder


def _measure(
    console: Console, task: Task, bytes_of: "Content", directory: str, largest: int, folder: Path
) -> "tuple[Header, Outcome]":
    """The search itself; trials.jsonl grows while it goes on."""
    from autockpt.cli.jobs import tune_text
    from autockpt.profiling.measure import timed_write
    from autockpt.profiling.tuning import carry_out, fit_sample, with_codecs
    from autockpt.run_directory import utc_now
    from autockpt.tuner.search.outcome import model_of, outcome_of
    from autockpt.tuner.search.proposals import OptunaProposer
    from autockpt.tuner.search.record import Header
    from autockpt.tuner.search.search import Search, seeds_of
    from autockpt.tuner.search.space import Candidate

    def measure(candidate: Candidate, nbytes: int) -> timed_write.Write:
        return timed_write.measure(directory, bytes_of.images(task.ranks, nbytes), candidate)

    profile = with_codecs(task.profile, bytes_of)
    default = model_of(profile, task.goal, sample_bytes=largest).space.default
    size = fit_sample(measure, default, largest, budget=task.budget, limit_s=task.limit_s)
    model = model_of(profile, task.goal, sample_bytes=size)
    earlier = _earlier(task, profile, folder)
    proposer = OptunaProposer(
        model.space.allowed(),
        seed=task.seed,
        seeds=len(seeds_of(model)),
        fallback=model.predicted_ratio,
    )
    header = Header(
        profile=profile,
        goal=task.goal,
        budget=task.budget,
        seed=task.seed,
        sample_bytes=size,
        content=bytes_of.source,
        directory=directory,
        created=utc_now(),
        proposer=proposer.name,
        earlier=earlier,
    )
    search = Search(model, proposer, task.budget, earlier=earlier)
    told = tune_text.teller(console, task.budget)
    trials = folder / "trials.jsonl"
    with open(trials, "w", encoding="utf-8", opener=new_files.readable) as file:
        carry_out(search, header, measure, file, limit_s=task.limit_s, told=told)
    proposer.save(str(folder / "study.journal"))
    new_files.close_to_others(folder / "study.journal")
    return header, outcome_of(search)


def _earlier(task: Task, profile: "Profile", folder: Path) -> "tuple[EarlierTry, ...]":
    """Return the measurements of searches beside `folder` with the same job on the same machine."""
    import contextlib

    from autockpt.tuner.search.record import earlier_tries, parse
    from autockpt.values.errors import AutockptError

    records = []
    for path in sorted(task.folder.glob("tune-*/trials.jsonl")):
        if path.parent == folder:
            continue
        # Of another version, or cut short: it says nothing.
        with contextlib.suppress(AutockptError, OSError, UnicodeDecodeError), path.open() as file:
            record = parse(file, where=str(path))
            if record.header.profile.fingerprint == profile.fingerprint:
                records.append(record)
    return earlier_tries(records)


def _claim(out: str | None, folder: Path) -> Path:
    """A directory for the results.  Raises ConfigError, StorageError."""
    import time

    require_local(out or "", name="--out ")
    path = Path(out) if out is not None else folder / time.strftime("tune-%Y%m%d-%H%M%S")
    try:
        new_files.make_directory(path)
        (path / "study.journal").unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; name an --out") from None
    return path
