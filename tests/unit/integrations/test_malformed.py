"""Checkpoints whose digests are all right and whose fields are not: only documented errors.

Every field of the skeleton, the header, the index and the COMMIT is replaced or left out, and every
digest that covers it is made right again, as somebody who writes checkpoints could do.
"""

import collections
import copy
import hashlib
import json
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import autockpt
from autockpt.executors.storage.catalogue import list_generations, verify_generation
from autockpt.values.errors import AutockptError, CorruptCheckpointError
from tests.unit.integrations.trained import saved, trained_job

ODD: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**70, "", "x", "\0", "1" * 5000, [], {}, [[]], [None], {"x": None},
    {"$tensor": []}, {"$tensor": "x"}, {"$array": 1}, {"$int": 3}, {"$scalar": ["O", ""]},
    {"$dict": [[[], 1]]}, {"$size": [-1]}, {"$dtype": []}, {"$new": 1},
)  # fmt: skip
"""What a field is replaced by."""


class Everything:
    """An attached object whose state has a value of every kind."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "tuple": (1, "a"), "keys": {1: 2, (1, 2): 3}, "big": 2**60, "nan": float("nan"),
            "ordered": collections.OrderedDict(a=1), "count": collections.Counter("aab"),
            "default": collections.defaultdict(list, a=[1]), "complex": 1j, "bytes": b"abc",
            "size": torch.Size([2]), "set": {1, 2}, "frozen": frozenset("a"),
            "device": torch.device("cpu"), "dtype": torch.float16, "scalar": np.float32(1.5),
            "array": np.arange(3), "tensor": torch.ones(2),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Sealed:
    """A generation whose parts can be changed, with digests that match again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = json.loads((folder / "COMMIT").read_text())
        row = self.commit["records"][0]
        self.index_path, self.image_path = folder / row["index"], folder / row["file"]
        self.index = json.loads(self.index_path.read_text())
        self.image = self.image_path.read_bytes()
        self.base = 8 + struct.unpack("<Q", self.image[:8])[0]
        self.header = json.loads(self.image[8 : self.base])
        self.start, self.stop = self.header["__extra"]["data_offsets"]
        self.skeleton = json.loads(self.image[self.base + self.start : self.base + self.stop])

    def write(self, part: str, data: Any) -> bool:
        """Put one part in place; False if it does not fit into the bytes that there are."""
        parts = {"skeleton": self.skeleton, "header": self.header} | {part: data}
        image = bytearray(self.image)
        header, text = _json(parts["header"]), _json(parts["skeleton"])
        if len(header) > self.base - 8 or len(text) > self.stop - self.start:
            return False
        image[8 : self.base] = header.ljust(self.base - 8)
        at = self.base + self.start
        image[at : self.base + self.stop] = text.ljust(self.stop - self.start)
        index = data if part == "index" else self._sealed_index(bytes(image))
        commit = copy.deepcopy(data if part == "commit" else self.commit)
        if part != "commit":
            commit["records"][0]["root"] = _root(index)
        if isinstance(commit, dict):
            commit["digest"] = hashlib.sha256(_json({**commit, "digest": ""})).hexdigest()
        self.image_path.write_bytes(image)
        self.index_path.write_bytes(_json(index))
        (self.folder / "COMMIT").write_bytes(_json(commit))
        return True

    def _sealed_index(self, image: bytes) -> dict[str, Any]:
        size, head = self.index["chunk_bytes"], self.index["head_bytes"]
        chunks = [image[i : i + size] for i in range(0, len(image), size)]
        index = {**self.index, "digests": [xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks]}
        if head:
            index["head_digest"] = xxhash.xxh3_128_hexdigest(image[:head])
        return index


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _root(index: Any) -> str:
    try:
        lines = [
            "autockpt-image-1", index["run_id"],
            "ckpt-t{term:04}-step-{step:08}".format(**index["generation"]),
            index["rank"], index["world_size"], index["layout_digest"], index["image_bytes"],
            index["chunk_bytes"], *index["digests"], index["head_bytes"], index["head_digest"],
        ]  # fmt: skip
    except (KeyError, TypeError):
        return ""
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()


@pytest.fixture
def sealed(tmp_path: Path) -> Sealed:
    folder = saved(tmp_path / "checkpoints", trained_job(), others={"everything": Everything()})
    found = Sealed(Path(folder))
    for part in ("skeleton", "header", "index", "commit"):
        assert found.write(part, getattr(found, part))
        assert autockpt.load(folder)["step"] == 7
        assert verify_generation(str(found.folder.parent), found.folder.name).ok
    return found


def changes(data: Any) -> Iterator[Callable[[Any], Any]]:
    """Every field replaced by each odd value, and left out."""
    for path in list(_paths(data)):
        for odd in ODD:
            yield lambda whole, path=path, odd=odd: _changed(whole, path, odd)
        if path:
            yield lambda whole, path=path: _changed(whole, path, _changed)


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data[:2])
    for key, item in items if isinstance(data, dict | list) else ():
        yield from _paths(item, (*path, key)) if isinstance(item, dict | list) else [(*path, key)]


def _changed(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    whole = copy.deepcopy(whole)
    at = whole
    for key in path[:-1]:
        at = at[key]
    if value is _changed:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return whole


def escapes(sealed: Sealed, part: str, count: int | None) -> tuple[int, list[str]]:
    """(inputs tried, errors that no docstring names); `count`: of a seeded sample."""
    data = getattr(sealed, part)
    every = list(changes(data))
    if count is not None and count < len(every):
        every = random.Random(f"malformed {part}").sample(every, count)
    directory, name = str(sealed.folder.parent), sealed.folder.name
    tried, found = 0, []
    for change in every:
        changed = change(data)
        if not sealed.write(part, changed):
            continue
        tried += 1
        for read in (
            lambda: autockpt.load(directory, generation=name),
            lambda: autockpt.load(directory),
            lambda: list_generations(directory),
            lambda: verify_generation(directory, name),
        ):
            try:
                read()
            except AutockptError:
                pass
            except Exception as error:
                found.append(f"{part}: {error!r:.200}: {_json(changed)[:200]!r}")
    sealed.write("skeleton", sealed.skeleton)
    return tried, found


@pytest.mark.parametrize("part", ["skeleton", "header", "index", "commit"])
def test_malformed_fields_are_documented_errors(sealed: Sealed, part: str) -> None:
    """A sample of all fields; `load`, `ls` and `verify` raise nothing but our own errors."""
    tried, found = escapes(sealed, part, 60)
    assert tried > 10
    assert not found, "\n".join(found[:5])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["skeleton", "header", "index", "commit"])
def test_every_malformed_field_is_a_documented_error(sealed: Sealed, part: str) -> None:
    """All fields with all values."""
    tried, found = escapes(sealed, part, None)
    print(f"{part}: {tried} inputs, {len(found)} escaped")
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("others", None), ("others", []), ("optimizers", "x"), ("optimizers", 1.5),
        ("rng", {"torch": {"$tensor": []}}), ("progress", {"step": -1}), ("modules", 0),
    ],
)  # fmt: skip
def test_the_field_is_named(sealed: Sealed, field: str, value: Any) -> None:
    """The error says which part of the skeleton is malformed."""
    assert sealed.write("skeleton", {**sealed.skeleton, field: value})
    with warnings.catch_warnings(), pytest.raises(CorruptCheckpointError, match=field):
        autockpt.load(str(sealed.folder))
