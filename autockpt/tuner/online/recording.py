"""The inputs, questions and answers of a controller: recorded and replayed.

A recording is lines of JSON data.  The first is an opening, which holds all that decides: memory,
goal, settings.  Every further one is an input, or a question with its answer.  Replaying the inputs
to a controller made from the opening must give the same answers.  A decision is a function of
telemetry; `replay` checks that.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autockpt.tuner.online.controller import Controller
from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.proposals import PlanProposal
from autockpt.tuner.online.settings import ControllerSettings
from autockpt.values.decision_inputs import DecisionInputs
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Expected
from autockpt.values.record import from_data, to_data
from autockpt.values.telemetry import Event, event_data, event_from_data

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where a recording begins."""

    schema_version: int = 1
    goal: Goal
    settings: ControllerSettings
    memory: Memory


class RecordedController:
    """A controller whose inputs and answers are written down.

    `write` takes one line and says whether a new recording should begin: then an opening follows.
    """

    def __init__(self, controller: Controller, write: Callable[[Line], bool]) -> None:
        self._controller = controller
        self._write = write
        write(self._opening())

    @property
    def plan(self) -> CheckpointPlan:
        """The plan in force."""
        return self._controller.plan

    @property
    def memory(self) -> Memory:
        """The controller's memory, for the next process."""
        return self._controller.memory

    @property
    def observing(self) -> bool:
        """Its proposals must not be applied."""
        return self._controller.mode == "observe"

    def observe(self, event: Event) -> None:
        """Take in one event of this run, oldest first."""
        self._controller.observe(event)
        self._note({"observed": event_data(event)})

    def expect(self, plan: CheckpointPlan, expected: Expected) -> None:
        """A plan that was decided elsewhere and is offered to all ranks."""
        self._tell({"expected": {"plan": to_data(plan), "promise": to_data(expected)}})

    def interrupted(self, at_s: float, exposure_s: float) -> None:
        """The run was interrupted at `at_s`, `exposure_s` of training after the last time."""
        self._tell({"interrupted": {"at_s": at_s, "exposure_s": exposure_s}})

    def start(self) -> PlanProposal | None:
        """A better plan for the process that begins; the first question of a recording."""
        found = self._controller.start()
        self._note({"started": True, "answer": to_data(found)})
        return found

    def promise(self) -> tuple[Expected, DecisionInputs] | None:
        """The promise of the plan in force; it decides nothing, so it is not recorded."""
        return self._controller.promise()

    def lasts(self, run_s: float) -> None:
        """The whole run will take about this long."""
        self._tell({"run_s": run_s})

    def propose(self, now_s: float, step: int) -> PlanProposal | None:
        """A better plan, if there is one worth the change now."""
        found = self._controller.propose(now_s, step)
        self._note({"asked": {"at_s": now_s, "step": step}, "answer": to_data(found)})
        return found

    def _tell(self, line: Line) -> None:
        tell(self._controller, line, where="controller")
        self._note(line)

    def _note(self, line: Line) -> None:
        if self._write(line):
            self._write(self._opening())

    def _opening(self) -> Line:
        own = self._controller
        return {
            "opening": to_data(Opening(goal=own.goal, settings=own.settings, memory=own.memory))
        }


def tell(controller: Controller, line: Line, *, where: str) -> None:
    """Give an input to a controller.  Raises ConfigError where the line holds none."""
    match line:
        case {"observed": data}:
            controller.observe(event_from_data(data, where=where))
        case {"expected": {"plan": plan, "promise": promise}}:
            controller.expect(
                from_data(CheckpointPlan, plan, where=where), from_data(Expected, promise)
            )
        case {"interrupted": {"at_s": at_s, "exposure_s": exposure_s}}:
            controller.interrupted(at_s, exposure_s)
        case {"run_s": run_s}:
            controller.settings = replace(controller.settings, run_s=run_s)
        case _:
            raise ConfigError(f"{where}: not a line of a recording: {str(line)[:80]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A question that was answered otherwise when it was asked again."""

    where: str
    step: int
    recorded: str
    """The reason of the proposal, "no change" without one."""
    replayed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of replaying recordings."""

    recordings: int
    inputs: int
    questions: int
    proposals: tuple[PlanProposal, ...]
    """As replayed, each once however often it was repeated."""
    difference: Difference | None
    """The first one; None: every answer was the same."""


def replay(recordings: Iterable[tuple[str, Sequence[Line]]]) -> Replay:
    """Play recordings, each with the name of its place, up to the first difference.

    Raises ConfigError for a line that is no line of a recording.
    """
    count = inputs = questions = 0
    proposals: list[PlanProposal] = []
    for name, lines in recordings:
        count += 1
        controller = _opened(lines, name)
        for number, line in enumerate(lines[1:], start=2):
            if "asked" not in line and "started" not in line:
                tell(controller, line, where=f"{name}:{number}")
                inputs += 1
                continue
            questions += 1
            found = _asked(controller, line, where=f"{name}:{number}")
            if to_data(found) != line.get("answer"):
                difference = _difference(f"{name}:{number}", line, found)
                return Replay(recordings=count, inputs=inputs, questions=questions,
                              proposals=tuple(proposals), difference=difference)  # fmt: skip
            if found is not None and found not in proposals:
                proposals.append(found)
    return Replay(recordings=count, inputs=inputs, questions=questions,
                  proposals=tuple(proposals), difference=None)  # fmt: skip


def _opened(lines: Sequence[Line], where: str) -> Controller:
    if not lines or "opening" not in lines[0]:
        raise ConfigError(f"{where}: the first line of a recording is its opening, and this is not")
    opening = from_data(Opening, lines[0]["opening"], where=f"{where}:1")
    return Controller(opening.memory, goal=opening.goal, settings=opening.settings)


def _asked(controller: Controller, line: Line, *, where: str) -> PlanProposal | None:
    if "started" in line:
        return controller.start()
    match line["asked"]:
        case {"at_s": float(at_s), "step": int(step)}:
            return controller.propose(at_s, step)
    raise ConfigError(f"{where}: not a question of a recording: {str(line)[:80]}")


def _difference(where: str, line: Line, found: PlanProposal | None) -> Difference:
    recorded = line.get("answer") or {}
    return Difference(
        where=where,
        step=line["asked"]["step"] if "asked" in line else 0,
        recorded=str(recorded.get("reason", "no change")),
        replayed=found.reason if found is not None else "no change",
    )
