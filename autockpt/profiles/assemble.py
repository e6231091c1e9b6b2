"""Measures -> the Profile, with a sentence for everything that is missing or unsteady.

There are two entries.  `assemble` serves `autockpt profile`, which probed at leisure.
`profile_from_run` serves a run without a profile, which knows only its own first iterations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autockpt.profiles import estimators
from autockpt.profiles.samples import (
    PHASES,
    CodecSample,
    IterationSample,
    RunSamples,
    StorageSamples,
    TransferSample,
    UnitSample,
)
from autockpt.profiles.schedule import SCHEDULE_WORKS
from autockpt.profiles.windows import window_warnings
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains
from autockpt.values.plan import WRITERS
from autockpt.values.profile import (
    Bubble,
    Distribution,
    Estimate,
    FailureRates,
    Fingerprint,
    GpuCounters,
    InterferenceMeasure,
    IterationTrace,
    LinkMeasure,
    LinkTraffic,
    MemoryHeadroom,
    Profile,
    RecoveryTimes,
    StateInventory,
    StorageMeasure,
)
from autockpt.values.units import format_fraction

RERUN = "rerun `autockpt profile` when the machine is quiet"

UNSURE_SLOWDOWN = 0.1
"""Width of the bootstrap band above which a slow-down is called unsure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Facts known without timing anything; both ways to a profile need them."""

    fingerprint: Fingerprint
    created: str
    """UTC, ISO 8601."""
    command: str
    state: StateInventory
    memory: MemoryHeadroom
    failures: FailureRates
    recovery: RecoveryTimes
    gpus: tuple[GpuCounters, ...] = ()
    domains: FailureDomains = UNKNOWN_DOMAINS
    warnings: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Everything the probes brought home; empty where a probe did not run."""

    iterations: list[IterationSample] = field(default_factory=list)
    """Quiet ones."""
    links: dict[str, list[TransferSample]] = field(default_factory=dict)
    link_notes: dict[str, str] = field(default_factory=dict)
    between_nodes: set[str] = field(default_factory=set)
    """Links to a peer that was on another node."""
    storage: StorageSamples | None = None
    codecs: list[CodecSample] = field(default_factory=list)
    units: list[UnitSample] = field(default_factory=list)
    traffic: tuple[LinkTraffic, ...] = ()
    traces: list[IterationTrace] = field(default_factory=list)
    bubbles: list[Bubble] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def assemble(facts: JobFacts, measured: Measurements) -> Profile:
    """The profile of a probed job.  Raises ConfigError when not one iteration was timed."""
    links = tuple(
        replace(
            estimators.fit_link(name, samples, note=measured.link_notes.get(name, "")),
            between_nodes=name in measured.between_nodes,
        )
        for name, samples in measured.links.items()
        if samples
    )
    storage = estimators.storage_measures(measured.storage) if measured.storage else ()
    units = measured.units
    lazy = [unit for unit in units if unit.work not in SCHEDULE_WORKS]
    profile = Profile(
        fingerprint=facts.fingerprint,
        created=facts.created,
        command=facts.command,
        iteration_s=estimators.distribution(s.iteration_s for s in measured.iterations),
        phases_s=estimators.phases(measured.iterations),
        state=facts.state,
        memory=facts.memory,
        failures=facts.failures,
        recovery=derive_recovery(
            facts.recovery,
            facts.state.restored_bytes or facts.state.total_bytes,
            links,
            storage,
            ranks=facts.fingerprint.ranks_per_node,
        ),
        links=links,
        traffic=measured.traffic,
        storage=storage,
        interference=estimators.interference(units),
        codecs=estimators.codec_measures(measured.codecs),
        encoders=estimators.encoders(measured.units, measured.codecs, threads=WRITERS),
        bubbles=tuple(measured.bubbles),
        traces=tuple(measured.traces),
        gpus=facts.gpus,
        domains=facts.domains,
        stall_s=estimators.maybe(s for unit in lazy for s in unit.stalls_s),
        snapshot_s=estimators.maybe(s for unit in lazy for s in unit.copies_s),
        persist_s=estimators.maybe(s for unit in lazy for s in unit.persists_s),
        samples=_raw_samples(measured),
    )
    probe_warnings = measured.storage.warnings if measured.storage else ()
    said = (*facts.warnings, *measured.warnings, *probe_warnings, *window_warnings(profile))
    return replace(profile, warnings=(*said, *missing(profile), *unsteady(profile)))


