"""Schemes side by side: what each costs, and how likely it survives lost nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autockpt.policies.redundancy.survival import survived, survived_domains, survived_mix
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains, place
from autockpt.values.redundancy import Redundancy, arrangement, said

COMPARED = (
    Redundancy(scheme="replicas", copies=2),
    Redundancy(scheme="replicas", copies=2, placement="ring"),
    Redundancy(scheme="replicas", copies=3),
    Redundancy(scheme="xor", set_size=4, parity=1),
    Redundancy(scheme="xor", set_size=8, parity=1),
    Redundancy(scheme="rs", set_size=8, parity=2),
)
SIZES = (8, 16, 64, 256, 1024, 4096)
LOSSES = (2, 3, 4, 8)
"""Simultaneous losses that are shown one by one."""
ASSUMED_TOGETHER = (0.887, 0.073, 0.019, 0.021)
"""Assumed shares of node failures that take 1, 2, 3 and at least 4 nodes, without a record.  11 %
take at least 2 and 4 % at least 3, within 10 to 30 minutes on 400 GPU servers over 348 days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRow:
    """One scheme on a number of nodes."""

    nodes: int
    scheme: str
    """In words."""
    memory: float
    """Beside the own image, of one generation, over what a node saves."""
    sent: float
    """By a node per checkpoint, over what it saves."""
    rebuilt: float
    """Read to rebuild a node, over what it saves."""
    survived: dict[str, float]
    """P after that many losses at once, by number."""
    mixed: float
    """P after a failure of nodes, by how many go together."""
    domains: dict[str, float]
    """By level the share of domains whose loss as a whole is survived; empty: not known."""


def compare_schemes(
    nodes: int,
    *,
    together: Sequence[float] = ASSUMED_TOGETHER,
    domains: FailureDomains = UNKNOWN_DOMAINS,
    schemes: Sequence[Redundancy] = COMPARED,
) -> list[SchemeRow]:
    """A row for each scheme that this number of nodes can have."""
    return [
        _row(scheme, nodes, together, domains) for scheme in schemes if nodes > scheme.tolerates
    ]


def _row(
    scheme: Redundancy, nodes: int, together: Sequence[float], domains: FailureDomains
) -> SchemeRow:
    if scheme.placement == "mixed":
        scheme = replace(scheme, placement=arrangement(scheme.copies, nodes))
    placement = place(scheme, nodes, domains)
    return SchemeRow(
        nodes=nodes,
        scheme=said(scheme),
        memory=scheme.memory_share,
        sent=scheme.sent_share,
        rebuilt=scheme.rebuilt_share,
        survived={str(k): survived(placement, k) for k in LOSSES if k <= nodes},
        mixed=survived_mix(placement, together),
        domains={level: survived_domains(placement, domains, level) for level in domains.levels},
    )
