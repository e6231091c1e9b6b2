"""The kept walk: the same one as long as a new walk would find the same, and never longer."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.tensor_index import TensorIndex
from autockpt.values.errors import ConfigError
from tests.unit.executors.shots import assert_image, shoot, slot_for, snapshotter, state_bytes
from tests.unit.executors.states import Module

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class Work:
    """A model with two optimizers and everything that a training may do to them."""

    def __init__(self) -> None:
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        )
        body = [*self.model[0].parameters(), *self.model[1].parameters()]
        head = list(self.model[2].parameters())
        self.body = torch.optim.AdamW([{"params": body[:2]}, {"params": body[2:]}])
        self.head = torch.optim.SGD(head, lr=0.1, momentum=0.9)
        self.state = LiveState.of(
            model=self.model, optimizer={"body": self.body, "head": self.head}
        )
        self._added = 0

    def train(self) -> None:
        """One iteration."""
        self.model(torch.randn(5, 3)).sum().backward()
        self.body.step()
        self.head.step()

    def add(self) -> torch.nn.Parameter:
        """A new parameter of the model."""
        self._added += 1
        parameter = torch.nn.Parameter(torch.ones(2))
        self.model.register_parameter(f"added{self._added}", parameter)
        return parameter

    def remove(self) -> None:
        """The newest of them goes again, if there is one."""
        names = [name for name in self.model._parameters if name.startswith("added")]
        if names:
            delattr(self.model, names[-1])

    def move(self) -> None:
        """The last parameter of the first group goes to the second one."""
        first, second = (group["params"] for group in self.body.param_groups[:2])
        if first:
            second.append(first.pop())

    def set_state(self, **values: Any) -> None:
        """Entries in the state of one parameter, whatever was there."""
        parameter = self.head.param_groups[0]["params"][0]
        self.head.state[parameter] = {**self.head.state.get(parameter, {}), **values}


MUTATIONS: dict[str, Callable[[Work], object]] = {
    "a step": Work.train,
    "a parameter added": Work.add,
    "a parameter removed": Work.remove,
    "a parameter replaced": lambda w: setattr(
        w.model[0], "weight", torch.nn.Parameter(torch.zeros(4, 3))
    ),
    "a parameter set to nothing": lambda w: w.model[2].register_parameter("bias", None),
    "a parameter tied": lambda w: setattr(w.model, "tied", w.model[0].weight),
    "a parameter frozen": lambda w: w.model[0].weight.requires_grad_(False),
    "a parameter on other memory": lambda w: setattr(
        w.model[0].weight, "data", w.model[0].weight.data.clone()
    ),
    "a module replaced": lambda w: w.model.__setitem__(2, torch.nn.Linear(4, 2)),
    "a module added": lambda w: w.model.add_module("late", torch.nn.BatchNorm1d(2)),
    "a buffer added": lambda w: w.model.register_buffer("seen", torch.zeros(3)),
    "a buffer replaced": lambda w: setattr(w.model[1], "running_mean", torch.zeros(4)),
    "a group added": lambda w: w.body.add_param_group({"params": [w.add()]}),
    "a group's list replaced": lambda w: w.body.param_groups[0].update(
        params=list(w.body.param_groups[0]["params"])
    ),
    "a parameter moved between groups": Work.move,
    "the order of a group reversed": lambda w: w.body.param_groups[1]["params"].reverse(),
    "the groups' learning rate": lambda w: w.body.param_groups[0].update(lr=0.5),
    "state loaded": lambda w: w.body.load_state_dict(w.body.state_dict()),
    "state cleared": lambda w: w.body.state.clear(),
    "a state tensor replaced": lambda w: w.set_state(momentum_buffer=torch.zeros(2, 4)),
    "a state tensor set to nothing": lambda w: w.set_state(momentum_buffer=None),
    "a number in the state": lambda w: w.set_state(count=7),
    "a list in the state": lambda w: w.set_state(history=[torch.ones(2), 3.0]),
    "the second optimizer stepped first": lambda w: w.state.stepped(w.head),
    "the first optimizer stepped": lambda w: w.state.stepped(w.body),
}

CHANGES_NOTHING = {
    "a parameter frozen", "a parameter on other memory", "the groups' learning rate",
    "a parameter removed",  # there is none yet
}  # fmt: skip


def from_scratch(state: LiveState) -> TensorIndex:
    """What somebody who sees the state for the first time finds."""
    other = LiveState(state.models, state.optimizers, state.others)
    other.step_order = list(state.step_order)
    return other.inventory()


def contents(inventory: TensorIndex) -> Any:
    """Everything in it that somebody reads; tensors by their memory, order included."""
    return (
        [(name, tensor.data_ptr(), tensor.shape) for name, tensor in inventory.lazy.items()],
        [(name, local.data_ptr(), local.shape) for name, local in inventory.locals.items()],
        inventory.parts,
        inventory.needs,
        [(name, id(buffer)) for name, buffer in inventory.buffers.items()],
        [(name, id(module)) for name, module in inventory.extras],
        {
            prefix: (parts.regular, {n: id(v) for n, v in parts.irregular.items()}, parts.names)
            for prefix, parts in inventory.optimizers.items()
        },
    )


def said(state: LiveState, ask: Callable[[LiveState], TensorIndex] = LiveState.inventory) -> object:
    """What a walk finds, or why there is none."""
    try:
        return contents(ask(state))
    except ConfigError as error:
        return str(error)


def assert_right(state: LiveState) -> None:
    """The kept walk says what a new one says, errors included."""
    assert said(state) == said(state, from_scratch)


def test_a_training_that_changes_no_structure_walks_once() -> None:
    """Forward, backward, steps, schedules, modes: the same object for ever."""
    work = Work()
    work.train()
    kept = work.state.inventory()
    for _ in range(3):
        work.train()
        work.body.zero_grad()
        work.body.param_groups[0]["lr"] *= 0.5
        work.model.eval().train()
        assert work.state.inventory() is kept
    assert_right(work.state)


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_change_of_structure_is_found(name: str) -> None:
    """A new walk where something was added, replaced, moved or removed, and only there."""
    work = Work()
    if name != "a step":  # the first one: it makes the optimizers' state
        work.train()
    before = work.state.inventory()
    MUTATIONS[name](work)
    assert (work.state.inventory() is before) == (name in CHANGES_NOTHING)
    assert_right(work.state)


@QUICK
@given(st.lists(st.sampled_from(sorted(MUTATIONS)), max_size=8))
def test_after_any_history_the_kept_walk_is_right(names: list[str]) -> None:
    """Asked after every change, and again."""
    work = Work()
    for name in names:
        try:
            MUTATIONS[name](work)
        except (RuntimeError, KeyError, IndexError):
            return  # torch refuses this after that: no training goes on from here
        assert_right(work.state)
        assert_right(work.state)


# --- what cannot be kept -------------------------------------------------------------------------


def test_state_of_numbers_is_walked_every_time() -> None:
    """A counter is a new object at every step; its newest value is what is saved."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values: dict[str, Any] = {"step": 1, "average": torch.zeros(1, 3)}
    optimizer.state[model.weight] = values
    state = LiveState.of(model=model, optimizer=optimizer)
    for count in range(2, 5):
        values["step"] = count
        inventory = state.inventory()
        assert not inventory.holds()
        assert inventory.optimizers["optimizer"].irregular["model.weight"]["step"] == count
        assert "optimizer.model.weight.average" in inventory.lazy


