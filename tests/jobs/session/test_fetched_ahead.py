"""Scripts that fetch batches ahead of the training read that a restart would leave them out."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support import trainings


def ahead(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """As the prefetchers of apex and timm do it."""
    iterator = iter(batches)
    waiting = list(itertools.islice(iterator, count))
    for coming in iterator:
        waiting.append(coming)
        yield waiting.pop(0)
    yield from waiting


def pairs(batches: Iterable[Any]) -> Iterator[Any]:
    """Two batches for one iteration."""
    iterator = iter(batches)
    return ([a + b] for (a,), (b,) in zip(iterator, iterator, strict=True))


def trained(attach: Callable[..., Any], run_dir: str, way: str, told: int = 0) -> None:
    """One epoch of 16 batches."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = DataLoader(TensorDataset(torch.arange(32.0).view(32, 1)), batch_size=2)
    if way == "batches":
        ckpt = attach(model=model, optimizer=optimizer, data=data, run_dir=run_dir)
        every: Iterable[Any] = (batch for _, batch in ahead(ckpt.batches(16), 1))
    else:
        ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
        loader = ckpt.loader(data, ahead=told)
        every = {"pairs": pairs, "plain": iter}.get(way, lambda it: ahead(it, int(way)))(loader)
    for (x,) in every:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    ckpt.close(final_checkpoint=False)


@pytest.mark.parametrize(
    ("way", "told", "text"),
    [
        ("1", 0, "had fetched 1 more batches of ckpt.loader"),
        ("2", 0, "ckpt.loader(..., ahead=2)"),
        ("1", 1, ""),
        ("plain", 0, ""),
        ("pairs", 0, ""),
        ("batches", 0, "asked ckpt.batches for the next batch before it had trained"),
    ],
)
def test_batches_that_wait_in_the_script_are_reported(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str],
    way: str, told: int, text: str,
) -> None:  # fmt: skip
    """Not where the loader was told, and not where an iteration takes two."""
    trained(attach, trainings.prepare(new_run(), trainings.plan(memory=5, disk=5)), way, told)
    said = capfd.readouterr().err
    assert text in said
    assert ("carried values" in said) is bool(text)
