"""What real gloo ranks say they hold, for every kind of wrapper: `ranks.py` runs them once."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.image.layout.boxes import Box, whole
from tests.unit.executors.sharding.ranks import CASES

Reports = Callable[[int], list[dict[str, Any]]]
"""Of a number of ranks what each of them wrote down."""


def run(name: str, world_size: int, *others: Any) -> Any:
    """Parameters of a test; eight processes are for `make test-all`."""
    marks = [pytest.mark.slow] if world_size > 4 else []
    return pytest.param(name, world_size, *others, marks=marks)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by 2 and by 4 ranks."""
    return _run_ranks(tmp_path_factory.mktemp("small"), "2", "4")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by 8 ranks."""
    return _run_ranks(tmp_path_factory.mktemp("large"), "8")


def _run_ranks(folder: Path, *world_sizes: str) -> Path:
    module = "tests.unit.executors.sharding.ranks"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(folder), *world_sizes],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def reports(request: pytest.FixtureRequest) -> Reports:
    """What the ranks wrote down, which run when the first of it is asked for."""

    def read(world_size: int) -> list[dict[str, Any]]:
        folder: Path = request.getfixturevalue("small" if world_size <= 4 else "large")
        return [_read(folder / f"{world_size}.{rank}.json") for rank in range(world_size)]

    return read


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.mark.parametrize(
    ("name", "world_size"), [run(name, n) for name, (sizes, _) in CASES.items() for n in sizes]
)
def test_holdings_are_what_the_ranks_hold(reports: Reports, name: str, world_size: int) -> None:
    """The bytes are that part of the bare model, and each copy covers every element once."""
    ranks = [report[name] for report in reports(world_size)]
    assert not [text for text in ranks if isinstance(text, str)], ranks[0]
    assert ranks[0]
    for tensor in {name for rank in ranks for name in rank}:
        seen = {number: rank[tensor] for number, rank in enumerate(ranks) if tensor in rank}
        for rank, one in seen.items():
            assert one["same"], f"{tensor} on rank {rank}: {one}"
            assert one["global_shape"] == one["true_shape"]
            assert one["elements"] >= _count(one)
        _require_exact_cover(tensor, seen)


def _count(seen: dict[str, Any]) -> int:
    return sum(len(list(_elements(box))) for box in _boxes(seen))


def _boxes(seen: dict[str, Any]) -> list[Box]:
    return [Box(offset=tuple(offset), shape=tuple(shape)) for offset, shape in seen["boxes"]]


def _elements(box: Box) -> Any:
    steps = zip(box.offset, box.shape, strict=True)
    return itertools.product(*(range(start, start + size) for start, size in steps))


def _require_exact_cover(tensor: str, seen: dict[int, dict[str, Any]]) -> None:
    """Holders agree with each other; one holder of each part covers every element once."""
    groups = {tuple(one["holders"]) or (rank,): one for rank, one in seen.items()}
    for holders, one in groups.items():
        assert all(seen[rank]["boxes"] == one["boxes"] for rank in holders), tensor
    counts = Counter(
        element for one in groups.values() for box in _boxes(one) for element in _elements(box)
    )
    true_shape = next(iter(seen.values()))["true_shape"]
    everything = whole(true_shape)
    assert set(counts) == set(_elements(everything)), tensor
    # Plain tensors beside DTensors are whole on ranks that do not know of each other.
    unknown = all(_boxes(one) == [everything] for one in groups.values())
    assert set(counts.values()) == {len(groups) if unknown else 1}, tensor


@pytest.mark.parametrize(
    ("name", "world_size", "tensor", "holders"),
    [
        run("ddp", 4, "norm.weight", [0, 1, 2, 3]),
        run("fsdp2", 4, "norm.weight", []),
        run("hsdp", 4, "norm.weight", [0, 2]),
        run("hsdp_over_tensor_parallel", 8, "norm.weight", [0, 4]),
        run("hsdp_over_tensor_parallel", 8, "mix.weight", [0, 4]),
        run("fsdp1_hybrid", 4, "norm.weight", [0, 2]),
        run("fsdp1_no_shard", 2, "norm.weight", [0, 1]),
        run("tensors_of_meshes", 4, "across", [0, 2]),
        run("tensors_of_meshes", 4, "copies", [0, 1, 2, 3]),
        run("tensor_parallel", 2, "mix.weight", []),
        run("pipeline_stages", 4, "layers.1.weight", [0, 1]),
    ],
)
def test_copies_know_of_each_other(
    reports: Reports, name: str, world_size: int, tensor: str, holders: list[int]
) -> None:
    """Rank 0 names all ranks that hold the same bytes as it does."""
    assert reports(world_size)[0][name][tensor]["holders"] == holders


def test_last_range_of_a_flat_unit_is_padded(reports: Reports) -> None:
    """The elements that pad the last rank's range belong to no box."""
    last = reports(4)[3]["fsdp1_flat"]["_flat_param"]
    assert last["elements"] > _count(last)


def test_a_column_parallel_weight_under_fsdp_is_cut_in_strided_order(
    reports: Reports,
) -> None:
    """FSDP cuts the tensor-parallel part, so the rows of rank 1 do not follow those of rank 0."""
    rows = [r["fsdp2_over_tensor_parallel"]["norm.weight"]["boxes"] for r in reports(4)]
    assert rows == [[[[0, 0], [1, 5]]], [[[2, 0], [1, 5]]], [[[1, 0], [1, 5]]], []]
