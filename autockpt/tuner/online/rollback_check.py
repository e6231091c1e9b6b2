"""Whether the last change turned out worse than it promised, as a sentence; "" if it did not."""

import math
from dataclasses import replace

from autockpt.tuner.online.controller_state import Change
from autockpt.tuner.online.outlook import Outlook
from autockpt.tuner.online.settings import ControllerSettings
from autockpt.values.units import format_fraction


def regret(change: Change, outlook: Outlook, settings: ControllerSettings) -> str:
    """Why to go back."""
    return slower(change, outlook, settings) or _worse(change, outlook, settings)


def slower(change: Change, outlook: Outlook, settings: ControllerSettings) -> str:
    """Why to go back, by the iterations alone."""
    pace = outlook.seen.pace
    if not change.pace_s or pace.n < 2:
        return ""
    longer = pace.mean / change.pace_s - 1.0
    error = math.hypot(pace.error, change.pace_error_s) / change.pace_s
    if longer <= max(settings.rollback_slowdown, settings.rollback_sigmas * error):
        return ""
    return f"iterations became {format_fraction(longer)} longer with the change"


def _worse(change: Change, outlook: Outlook, settings: ControllerSettings) -> str:
    if change.expected_waste is None or outlook.goal.pins.interval_rule == "checkfreq":
        return ""  # that rule spends its budget at any waste
    before = replace(outlook, plan=change.before).waste
    allowed = change.expected_waste + settings.rollback_sigmas * outlook.waste_error()
    if outlook.waste <= allowed or before >= outlook.waste:
        return ""
    return (
        f"waste is {format_fraction(outlook.waste)} where "
        f"{format_fraction(change.expected_waste)} was expected, and the plan before would "
        f"have {format_fraction(before)}"
    )
