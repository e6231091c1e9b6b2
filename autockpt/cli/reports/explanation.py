"""Everything known about the decisions of one run, gathered as a value."""

from dataclasses import dataclass, replace

from autockpt.policies.cost_model.sensitivity import INTERVALS, Flip
from autockpt.reports.analysis.accounting import Restore
from autockpt.reports.analysis.promises import Promise, parted
from autockpt.reports.analysis.saves import Change
from autockpt.run_directory import RunDirectory
from autockpt.tuner.online.proposals import PlanProposal
from autockpt.tuner.online.recording import Replay
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Choice, Decision
from autockpt.values.profile import Profile
from autockpt.values.telemetry import PlanChangeWithheld


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedChoice:
    """A choice of the plan, and the changes that would turn it."""

    choice: Choice
    flips: tuple[Flip, ...] = ()
    even_at_failures_times: float | None = None
    """For intervals: times as many failures at which the runner-up is as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedChange:
    """A change of the plan during the run, with the controller's knowledge; None: not recorded."""

    change: Change
    proposal: PlanProposal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Of one run."""

    protected: bool
    begins: bool
    """The script has not attached so far."""
    plan: CheckpointPlan | None
    decision: Decision | None
    choices: tuple[ExplainedChoice, ...]
    changes: tuple[ExplainedChange, ...]
    withheld: tuple[PlanChangeWithheld, ...]
    """Changes that an observing policy did not make."""
    promises: tuple[Promise, ...]
    warnings: tuple[str, ...]
    """Where promise and observation part."""
    restores: tuple[Restore, ...]

    def only(self, name: str) -> "Explanation":
        """One decision: a choice by its name, a change by the version of its plan.

        Raises ConfigError naming the known ones.
        """
        choices = tuple(item for item in self.choices if item.choice.name == name)
        changes = tuple(item for item in self.changes if _version(item) == name)
        if not choices and not changes:
            known = [item.choice.name for item in self.choices] + list(map(_version, self.changes))
            raise ConfigError(
                f"no decision of this run is called {name!r}; there are: "
                f"{', '.join(known) or 'none at all'}"
            )
        return replace(self, choices=choices, changes=changes)


def _version(item: ExplainedChange) -> str:
    return f"v{item.change.plan_version}"


def explanation(run: RunDirectory) -> Explanation:
    """Return the explanation from the files of a run.

    Raises ConfigError when one cannot be read.
    """
    from autockpt.cli.shared.gather import run_data
    from autockpt.reports.model import build

    data = run_data(run)
    model = build(data)
    proposals = _recorded(run) if model.changes else {}
    goal = run.read_goal() or Goal()
    return Explanation(
        protected=model.protected,
        begins=model.begins,
        plan=run.read_plan(),
        decision=data.decision,
        choices=_explained(data.profile, goal, data.decision),
        changes=tuple(
            ExplainedChange(change=change, proposal=proposals.get(change.plan_version))
            for change in model.changes
        ),
        withheld=tuple(e for e in data.events if isinstance(e, PlanChangeWithheld)),
        promises=model.promises,
        warnings=parted(model.promises),
        restores=model.restores,
    )


def replayed(run: RunDirectory) -> Replay:
    """The controller's recordings played again.  Raises ConfigError where there are none."""
    from autockpt.tuner.online.recording import replay

    recordings = list(run.recordings())
    if not recordings:
        raise ConfigError(
            f"{run.path}: no recording of the controller ({run.controller.name}/ is empty); a run "
            "records from its first iterations on, and profiles have none"
        )
    return replay(recordings)


def _recorded(run: RunDirectory) -> dict[int, PlanProposal]:
    """By version of the plan, the newest proposal in the recordings."""
    from autockpt.values.record import from_data

    found = {}
    for name, lines in run.recordings():
        for line in lines:
            if line.get("answer") is not None:
                proposal = from_data(PlanProposal, line["answer"], where=name)
                found[proposal.plan.version] = proposal
    return found


def _explained(
    profile: Profile | None, goal: Goal, decision: Decision | None
) -> tuple[ExplainedChoice, ...]:
    """Return each choice; with turning points only where the profile still leads to it."""
    if decision is None:
        return ()
    if profile is None:
        return tuple(ExplainedChoice(choice=choice) for choice in decision.choices)
    from autockpt.policies.cost_model.sensitivity import flips
    from autockpt.policies.decide import decide

    try:
        first = decide(profile, goal)
    except ConfigError:
        return tuple(ExplainedChoice(choice=choice) for choice in decision.choices)
    turned = flips(profile, goal, first, decide)
    even = _even(decision)
    explained = []
    for choice in decision.choices:
        same = first.choice(choice.name)
        if same is None or same.chosen != choice.chosen:
            explained.append(ExplainedChoice(choice=choice))
            continue
        mine = tuple(flip for flip in turned if flip.choice == choice.name)
        explained.append(
            ExplainedChoice(
                choice=choice,
                flips=mine,
                even_at_failures_times=even if choice.name in INTERVALS else None,
            )
        )
    return tuple(explained)


def _even(decision: Decision) -> float | None:
    """Times as many failures at which the next best intervals are as good."""
    from autockpt.policies.cost_model.inputs import tiers_from
    from autockpt.policies.cost_model.sensitivity import even_failures

    pairs = tuple(decision.plan.tier(name).interval_steps for name in ("memory", "disk"))
    others = tuple(_runner_up_steps(decision.choice(name)) for name in INTERVALS)
    if decision.inputs is None or not others[1] or bool(pairs[0]) != bool(others[0]):
        return None
    tiers = tiers_from(decision.inputs)
    return even_failures(tiers, (pairs[0], pairs[1]), (others[0], others[1]))


def _runner_up_steps(choice: Choice | None) -> int:
    words = choice.runner_up.split() if choice is not None else []
    return int(words[0]) if words and words[0].isdigit() else 0