def test_the_history_of_an_lbfgs_is_found_as_it_grows() -> None:
    """Lists of tensors, numbers, None: all of it in the parameter's state."""
    model: Any = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=3, max_iter=2)
    state = LiveState.of(model=model, optimizer=optimizer)
    inputs = torch.randn(6, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().sum() + model.weight.exp().sum()
        loss.backward()
        return loss

    sizes = []
    for _ in range(4):
        optimizer.step(closure)
        assert_right(state)
        sizes.append(len(state.inventory().lazy))
    assert sizes[-1] > sizes[0]


def test_an_optimizer_that_computes_its_state_is_never_trusted() -> None:
    """Wrappers give a new dict at every access: nothing to hold on to."""

    class Computed(torch.optim.SGD):
        @property  # type: ignore[override]
        def state(self) -> dict[Any, Any]:
            return dict(self.__dict__["kept"])

        @state.setter
        def state(self, value: dict[Any, Any]) -> None:
            self.__dict__["kept"] = value

    model = torch.nn.Linear(3, 1)
    optimizer = Computed(model.parameters(), lr=0.1)
    state = LiveState.of(model=model, optimizer=optimizer)
    assert not state.inventory().cacheable
    optimizer.__dict__["kept"][model.weight] = {"m": torch.zeros(1, 3)}
    assert "optimizer.model.weight.m" in state.inventory().lazy
    assert_right(state)


# --- who changes what ----------------------------------------------------------------------------


def test_a_tied_parameter_has_all_its_names_in_one_part() -> None:
    """Whoever steps it changes both names."""
    model: Any = Module([("first", torch.ones(3)), ("other", torch.ones(2))])
    model.second = model.first
    state = LiveState.of(
        model=model, optimizer={"a": torch.optim.SGD([model.first], lr=0.1),
                                "b": torch.optim.SGD([model.other], lr=0.1)},
    )  # fmt: skip
    parts = state.inventory().parts
    assert parts["optimizer.a"] == ("model.first", "model.second")
    assert parts["optimizer.b"] == ("model.other",)


def test_a_parameter_of_two_optimizers_belongs_to_the_first_and_both_need_it() -> None:
    """The second one's step changes a tensor of the first one's part."""
    model: Any = Module(
        [("mine", torch.ones(3)), ("shared", torch.ones(2)), ("own", torch.ones(4))]
    )
    state = LiveState.of(
        model=model,
        optimizer={"a": torch.optim.SGD([model.mine, model.shared], lr=0.1),
                   "b": torch.optim.SGD([model.shared, model.own], lr=0.1)},
    )  # fmt: skip
    inventory = state.inventory()
    assert inventory.parts["optimizer.a"] == ("model.mine", "model.shared")
    assert inventory.parts["optimizer.b"] == ("model.own",)
    assert inventory.needs == {
        "optimizer.a": ("optimizer.a",), "optimizer.b": ("optimizer.b", "optimizer.a"),
    }  # fmt: skip


def test_what_no_optimizer_changes_is_a_part_of_its_own() -> None:
    """Frozen layers and averages: nobody's step waits for them."""
    model: Any = Module([("frozen", torch.ones(3)), ("trained", torch.ones(2))])
    state = LiveState.of(model=model, optimizer=torch.optim.SGD([model.trained], lr=0.1))
    assert state.inventory().parts == {
        "optimizer": ("model.trained",), "": ("model.frozen",)
    }  # fmt: skip
    assert state.inventory().needs == {"optimizer": ("optimizer",)}


def test_parts_stand_in_the_order_in_which_optimizers_step() -> None:
    """What changes first is copied first; attached in another order."""
    work = Work()
    assert list(work.state.inventory().parts) == ["optimizer.body", "optimizer.head"]
    work.state.stepped(work.head)
    assert list(work.state.inventory().parts) == ["optimizer.head", "optimizer.body"]
    work.state.stepped(work.body)
    kept = work.state.inventory()
    work.state.stepped(work.head)
    work.state.stepped(work.body)
    assert work.state.inventory() is kept


def test_state_of_a_parameter_in_no_group_is_refused() -> None:
    """It could not be joined to a name at the restore."""
    work = Work()
    work.train()
    work.body.param_groups[0]["params"].pop()
    with pytest.raises(ConfigError, match="holds state of a parameter that is in no group"):
        work.state.inventory()


# --- distributed tensors -------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=cast(Any, dist).HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_local_parts_of_distributed_tensors_are_asked_for_every_time(one_rank: Any) -> None:
    """The walk is kept, the local tensor may be another one; images are of what it is now."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model: Any = torch.nn.Module()
    model.w = torch.nn.Parameter(distribute_tensor(torch.randn(8, 4), one_rank, [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters())
    state = LiveState.of(model=model, optimizer=optimizer)
    with snapshotter(state) as shooter:
        (model.w * model.w).sum().backward()
        optimizer.step()
        arena = slot_for(shooter)
        for _ in range(3):
            optimizer.step()
            shoot(shooter, arena)
            assert_image(arena, state_bytes(state))
        kept = state.inventory()
        assert "model.w" in kept.distributed
        model.w.data = distribute_tensor(torch.randn(8, 4), one_rank, [Shard(0)])
        assert state.inventory() is kept
        shoot(shooter, arena)
        assert_image(arena, state_bytes(state))


class Closed(torch.Tensor):
    """Has no memory of its own, and does not say what it wraps."""

    @staticmethod
    def __new__(cls) -> "Closed":
        """Looks like a matrix."""
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size((3, 3)), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls()


@pytest.mark.parametrize("where", ["parameter", "state", "buffer"])
def test_a_tensor_that_hides_its_parts_is_refused_by_name(where: str) -> None:
    """It has no bytes of its own; an error of the copy names nothing."""
    model, wrapper = torch.nn.Linear(3, 3), Closed()
    if where == "parameter":
        model.weight = torch.nn.Parameter(wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if where == "state":
        optimizer.state[model.weight] = {"momentum_buffer": wrapper}
    if where == "buffer":
        model.register_buffer("mean", wrapper)
    name = {"parameter": "model.weight", "buffer": "model.mean"}.get(
        where, "optimizer.model.weight.momentum_buffer"
    )
    state = LiveState.of(model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match=rf"^{name}: a \S+\.Closed has no memory of its own"):
        state.dry_encode()


def test_a_model_without_shapes_is_refused() -> None:
    """A lazy module has parameters after its first forward only."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"model\.0\.weight: has no shape yet; run one forward"):
        LiveState.of(model=model)
    model(torch.ones(1, 3))
    LiveState.of(model=model).dry_encode()
