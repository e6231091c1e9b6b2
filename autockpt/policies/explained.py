"""The staging as one choice for the reader: how it is copied, written, cloned, what overlaps."""

from dataclasses import replace

from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.staging.device_clone import CloneChoice
from autockpt.policies.staging.write_path import WriteChoice
from autockpt.values.goal import Goal
from autockpt.values.plan import Choice, WriteWay
from autockpt.values.units import format_duration


def staging_choice(
    schedule: Choice, write: WriteChoice, clone: CloneChoice, goal: Goal, costs: Costs
) -> Choice:
    """The schedule's choice with the reasons, numbers and bindings of the others behind its own."""
    way = WriteWay(writers=write.writers, chunk_bytes=write.chunk_bytes, direct_io=write.direct_io)
    flying = in_flight_sentence(goal, costs)
    reasons = (schedule.reason, _sentence(write.reason), _sentence(clone.reason), flying)
    bindings = (
        schedule.binding,
        write.binding,
        clone.binding,
        "staging.in_flight" if flying else "",
    )
    return replace(
        schedule,
        chosen=f"{schedule.chosen}, {way}",
        reason=". ".join(filter(None, reasons)),
        numbers={**schedule.numbers, **write.numbers, **clone.numbers},
        runner_up="; ".join(filter(None, (schedule.runner_up, write.runner_up))),
        binding=" and ".join(filter(None, bindings)),
    )


def in_flight_sentence(goal: Goal, costs: Costs) -> str:
    """Return the effect of a pinned number of checkpoints in flight; "" without a pin."""
    count = goal.pins.in_flight
    if count is None or goal.pins.persist == "sync":
        return ""
    checkpoints = "1 checkpoint is" if count == 1 else f"{count} checkpoints are"
    apart_s = costs.persist_s / count
    return (
        f"At most {checkpoints} on the way to storage, {format_duration(costs.persist_s)} each, so "
        f"one that comes due every {format_duration(apart_s)} is not skipped"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
