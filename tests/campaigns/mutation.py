"""Hostile input from good input: bytes, and the structure of JSON-like text.

Structure is found once for an input, as places in its bytes, and changed as bytes: nothing is
parsed or printed for a single mutation, so that a microsecond or two make one.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Span = tuple[int, int]
"""(start, stop) of some bytes of an input."""

TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"true", b"-1", b"1e999", b"NaN", b"\\u0000",
    b"9" * 400, b"../../../etc/passwd", b"/dev/zero", b"\xff\xfe", b"\0", b"!!python/object/apply:",
    b"&a", b"*a", b"<<: *a", b"%s%n", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04", b"$tensor",
    (2**63).to_bytes(8, "little"), (2**31 - 1).to_bytes(4, "big"), b"\x28\xb5\x2f\xfd",
    b"PK\x03\x04",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**400, -(2**63), 0.5, -0.0, 1e308,
    "", "x" * 3000, "../../x", "\0", "NaN", "inf", "-inf", "\ud800", [], {}, [[]], [{}], {"": None},
    {"$tensor": "x"}, {"$tuple": 3}, {"$dict": [[1]]}, {"$scalar": ["O", ""]}, {"$int": "9" * 5000},
    {"$array": {"$tensor": 1}}, {"$size": ["a"]}, {"$dtype": "load"}, "ckpt-t0001-step-00000001",
    "x", "__class__", "schema_version", "$tensor",
)  # fmt: skip
MAX_BYTES = 2**17
_PRINTED = tuple(json.dumps(value, separators=(",", ":")).encode() for value in VALUES)
_OPENED = ((b"[", b"]"), (b'{"$tuple":[', b"]}"))
_TOKEN = re.compile(rb'[{}\[\],:]|"(?:[^"\\]|\\.)*"|[^\s{}\[\],:"]+')


class Sample:
    """An input that others are made from."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @cached_property
    def values(self) -> list[Span]:
        """Where scalars, keys and containers stand; none unless it looks like JSON."""
        return self._structure[0]

    @cached_property
    def members(self) -> list[Span]:
        """Where the members of containers stand, a key and its value together."""
        return self._structure[1]

    @cached_property
    def _structure(self) -> tuple[list[Span], list[Span]]:
        values: list[Span] = []
        members: list[Span] = []
        if self.data[:1] not in (b"{", b"["):
            return values, members
        opened, began, stop = list[int](), list[int](), 0
        for token in _TOKEN.finditer(self.data):
            start, mark = token.start(), token[0]
            if mark in (b"{", b"["):
                opened.append(start)
                began.append(token.end())
            elif mark == b",":
                if began:
                    members.append((began[-1], start))
                    began[-1] = token.end()
            elif mark in (b"}", b"]"):
                if opened:
                    members.append((began.pop(), start))
                    values.append((opened.pop(), token.end()))
            elif mark != b":":
                values.append((start, token.end()))
            stop = token.end()
        values += [(start, stop) for start in opened]
        return values, [span for span in members if span[0] < span[1]]


def mutated(sample: Sample, other: bytes, rng: Random) -> bytes:
    """Another input, by one to four changes; `other` is a second good one to cross with."""
    random = rng.random
    count = (1, 1, 1, 2, 4)[int(random() * 5)]
    data = sample.data
    if random() < 0.6 and sample.members:
        data = _pick(_STRUCTURED, rng)(sample, rng)
        count -= 1
    return changed(data, other, rng, count)


def changed(data: bytes, other: bytes, rng: Random, count: int = 1) -> bytes:
    """The same for bytes that are made from once."""
    for _ in range(count):
        data = _pick(_BYTES, rng)(data, other, rng)
    return data[:MAX_BYTES]


def _pick(some: Sequence[T], rng: Random) -> T:
    return some[int(rng.random() * len(some))]


def _place(data: bytes, rng: Random) -> int:
    return int(rng.random() * (len(data) + 1))


def _flip(data: bytes, other: bytes, rng: Random) -> bytes:
    if not data:
        return data
    at = int(rng.random() * len(data))
    return data[:at] + bytes([data[at] ^ 1 << int(rng.random() * 8)]) + data[at + 1 :]


def _set(data: bytes, other: bytes, rng: Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + _pick((b"\0", b"\1", b"\x7f", b"\x80", b"\xff"), rng) + data[at + 1 :]


def _cut(data: bytes, other: bytes, rng: Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + int(rng.random() * 64) :]


def _truncate(data: bytes, other: bytes, rng: Random) -> bytes:
    return data[: _place(data, rng)]


def _double(data: bytes, other: bytes, rng: Random) -> bytes:
    a, b = sorted((_place(data, rng), _place(data, rng)))
    return data[:b] + data[a:b] * _pick((1, 1, 8), rng) + data[b:]


def _insert(data: bytes, other: bytes, rng: Random) -> bytes:
    at = _place(data, rng)
    token = _pick(TOKENS, rng)
    if token in (b"[", b"{") and rng.random() < 0.1:
        token *= 3000
    return data[:at] + token + data[at:]


def _random(data: bytes, other: bytes, rng: Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + rng.randbytes(1 + int(rng.random() * 16)) + data[at:]


def _cross(data: bytes, other: bytes, rng: Random) -> bytes:
    return data[: _place(data, rng)] + other[_place(other, rng) :]


_BYTES: tuple[Callable[[bytes, bytes, Random], bytes], ...] = (
    _flip, _flip, _set, _cut, _truncate, _double, _insert, _insert, _random, _cross,
)  # fmt: skip


def _replace(sample: Sample, rng: Random) -> bytes:
    data, (start, stop) = sample.data, _pick(sample.values, rng)
    return data[:start] + _pick(_PRINTED, rng) + data[stop:]


def _remove(sample: Sample, rng: Random) -> bytes:
    data, (start, stop) = sample.data, _pick(sample.members, rng)
    if data[stop : stop + 1] == b",":
        stop += 1
    elif data[start - 1 : start] == b",":
        start -= 1
    return data[:start] + data[stop:]


def _add(sample: Sample, rng: Random) -> bytes:
    """A member once more, or often; of an object that is a key twice."""
    data, (start, stop) = sample.data, _pick(sample.members, rng)
    return data[:start] + (data[start:stop] + b",") * _pick((1, 100), rng) + data[start:]


def _nest(sample: Sample, rng: Random) -> bytes:
    data, (start, stop) = sample.data, _pick(sample.values, rng)
    deep = _pick((1, 20, 400), rng)
    opening, closing = _pick(_OPENED, rng)
    return data[:start] + opening * deep + data[start:stop] + closing * deep + data[stop:]


def _swap(sample: Sample, rng: Random) -> bytes:
    """Two values in each other's place; of a container and what is in it, one for the other."""
    data = sample.data
    (a, b), (c, d) = sorted((_pick(sample.values, rng), _pick(sample.values, rng)))
    if b > c:
        return data[:a] + data[c:d] + data[b:]
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


_STRUCTURED: tuple[Callable[[Sample, Random], bytes], ...] = (
    _replace, _replace, _remove, _add, _nest, _swap,
)  # fmt: skip
