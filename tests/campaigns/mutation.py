"""Hostile input from good input: bytes, JSON structure, and what found something new is kept."""

import json
import random
from collections.abc import Callable
from typing import Any

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
    {"$array": {"$tensor": 1}}, {"$size": ["a"]}, {"$dtype": "load"}, "gen-e000001-s000000001",
)  # fmt: skip
MAX_BYTES = 2**17


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Another input, by one to four changes; `other` is a second good one to cross with."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        change = rng.choice(_STRUCTURED if data[:1] in b"{[" and rng.random() < 0.6 else _BYTES)
        data = change(data, other, rng)[:MAX_BYTES]
    return data


def _place(data: bytes, rng: random.Random) -> int:
    return rng.randrange(len(data) + 1)


def _flip(data: bytes, other: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _set(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + bytes([rng.choice([0, 1, 127, 128, 255])]) + data[at + 1 :]


def _cut(data: bytes, other: bytes, rng: random.Random) -> bytes:
    a, b = sorted((_place(data, rng), _place(data, rng)))
    return data[:a] + data[min(b, a + 64) :]


def _truncate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _double(data: bytes, other: bytes, rng: random.Random) -> bytes:
    a, b = sorted((_place(data, rng), _place(data, rng)))
    return data[:b] + data[a:b] * rng.choice([1, 1, 8]) + data[b:]


def _insert(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    token = rng.choice(TOKENS)
    if token in (b"[", b"{") and rng.random() < 0.1:
        token *= 3000
    return data[:at] + token + data[at:]


def _random(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]


def _cross(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)] + other[_place(other, rng) :]


_BYTES: tuple[Callable[[bytes, bytes, random.Random], bytes], ...] = (
    _flip, _flip, _set, _cut, _truncate, _double, _insert, _insert, _random, _cross,
)  # fmt: skip


def _structured(change: Callable[[Any, Any, random.Random], None]) -> Callable[..., bytes]:
    """A change of one container inside JSON; what is no JSON is changed as bytes."""

    def apply(data: bytes, other: bytes, rng: random.Random) -> bytes:
        try:
            tree = json.loads(data)
            containers = _containers(tree)
        except (ValueError, RecursionError):
            return _flip(data, other, rng)
        container = rng.choice(containers)
        if container:
            keys = [*container] if isinstance(container, dict) else [*range(len(container))]
            change(container, rng.choice(keys), rng)
        try:
            return json.dumps(tree, separators=(",", ":")).encode()
        except RecursionError:  # nested twice
            return _insert(data, other, rng)

    return apply


def _containers(tree: Any) -> list[Any]:
    found, rest = [], [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, dict | list):
            found.append(node)
            rest.extend(node.values() if isinstance(node, dict) else node)
    return found or [[]]


def _replace(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = rng.choice(VALUES)


def _remove(container: Any, key: Any, rng: random.Random) -> None:
    del container[key]


def _add(container: Any, key: Any, rng: random.Random) -> None:
    if isinstance(container, dict):
        container[rng.choice(["", "x", "__class__", "schema_version", "$tensor"])] = container[key]
    else:
        container.extend([container[key]] * rng.choice([1, 100]))


def _nest(container: Any, key: Any, rng: random.Random) -> None:
    value = container[key]
    for _ in range(rng.choice([1, 20, 400])):
        value = [value] if rng.random() < 0.5 else {"$tuple": [value]}
    container[key] = value


def _swap(container: Any, key: Any, rng: random.Random) -> None:
    other = rng.choice([*container] if isinstance(container, dict) else [*range(len(container))])
    container[key], container[other] = container[other], container[key]


_STRUCTURED = tuple(_structured(one) for one in (_replace, _replace, _remove, _add, _nest, _swap))
