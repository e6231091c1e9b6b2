"""Results of the probes: raw samples, one small record per kind.  No statistics here."""

from dataclasses import dataclass, field
from typing import Literal

PHASES = ("forward", "backward", "optimizer", "data_wait", "other")
"""Parts of an iteration, in the order in which reports show them; they add up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSample:
    """One iteration, from one boundary to the next."""

    iteration_s: float
    phases_s: dict[str, float]
    """By name of `PHASES`; exclusive, so they add up to `iteration_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """`bytes` moved over a link in `seconds`."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSample:
    """One file written (durable) or read (cold) in one configuration."""

    operation: Literal["write", "read"]
    direct: bool
    writers: int
    chunk_bytes: int
    bytes: int
    seconds: float

    @property
    def configuration(self) -> tuple[str, bool, int, int]:
        """Everything but the outcome: samples of one configuration belong together."""
        return (self.operation, self.direct, self.writers, self.chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSamples:
    """A whole storage probe."""

    samples: tuple[StorageSample, ...]
    empty_write_s: tuple[float, ...]
    """Seconds to make one page durable, open and close included."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSample:
    """One chunk encoded and decoded again by one thread."""

    codec: str
    tensor_class: Literal["parameters", "moments", "other"]
    raw_bytes: int
    encoded_bytes: int
    encode_s: float
    decode_s: float
    gap_steps: int = 0
    """Iterations between the bytes and their base; 0: there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSample:
    """A few iterations in a row with the same background work (or none)."""

    work: str
    """quiet, or the work of an `InterferenceMeasure`."""
    round: int
    """Units of one round are compared with each other."""
    iterations: int
    total_s: float
    """Wall time of the iterations, stalls excluded."""
    busy_s: float = 0.0
    """How long the background work ran, within the unit."""
    stalls_s: tuple[float, ...] = ()
    """Blocked time of each snapshot: copy at the boundary and wait at the fence."""
    copies_s: tuple[float, ...] = ()
    """Of each snapshot, from the boundary to the last byte in host memory."""
    persists_s: tuple[float, ...] = ()
    """Of each persist, from the boundary until durable."""
    encoded_bytes_per_s: float = 0.0
    """Raw bytes that all encoders together got done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """One tensor of the state, as far as estimators care."""

    name: str
    tensor_class: Literal["parameters", "moments", "other"]
    dtype: str
    bytes: int
    lazy: bool
    """True when it was proven to stay constant from the boundary to the fence."""
    elsewhere: tuple[int, ...] = ()
    """Nodes that hold the same part: so many further on, counted around."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSamples:
    """Samples of a real run's first iterations; the input of `assemble.profile_from_run`."""

    quiet_s: tuple[float, ...]
    """Iterations without any background work, seconds."""
    busy_s: tuple[float, ...] = ()
    """Iterations during which a snapshot or a write ran, stalls excluded."""
    stalls_s: tuple[float, ...] = ()
    copies_s: tuple[float, ...] = ()
    persists_s: tuple[float, ...] = ()
    """Latencies from the boundary until durable."""
    writes: tuple[StorageSample, ...] = ()
    """Images written by the run itself."""
    phases_s: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSample:
    """Chunks of one rank in one iteration, from boundary to boundary (ends of optimizer steps)."""

    marks: tuple[str, ...]
    """Chunks of a pipeline (0F3), or collectives, in the order in which they began."""
    spans: tuple[tuple[float, float], ...]
    """(begin, end) of each, seconds since the boundary."""
    step_s: float
    """When the optimizer's step began, since the boundary."""
    iteration_s: float
    probe_s: float = 0.0
    """Time that the recording took of it."""
