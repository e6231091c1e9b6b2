"""The options of `autockpt simulate`, checked and turned into a job, histories and strategies."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.failure_trace import read_trace
from autockpt.cli.shared.quantities import Options, duration, flag, positive, share
from autockpt.tuner.simulation.history import History, World, draw, from_trace, together
from autockpt.tuner.simulation.job import (
    Job,
    known_failures,
    profile_of,
    with_failures,
    with_network,
    with_recovery,
)
from autockpt.tuner.simulation.rules import RULES, Bench, Network, build
from autockpt.tuner.simulation.strategy import Strategy
from autockpt.values.errors import ConfigError, OptionError
from autockpt.values.goal import Goal
from autockpt.values.profile import FailureRates, Profile
from autockpt.values.units import (
    format_bytes,
    format_duration,
    format_fraction,
    format_rate,
    parse_duration_s,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)

CONTRADICTIONS = (
    ("mtbf", "node_mtbf"),
    *(("trace", other) for other in ("mtbf", "node_mtbf", "process_share", "burst", "runs")),
    *(
        ("profile", other)
        for other in ("iteration", "state", "copy", "disk", "slowdown", "storage")
    ),
    ("disk", "storage"),
)
PROCESS_SHARE = 0.35
"""Of a job without a profile: the mean of the prior that a measured one starts from."""
COPY_BYTES_PER_S, SLOWDOWN = 20e9, 0.05
MOST_NODES = 1_000_000
MOST_FAILURES = 2_000_000
"""Over all runs; more than this takes minutes, and is a mistyped unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything a simulation needs."""

    names: tuple[str, ...]
    """Strategies that were asked for; none: all that fit."""
    profile: Profile
    """With the failure rates that the strategies reckon with."""
    network: Network | None
    domain_nodes: int
    nodes: int
    histories: tuple[History, ...]
    seed: int | None
    """None: a trace, nothing is drawn."""
    mtbf_s: float
    process_share: float
    is_measured: bool
    """The job is the one of a profile, and not a description."""
    bandwidths: tuple[str, ...] = ()
    """Of a described job, in words: copy, storage, slow-down, network."""


def read(options: Options) -> Asked:
    """All options.  Raises ConfigError for wrong, missing or contradictory options."""
    for one, other in CONTRADICTIONS:
        if options[one] is not None and options[other] is not None:
            raise OptionError(f"{flag(one)} and {flag(other)} contradict each other; drop one")
    if options["spares"] is not None and options["trace"] is None:
        raise OptionError("--spares: only a trace says how long a node is out; add --trace")
    measured = plan_choice.read_profile(options["profile"]) if options["profile"] else None
    histories, world = _histories(options, measured)
    believed = options["assumed_mtbf"] is not None
    mtbf_s = positive(options, "assumed_mtbf", parse_duration_s, 0.0) if believed else world.mtbf_s
    failures = known_failures(
        mtbf_s=mtbf_s,
        process_share=world.process_share,
        nodes=world.nodes,
        together=together(histories),
    )
    network = _network(options)
    profile = _profile(options, measured, failures)
    if measured is None:
        _require_short_write(options, profile, histories[0])
    return Asked(
        names=tuple(options["strategies"]),
        profile=_linked(profile, network, options),
        network=network,
        domain_nodes=world.domain_nodes,
        nodes=world.nodes,
        histories=histories,
        seed=options["seed"] if options["trace"] is None else None,
        mtbf_s=world.mtbf_s,
        process_share=world.process_share,
        is_measured=measured is not None,
        bandwidths=() if measured else tuple(_bandwidths(options, network, world.nodes)),
    )


def strategies(asked: Asked) -> tuple[list[Strategy], list[str]]:
    """The strategies asked for, and why others cannot be applied; without names all that fit."""
    goals = _goals()
    for name in asked.names:
        if name not in goals and name not in RULES:
            goals[name] = _goal_of(name, goals)
    bench = Bench(
        profile=asked.profile,
        goals=goals,
        network=asked.network,
        domain_nodes=asked.domain_nodes,
    )
    if asked.names:
        return [build(name, bench) for name in dict.fromkeys(asked.names)], []
    found, skipped = [], []
    for name in dict.fromkeys(("auto", *goals, *RULES)):
        try:
            found.append(build(name, bench))
        except ConfigError as error:
            skipped.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
    return found, skipped


def _goals() -> dict[str, Goal]:
    from autockpt.policies.registry import PREFIX, presets

    names = [name for name in presets() if name not in RULES]
    return {name: plan_choice.read_goal(f"{PREFIX}{name}", (), environ={}) for name in names}


def _goal_of(name: str, known: Mapping[str, Goal]) -> Goal:
    from autockpt.cli.shared.options import did_you_mean
    from autockpt.policies.registry import PREFIX

    if name.startswith(PREFIX) or os.path.exists(name) or name.endswith((".yaml", ".yml")):
        return plan_choice.read_goal(name, (), environ={})
    raise ConfigError(
        f"--strategy {name}: no preset, rule or policy file{did_you_mean(name, [*known, *RULES])}"
    )


def _histories(options: Options, measured: Profile | None) -> tuple[tuple[History, ...], World]:
    """The failures, and the world they are of."""
    nodes = options["nodes"] or (measured.failures.nodes if measured is not None else None)
    domain = options["domain"] or 16
    if options["nodes"] is not None and options["nodes"] < 1:
        raise OptionError(f"--nodes {options['nodes']}: must be at least 1")
    if nodes is not None and nodes > MOST_NODES:
        raise OptionError(f"--nodes {nodes}: at most {MOST_NODES:,} can be simulated")
    if options["domain"] is not None and options["domain"] < 1:
        raise OptionError(f"--domain {options['domain']}: must be at least 1")
    if options["trace"] is not None:
        return _from_trace(options, nodes, domain)
    if nodes is None:
        raise OptionError("--nodes: how large is the job? Say it, or name a --profile")
    length_s = positive(options, "length", parse_duration_s, 30 * 86400.0)
    mtbf_s, survives = _rate(options, measured, nodes)
    burst = share(options, "burst", 0.0)
    world = World(
        nodes=nodes,
        mtbf_s=mtbf_s,
        process_share=survives,
        domain_nodes=domain,
        burst_share=burst,
    )
    runs = 10 if options["runs"] is None else options["runs"]
    if runs < 1 or options["seed"] < 0:
        raise OptionError(
            f"--runs {runs} --seed {options['seed']}: at least 1 run, no seed below 0"
        )
    if runs * length_s / mtbf_s > MOST_FAILURES:
        raise OptionError(
            f"{runs} runs would see {runs * length_s / mtbf_s:.3g} failures, and the most is "
            f"{MOST_FAILURES}; shorten --length or --runs, or check the MTBF"
        )
    drawn = (draw(world, length_s=length_s, seed=options["seed"], run=run) for run in range(runs))
    return tuple(drawn), world


def _from_trace(
    options: Options, nodes: int | None, domain: int
) -> tuple[tuple[History, ...], World]:
    path, spares = options["trace"], options["spares"]
    if spares is not None and spares < 0:
        raise OptionError(f"--spares {spares}: must be at least 0")
    downs = read_trace(path, nodes=nodes)
    nodes = nodes or 1 + max((d.node for d in downs if d.node is not None), default=0)
    last_s = max(max(down.start_s, down.end_s) for down in downs)
    length_s = positive(options, "length", parse_duration_s, last_s)
    history = from_trace(downs, nodes=nodes, spares=spares, length_s=length_s)
    if not history.failures:
        raise ConfigError(f"{path}: no failure begins within --length")
    world = World(
        nodes=nodes,
        mtbf_s=1.0 / history.failures_per_s,
        process_share=history.process_share,
        domain_nodes=domain,
    )
    return (history,), world


def _rate(options: Options, measured: Profile | None, nodes: int) -> tuple[float, float]:
    """MTBF of the job and the share of failures that memory survives."""
    known = measured.failures.process_share if measured is not None else PROCESS_SHARE
    survives = share(options, "process_share", known)
    if options["mtbf"] is not None:
        return positive(options, "mtbf", parse_duration_s, 0.0), survives
    if options["node_mtbf"] is not None:
        return positive(options, "node_mtbf", parse_duration_s, 0.0) / nodes, survives
    if measured is None:
        raise OptionError("how often does it fail? Give --mtbf, --node-mtbf, --trace or --profile")
    return 1.0 / replace(measured.failures, nodes=nodes).interruptions_per_s, survives


def _profile(options: Options, measured: Profile | None, failures: FailureRates) -> Profile:
    if measured is None:
        job = Job(
            iteration_s=positive(options, "iteration", parse_duration_s, 5.0),
            state_bytes=positive(options, "state", parse_size_bytes, 3e9),
            copy_bytes_per_s=positive(options, "copy", parse_rate_bytes_per_s, COPY_BYTES_PER_S),
            disk_bytes_per_s=_disk_rate(options, failures.nodes),
            slowdown=share(options, "slowdown", SLOWDOWN),
            detect_s=duration(options, "detect", 60.0),
            restart_s=duration(options, "restart", 600.0),
        )
        return profile_of(job, failures=failures)
    profile = with_failures(measured, failures)
    detect = options["detect"] is not None
    restart = options["restart"] is not None
    return with_recovery(
        profile,
        detect_s=duration(options, "detect", 0.0) if detect else None,
        restart_s=duration(options, "restart", 0.0) if restart else None,
    )


def _disk_rate(options: Options, nodes: int) -> float:
    """A node's share of the storage, bytes/s: --disk, or --storage divided where it is shared."""
    if options["storage"] is None:
        return positive(options, "disk", parse_rate_bytes_per_s, 0.5e9)
    rate, _, word = options["storage"].partition("shared")
    if word.strip() or "shared" not in options["storage"]:
        raise OptionError(
            f"--storage {options['storage']}: expected the rate of the file system and the word "
            "shared, as in '2 GB/s shared'. --disk takes the share of one node"
        )
    total = positive({"storage": rate}, "storage", parse_rate_bytes_per_s, 0.5e9)
    return total / nodes


