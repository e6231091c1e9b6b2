"""The lines of trials.jsonl keep the contract of values."""

from hypothesis import strategies as st

from autockpt.tuner.search.record import EarlierTry, Header, Trial
from autockpt.tuner.search.space import Candidate
from tests.contracts.records import VALIDATED
from tests.contracts.values_contract import RecordContract

VALIDATED[Candidate] = {
    "chunk_bytes": st.sampled_from([2**16, 2**23, 2**26]),
    "writers": st.integers(1, 512),
}
VALIDATED[EarlierTry] = {
    "ratio": st.floats(1e-9, 1e9),
    "extra_cpu": st.floats(-1e9, 1e9),
}
VALIDATED[Trial] = {
    "seconds": st.floats(1e-9, 1e9),
    "cpu_s": st.floats(0.0, 1e9),
    "failure": st.just(""),
}


class TestHeader(RecordContract):
    """The first line."""

    record = Header


class TestTrial(RecordContract):
    """A further one."""

    record = Trial
