"""The report for the terminal: the same model as the page, plain text, verdict first."""

import textwrap
from collections.abc import Iterable, Sequence

from autockpt.reports.analysis.accounting import Restore
from autockpt.reports.analysis.idle_windows import Windows
from autockpt.reports.analysis.promises import Promise
from autockpt.reports.analysis.replication import facts as copy_facts
from autockpt.reports.analysis.restarts import LABELS as PARTS
from autockpt.reports.analysis.what_if import terms
from autockpt.reports.findings import Finding
from autockpt.reports.html.charts.where_time import LABELS
from autockpt.reports.html.escape import UNIT, plain
from autockpt.reports.model import ATTACH_LINES, ReportModel
from autockpt.reports.tiles import COSTS
from autockpt.values.table import columns
from autockpt.values.units import format_duration, format_fraction

WIDTH = 88
"""Columns; fits a split screen and a mail."""
BAR = 28


def render(model: ReportModel) -> str:
    """The report in at most `WIDTH` columns, ASCII except for what users wrote.

    A command keeps its line, however long it is: it is there to be copied.
    """
    blocks = (
        _wrap(f"autockpt {model.kind}: {model.title}"),
        _banner(model),
        _verdict(model),
        _tiles(model),
        _head(model),
        _time(model),
        _promises(model.promises),
        _copies(model),
        _restores(model),
        _restarts(model),
        _windows(model),
        _choices(model),
        _unknown(model),
        _findings(model.findings),
        _warnings(model.warnings),
    )
    lines = [line for block in blocks if block for line in (*block, "")]
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def _head(model: ReportModel) -> list[str]:
    facts = ", ".join(f"{fact.label.lower()} {fact.value}" for fact in model.facts)
    return [*_command(model.command, "$ "), *_wrap(facts)]


def _banner(model: ReportModel) -> list[str]:
    if not model.attach_missing:
        return []
    return [
        "!" * WIDTH,
        "UNPROTECTED: the script ran unchanged and was not checkpointed. The lines to add, with",
        "the usual names (autockpt run ends by printing them with the script's own):",
        "",
        *(f"    {line}" for line in ATTACH_LINES),
        "!" * WIDTH,
    ]


def _verdict(model: ReportModel) -> list[str]:
    said = model.verdict
    return [
        *_wrap(said.headline, "=> ", "   "),
        *(line for label, text in said.lines() for line in _wrap(f"{label}: {text}", "   ", "   ")),
        *_command(said.command, "     $ "),
        *_wrap(said.detail, "   ", "   "),
        *_wrap(f"Confidence: {said.confidence} ({said.confidence_reason}).", "   ", "   "),
    ]


def _command(command: str, prompt: str) -> list[str]:
    return [prompt + plain(command).replace("\n", " ")] if command else []


def _tiles(model: ReportModel) -> list[str]:
    return _columns([(tile.label, tile.value, tile.note) for tile in model.tiles])


def _time(model: ReportModel) -> list[str]:
    """Shares of the wall time, or of the predicted time."""
    if model.accounting is not None:
        total = model.accounting.wall_s
        parts = model.accounting.parts()
        rows = [
            (LABELS[name], _bar(seconds / total if total else 0.0),
             format_fraction(seconds / total if total else 0.0), format_duration(seconds))
            for name, seconds in parts.items()
        ]  # fmt: skip
        return ["Where time went", *_columns(rows)]
    if model.what_if is None:
        return []
    lost = terms(model.what_if.point)
    whole = sum(lost.values()) or 1.0
    rows_ = [
        (COSTS[name], _bar(value / whole), format_fraction(value)) for name, value in lost.items()
    ]
    return [f"What will be lost: {format_fraction(sum(lost.values()))} of the time",
            *_columns(rows_)]  # fmt: skip


def _promises(promises: Sequence[Promise]) -> list[str]:
    if not promises:
        return []
    rows = [("", "promised", "observed", "")]
    for promise in promises:
        show = format_duration if promise.unit == "s" else format_fraction
        seen = "-" if promise.observed is None else show(promise.observed)
        rows.append((promise.label, show(promise.promised), seen, promise.verdict))
    return ["Promised and observed", *_columns(rows)]


def _copies(model: ReportModel) -> list[str]:
    copies = model.protection
    return ["Copies on other nodes", *_columns(copy_facts(copies))] if copies is not None else []


def _restores(model: ReportModel) -> list[str]:
    lines = []
    for restore in model.restores:
        what = f"{restore.what} lost" if restore.what else "resumed"
        lines += _wrap(
            f"{format_duration(restore.at_s)}: {what}, back from {restore.source or 'scratch'} at "
            f"step {restore.step}; {_cost(restore)}{_replay(restore)}",
            "  ", "    ",
        )  # fmt: skip
    return ["Failures and restores", *lines] if lines else []


