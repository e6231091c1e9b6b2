"""From measurements to a profile, whole and partial; what is missing is said."""

from dataclasses import replace

import pytest

from autockpt.profiles import freshness
from autockpt.profiles.assemble import (
    JobFacts,
    Measurements,
    assemble,
    derive_recovery,
    profile_from_run,
)
from autockpt.profiles.estimators import fit_link, inventory
from autockpt.profiles.failures import estimate_rates, estimate_recovery
from autockpt.profiles.samples import (
    CodecSample,
    IterationSample,
    RunSamples,
    StorageSample,
    StorageSamples,
    TensorFacts,
    TransferSample,
    UnitSample,
)
from autockpt.values.errors import ConfigError
from autockpt.values.profile import Estimate, Fingerprint, MemoryHeadroom, Profile
from autockpt.values.record import from_json, to_json

FINGERPRINT = Fingerprint(
    host="h", cpu="c", cores=2, gpus=(), world_size=8, nodes=1, torch_version="2.13.0",
    layout_digest="d", storage="ext4 /dev/vda", autockpt_version="0.1.0",
)  # fmt: skip
STATE = inventory(
    [TensorFacts(name="w", tensor_class="parameters", dtype="float32", bytes=10**9, lazy=True)],
    layout_digest="d",
)
FACTS = JobFacts(
    fingerprint=FINGERPRINT,
    created="2026-01-01T00:00:00Z",
    command="train.py",
    state=STATE,
    memory=MemoryHeadroom(host_total_bytes=10**11, host_available_bytes=10**10),
    failures=estimate_rates([], nodes=1),
    recovery=estimate_recovery([]),
)
ITERATION = IterationSample(
    iteration_s=0.5,
    phases_s={"forward": 0.2, "backward": 0.2, "optimizer": 0.1, "data_wait": 0.0, "other": 0.0},
)
COPY = [TransferSample(bytes=size, seconds=size / 10e9) for size in (10**6, 10**7, 10**8)]


def full() -> Measurements:
    """Everything measured, steady."""
    work = ("quiet", "snapshot_copy", "storage_write", "persist")
    return Measurements(
        iterations=[ITERATION] * 8,
        links={"host_copy": COPY, "host_to_peer": COPY},
        storage=StorageSamples(
            samples=tuple(
                StorageSample(
                    operation=operation, direct=True, writers=2, chunk_bytes=2**23,
                    bytes=10**8, seconds=0.1,
                )
                for operation in ("write", "read")
                for _ in range(3)
            ),
            empty_write_s=(0.001,),
        ),
        units=[
            UnitSample(
                work=w, round=r, iterations=1, total_s=0.5, busy_s=0.1, stalls_s=(0.01,),
                copies_s=(0.1,), persists_s=(0.4,),
            )
            for r in range(6)
            for w in work
        ],
    )  # fmt: skip


def test_a_profile_survives_its_file() -> None:
    """What is written is what is read."""
    measured = full()
    measured.codecs = [
        CodecSample(
            codec="planes", tensor_class="moments", raw_bytes=10**6, encoded_bytes=8 * 10**5,
            encode_s=1e-3, decode_s=1e-3,
        )
    ]  # fmt: skip
    measured.units += [replace(u, work="encode", encoded_bytes_per_s=0.5e9) for u in measured.units
                       if u.work == "storage_write"]  # fmt: skip
    profile = assemble(FACTS, measured)

    assert profile.encoders is not None
    assert profile.encoders.worth.mean == pytest.approx(0.5)
    assert profile.under("encode") is not None
    assert from_json(Profile, to_json(profile)) == profile


def test_every_unmeasured_thing_is_said() -> None:
    """Nothing is passed over in silence: an empty set of probes gives a sentence for each."""
    said = "\n".join(assemble(FACTS, Measurements(iterations=[ITERATION] * 3)).warnings)

    for word in ("host copy", "peer", "writes", "reads", "snapshot", "codec"):
        assert word in said


