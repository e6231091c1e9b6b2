"""What if: sliders over the waste function, and the static curve for everyone else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autockpt.reports.analysis.what_if import (
    FORMULA_TEXT,
    NEVER_S,
    PARAMETERS,
    WhatIfCurve,
    optimum_s,
    terms,
    waste,
)
from autockpt.reports.html.charts import u_curve
from autockpt.reports.html.escape import Html, join, tag
from autockpt.reports.html.sections.parts import Section, chart, details, duration, table
from autockpt.reports.model import ReportModel
from autockpt.reports.tiles import COSTS
from autockpt.values.units import format_duration, format_fraction

TABLE_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Slider:
    """One parameter the reader may move."""

    name: str
    label: str
    reach: float = 20.0
    """Logarithmic sliders go from the plan's value divided by this to times this."""
    least: float = 1e-3
    """Lower end where the plan's value is 0."""
    unit: str = "s"
    """s, "" for a fraction, x for a multiple of the plan's value."""
    linear: bool = False
    """From 0 to 1."""


def section(model: ReportModel) -> Section | None:
    """The what-if of the plan."""
    curve = model.what_if
    if curve is None:
        return None
    return Section(id="what-if", title="What if", body=_body(curve))


def _body(curve: WhatIfCurve) -> Html:
    here = waste(curve.point)
    assumed = " The time between failures is an assumption: no failure was seen yet."
    return join(
        tag(
            "p",
            "Time lost to checkpoints and failures, from the same formula that chose the plan. "
            "The bottom of the curve is flat: a somewhat longer or shorter interval costs little.",
            assumed if curve.mtbf_assumed else None,
            class_="lead",
        ),
        _sliders(curve),
        tag("p", _status(curve, here), id="what-if-status", role="status", class_="status"),
        _terms(curve),
        chart(u_curve.draw(curve), u_curve.legend(curve.tiers)),
        details(
            "Formula, inputs and the curve as a table",
            tag("p", tag("code", FORMULA_TEXT)),
            tag(
                "p",
                "Summed over the tiers: s stall, \u03c3 slow-down while the checkpoint becomes "
                "recoverable after L, T interval, \u039b failures per second that this tier "
                "serves, D detect and restart, R restore. Twice the nodes halve the time between "
                "failures; storage twice as fast halves time to durable and restore from disk; "
                "twice the state doubles stall, time until recoverable and restore.",
                class_="lead",
            ),
            _inputs(curve.point),
            _curve_table(curve),
        ),
    )


def _sliders(curve: WhatIfCurve) -> Html:
    memory = "memory" in curve.tiers
    stalled = "memory" if memory else "disk"
    wanted = [
        Slider(name="memory_interval_s", label="interval to memory"),
        Slider(name="disk_interval_s", label="interval to disk" if memory else "interval"),
        Slider(name=f"{stalled}_stall_s", label="stall per checkpoint", reach=100),
        Slider(name="disk_latency_s", label="time to durable"),
        Slider(name="disk_slowdown", label="slow-down while writing", unit="", least=1e-4),
        Slider(name="mtbf_s", label="time between failures", reach=100),
        Slider(name="process_share", label="failures memory survives", unit="", linear=True),
        Slider(name="restart_s", label="detect and restart"),
        Slider(name="nodes", label="nodes", reach=32, unit="x"),
        Slider(name="storage", label="speed of the storage", reach=16, unit="x"),
        Slider(name="state", label="size of the state", reach=16, unit="x"),
    ]
    shown = [s for s in wanted if memory or s.name not in ("memory_interval_s", "process_share")]
    inputs = [_slider(slider, curve.point.get(slider.name, 1.0)) for slider in shown]
    reset = tag("button", "back to the plan", type="button", id="what-if-reset", class_="js-only")
    return join(tag("div", *inputs, class_="sliders js-only"), reset)


def _slider(slider: Slider, value: float) -> Html:
    low, high, position = _range(slider, value)
    shown = {"s": format_duration, "": format_fraction}.get(slider.unit, _times)(value)
    return tag(
        "label",
        tag("span", slider.label),
        tag("output", shown),
        tag("input", type="range", min=0, max=1000, value=round(position * 1000),
            data_name=slider.name, data_low=repr(low), data_high=repr(high),
            data_unit=slider.unit or "fraction", data_scale="linear" if slider.linear else "log",
            aria_valuetext=shown),
    )  # fmt: skip


def _times(value: float) -> str:
    return f"{value:.3g} x"


def _range(slider: Slider, value: float) -> tuple[float, float, float]:
    """Lower end, upper end and where the plan stands between them, 0..1."""
    if slider.linear:
        return 0.0, 1.0, value
    center = max(min(value, NEVER_S / 1e3), slider.least)
    low, high = center / slider.reach, center * slider.reach
    if slider.unit == "":
        high = min(1.0, high)
    return low, high, math.log(center / low) / math.log(high / low)


def _status(curve: WhatIfCurve, here: float) -> str:
    best = ", ".join(
        f"{tier} every {format_duration(optimum_s(tier, curve.point))}" for tier in curve.tiers
    )
    return (
        f"Lost time {format_fraction(here)}, goodput {format_fraction(max(0.0, 1 - here))}. "
        f"Least loss here: {best}."
    )


def _terms(curve: WhatIfCurve) -> Html:
    parts = terms(curve.point)
    return tag(
        "ul",
        *[
            tag("li", tag("i", class_=f"key {name}"), f"{COSTS[name]} ",
                tag("b", format_fraction(value), id=f"term-{name}"))
            for name, value in parts.items()
        ],
        class_="legend",
    )  # fmt: skip


def _inputs(point: Mapping[str, float]) -> Html:
    rows = [
        (PARAMETERS[name], duration(value) if name.endswith("_s") else format_fraction(value), name)
        for name, value in point.items()
    ]
    return table(("input", "value", "name"), rows, caption="Inputs at the plan", numbers=(1,))


def _curve_table(curve: WhatIfCurve) -> Html:
    box = u_curve.geometry(curve)
    low, high = float(str(box["low"])), float(str(box["high"]))
    step = u_curve.SAMPLES // TABLE_ROWS
    columns = {tier: u_curve.sample(curve.point, tier, low, high)[::step] for tier in curve.tiers}
    rows = [
        (format_duration(interval_s), *[format_fraction(columns[t][i][1]) for t in curve.tiers])
        for i, (interval_s, _) in enumerate(columns[curve.tiers[0]])
    ]
    head = ("interval", *[f"lost, {tier} interval moved" for tier in curve.tiers])
    return table(head, rows, caption="Lost time when one interval moves", numbers=(1, 2))
