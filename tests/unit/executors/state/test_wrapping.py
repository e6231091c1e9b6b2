"""Wrappers of frameworks, as fakes of their exact shapes: unwrapped, or refused at attach."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.executors.state.wrapping import unattached_schedulers
from autockpt.values.errors import ConfigError

DATA = TensorDataset(torch.arange(23.0))


def plain() -> "DataLoader[Any]":
    """What the framework was given."""
    return DataLoader(DATA, batch_size=4, shuffle=True)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """accelerate's: it never calls the constructor of its base."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Of the one inside."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Of the one inside."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Of the one inside."""
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        """Of the one inside."""
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the one inside."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of the one inside."""
        self.optimizer.step(closure)


class _FabricOptimizer:
    """Lightning Fabric's: its class is made to be one of the optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        bases = (self.__class__, optimizer.__class__)
        self.__class__ = type("Fabric" + type(optimizer).__name__, bases, {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one inside."""
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        """Of the one inside."""
        return self.optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class DataLoaderShard(DataLoader[Any]):
    """accelerate's: `state_dict` raises unless the loader inside is stateful."""

    def __init__(self, base: Any, **more: Any) -> None:
        self.__dict__.update({"base_dataloader": base, "device": torch.device("cpu"), **more})

    def __getattr__(self, name: str) -> Any:
        if name in ("base_dataloader", "dl_state_dict"):
            raise AttributeError(f"'DataLoader' object has no attribute {name!r}")
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        ahead = iter(self.base_dataloader)
        batch = next(ahead, None)
        while batch is not None:
            following = next(ahead, None)
            yield batch
            batch = following

    def state_dict(self) -> Any:
        """Fails late."""
        return self.dl_state_dict

    def load_state_dict(self, state: Any) -> None:
        """Has nothing to load into."""
        self.base_dataloader.load_state_dict(state)


class DataLoaderDispatcher(DataLoaderShard):
    """accelerate's, where one rank reads for all."""


class _WrappedDataLoader(DataLoader[Any]):
    """Ray Train's: its own iterator."""

    def __init__(self, base: Any) -> None:
        self.__dict__.update(base.__dict__)
        self._dataloader, self.device = base, torch.device("cpu")

    def __iter__(self) -> Any:
        self.dataloader_iter = iter(self._dataloader)
        return self

    def __next__(self) -> Any:
        return next(self.dataloader_iter)


class _FabricDataLoader:
    """Lightning Fabric's."""

    def __init__(self, base: Any) -> None:
        self.__dict__.update(base.__dict__)
        self._dataloader, self._device, self._num_iter_calls = base, None, 0

    def __iter__(self) -> Iterator[Any]:
        self._num_iter_calls += 1
        yield from self._dataloader


class Otherwise(DataLoader[Any]):
    """Somebody's own, which never asks DataLoader for an iterator."""

    def __iter__(self) -> Iterator[Any]:
        yield from (self.dataset[i] for i in range(23))  # type: ignore[misc]


class Through(DataLoader[Any]):
    """Somebody's own, which changes what DataLoader gives."""

    def __iter__(self) -> Iterator[Any]:
        for (batch,) in super().__iter__():
            yield (batch + 1,)


class Raising(DataLoader[Any]):
    """Has the methods of a stateful loader, and they raise."""

    def state_dict(self) -> Any:
        """Not yet."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Not yet."""
        raise NotImplementedError


class Pair(NamedTuple):
    """A batch as some collate functions make it."""

    inputs: torch.Tensor
    labels: list[torch.Tensor]


