"""The fuzzer by itself: what it must notice, in a batch as alone, and what it makes."""

import json
import random
import signal
import time
from collections.abc import Iterator

import pytest

from autockpt.values.errors import CorruptCheckpointError
from tests.campaigns import fuzz
from tests.campaigns.framework import Violation
from tests.campaigns.mutation import MAX_BYTES, Sample, mutated
from tests.campaigns.parsers import Parser

BATCH = [b"good", b"bad", b"good", b"worse", b"good"]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seconds are long for a test."""
    monkeypatch.setattr(fuzz, "PARSE_CPU_S", 0.2)
    monkeypatch.setattr(fuzz, "HANG_CPU_S", 0.4)
    before = signal.signal(signal.SIGVTALRM, fuzz._hangs)
    yield
    signal.signal(signal.SIGVTALRM, before)


def compute(cpu_s: float) -> None:
    """Takes so long on a core, however fast that is."""
    until_s = time.process_time() + cpu_s
    while time.process_time() < until_s:
        pass


def parser(worse: object, *, cpu_s: float = 0.0) -> Parser:
    """Refuses what is bad; `worse` is raised, after `cpu_s` seconds of computing."""

    def read(data: bytes) -> object:
        if data == b"bad":
            raise CorruptCheckpointError("bad")
        if data == b"worse":
            compute(cpu_s)
            if isinstance(worse, BaseException):
                raise worse
        return 1

    return Parser(name="p", good=(b"good",), read=read)


def test_values_and_documented_errors_are_told_apart() -> None:
    """By their type, and by the line that raised."""
    ends = fuzz.execute(parser(None), BATCH)
    assert [ended is int for ended in ends] == [True, False, True, True, True]


def test_another_error_is_a_violation() -> None:
    """The message has the input."""
    with pytest.raises(Violation, match=r"p: KeyError.*for b'worse'"):
        fuzz.execute(parser(KeyError("x")), BATCH)


def test_one_slow_input_in_a_batch_is_found() -> None:
    """The batch is played again, one by one."""
    with pytest.raises(Violation, match=r"p: [0-9.]+ s for b'worse'"):
        fuzz.execute(parser(None, cpu_s=0.3), BATCH)


def test_an_input_without_an_end_is_found_whatever_the_parser_catches() -> None:
    """The alarm is no Exception."""

    def read(data: bytes) -> object:
        while data == b"worse":
            try:
                for _ in range(10**9):
                    pass
            except Exception:
                return None
        return None

    with pytest.raises(Violation, match="for b'worse'"):
        fuzz.execute(Parser(name="p", good=(b"",), read=read), BATCH)


def test_a_slow_batch_of_quick_inputs_is_none() -> None:
    """The bound is of one input."""

    def read(data: bytes) -> object:
        compute(0.05)
        return 1

    slow = Parser(name="p", good=(b"",), read=read)
    assert fuzz.execute(slow, [b"x"] * 12) == [int] * 12


def test_structure_is_found_where_it_stands() -> None:
    """Scalars, keys and containers; members with their keys."""
    text = b'{"a": [1, "x]\\""], "b": {}}'
    sample = Sample(text)
    values = {text[start:stop] for start, stop in sample.values}
    assert values == {b'"a"', b'[1, "x]\\""]', b"1", b'"x]\\""', b'"b"', b"{}", text}
    members = [text[start:stop].strip() for start, stop in sample.members]
    assert members == [b"1", b'"x]\\""', b'"a": [1, "x]\\""]', b'"b": {}']
    assert not Sample(b"no: json").members


def test_many_changes_of_structure_are_still_json() -> None:
    """Else only the outermost check of a parser would ever be reached."""
    rng, good = random.Random(1), json.dumps({"a": [1, {"b": None}], "c": "d"}).encode()
    made = [mutated(Sample(good), good, rng) for _ in range(4000)]
    read = 0
    for data in made:
        assert len(data) <= MAX_BYTES
        try:
            json.loads(data)
            read += data != good
        except (ValueError, RecursionError):
            pass
    assert read > 800
    assert len(set(made)) > 2000