def profile_from_run(
    samples: RunSamples, facts: JobFacts, *, warnings: Sequence[str] = ()
) -> Profile:
    """A partial profile from the first iterations of a real run.

    Busy iterations are compared with the median quiet one: they were not interleaved on purpose.
    Raises ConfigError when there is no quiet iteration.
    """
    iteration_s = estimators.distribution(samples.quiet_s)
    storage = estimators.storage_measures(StorageSamples(samples=samples.writes, empty_write_s=()))
    interference: tuple[InterferenceMeasure, ...] = ()
    if samples.busy_s:
        quiet = [float(np.median(samples.quiet_s))] * len(samples.busy_s)
        interference = (
            InterferenceMeasure(
                work="persist",
                slowdown=estimators.slowdown(quiet, samples.busy_s),
                busy_s=_worked_s(samples),
            ),
        )
    profile = Profile(
        fingerprint=facts.fingerprint,
        created=facts.created,
        command=facts.command,
        iteration_s=iteration_s,
        phases_s={
            name: estimators.distribution(values)
            for name, values in samples.phases_s.items()
            if name in PHASES and values
        },
        state=facts.state,
        memory=facts.memory,
        failures=facts.failures,
        recovery=derive_recovery(
            facts.recovery,
            facts.state.restored_bytes or facts.state.total_bytes,
            (),
            storage,
            ranks=facts.fingerprint.ranks_per_node,
        ).like_saves(
            copy_s=float(np.mean(samples.copies_s or (0.0,))),
            persist_s=float(np.mean(samples.persists_s or (0.0,))),
            n=min(len(samples.copies_s), len(samples.persists_s)),
        ),
        storage=storage,
        interference=interference,
        gpus=facts.gpus,
        domains=facts.domains,
        stall_s=estimators.maybe(samples.stalls_s),
        snapshot_s=estimators.maybe(samples.copies_s),
        persist_s=estimators.maybe(samples.persists_s),
        samples={
            "iteration_s": samples.quiet_s,
            "busy_iteration_s": samples.busy_s,
            "stall_s": samples.stalls_s,
            "snapshot_s": samples.copies_s,
            "persist_s": samples.persists_s,
        },
    )
    in_place = "measured in place by a run's first iterations; `autockpt profile` sees more"
    said = (in_place, *facts.warnings, *warnings)
    return replace(profile, warnings=(*said, *missing(profile), *unsteady(profile)))


def _worked_s(samples: RunSamples) -> float:
    """Background work in a busy iteration: a save may end before the iteration does."""
    busy_s = float(np.mean(samples.busy_s))
    if not samples.persists_s or busy_s <= 0:
        return busy_s
    persist_s = float(np.mean(samples.persists_s))
    return persist_s / max(1, math.ceil(persist_s / busy_s))


def derive_recovery(
    known: RecoveryTimes,
    state_bytes: int,
    links: Sequence[LinkMeasure],
    storage: Sequence[StorageMeasure],
    *,
    ranks: int,
) -> RecoveryTimes:
    """Return `known` with its assumed restores replaced by restores computed from the probes.

    The storage of a node serves its `ranks` together, `state_bytes` each; from memory each copies
    its own.
    """
    copy = next((link for link in links if link.link == "host_copy"), None)
    reads = [m for m in storage if m.operation == "read"]
    memory, disk = known.restore_memory, known.restore_disk
    if copy is not None and memory.source == "assumed":
        seconds = copy.alpha_s + state_bytes / copy.bytes_per_s
        memory = _derived(seconds, copy.n, "one host copy of the state")
    if reads and disk.source == "assumed":
        best = max(reads, key=lambda m: m.bytes_per_s.p50)
        seconds = best.alpha_s + ranks * state_bytes / best.bytes_per_s.p50
        what = "one cold read of the state of all ranks of a node"
        disk = _derived(seconds, best.bytes_per_s.n, what)
    return replace(known, restore_memory=memory, restore_disk=disk)


def _derived(seconds: float, n: int, note: str) -> Estimate:
    return Estimate(value_s=seconds, source="derived", n=n, note=note)