def _bandwidths(options: Options, network: Network | None, nodes: int) -> Iterator[str]:
    """Yield what moves the bytes of a described job, as it is assumed or was given."""
    copy = positive(options, "copy", parse_rate_bytes_per_s, COPY_BYTES_PER_S)
    yield f"copy {format_rate(copy)}"
    yield f"storage {format_rate(_disk_rate(options, nodes))} a node"
    yield f"slow-down {format_fraction(share(options, 'slowdown', SLOWDOWN))}"
    if network is not None:
        known = "" if options["network"] else ", on which auto does not rely without --network"
        yield f"network {format_rate(network.bytes_per_s)}{known}"


def _require_short_write(options: Options, profile: Profile, history: History) -> None:
    """Refuse a described job whose checkpoint is never written: a unit is mistyped."""
    write_s = profile.state.total_bytes / _disk_rate(options, history.nodes)
    if write_s > history.length_s:
        raise OptionError(
            f"--state {format_bytes(profile.state.total_bytes)}: a node writes it in "
            f"{format_duration(write_s)}, and {format_duration(history.length_s)} are simulated; "
            "check its unit, --disk and --storage"
        )


def _linked(profile: Profile, network: Network | None, options: Options) -> Profile:
    """With the network as a link between nodes, unless one was measured."""
    measured = profile.link("host_to_peer")
    if network is None or (measured is not None and measured.between_nodes):
        return profile
    others = tuple(link for link in profile.links if link is not measured)
    return with_network(
        replace(profile, links=others),
        bytes_per_s=network.bytes_per_s,
        idle=network.idle,
        known=options["network"] is not None,
    )


def _network(options: Options) -> Network | None:
    idle = share(options, "idle", 0.5)
    if options["network"] is None and options["profile"] is not None:
        return None
    return Network(
        bytes_per_s=positive(options, "network", parse_rate_bytes_per_s, 10e9), idle=idle
    )
