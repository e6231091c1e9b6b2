"""Made-up but coherent profiles: one 60 M parameter GPT on one small machine.

`example_profile(iteration_s=..., failures=example_failures(mtbf_s=3600.0))` changes single fields;
`example_failures`, `example_storage` and the others build the parts.
"""

from dataclasses import replace
from typing import Any

from autockpt.values.profile import (
    Bubble,
    CodecMeasure,
    Distribution,
    EncoderMeasure,
    Estimate,
    FailureRates,
    Fingerprint,
    InterferenceMeasure,
    IterationTrace,
    LinkMeasure,
    MemoryHeadroom,
    Profile,
    RatePosterior,
    RecoveryTimes,
    StateClass,
    StateInventory,
    StorageMeasure,
)

MIB = 2**20
STATE_BYTES = 720_000_000
"""60 M parameters in fp32 with two AdamW moments."""


def distribution(value: float, *, spread: float = 0.05, n: int = 20) -> Distribution:
    """A symmetric distribution around `value`; `spread` is (p95 - p50) / p50."""
    return Distribution(
        n=n,
        mean=value,
        p10=value * (1 - 0.8 * spread),
        p50=value,
        p90=value * (1 + 0.8 * spread),
        p95=value * (1 + spread),
    )


def example_state(total_bytes: int = STATE_BYTES) -> StateInventory:
    """One third parameters, two thirds moments, a few kilobytes of buffers and RNG."""
    other = min(20_000, total_bytes // 10)
    parameters = (total_bytes - other) // 3
    moments = total_bytes - other - parameters
    return StateInventory(
        total_bytes=total_bytes,
        layout_digest="0123456789abcdef",
        lazy_bytes=parameters + moments,
        boundary_bytes=other,
        classes=(
            StateClass(
                name="parameters", tensors=100, bytes=parameters, dtypes={"float32": parameters}
            ),
            StateClass(name="moments", tensors=200, bytes=moments, dtypes={"float32": moments}),
            StateClass(name="other", tensors=5, bytes=other, dtypes={"uint8": other}),
        ),
    )


def example_windows(
    *, rank: int = 0, lengths_s: tuple[float, ...] = (0.2,), schedule: str = "1F1B"
) -> dict[str, Any]:
    """Fields of a profile of a pipeline rank with such gaps, one after each of its chunks."""
    trace = IterationTrace(
        rank=rank, schedule=schedule, fingerprint="feed", iteration_s=distribution(1.0),
        chunk_s={"0F": distribution(0.1)},
    )  # fmt: skip
    bubbles = tuple(
        Bubble(rank=rank, offset_s=distribution(0.1 * n), length_s=distribution(s), after=n)
        for n, s in enumerate(lengths_s)
    )
    return {"traces": (trace,), "bubbles": bubbles}


def example_failures(
    *, mtbf_s: float | None = None, process_share: float = 0.4, nodes: int = 1, shape: float = 1.0
) -> FailureRates:
    """The stated priors, or (with `mtbf_s`) rates whose mean gives that MTBF of the job."""
    node_days, job_days = 250.0, 10.0
    if mtbf_s is not None:
        # A third of the interruptions from the nodes, two thirds from the job.
        node_days = 3 * nodes * mtbf_s / 86400.0
        job_days = 1.5 * mtbf_s / 86400.0
    return FailureRates(
        per_node=RatePosterior(
            shape=shape, exposure_days=shape * node_days, events=0, source="prior"
        ),
        per_job=RatePosterior(
            shape=shape, exposure_days=shape * job_days, events=0, source="prior"
        ),
        process_share=process_share,
        nodes=nodes,
    )


def example_recovery(
    *,
    detect_s: float = 1.0,
    restart_s: float = 20.0,
    restore_memory_s: float = 0.5,
    restore_disk_s: float = 2.0,
) -> RecoveryTimes:
    """Recovery in which the process start dominates."""
    return RecoveryTimes(
        detect=Estimate(value_s=detect_s, source="assumed"),
        restart=Estimate(value_s=restart_s, source="assumed"),
        restore_memory=Estimate(value_s=restore_memory_s, source="derived"),
        restore_disk=Estimate(value_s=restore_disk_s, source="derived"),
    )


def storage_measure(
    *,
    gb_per_s: float,
    writers: int,
    chunk_mib: float = 8,
    direct: bool = True,
    operation: str = "write",
) -> StorageMeasure:
    """One cell of the storage grid."""
    return StorageMeasure(
        operation="read" if operation == "read" else "write",
        direct=direct,
        writers=writers,
        chunk_bytes=int(chunk_mib * MIB),
        alpha_s=0.005,
        bytes_per_s=distribution(gb_per_s * 1e9),
    )


def example_storage(*, peak_gb_per_s: float = 2.0) -> tuple[StorageMeasure, ...]:
    """A grid that saturates at two writers and 8 MiB; buffered is a quarter slower."""
    by_writers = {1: 0.70, 2: 0.98, 4: 1.0}
    by_chunk = {1: 0.80, 8: 0.99, 32: 1.0}
    writes = tuple(
        storage_measure(
            gb_per_s=peak_gb_per_s * a * b * (1.0 if direct else 0.75),
            writers=writers,
            chunk_mib=chunk,
            direct=direct,
        )
        for writers, a in by_writers.items()
        for chunk, b in by_chunk.items()
        for direct in (True, False)
    )
    read = storage_measure(gb_per_s=peak_gb_per_s * 1.2, writers=2, operation="read")
    return (*writes, read)


def example_interference(
    *, copy: float = 0.02, write: float = 0.05, persist: float = 0.06
) -> tuple[InterferenceMeasure, ...]:
    """Slow-downs of a 0.4 s iteration; `persist` is copy and write together."""
    return (
        InterferenceMeasure(work="snapshot_copy", slowdown=distribution(copy), busy_s=0.1),
        InterferenceMeasure(work="storage_write", slowdown=distribution(write), busy_s=0.4),
        InterferenceMeasure(work="persist", slowdown=distribution(persist), busy_s=0.4),
    )


def example_codecs() -> tuple[CodecMeasure, ...]:
    """zstd on trained fp32 tensors: small gain, less than a disk's speed."""
    figures = {"parameters": (1.10, 0.45e9), "moments": (1.25, 0.50e9), "other": (2.0, 0.8e9)}
    return tuple(
        CodecMeasure(
            codec="zstd",
            tensor_class=name,  # type: ignore[arg-type]
            ratio=ratio,
            encode_bytes_per_s=speed,
            decode_bytes_per_s=3 * speed,
            sample_bytes=16 * MIB,
        )
        for name, (ratio, speed) in figures.items()
    )


def beside_training(
    profile: Profile, *, worth: float | None = 2.0, slowdown: float = 0.0
) -> Profile:
    """The profile with two encoders that were measured while the job trained.

    `worth` None: they were not.
    """
    rest = tuple(m for m in profile.interference if m.work != "encode")
    if worth is None:
        return replace(profile, encoders=None, interference=rest)
    felt = InterferenceMeasure(
        work="encode", slowdown=distribution(slowdown, spread=0.0), busy_s=profile.iteration_s.mean
    )
    measure = EncoderMeasure(threads=2, worth=distribution(worth, spread=0.0, n=6))
    return replace(profile, encoders=measure, interference=(*rest, felt))


def example_profile(**overrides: Any) -> Profile:
    """A complete profile; any field of Profile may be replaced by keyword.

    `iteration_s`, `stall_s`, `snapshot_s` and `persist_s` may be given as plain seconds.
    """
    profile = Profile(
        fingerprint=Fingerprint(
            host="5f1d7a84db00d2fc",
            cpu="example-cpu",
            cores=16,
            gpus=(),
            world_size=1,
            nodes=1,
            torch_version="2.13.0",
            layout_digest="0123456789abcdef",
            storage="ext4 nvme0n1",
            autockpt_version="0.1.0",
        ),
        created="2026-01-01T00:00:00Z",
        command="train.py --lr 1e-3",
        iteration_s=distribution(0.4),
        phases_s={
            "forward": distribution(0.12),
            "backward": distribution(0.22),
            "optimizer": distribution(0.04),
            "data_wait": distribution(0.01),
            "other": distribution(0.01),
        },
        state=example_state(),
        memory=MemoryHeadroom(host_total_bytes=64_000_000_000, host_available_bytes=48_000_000_000),
        failures=example_failures(),
        recovery=example_recovery(),
        links=(
            LinkMeasure(
                link="host_copy", alpha_s=1e-4, bytes_per_s=8e9, relative_spread=0.03, n=30
            ),
        ),
        storage=example_storage(),
        interference=example_interference(),
        codecs=example_codecs(),
        stall_s=distribution(0.004, spread=0.5),
        snapshot_s=distribution(0.1),
        persist_s=distribution(0.5, spread=0.2),
    )
    timed = {"iteration_s", "stall_s", "snapshot_s", "persist_s"}
    ready = {
        name: distribution(float(value))
        if name in timed and isinstance(value, int | float)
        else value
        for name, value in overrides.items()
    }
    return replace(profile, **ready)