WRAPPED = {
    "shard": DataLoaderShard,
    "ray": _WrappedDataLoader,
    "fabric": _FabricDataLoader,
    "twice": lambda base: _FabricDataLoader(DataLoaderShard(base)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_loader_inside_is_resumed_in_the_middle_of_an_epoch(name: str) -> None:
    """Batches are those of the wrapper, before and behind the resume."""
    torch.manual_seed(3)
    expected = [batch for _ in range(2) for (batch,) in WRAPPED[name](plain())]
    torch.manual_seed(3)
    position = DataPosition(WRAPPED[name](plain()))
    batches = position.batches()
    taken = [next(batches)[0] for _ in range(4)]
    state, random = position.require_state(), rng_state()
    resumed = DataPosition(WRAPPED[name](plain()))
    resumed.load(state)
    resumed.prepare()
    set_rng_state(random)
    rest = resumed.batches()
    taken += [next(rest)[0] for _ in range(len(expected) - 4)]
    assert all(map(torch.equal, taken, expected))


def test_batches_are_put_where_the_wrapper_puts_them() -> None:
    """Tensors in tuples, lists and dicts go to the wrapper's device."""

    def collate(items: list[Any]) -> Any:
        inputs = torch.stack([item[0] for item in items])
        return {"pair": Pair(inputs, [inputs]), "names": "as they are"}

    loader = DataLoaderShard(DataLoader(DATA, 4, collate_fn=collate), device=torch.device("meta"))
    batch = next(DataPosition(loader).batches())
    assert batch["pair"].inputs.device.type == "meta"
    assert batch["pair"].labels[0].device.type == "meta"
    assert batch["names"] == "as they are"


class _Accumulation:
    num_steps = 4


REFUSED = {
    "dispatcher": (lambda: DataLoaderDispatcher(plain()), "one rank for all"),
    "accumulation": (
        lambda: DataLoaderShard(plain(), gradient_state=_Accumulation()),
        "accumulation of 4 iterations",
    ),
    "skipping": (lambda: DataLoaderShard(plain(), skip_batches=3), "skips 3 batches"),
    "otherwise": (lambda: Otherwise(DATA, 4), "does not iterate as DataLoader does"),
    "raising": (lambda: Raising(DATA, 4), r"Raising.state_dict\(\) raised NotImpl"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_unwrapped_is_refused_at_the_first_attach(name: str) -> None:
    """By name, before a step is trained."""
    make, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        DataPosition(make()).require_state()


def test_the_session_tries_the_position_at_attach(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """A loader whose state cannot be saved ends `attach`, not every save."""
    with pytest.raises(ConfigError, match=r"Raising.state_dict\(\) raised"):
        attach(model=torch.nn.Linear(2, 1), data=Raising(DATA, 4), run_dir=new_run())


def test_a_loader_that_only_changes_batches_is_left_as_it_is() -> None:
    """It is asked without a batch being read, and nothing is drawn."""
    before = torch.get_rng_state()
    position = DataPosition(Through(DATA, 4, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())
    assert next(position.batches())[0].min() >= 1


def test_an_object_whose_state_raises_is_refused_by_name() -> None:
    """Schedulers and others, too."""
    state = LiveState.of(model=torch.nn.Linear(2, 1), ema=Raising(DATA, 4))
    with pytest.raises(ConfigError, match=r"attach\(ema=...\): Raising.state_dict\(\) raised"):
        state.dry_encode()


OPTIMIZERS = {
    "accelerate": AcceleratedOptimizer,
    "fabric": _FabricOptimizer,
    "both": lambda optimizer: _FabricOptimizer(AcceleratedOptimizer(optimizer)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_of_the_optimizer_inside_are_seen(name: str) -> None:
    """It is what is attached, so that its hooks fire and its state is saved."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.AdamW(model.parameters())
    wrapped = OPTIMIZERS[name](inner)
    state = LiveState.of(model=model, optimizer=wrapped)
    assert state.optimizers == {"optimizer": inner}
    seen: list[Any] = []
    hooks = OptimizerHooks([inner], seen.append, seen.append)
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    hooks.remove()
    assert seen == [inner, inner]


def test_a_training_with_wrapped_objects_is_resumed(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """Its steps count, and it comes back at the step it had, to the bit."""
    run_dir = new_run()

    def begun() -> tuple[torch.nn.Module, Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        wrapped = AcceleratedOptimizer(torch.optim.AdamW(model.parameters()))
        loader = DataLoaderShard(DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True))
        ckpt = attach(model=model, optimizer=wrapped, data=loader, run_dir=run_dir)
        return model, wrapped, ckpt

    def train(total: int) -> list[torch.Tensor]:
        model, optimizer, ckpt = begun()
        for _, (batch,) in ckpt.batches(total):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    ended = train(8)
    model, _, ckpt = begun()
    assert ckpt.step_count == 8
    assert all(map(torch.equal, model.parameters(), ended))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.StepLR(o, 3)]
    ),
}


class Holding:
    """A framework's, around a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("around", [lambda one: one, Holding, lambda one: Holding([one])])
def test_a_scheduler_that_nobody_attached_is_seen(name: str, around: Callable[..., Any]) -> None:
    """The state of it is lost with the process; attached ones, and those inside, are not."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = SCHEDULES[name](optimizer)
    assert unattached_schedulers({"optimizer": optimizer}, [around(scheduler)]) == []
    assert name in unattached_schedulers({"optimizer": optimizer}, [])
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert unattached_schedulers({"optimizer": other}, []) == []


def test_a_run_says_that_a_scheduler_is_not_attached(
    attach: Callable[..., Any], new_run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Made behind `attach`, too."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = attach(model=model, optimizer=optimizer, run_dir=new_run())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in ckpt.steps(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert capsys.readouterr().err.count("a StepLR sets the optimizer's rates") == 1
