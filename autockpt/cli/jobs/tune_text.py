"""Output of `autockpt tune`: lines while it measures, a table, one object, a policy fragment."""

import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

from autockpt.console import Console
from autockpt.policies.policy_file import as_yaml
from autockpt.tuner.search.outcome import Outcome, Tried
from autockpt.tuner.search.record import Header, Trial
from autockpt.tuner.search.space import MIB
from autockpt.values.policy_keys.kinds import quoted
from autockpt.values.record import to_data
from autockpt.values.units import format_bytes, format_duration, format_fraction

Found = tuple[Header, Outcome, Mapping[str, str]]
"""A record's header, what came of it, and the files by name."""


def teller(console: Console, budget: int) -> Callable[[Trial], None]:
    """Says each measured write as soon as it is done."""
    began = time.monotonic()

    def told(trial: Trial) -> None:
        figure = trial.failure or format_duration(trial.seconds)
        at = f"{time.monotonic() - began:5.1f} s  {trial.number + 1:>2} of {budget}"
        console.say(f"tune: {at}  {trial.stage:<6}  {trial.candidate}: {figure}")

    return told


def show(console: Console, header: Header, outcome: Outcome, files: Mapping[str, str]) -> None:
    """The whole result of the command."""
    console.object("tune", as_object(header, outcome, files))
    print_found(console, header, outcome, files)


def print_found(
    console: Console, header: Header, outcome: Outcome, files: Mapping[str, str]
) -> None:
    """The verdict, the table, and where the files are."""
    verdict = outcome.verdict
    what = "keep the default" if verdict.kept_default else f"chosen: {verdict.winner}"
    console.styled(what, "bold")
    console.result(textwrap.fill(verdict.reason, 100))
    console.result("")
    console.table(
        ("", "way to write", "predicted", "measured", "writes", "lost time", ""),
        [_row(outcome, tried) for tried in outcome.tried],
    )
    console.result("")
    refused = "".join(f"; {count} out: {why}" for why, count in outcome.refused.items())
    console.result(f"space     {outcome.ways} ways to write{refused}")
    console.result(
        f"measured  {format_bytes(header.sample_bytes)} a rank and write, {header.content}"
    )
    console.result(f"matters   {matters(outcome)}")
    if header.earlier:
        console.result(f"earlier   {len(header.earlier)} ways known from searches before this one")
    for warning in outcome.warnings:
        console.result(f"warning: {warning}")
    for name, path in files.items():
        console.result(f"{name.partition('.')[0]:<8}  {path}")


def matters(outcome: Outcome) -> str:
    """The knobs by importance, in words."""
    found = outcome.importances
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items())
    return f"{shares}; together {found.explained:.0%} of the spread of the writes"


def policy_words(header: Header, outcome: Outcome, files: Mapping[str, str]) -> list[str]:
    """The option with which a run follows the winner; [] where the default stays."""
    return [] if outcome.verdict.kept_default else ["--policy", files["tuned.yaml"]]


def as_object(header: Header, outcome: Outcome, files: Mapping[str, str]) -> dict[str, Any]:
    """The same for --json, without the profile."""
    return {
        "outcome": to_data(outcome),
        "budget": header.budget,
        "seed": header.seed,
        "sample_bytes": header.sample_bytes,
        "content": header.content,
        "directory": header.directory,
        "proposer": header.proposer,
        "files": dict(files),
    }


def policy_fragment(
    outcome: Outcome, *, extends: str, settings: Mapping[str, str] | None = None
) -> str:
    """Return a policy file: the base, the `settings` by key, and the pinned result.

    Nothing is pinned where the default stays.
    """
    verdict, winner = outcome.verdict, outcome.verdict.winner
    said = textwrap.wrap(verdict.reason, 96)
    lines = [
        "# Found by `autockpt tune`; `autockpt run --policy THIS SCRIPT` follows it.",
        *(f"# {line}" for line in said),
        "version: 1",
        f"extends: {quoted(extends)}",
    ]
    written = dict(settings or {})
    if verdict.kept_default:
        lines.append("# Nothing is pinned: what runs untuned is not beaten.")
        return "\n".join([*lines, *as_yaml(written), ""])
    written |= {
        "disk.writers": str(winner.writers),
        "disk.chunk": _size(winner.chunk_bytes),
        "disk.direct": "true" if winner.direct_io else "false",
        "disk.codec": winner.codec,
    }
    if verdict.rating.slots != outcome.default_slots:
        written["memory.slots"] = f"{verdict.rating.slots}  # best beside these writes"
    return "\n".join([*lines, *as_yaml(written), ""])


def _size(chunk_bytes: int) -> str:
    """As policy files take it, without loss."""
    return f"{chunk_bytes // MIB} MiB" if chunk_bytes % MIB == 0 else f"{chunk_bytes // 1024} KiB"


def _row(outcome: Outcome, tried: Tried) -> tuple[str, ...]:
    verdict = outcome.verdict
    marks = []
    if tried.candidate == verdict.winner:
        marks.append("chosen")
    elif tried.candidate in verdict.tied:
        marks.append("tied")
    if tried.candidate == outcome.default:
        marks.append("default")
    return (
        ">" if tried.candidate == verdict.winner else "",
        str(tried.candidate),
        format_duration(tried.predicted_s),
        format_duration(tried.measured_s) if tried.measured_s is not None else "-",
        str(tried.writes),
        format_fraction(tried.waste) if tried.waste is not None else "-",
        ", ".join(marks) or tried.failure,
    )
