"""Names in the whole model, whatever wraps it and however it is cut into stages."""

import pytest
import torch
from torch import nn

from autockpt.executors.sharding.fqns import Assembled, ModelNames, plain_fqn
from autockpt.values.errors import ConfigError


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("weight", "weight"),
        ("module.layers.0.weight", "layers.0.weight"),
        ("module._orig_mod.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.module.weight", "weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.layers.1._fsdp_wrapped_module.weight", "layers.1.weight"),
        ("layers.2._checkpoint_wrapped_module.weight", "layers.2.weight"),
        ("_fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod.weight", "weight"),
        ("_fsdp_wrapped_module._flat_param", "_flat_param"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("module", "module"),
    ],
)
def test_words_of_wrappers_are_taken_off(wrapped: str, plain: str) -> None:
    """The model's own words stay, also where they look like a wrapper's."""
    assert plain_fqn(wrapped) == plain
    assert plain_fqn(plain) == plain


def test_real_wrappers_leave_the_plain_name() -> None:
    """The words of activation checkpointing and torch.compile are those of this torch."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = [name for name, _ in model.named_parameters()]
    model[1] = checkpoint_wrapper(model[1])
    wrapped = torch.compile(model, backend="eager")
    found = [name for name, _ in wrapped.named_parameters()]
    assert found != names
    assert [plain_fqn(name) for name in found] == names


class Around(nn.Module):
    """A module around another one, with a head of its own, or that one's."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2, bias=False)})
        self.head = nn.Linear(2, 2, bias=False)
        if tied:
            self.head.weight = self.module["head"].weight


@pytest.mark.parametrize("wrappers", [(), ("module",), ("module", "_orig_mod", "module")])
def test_what_would_have_the_name_of_another_keeps_its_module(wrappers: tuple[str, ...]) -> None:
    """Whatever is around both; the rest is called as it always was."""
    model: nn.Module = Around()
    for word in wrappers:
        model = nn.ModuleDict({word: model})
    names = ModelNames(model)
    found = {names.of(name) for name, _ in model.named_parameters()}
    assert found == {"body.weight", "body.bias", "module.head.weight", "head.weight"}


def test_one_tensor_in_two_places_is_no_contradiction() -> None:
    """It has one name, as it always had."""
    model = Around(tied=True)
    names = ModelNames(model)
    found = [names.of(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    assert found == ["body.weight", "body.bias", "head.weight", "head.weight"]


def test_a_buffer_that_is_yet_to_be_filled_has_its_name_already() -> None:
    """A name is the same before the first forward and after it."""
    model = nn.ModuleDict({"module": nn.Module(), "other": nn.Linear(1, 1)})
    model["module"].register_buffer("angles", torch.ones(1))
    model.register_buffer("angles", None, persistent=False)
    before = ModelNames(model).of("module.angles")
    model.angles = torch.ones(1)
    assert before == ModelNames(model).of("module.angles") == "module.angles"


class Block(nn.Module):
    """A parameter, buffers that are kept and not, a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.inner = nn.Linear(2, 2)


class Whole(nn.Module):
    """Two layers in a list, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(2)


def test_parts_at_their_paths_have_the_names_of_the_whole() -> None:
    """Parameters, buffers and what a state dict leaves out are those of the whole model."""
    whole = Whole()
    parts = Assembled(at={"layers.0": whole.layers[0], "layers.1": whole.layers[1]})
    parts_and_norm = Assembled(parts, at={"norm": whole.norm})
    assert _tensors(parts_and_norm) == _tensors(whole)
    assert set(parts_and_norm.state_dict()) == set(whole.state_dict())


def _tensors(module: nn.Module) -> dict[str, int]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: id(tensor) for name, tensor in named}


def test_stages_with_global_names_are_laid_over_one_another() -> None:
    """Two stages that both have `layers` give one `layers`; the stages stay as they are."""
    whole = Whole()
    first, last = Whole(), Whole()
    first.layers, last.layers = nn.ModuleDict(), nn.ModuleDict()
    first.layers["0"], last.layers["1"] = whole.layers[0], whole.layers[1]
    del first.norm
    last.norm = whole.norm
    assert _tensors(Assembled(first, last)) == _tensors(whole)
    assert list(first.layers) == ["0"]
    assert list(last.layers) == ["1"]


def test_what_a_state_dict_leaves_out_stays_out() -> None:
    """A buffer that is not persistent is none of the assembled model's state either."""
    assert set(Assembled(Block()).state_dict()) == set(Block().state_dict())


def test_two_parts_with_one_name_are_refused() -> None:
    """Stages that count from 0 must say where they stand, else one would replace the other."""
    with pytest.raises(ConfigError, match=r"two parts have a tensor 'layers\.0\.scale'; give"):
        Assembled(Whole(), Whole())


def test_wrappers_are_not_kept_alive() -> None:
    """DDP that outlives the training keeps its communication threads."""
    whole = Whole()
    wrapper = nn.Sequential(whole.norm)
    assembled = Assembled(at={"norm": whole.norm}, wrappers=[wrapper])
    assert assembled.parts == (whole.norm, wrapper)
    del wrapper
    assert assembled.parts == (whole.norm,)


def test_a_part_may_be_given_twice() -> None:
    """The same tensor under the same name is no contradiction."""
    whole = Whole()
    assert _tensors(Assembled(whole, whole)) == _tensors(whole)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_stages_of_the_tracer_keep_the_names_of_the_model() -> None:
    """torch.distributed.pipelining splits a traced model; nothing has to be renamed."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = nn.Sequential()
    for i in range(3):
        model.append(nn.Linear(2, 2))
        model.append(nn.BatchNorm1d(2) if i == 1 else nn.ReLU())
    pipe = pipeline(model, (torch.ones(4, 2),), split_spec={"2": SplitPoint.BEGINNING})
    stages = [pipe.get_stage_module(i) for i in range(pipe.num_stages)]
    assert len(stages) == 2
    assert set(Assembled(*stages).state_dict()) == set(model.state_dict())
