"""The request of `autockpt redundancy`, and its table: for people, programs and documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autockpt.policies.redundancy.schemes import (
    ASSUMED_TOGETHER,
    LOSSES,
    SIZES,
    SchemeRow,
    compare_schemes,
)
from autockpt.values import table
from autockpt.values.errors import ConfigError, OptionError
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains
from autockpt.values.record import to_data
from autockpt.values.units import format_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Sizes of the job, domains of its nodes, and how many are lost together."""

    nodes: tuple[int, ...]
    domains: FailureDomains
    together: tuple[float, ...]

    def rows(self) -> list[SchemeRow]:
        """All sizes, scheme by scheme."""
        return [
            row
            for nodes in self.nodes
            for row in compare_schemes(nodes, together=self.together, domains=self.domains)
        ]


def asked(nodes: Sequence[int], domains: str | None, profile: str | None) -> Asked:
    """The options, read.  Raises ConfigError where they contradict each other."""
    together: tuple[float, ...] = ASSUMED_TOGETHER
    sizes, known = tuple(dict.fromkeys(nodes)), UNKNOWN_DOMAINS
    if profile is not None:
        from autockpt.cli.shared.plan_choice import read_profile

        measured = read_profile(profile)
        together = measured.failures.together or together
        sizes = sizes or (measured.failures.nodes,)
    if domains is not None:
        known = _domains(domains)
        count = len(known.labels)
        if sizes not in ((), (count,)):
            raise ConfigError(f"--domains {domains} names {count} nodes, the job has {sizes[0]}")
        sizes = (count,)
    if sizes and min(sizes) < 2:
        kind = OptionError if nodes else ConfigError
        raise kind("a job on one node has no other whose memory could serve it")
    return Asked(nodes=sizes or SIZES, domains=known, together=together)


def _domains(path: str) -> FailureDomains:
    from autockpt.profiles.domains import of_nodes
    from autockpt.profiling.facts.failure_domains import read_table

    table = read_table(path)
    return of_nodes(list(table), table, where=path)


def as_object(asked: Asked, rows: Sequence[SchemeRow]) -> dict[str, Any]:
    """The same for --json."""
    return {"together": list(asked.together), "rows": to_data(rows)}


def columns(rows: Sequence[SchemeRow]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells."""
    levels = list(dict.fromkeys(level for row in rows for level in row.domains))
    headers = ["nodes", "scheme", "memory", "sent", "rebuild"]
    headers += [f"{k} lost" for k in LOSSES] + ["mix", *(f"a {level} lost" for level in levels)]
    return headers, [_cells(row, levels) for row in rows]


def markdown(rows: Sequence[SchemeRow]) -> str:
    """The table of docs/concepts/redundancy.md."""
    return "".join(f"{line}\n" for line in table.markdown(*columns(rows)))


def legend(asked: Asked) -> list[str]:
    """Explain the columns, in lines."""
    shares = ", ".join(format_fraction(w / sum(asked.together)) for w in asked.together)
    return [
        "",
        "memory beside the own image, sent per checkpoint, read to rebuild a node: over what a "
        "node saves",
        "lost: % recovered from memory when that many nodes are lost at once, each set as likely",
        f"mix: the same of failures that take 1, 2, ... and more nodes in {shares} of cases",
    ]


def _cells(row: SchemeRow, levels: Sequence[str]) -> list[str]:
    known = [_percent(row.survived[str(k)]) if str(k) in row.survived else "" for k in LOSSES]
    return [
        f"{row.nodes}",
        row.scheme,
        f"{row.memory:.3g}",
        f"{row.sent:.3g}",
        f"{row.rebuilt:.3g}",
        *known,
        _percent(row.mixed),
        *(_percent(row.domains[level]) if level in row.domains else "" for level in levels),
    ]


def _percent(chance: float) -> str:
    """Two digits behind the point; 100.00 and 0.00 only where it is exactly that."""
    shown = f"{100 * chance:.2f}"
    if shown == "100.00":
        return "100" if chance == 1.0 else "> 99.99"
    if shown == "0.00":
        return "0" if chance == 0.0 else "< 0.01"
    return shown