def test_a_steady_profile_complains_about_nothing_that_was_measured() -> None:
    """Only the assumed recovery times and the missing codecs are left to say."""
    said = assemble(FACTS, full()).warnings

    assert [w for w in said if "codec" not in w and "assumed" not in w] == []


def test_without_iterations_there_is_no_profile() -> None:
    """The one thing that a profile cannot do without."""
    with pytest.raises(ConfigError, match="at least one sample"):
        assemble(FACTS, Measurements())


def test_assumed_restores_follow_from_probes_and_measured_ones_stay() -> None:
    """1 GB over 10 GB/s is 0.1 s; a restore of an earlier run is better than any prediction."""
    links = (fit_link("host_copy", COPY),)
    derived = derive_recovery(FACTS.recovery, 10**9, links, (), ranks=1)
    seen = replace(FACTS.recovery, restore_memory=Estimate(value_s=0.7, source="measured", n=2))

    assert derived.restore_memory.source == "derived"
    assert derived.restore_memory.value_s == pytest.approx(0.1)
    assert derived.restore_disk.source == "assumed"
    assert derive_recovery(seen, 10**9, links, (), ranks=1).restore_memory.value_s == 0.7


def test_a_run_gives_a_partial_profile() -> None:
    """Iterations, stalls, persists and writes of a real run are enough for the policy."""
    samples = RunSamples(
        quiet_s=(0.5, 0.5, 0.52),
        busy_s=(0.55, 0.55),
        stalls_s=(0.01,),
        copies_s=(0.1,),
        persists_s=(0.6,),
        writes=full().storage.samples[:3] if (full().storage) else (),  # type: ignore[union-attr]
    )
    profile = profile_from_run(samples, FACTS, warnings=("hello",))

    assert profile.iteration_s.p50 == 0.5
    assert profile.interference[0].work == "persist"
    assert profile.interference[0].slowdown.mean == pytest.approx(0.1)
    assert profile.persist_s is not None
    assert profile.persist_s.p50 == 0.6
    assert profile.storage[0].bytes_per_s.p50 == pytest.approx(1e9)
    assert "in place" in profile.warnings[0]
    assert "hello" in profile.warnings
    assert from_json(Profile, to_json(profile)) == profile


def test_a_stale_profile_names_what_differs() -> None:
    """Every differing field with both values; an equal one has none."""
    now = replace(FINGERPRINT, world_size=16, gpus=("H200",))
    assert freshness.mismatches(FINGERPRINT, FINGERPRINT) == []
    assert freshness.mismatches(FINGERPRINT, now) == [
        "gpus none, this job has H200",
        "world_size 8, this job has 16",
    ]


def test_a_save_shorter_than_an_iteration_slows_it_for_its_own_time() -> None:
    """1 s of work that takes 0.5 s from an iteration of 10 s; and the same over three of 0.5 s."""
    short = RunSamples(quiet_s=(10.0,) * 3, busy_s=(10.5,) * 3, persists_s=(1.0,) * 3)
    (measure,) = profile_from_run(short, FACTS).interference
    assert measure.busy_s == pytest.approx(1.0)
    assert measure.slowdown.mean * 10.0 / measure.busy_s == pytest.approx(0.5)
    long = RunSamples(quiet_s=(0.5,) * 3, busy_s=(0.55,) * 3, persists_s=(1.5,) * 3)
    (measure,) = profile_from_run(long, FACTS).interference
    assert measure.busy_s == pytest.approx(0.5)


def test_ranks_of_a_node_read_through_one_storage() -> None:
    """Eight ranks with 1 GB each at 1 GB/s; from memory each copies its own at 10 GB/s."""
    recovery = assemble(FACTS, full()).recovery
    assert recovery.restore_disk.value_s == pytest.approx(8.0, rel=0.01)
    assert recovery.restore_memory.value_s == pytest.approx(0.1)
