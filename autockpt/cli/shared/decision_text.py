"""A decision on the terminal: the choices, their reasons, and the promise."""

from collections.abc import Iterator
from typing import Any

from autockpt.console import Console
from autockpt.reports.remarks import grouped
from autockpt.values.plan import CheckpointPlan, Choice, Decision, Expected
from autockpt.values.record import to_data
from autockpt.values.units import format_duration, format_fraction


def plan_object(plan: CheckpointPlan, decision: Decision | None) -> dict[str, Any]:
    """The same for --json."""
    return {"plan": to_data(plan), "decision": to_data(decision) if decision else None}


def verdict(decision: Decision) -> str:
    """Return one sentence: the advice and its value."""
    expected, today = decision.expected, decision.current
    lost = f"lost time {format_fraction(expected.waste)}"
    if today is not None:
        lost += f" instead of {format_fraction(today.waste)} with a blocking save every 30 min"
    return f"checkpoint {_intervals(decision.plan)}: {lost}"


def print_plan(console: Console, plan: CheckpointPlan) -> None:
    """Print a plan that has no decision."""
    staging = plan.staging
    console.result(f"plan      {_intervals(plan)} (safe defaults: nothing was measured yet)")
    console.result(
        f"staging   {staging.schedule}, {staging.persist}, {staging.write_way}, {plan.slots} slots"
    )


def print_decision(console: Console, decision: Decision) -> None:
    """The verdict, every choice with its reason and runner-up, and the promise."""
    console.styled(verdict(decision), "bold")
    console.result("")
    console.columns(row for choice in decision.choices for row in choice_rows(choice))
    console.result("")
    for line in promise(decision.expected):
        console.result(line)
    for warning in grouped(decision.warnings):
        console.result(f"warning: {warning}")


def choice_rows(choice: Choice) -> Iterator[tuple[str, str]]:
    """One decision, in two columns."""
    yield choice.name, choice.chosen
    yield "", choice.reason
    if choice.runner_up:
        yield "", f"runner-up: {choice.runner_up_text}"
    if choice.binding:
        yield "", f"bound by: {choice.binding}"


def promise(expected: Expected) -> list[str]:
    """Return the promise of the plan, in lines."""
    return [
        f"promise   goodput {format_fraction(expected.goodput)}, lost time "
        f"{format_fraction(expected.waste)} (90 % band {format_fraction(expected.waste_low)} to "
        f"{format_fraction(expected.waste_high)})",
        f"          stall {format_duration(expected.stall_s)} a checkpoint, durable "
        f"{format_duration(expected.persist_s)} after it began",
        f"          a failure costs {format_duration(expected.recovery_memory_s)} from memory, "
        f"{format_duration(expected.recovery_disk_s)} from disk (mean)",
        *_peers(expected),
    ]


def _peers(expected: Expected) -> list[str]:
    if expected.recovery_peer_s is None:
        return []
    peers_s, share = format_duration(expected.recovery_peer_s), format_fraction(expected.survived)
    return [
        f"          a lost node costs {peers_s} from other nodes' memory, which serves {share} of "
        "such failures"
    ]


def _intervals(plan: CheckpointPlan) -> str:
    memory, disk = plan.tier("memory").interval_steps, plan.tier("disk").interval_steps
    early = plan.early_step
    if memory and memory == disk:
        first = f", at first of steps {early}, {2 * early}, {4 * early}, ..." if early else ""
        return f"to memory and disk every {disk} iterations{first}"
    if not memory:
        return f"to disk every {disk} iterations" if disk else "never"
    to_disk = f", to disk every {disk}" if disk else ""
    return f"to memory every {memory} iterations{to_disk}"