def _cost(restore: Restore) -> str:
    """The work lost and the time down."""
    if not restore.lost_steps and not restore.down_s:
        return "nothing lost"
    took = f" ({format_duration(restore.lost_s)})" if restore.lost_s > 0 else ""
    lost = f"{restore.lost_steps} steps{took} lost"
    return f"{lost}, down {format_duration(restore.down_s)}"


def _replay(restore: Restore) -> str:
    return f"; random numbers as before: {restore.replay}" if restore.replay else ""


def _restarts(model: ReportModel) -> list[str]:
    """Parts of the newest restart; parts that were not separated are left out."""
    if not model.restarts:
        return []
    newest = model.restarts[-1]
    rows = [
        (label, _bar(seconds / newest.total_s if newest.total_s > 0 else 0.0),
         format_duration(seconds))
        for name, label in PARTS.items()
        if (seconds := newest.parts.get(name)) is not None
    ]  # fmt: skip
    return [
        f"The newest of {len(model.restarts)} restarts: {format_duration(newest.total_s)} from the "
        "failure to the end of the first iteration",
        *_columns(rows),
        *_next_gain(model),
    ]


def _next_gain(model: ReportModel) -> list[str]:
    """One line, where there is something to gain."""
    gain = model.next_gain
    if gain is None:
        return []
    return _wrap(
        f"The cheapest next gain, up to {format_duration(gain.seconds)}: {gain.remedy}",
        "  ",
        "    ",
    )


def _windows(model: ReportModel) -> list[str]:
    """Use of each rank's idle windows by its snapshots."""
    if model.windows is None:
        return []
    rows = [
        (f"rank {rank.rank}", format_duration(rank.idle_s),
         "-" if rank.window_share is None else format_fraction(rank.window_share), rank.why_not)
        for rank in model.windows.ranks
    ]  # fmt: skip
    return [
        "Idle windows of an iteration, and what moved in them",
        *_columns(rows),
        *_compared(model.windows),
    ]


def _compared(windows: Windows) -> list[str]:
    """Schedules of copying that took turns."""
    rows = [
        (cost.schedule, format_duration(max(0.0, cost.observed_s)),
         "-" if cost.expected_s is None else f"expected {format_duration(cost.expected_s)}",
         f"{cost.tries} tries")
        for cost in windows.compared
    ]  # fmt: skip
    return ["Training time of a snapshot by schedule", *_columns(rows)] if rows else []


def _choices(model: ReportModel) -> list[str]:
    if model.decision is None or model.kind == "run":
        return []
    lines = ["Decisions"]
    for choice in model.decision.choices:
        lines += _wrap(f"{choice.name}: {choice.chosen}, because {choice.reason}", "  ", "    ")
    return lines


def _unknown(model: ReportModel) -> list[str]:
    """The result of a search, and the forecast of a month."""
    lines = []
    if model.search is not None:
        found = model.search
        what = f"the default stays: {found.winner}" if found.kept_default else found.winner
        lines += ["Search", *_wrap(f"{what}; {found.reason}", "  ", "    ")]
    if model.risk is not None:
        lines += ["Risk", *_wrap(model.risk.sentence(), "  ", "    ")]
    return lines


def _findings(findings: Sequence[Finding]) -> list[str]:
    open_ = [finding for finding in findings if not finding.passed]
    passed = len(findings) - len(open_)
    lines = ["Findings"] if findings else []
    for finding in open_:
        saving = f", worth {format_fraction(finding.saving)}" if finding.saving else ""
        lines += _wrap(f"[{finding.severity}] {finding.title}{saving} ({finding.id})", "  ", "    ")
        lines += _wrap(finding.evidence, "    ", "    ")
        lines += _wrap(finding.fix, "    do: ", "        ")
    if passed:
        lines.append(f"  {passed} checks passed")
    return lines


def _warnings(warnings: Iterable[str]) -> list[str]:
    lines = [line for warning in warnings for line in _wrap(warning, "  - ", "    ")]
    return ["Note", *lines] if lines else []


def _bar(share: float) -> str:
    filled = round(min(1.0, max(0.0, share)) * BAR)
    return "#" * filled + "." * (BAR - filled)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in aligned columns, the last one wrapped where it must be."""
    cleaned = [[_unbroken(cell).replace("\n", " ") for cell in row] for row in rows]
    return [_broken(line) for line in columns(cleaned, width=WIDTH, indent="  ")]


def _unbroken(text: str) -> str:
    """Text without styles, whose figures keep their units when it is wrapped."""
    return UNIT.sub("\\1\u00a0\\2", plain(text))


def _broken(line: str) -> str:
    return line.replace("\u00a0", " ")


def _wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    lines = textwrap.wrap(
        _unbroken(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest or " " * len(first),
    )
    return [_broken(line) for line in lines]