def missing(profile: Profile) -> list[str]:
    """A sentence for each measure that a decision would like and does not get."""
    said = []
    if profile.link("host_copy") is None:
        said.append("host copy was not measured: the stall is taken from snapshots or assumed")
    if profile.link("host_to_peer") is None:
        said.append("host to peer was not measured: replication is judged by defaults")
    if not any(m.operation == "write" for m in profile.storage):
        said.append("storage writes were not measured: writers and chunks are defaults")
    if not any(m.operation == "read" for m in profile.storage):
        said.append("storage reads were not measured: a restore is taken from saves, or assumed")
    works = {measure.work for measure in profile.interference}
    said += [
        f"the slow-down under {what} was not measured: it is assumed"
        for work, what in (("snapshot_copy", "a snapshot"), ("storage_write", "a write"))
        if not works & {work, "persist"}
    ]
    if not profile.codecs:
        said.append("no codec was measured on this state: none is chosen")
    if profile.state.total_bytes == 0:
        said.append("no state was found: the script has nothing to checkpoint, or hides it")
    return said


def unsteady(profile: Profile) -> list[str]:
    """A sentence for each measure that scatters too much to be trusted."""
    judged: list[tuple[str, Distribution | None]] = [
        ("iteration time", profile.iteration_s),
        ("snapshot time", profile.snapshot_s),
        ("persist time", profile.persist_s),
    ]
    best = max(
        (m for m in profile.storage if m.operation == "write"),
        key=lambda m: m.bytes_per_s.p50,
        default=None,
    )
    if best is not None:
        what = f"storage write ({best.writers} writers, {'direct' if best.direct else 'buffered'})"
        judged.append((what, best.bytes_per_s))
    said = [
        warning
        for what, measured in judged
        if measured is not None
        and (warning := estimators.stability_warning(what, measured, rerun=RERUN))
    ]
    said += [
        f"link {link.link}: residuals of {format_fraction(link.relative_spread)} around the fit "
        f"(n={link.n}); {RERUN}"
        for link in profile.links
        if link.relative_spread > estimators.STABLE_SPREAD
    ]
    for measure in profile.interference:
        width = measure.slowdown.p90 - measure.slowdown.p10
        if width > UNSURE_SLOWDOWN:
            said.append(
                f"slow-down under {measure.work}: known only to "
                f"{format_fraction(measure.slowdown.p10)} .. "
                f"{format_fraction(measure.slowdown.p90)} (n={measure.slowdown.n}); {RERUN}"
            )
    return said


def _raw_samples(measured: Measurements) -> dict[str, tuple[float, ...]]:
    """Everything as it was timed, so that estimates can be replayed."""
    raw: dict[str, tuple[float, ...]] = {
        "iteration_s": tuple(s.iteration_s for s in measured.iterations)
    }
    for phase in PHASES:
        raw[f"phase.{phase}_s"] = tuple(s.phases_s.get(phase, 0.0) for s in measured.iterations)
    for name, samples in measured.links.items():
        raw[f"link.{name}.bytes"] = tuple(float(s.bytes) for s in samples)
        raw[f"link.{name}.seconds"] = tuple(s.seconds for s in samples)
    grouped: dict[str, list[float]] = {}
    for sample in measured.storage.samples if measured.storage else ():
        direct = "direct" if sample.direct else "buffered"
        way = f"{sample.operation}.{sample.writers}x{sample.chunk_bytes}.{direct}"
        grouped.setdefault(f"storage.{way}.bytes", []).append(float(sample.bytes))
        grouped.setdefault(f"storage.{way}.seconds", []).append(sample.seconds)
    for unit in measured.units:
        per_iteration_s = unit.total_s / unit.iterations
        grouped.setdefault(f"interference.{unit.work}_s", []).append(per_iteration_s)
        apart = f"{unit.work}." if unit.work in SCHEDULE_WORKS else ""
        grouped.setdefault(f"{apart}stall_s", []).extend(unit.stalls_s)
        grouped.setdefault(f"{apart}snapshot_s", []).extend(unit.copies_s)
        grouped.setdefault("persist_s", []).extend(unit.persists_s)
        if unit.encoded_bytes_per_s:
            grouped.setdefault("encoded_bytes_per_s", []).append(unit.encoded_bytes_per_s)
    raw.update({name: tuple(values) for name, values in grouped.items()})
    return raw
