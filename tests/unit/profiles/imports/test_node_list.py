"""Slurm's node lists, and moments as logs write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.profiles.imports.moments import iso_s, syslog_s
from autockpt.profiles.imports.node_list import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[001-004,7]", ("node001", "node002", "node003", "node004", "node7")),
        ("gpu5", ("gpu5",)),
        ("a,b-[08-10]-ib,c", ("a", "b-08-ib", "b-09-ib", "b-10-ib", "c")),
        ("r[1-2]n[3-4]", ("r1n3", "r1n4", "r2n3", "r2n4")),
        ("None assigned", ()),
        ("", ()),
    ],
)
def test_lists_expand_to_their_names(text, names):
    """Leading zeros count, several brackets multiply, what is assigned to nobody is nobody."""
    assert expand(text) == names


@given(st.integers(min_value=0, max_value=999), st.integers(min_value=0, max_value=300))
def test_a_range_has_as_many_names_as_numbers(first, more):
    """With leading zeros, each name once."""
    names = expand(f"n[{first:04}-{first + more:04}]")
    assert len(set(names)) == more + 1
    assert names[0] == f"n{first:04}"


@pytest.mark.parametrize("text", ["n[1-", "n]1[", "n[a-b]", "n[5-2]", "n[1-999999999]", "a,,b"])
def test_malformed_lists_are_refused(text):
    """Instead of inventing nodes, or filling the memory."""
    with pytest.raises(ValueError, match="node"):
        expand(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-02T00:00:00", 86400.0),
        ("1970-01-01T01:00:00.5+0100 host", 0.5),
        ("1970-01-01 00:00:00,250Z", 0.25),
        ("2024-02-29T00:00:00-00:30", 1709166600.0),
        ("2023-02-29T00:00:00", None),
        ("Unknown", None),
    ],
)
def test_iso_moments_are_seconds_since_1970(text, seconds):
    """Fractions and zones; days that do not exist are no moments."""
    assert iso_s(text) == seconds


def test_syslog_moments_take_the_year_that_is_given():
    """`dmesg -T` writes one itself."""
    assert syslog_s("Jan  2 00:00:00 node7", year=1970) == 86400.0
    assert syslog_s("Jan 2 00:00:00 1971", year=1970) == 86400.0 + 365 * 86400.0
    assert syslog_s("Foo 2 00:00:00", year=1970) is None
