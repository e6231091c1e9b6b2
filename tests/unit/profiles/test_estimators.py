"""Samples to measures: bounds, symmetry, blindness to outliers, sentences for what is unsteady."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.profiles import estimators
from autockpt.profiles.samples import (
    CodecSample,
    IterationSample,
    StorageSample,
    StorageSamples,
    TensorFacts,
    TransferSample,
    UnitSample,
)
from autockpt.values.errors import ConfigError

positive = st.floats(1e-6, 1e6)
SIZES = [2**20 * 4**i for i in range(5)]


def line(alpha_s: float, rate: float, *, noise: float = 0.0, seed: int = 0) -> list[TransferSample]:
    """Five rounds over five sizes of a perfect link, with relative noise."""
    random = np.random.default_rng(seed)
    return [
        TransferSample(
            bytes=size,
            seconds=(alpha_s + size / rate) * math.exp(noise * random.standard_normal()),
        )
        for _ in range(5)
        for size in SIZES
    ]


@given(st.lists(positive, min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_samples(samples: list[float]) -> None:
    """min <= p10 <= p50 <= p90 <= p95 <= max, and so is the mean."""
    measured = estimators.distribution(samples)

    assert measured.n == len(samples)
    ordered = [min(samples), measured.p10, measured.p50, measured.p90, measured.p95, max(samples)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(ordered))
    assert min(samples) * (1 - 1e-9) <= measured.mean <= max(samples) * (1 + 1e-9)


def test_a_distribution_of_nothing_is_refused() -> None:
    """No sample is an error, and None where it may be missing."""
    with pytest.raises(ConfigError, match="at least one sample"):
        estimators.distribution([float("nan")])
    assert estimators.maybe([]) is None


@given(alpha_s=st.floats(0, 0.1), rate=st.floats(1e6, 1e11))
def test_a_perfect_line_is_recovered(alpha_s: float, rate: float) -> None:
    """Noise-free samples give back the rate, and alpha as far as doubles resolve it."""
    fit = estimators.fit_link("host_copy", line(alpha_s, rate))

    assert fit.bytes_per_s == pytest.approx(rate, rel=1e-3)
    assert fit.alpha_s == pytest.approx(alpha_s, rel=1e-2, abs=1e-6 * SIZES[-1] / rate)
    assert fit.relative_spread < 1e-3


@pytest.mark.parametrize("victim", range(25))
def test_one_outlier_does_not_move_the_fit(victim: int) -> None:
    """A sample that took ten times longer shows in the spread and not in the rate."""
    samples = line(1e-3, 2e9, noise=0.02)
    late = samples[victim]
    samples[victim] = TransferSample(bytes=late.bytes, seconds=late.seconds * 10)
    fit = estimators.fit_link("host_to_peer", samples)

    assert fit.bytes_per_s == pytest.approx(2e9, rel=0.05)
    assert fit.alpha_s == pytest.approx(1e-3, rel=0.25)
    assert fit.relative_spread > 0.05


@given(st.lists(st.tuples(st.integers(1, 2**40), positive), min_size=1, max_size=20))
def test_a_fit_is_always_a_possible_link(points: list[tuple[int, float]]) -> None:
    """Whatever the samples: alpha >= 0, 0 < rate < inf."""
    fit = estimators.fit_link("x", [TransferSample(bytes=b, seconds=s) for b, s in points])

    assert fit.alpha_s >= 0
    assert 0 < fit.bytes_per_s < math.inf
    assert fit.n == len(points)


def test_one_size_gives_a_pure_rate() -> None:
    """Without a second size there is no alpha to see."""
    fit = estimators.fit_link("x", [TransferSample(bytes=10**6, seconds=0.1)] * 3)

    assert (fit.alpha_s, fit.bytes_per_s) == (0.0, pytest.approx(1e7))


def test_a_fit_without_samples_is_refused() -> None:
    """Nothing, and samples without size or time, are errors."""
    with pytest.raises(ConfigError, match="positive sizes"):
        estimators.fit_link("x", [])
    with pytest.raises(ConfigError, match="positive sizes"):
        estimators.fit_link("x", [TransferSample(bytes=0, seconds=1.0)])


pairs = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=20)


@given(pairs)
def test_slowdown_is_antisymmetric(sample: list[tuple[float, float]]) -> None:
    """Busy against quiet and quiet against busy are inverse to each other."""
    quiet, busy = [q for q, _ in sample], [b for _, b in sample]
    there, back = estimators.slowdown(quiet, busy), estimators.slowdown(busy, quiet)

    assert (1 + there.mean) * (1 + back.mean) == pytest.approx(1.0)
    assert there.p10 <= there.p50 <= there.p90


@given(pairs, st.floats(0.1, 10))
def test_slowdown_does_not_depend_on_the_unit(
    sample: list[tuple[float, float]], scale: float
) -> None:
    """Minutes or seconds: the ratio is the same."""
    quiet, busy = [q for q, _ in sample], [b for _, b in sample]
    other = estimators.slowdown([scale * q for q in quiet], [scale * b for b in busy])

    assert other.mean == pytest.approx(estimators.slowdown(quiet, busy).mean, rel=1e-6, abs=1e-9)


def test_drift_of_the_machine_cancels_in_pairs() -> None:
    """A machine that doubles its time during the measurement does not look like interference."""
    quiet = [0.1 * 2 ** (i / 10) for i in range(10)]
    measured = estimators.slowdown(quiet, [1.03 * q for q in quiet])

    assert measured.mean == pytest.approx(0.03)
    assert measured.p90 - measured.p10 < 1e-9


def test_slowdown_ignores_one_late_iteration() -> None:
    """One busy iteration at twenty times its time is cut."""
    assert estimators.slowdown([0.1] * 8, [0.102] * 7 + [2.0]).mean == pytest.approx(0.02)


def test_slowdown_refuses_what_is_no_pair() -> None:
    """Lists of different length are a bug of the caller."""
    with pytest.raises(ConfigError, match="not pairs"):
        estimators.slowdown([1.0], [1.0, 2.0])


def unit(work: str, round: int, total_s: float, *, busy_s: float = 0.0) -> UnitSample:
    """Two iterations."""
    return UnitSample(work=work, round=round, iterations=2, total_s=total_s, busy_s=busy_s)


def test_interference_compares_within_rounds() -> None:
    """Work is held against the quiet unit of its own round; a round without one is dropped."""
    units = [
        unit("quiet", 0, 1.0),
        unit("snapshot_copy", 0, 1.1, busy_s=0.4),
        unit("snapshot_copy", 1, 4.4, busy_s=0.8),
        unit("quiet", 1, 4.0),
        unit("snapshot_copy", 2, 99.0),
    ]
    (measure,) = estimators.interference(units)

    assert measure.work == "snapshot_copy"
    assert measure.slowdown.mean == pytest.approx(0.1)
    assert measure.busy_s == pytest.approx(0.3)


def encoded(rate: float, round: int) -> UnitSample:
    """Two iterations beside which encoders pass raw bytes at this rate."""
    return UnitSample(
        work="encode", round=round, iterations=2, total_s=1.0, encoded_bytes_per_s=rate
    )


def alone(encode_s: float, *, gap_steps: int = 0) -> CodecSample:
    """A megabyte by one encoder that nobody disturbs."""
    return CodecSample(
        codec="delta" if gap_steps else "planes", tensor_class="moments", raw_bytes=10**6,
        encoded_bytes=8 * 10**5, encode_s=encode_s, decode_s=1e-3, gap_steps=gap_steps,
    )  # fmt: skip


def test_encoders_beside_the_training_are_held_against_one_alone() -> None:
    """Alone at 1 GB/s: 0.8 GB/s together are worth 0.8; deltas are another codec."""
    units = [encoded(0.8e9, 0), encoded(0.6e9, 1), unit("quiet", 0, 1.0)]
    found = estimators.encoders(units, [alone(1e-3), alone(9.0, gap_steps=5)], threads=2)

    assert found is not None
    assert found.threads == 2
    assert (found.worth.n, found.worth.mean) == (2, pytest.approx(0.7))


def test_encoders_are_never_worth_more_than_their_threads() -> None:
    """One alone may have been measured in a bad moment."""
    found = estimators.encoders([encoded(9e9, 0)], [alone(1e-3)], threads=2)

    assert found is not None
    assert found.worth.mean == 2.0


def test_encoders_that_were_not_measured_are_no_figure() -> None:
    """Neither without the training nor without the codec."""
    assert estimators.encoders([unit("quiet", 0, 1.0)], [alone(1e-3)], threads=2) is None
    assert estimators.encoders([encoded(1e9, 0)], [], threads=2) is None


def storage_sample(seconds: float, *, writers: int = 2, operation: str = "write") -> StorageSample:
    """100 MB."""
    return StorageSample(
        operation="write" if operation == "write" else "read",
        direct=True,
        writers=writers,
        chunk_bytes=2**23,
        bytes=10**8,
        seconds=seconds,
    )


def test_storage_rate_excludes_the_fixed_part() -> None:
    """alpha + bytes / rate gives the measured time back, by configuration."""
    probe = StorageSamples(
        samples=(
            storage_sample(0.11),
            storage_sample(0.06, writers=4),
            storage_sample(0.2, operation="read"),
        ),
        empty_write_s=(0.01, 0.01, 0.5),
    )
    two, four, read = estimators.storage_measures(probe)

    assert two.alpha_s == pytest.approx(0.01)
    assert two.bytes_per_s.p50 == pytest.approx(1e9)
    assert four.bytes_per_s.p50 == pytest.approx(2e9)
    assert (read.alpha_s, read.bytes_per_s.p50) == (0.0, pytest.approx(5e8))


def test_a_fixed_part_longer_than_the_sample_does_not_divide_by_zero() -> None:
    """On noise the rate takes at least half of the time."""
    probe = StorageSamples(samples=(storage_sample(0.1),), empty_write_s=(5.0,))

    assert estimators.storage_measures(probe)[0].bytes_per_s.p50 == pytest.approx(2e9)


def test_codec_ratio_is_over_all_bytes() -> None:
    """A large piece weighs more than a small one."""
    samples = [
        CodecSample(
            codec="zstd",
            tensor_class="moments",
            raw_bytes=raw,
            encoded_bytes=encoded,
            encode_s=raw / 1e9,
            decode_s=raw / 2e9,
        )
        for raw, encoded in ((9_000_000, 9_000_000), (1_000_000, 1_000_000 // 2))
    ]
    (measure,) = estimators.codec_measures(samples)

    assert measure.ratio == pytest.approx(10 / 9.5)
    assert measure.encode_bytes_per_s == pytest.approx(1e9)
    assert measure.sample_bytes == 10_000_000


def test_inventory_adds_up() -> None:
    """lazy + boundary = total = the classes + the JSON."""
    tensors = [
        TensorFacts(name="w", tensor_class="parameters", dtype="bfloat16", bytes=100, lazy=True),
        TensorFacts(name="m", tensor_class="moments", dtype="float32", bytes=200, lazy=True),
        TensorFacts(name="n", tensor_class="other", dtype="int64", bytes=8, lazy=False),
    ]
    state = estimators.inventory(tensors, layout_digest="d", extra_bytes=32)

    assert (state.lazy_bytes, state.boundary_bytes, state.total_bytes) == (300, 40, 340)
    assert sum(c.bytes for c in state.classes) + 32 == state.total_bytes
    assert state.classes[0].dtypes == {"bfloat16": 100}


def test_phases_add_up_to_the_iteration() -> None:
    """A phase that a sample lacks counts as nothing."""
    sample = IterationSample(iteration_s=1.0, phases_s={"forward": 0.4, "other": 0.6})
    found = estimators.phases([sample])

    assert set(found) == {"forward", "backward", "optimizer", "data_wait", "other"}
    assert sum(phase.mean for phase in found.values()) == pytest.approx(1.0)


def test_an_unsteady_measure_says_by_how_much_and_what_to_rerun() -> None:
    """The sentence holds the number, the sample count and the next step; steady ones are silent."""
    steady = estimators.distribution([1.0, 1.01, 0.99, 1.0])
    unsteady = estimators.distribution([1.0, 2.0, 1.0, 2.0])

    assert estimators.stability_warning("writes", steady, rerun="again") is None
    said = estimators.stability_warning("writes", unsteady, rerun="rerun `autockpt profile`")
    assert said is not None
    assert "66.7 %" in said
    assert "n=4" in said
    assert "rerun `autockpt profile`" in said
    alone = estimators.stability_warning("writes", estimators.distribution([1.0]), rerun="again")
    assert alone is not None
    assert "one sample" in alone
