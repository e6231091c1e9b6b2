"""A record of failures on the terminal and as an object: counts, posteriors, repeat offenders."""

from typing import Any

from autockpt.console import Console
from autockpt.policies.cost_model.gamma import gamma_quantile
from autockpt.profiles.evidence import repeat_offenders
from autockpt.profiles.failures import estimate_rates
from autockpt.values.failure import FailureHistory
from autockpt.values.profile import FailureRates, RatePosterior
from autockpt.values.record import to_data
from autockpt.values.units import format_duration, format_fraction

DAY_S = 86400.0


def as_object(history: FailureHistory, *, nodes: int | None) -> dict[str, Any]:
    """For --json: the counts, and the rates of a job on one node."""
    node_days, job_days = _days(history)
    return {
        "source": history.source,
        "incidents": len(history.incidents),
        "node_days": node_days,
        "job_days": job_days,
        "rates": to_data(estimate_rates((), nodes=1, histories=(history,))),
        "repeat_offenders": repeat_offenders(history, nodes=_fleet(history, nodes)),
        "notes": list(history.notes),
    }


def print_history(console: Console, history: FailureHistory, *, nodes: int | None) -> None:
    """Print the findings, their effect on the prior, and the nodes that fail repeatedly."""
    node_days, job_days = _days(history)
    rates = estimate_rates((), nodes=1, histories=(history,))
    of_nodes = sum(one.of_nodes for one in history.incidents)
    console.styled(history.source, "bold")
    console.result(
        f"{len(history.incidents)} interruption{'s' * (len(history.incidents) != 1)}, "
        f"{of_nodes} of nodes, in {node_days:.4g} node-days"
        f" and {job_days:.4g} job-days"
    )
    console.result(f"per node     {_rate(rates.per_node, 1000.0, 'per 1000 node-days')}")
    console.result(f"per job      {_rate(rates.per_job, 1.0, 'a day')}")
    console.result(f"classes      {_shares(rates)}")
    console.result(f"together     {_together(rates)}")
    fleet = _fleet(history, nodes)
    offenders = repeat_offenders(history, nodes=fleet)
    if offenders:
        names = ", ".join(f"{name} ({events})" for name, events in offenders.items())
        share = sum(offenders.values()) / max(1, of_nodes)
        console.result(
            f"offenders    {names}: {format_fraction(share)} of the node failures of {fleet} "
            "nodes; drain them before you pay for checkpoints"
        )
    example = "  ".join(f"{n}: {format_duration(_mtbf_s(rates, n))}" for n in (1, 16, 128, 1024))
    console.result(f"training between failures of a job on N nodes: {example}")
    for note in history.notes:
        console.result(f"note: {note}")


def _days(history: FailureHistory) -> tuple[float, float]:
    node_s = sum(exposure.node_s for exposure in history.exposures)
    return node_s / DAY_S, sum(exposure.job_s for exposure in history.exposures) / DAY_S


def _fleet(history: FailureHistory, nodes: int | None) -> int:
    """Nodes that were watched: said, or as many as would give the exposure, or were named."""
    if nodes is not None:
        return nodes
    named = len({name for one in history.incidents for name in one.nodes})
    begin_s = min((exposure.begin_s for exposure in history.exposures), default=0.0)
    length_s = history.end_s - begin_s
    node_s = sum(exposure.node_s for exposure in history.exposures)
    return max(1, named, round(node_s / length_s) if length_s > 0 else 1)


def _rate(posterior: RatePosterior, scale: float, unit: str) -> str:
    low, high = (
        gamma_quantile(p, posterior.shape, posterior.exposure_days) * scale for p in (0.05, 0.95)
    )
    mean = posterior.mean_per_day * scale
    return f"{mean:.3g} {unit} (90 % band {low:.3g} to {high:.3g}); {posterior.source}"


def _shares(rates: FailureRates) -> str:
    total = sum(rates.classes.values())
    return ", ".join(f"{kind} {format_fraction(w / total)}" for kind, w in rates.classes.items())


def _together(rates: FailureRates) -> str:
    total = sum(rates.together)
    shares = [format_fraction(w / total) for w in rates.together]
    names = (*(str(k) for k in range(1, len(shares))), f"{len(shares)} or more")
    parts = (f"{name}: {share}" for name, share in zip(names, shares, strict=True))
    return f"{', '.join(parts)} (nodes lost within 10 min)"


def _mtbf_s(rates: FailureRates, nodes: int) -> float:
    return DAY_S / (rates.per_node.mean_per_day * nodes + rates.per_job.mean_per_day)
