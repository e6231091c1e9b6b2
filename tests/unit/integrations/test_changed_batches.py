"""Adapters count the rest of an epoch from its end where its batches have another size."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import autockpt
from autockpt.executors.state.data.epoch_loader import EpochLoader
from autockpt.integrations import accelerate, ignite
from autockpt.integrations.adapters import reading_of
from autockpt.integrations.lightning.loop import ProtectedFit

SAMPLES = 24
DATA = torch.arange(SAMPLES)


def placed(size: int, ahead: int = 0) -> Any:
    """A loader of ours."""
    return EpochLoader(DataLoader(DATA, size), ahead=ahead, begin=lambda: None)  # type: ignore[arg-type]


def saved(size: int, batches: int, *, each: int = 1) -> dict[str, Any]:
    """Its place behind so many batches; `each`: batches that are read ahead."""
    loader = placed(size, ahead=each)
    pairs = iter(loader)
    for _ in range(batches + each):
        next(pairs)
    loader.trained(batches)
    state: dict[str, Any] = loader.state()
    return state


class Prepared:
    """A loader as Accelerate prepares it."""

    split_batches, iteration, end_of_dataloader = False, 0, False

    def __init__(self, size: int) -> None:
        self.base_dataloader: Any = DataLoader(DATA, size)  # type: ignore[arg-type]

    def begin(self) -> None:
        """In front of a pass."""


class DataLoaderDispatcher(Prepared):
    """One rank reads for all; known by its name."""


def looped(
    monkeypatch: pytest.MonkeyPatch, loader: Prepared, state: dict[str, Any], extra: dict[str, Any],
    *, window: int = 1, processes: int = 1,
) -> tuple[Any, Any]:  # fmt: skip
    """(the loop of an accelerator that goes on, the accelerator)."""

    def load(inner: Any, *, ahead: int, name: str) -> Any:
        made = EpochLoader(inner, ahead=ahead, begin=lambda: None)
        made.load(state)
        return made

    def attach(**_: Any) -> Any:
        return SimpleNamespace(
            restored=SimpleNamespace(extra=extra), loader=load, own_boundary=lambda: None,
            finish_restore=lambda: None, step=lambda: None, close=lambda: None, step_count=0,
        )  # fmt: skip

    monkeypatch.setattr(autockpt, "attach", attach)
    accelerator = SimpleNamespace(
        _models=[torch.nn.Linear(1, 1)], _optimizers=[], _schedulers=[], _custom_objects=[],
        _dataloaders=[loader], step=0, gradient_accumulation_steps=window, sync_gradients=True,
        num_processes=processes, is_main_process=True,
        gradient_state=SimpleNamespace(active_dataloader=loader),
    )  # fmt: skip
    return accelerate.attach(accelerator), accelerator


EXTRA = {"step": 6, "accumulation": 2, "iterations": [0], "batches": [6], "epochs": [0]}


@pytest.mark.parametrize(("size", "first"), [(2, 6), (1, 12), (4, 3), (3, 4), (5, 2)])
def test_accelerates_first_batch_is_counted_from_the_end(
    monkeypatch: pytest.MonkeyPatch, size: int, first: int
) -> None:
    """A loop that asks whether `i + 1 == len(loader)` finds the last batch."""
    ckpt, _ = looped(monkeypatch, Prepared(size), saved(2, 6), EXTRA)
    assert ckpt.first_batch == first
    numbers = list(enumerate(ckpt._loaders[0].base_dataloader, ckpt.first_batch))
    assert numbers[-1][0] + 1 == len(DataLoader(DATA, size))  # type: ignore[arg-type]
    ckpt.close()


def test_a_window_of_accelerate_begins_where_its_length_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first one would be short."""
    ckpt, accelerator = looped(monkeypatch, Prepared(2), saved(2, 6), EXTRA, window=4)
    ckpt.close()
    assert accelerator.step == 0
    ckpt, accelerator = looped(monkeypatch, Prepared(2), saved(2, 6), EXTRA, window=2)
    ckpt.close()
    assert accelerator.step == 6


