"""An explanation on the terminal."""

from collections.abc import Mapping

from autockpt.cli.reports.explanation import ExplainedChange, ExplainedChoice, Explanation
from autockpt.cli.shared.decision_text import choice_rows, print_plan, promise, verdict
from autockpt.console import Console
from autockpt.policies.cost_model.sensitivity import Flip
from autockpt.tuner.online.recording import Replay
from autockpt.values.units import format_duration, format_fraction


def print_explanation(console: Console, explained: Explanation) -> None:
    """Everything, in the order in which it was decided."""
    if explained.begins:
        console.result("the script has not called autockpt.attach so far; the plan that waits:\n")
    if not explained.protected and not explained.begins:
        console.result("UNPROTECTED: the script never called autockpt.attach; no plan was followed")
    elif explained.decision is not None:
        console.styled(verdict(explained.decision), "bold")
        console.result("")
        print_some(console, explained, numbers=False)
        console.result("")
        for line in promise(explained.decision.expected):
            console.result(line)
        for warning in explained.decision.warnings:
            console.result(f"warning: {warning}")
    elif explained.plan is not None:
        print_plan(console, explained.plan)
        print_some(console, explained, numbers=False)
    _promises(console, explained)
    for event in explained.withheld:
        console.result(f"\nnot changed (the policy only observes): {event.reason}")
    for restore in explained.restores:
        lost = f"{restore.lost_steps} iterations lost" if restore.lost_steps else "nothing lost"
        took = f", {format_duration(restore.restore_s)} to restore" if restore.restore_s else ""
        console.result(f"\nresumed at step {restore.step} from {restore.source}, {lost}{took}")


def print_some(console: Console, explained: Explanation, *, numbers: bool) -> None:
    """Print the choices and changes of an explanation, with their turning points."""
    rows: list[tuple[str, str]] = []
    for item in explained.choices:
        notes = (*_sensitivity(item), *(_numbers(item.choice.numbers) if numbers else ()))
        rows += [*choice_rows(item.choice), *(("", note) for note in notes)]
    console.columns(rows)
    for change in explained.changes:
        _change(console, change, numbers=numbers)


def print_replay(console: Console, played: Replay) -> None:
    """Whether the recorded run leads to the same decisions."""
    what = (
        f"{played.inputs} inputs, {played.questions} questions, {len(played.proposals)} "
        f"proposals, recordings: {played.recordings}"
    )
    different = played.difference
    if different is None:
        console.result(f"replayed: {what}: the same decisions")
        return
    console.result(f"replayed: {what} up to the first difference")
    console.result(f"differs at {different.where}, step {different.step}")
    console.result(f"  recorded: {different.recorded}")
    console.result(f"  replayed: {different.replayed}")


def _sensitivity(item: ExplainedChoice) -> list[str]:
    """Return the changes, and their sizes, that would make another choice win."""
    lines = []
    if item.even_at_failures_times is not None:
        times = _times(item.even_at_failures_times)
        lines.append(f"the runner-up is as good with {times} the failures")
    by_input: dict[str, list[Flip]] = {}
    for flip in item.flips:
        by_input.setdefault(flip.input, []).append(flip)
    for name, flips in by_input.items():
        nearest = sorted(flips, key=lambda flip: flip.factor)
        turned = ", ".join(f"{_times(flip.factor)}: {flip.becomes}" for flip in nearest)
        lines.append(f"turned by {name}: {turned}")
    return lines


def _numbers(numbers: Mapping[str, float]) -> list[str]:
    """Inputs and outcome; the units are in the names."""
    return [f"{name} = {value:.4g}" for name, value in numbers.items()]


def _change(console: Console, item: ExplainedChange, *, numbers: bool) -> None:
    change, proposal = item.change, item.proposal
    console.result(f"\nv{change.plan_version}  from step {change.step}: {change.reason}")
    if proposal is None:
        return
    before, expected = proposal.numbers.get("waste_before"), proposal.expected
    if before is not None and expected is not None:
        console.result(
            f"    runner-up: as before (lost time {format_fraction(before)} against "
            f"{format_fraction(expected.waste)})"
        )
    even = proposal.numbers.get("even_at_failures_times")
    if even is not None:
        console.result(f"    the plan before is as good with {_times(even)} the failures")
    if proposal.binding:
        console.result(f"    bound by: {proposal.binding}")
    for line in _numbers(proposal.numbers) if numbers else ():
        console.result(f"    {line}")


def _promises(console: Console, explained: Explanation) -> None:
    if not explained.promises:
        return
    console.result("")
    rows = [
        (item.label, item.shown(item.promised), item.shown(item.observed), item.verdict)
        for item in explained.promises
    ]
    console.table(("promised against observed", "promised", "observed", ""), rows)
    for warning in explained.warnings:
        console.result(f"warning: {warning}")


def _times(factor: float) -> str:
    """`1.6 times`, with two digits that count."""
    return f"{factor:.3g} times" if factor >= 1000 else f"{factor:.2g} times"