def test_a_rank_that_begins_to_read_for_two_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that it has read ahead are not taken for trained ones."""
    loader = DataLoaderDispatcher(2)
    ckpt, _ = looped(monkeypatch, loader, saved(2, 6), EXTRA, processes=2)
    assert ckpt.first_batch == 3
    batches = iter(loader.base_dataloader)
    for _ in range(4):  # of one micro-batch, and of the next one
        next(batches)
    ckpt.step()
    assert loader.base_dataloader.state()["index"] == 8
    ckpt.close()


def _fit(loaders: list[Any], mode: str = "max_size_cycle") -> tuple[Any, Any]:
    current = SimpleNamespace(ready=6, started=6, processed=6, completed=6)
    epoch_loop = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
    fit_loop = SimpleNamespace(epoch_loop=epoch_loop, _combined_loader=SimpleNamespace(_mode=mode))
    fit = ProtectedFit(SimpleNamespace(fit_loop=fit_loop, callbacks=[]), None, {})
    fit._loaders = loaders
    return fit, current


@pytest.mark.parametrize(("size", "first"), [(2, 6), (1, 12), (4, 3), (5, 2)])
def test_lightnings_count_ends_with_the_epoch(size: int, first: int) -> None:
    """It validates, and steps a last time, at the batch that it counts as the last."""
    loader = placed(size)
    loader.load(saved(2, 6))
    fit, current = _fit([loader])
    fit._number_rest()
    assert set(vars(current).values()) == {first}


class Engine:
    """The state of an engine of Ignite."""

    state_dict_user_keys: tuple[str, ...] = ()

    def __init__(self, loader: Any, iteration: int = 0, max_epochs: int | None = 2) -> None:
        self.state = SimpleNamespace(
            dataloader=loader, iteration=iteration, epoch=0, epoch_length=12, max_epochs=max_epochs,
            max_iters=None,
        )  # fmt: skip

    def _is_done(self, state: Any) -> bool:
        return bool(state.iteration == state.epoch_length * state.max_epochs)


@pytest.mark.parametrize(
    ("size", "change", "ends"),
    [
        (2, lambda state: None, (12, 18)),
        (1, lambda state: None, (24, 36)),
        (4, lambda state: None, (6, 9)),
        (5, lambda state: None, (5, 7)),
        # The script has said itself how long an epoch is, or counts iterations alone.
        (1, lambda state: vars(state).update(epoch_length=7), (7, 18)),
        (1, lambda state: vars(state).update(max_epochs=None), (12, 18)),
    ],
)
def test_ignites_epochs_are_as_long_as_the_loader(
    size: int, change: Callable[[Any], Any], ends: tuple[int, int]
) -> None:
    """In the second epoch, behind 6 of 12 batches of 2 samples."""
    first = Engine(DataLoader(DATA, 2), iteration=18)  # type: ignore[arg-type]
    change(first.state)
    counters = ignite._Counters(first)
    state = counters.state_dict()
    loader = placed(size)
    loader.load(saved(2, 6))
    engine = Engine(loader)
    resumed = ignite._Counters(engine)
    resumed.load_state_dict(state)
    resumed.fit_to_loader()
    assert (engine.state.epoch_length, engine.state.iteration) == ends


@pytest.mark.parametrize(("iteration", "is_anew"), [(0, True), (24, False)])
def test_more_epochs_of_ignite_are_trained(iteration: int, is_anew: bool) -> None:
    """A run that was over is at its end only where Ignite begins it anew."""
    engine = Engine(None, iteration=24)
    counters = ignite._Counters(engine)
    counters.load_state_dict(counters.state_dict())
    engine.state.iteration = iteration
    assert counters.is_anew == is_anew


@pytest.mark.parametrize(
    ("splits", "is_first", "reading"),
    [(False, True, (4, 4)), (False, False, (4, 0)), (True, True, (1, 1)), (True, False, (1, 0))],
)
def test_one_rank_reads_for_all(splits: bool, is_first: bool, reading: tuple[int, int]) -> None:
    """As many batches ahead as there are ranks, unless each is split."""
    loader = DataLoaderDispatcher(2)
    loader.split_batches = splits
    accelerator = SimpleNamespace(num_processes=4, is_main_process=is_first)
    assert reading_of(loader, accelerator) == reading
    assert reading_of(Prepared(2), accelerator) == (1, 1)
