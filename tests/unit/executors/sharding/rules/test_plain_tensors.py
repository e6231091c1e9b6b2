"""Rules and modules that place parameters: names, parts, and what does not go together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.restore.shard_sources import shards_on_disk
from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.executors.sharding.mesh import Coordinates
from autockpt.executors.sharding.rules.plain_tensors import RankRules, placed_parameters
from autockpt.executors.sharding.rules.rules import Rule, Rules, Sharded
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.simulated import Member, save
from tests.unit.executors.sharding.zeros import zero_2, zero_3

COLUMNS = Rule(match="*weight", sharded=Sharded(dim=0, over="tp"))


def ruled(*rules: Rule, rank: int = 0, **axes: int) -> RankRules:
    """Rules on a rank of a grid."""
    return RankRules(rules=Rules(rules=rules), at=Coordinates(axes=axes or {"tp": 2}, rank=rank))


def state_of(tensors: dict[str, torch.Tensor], told: RankRules | None) -> LiveState:
    """A model of these parameters, with an optimizer that has state of each."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor.clone()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter] = {"momentum_buffer": parameter.detach() * 2}
    return LiveState.of(model=module, optimizer=optimizer, ruled=told)


def test_a_rule_names_and_divides_a_parameter_and_its_state() -> None:
    """Numbered in the name, cut along dim 0; what no rule matches is as it was."""
    own = Rule(match="noise", unique=("tp",))
    told = ruled(COLUMNS, own, rank=1)
    tensors = {"weight": torch.ones(3, 2), "noise": torch.ones(4), "bias": torch.ones(4)}
    held = state_of(tensors, told).inventory().holdings
    half = LocalShard(global_shape=(6, 2), boxes=(Box(offset=(3, 0), shape=(3, 2)),))
    assert held["model.weight"] == half
    assert held["optimizer.model.weight.momentum_buffer"] == half
    assert held["model.noise[tp=1]"] == held["optimizer.model.noise[tp=1].momentum_buffer"]
    assert "model.bias" not in held


def test_names_of_several_models_are_told_apart() -> None:
    """In rules the name of the model stands in front of those of its parameters."""
    models = {name: nn.Linear(2, 2, bias=False) for name in ("actor", "critic")}
    told = ruled(Rule(match="critic.weight", sharded=Sharded(dim=0, over="tp")))
    state = LiveState.of(model=models, ruled=told)
    shapes = {name: state.holding(p).global_shape for name, p in state.parameters().items()}
    assert shapes == {"model.actor.weight": (2, 2), "model.critic.weight": (4, 2)}


def test_a_tied_weight_keeps_both_of_its_names() -> None:
    """A rule speaks of the tensor, whatever it is called."""
    module = nn.Module()
    module.embed, module.head = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    module.head.weight = module.embed.weight
    told = ruled(Rule(match="embed.weight", sharded=Sharded(dim=0, over="tp")))
    state = LiveState.of(model=module, ruled=told)
    assert list(state.parameters()) == ["model.embed.weight", "model.head.weight"]
    held = state.inventory().holdings
    assert held["model.head.weight"] == held["model.embed.weight"]


def test_what_a_wrapper_divides_is_refused_to_rules() -> None:
    """Two that divide the same tensor, and neither knows of the other."""
    model = nn.Linear(2, 2, bias=False)
    cut = LocalShard(global_shape=(4,), boxes=(Box(offset=(0,), shape=(4,)),))
    half = LocalShard(global_shape=(8,), boxes=cut.boxes)
    with pytest.raises(ConfigError, match=r"^weight: a rule matches it, and its wrapper"):
        placed_parameters(
            {"model": model}, {"model": model}, {id(model.weight): half}, ruled(COLUMNS)
        )
    every = ruled(Rule(match="*", replicated=("tp",)))
    for make in (zero_2, zero_3):
        zero, module = make([(2, 3)], 0, 1)
        with pytest.raises(ConfigError, match=r"^p0: a rule matches it"):
            LiveState.of(model=module, optimizer=zero, ruled=every)


def test_a_rule_says_more_than_data_parallelism() -> None:
    """DDP only knows that its ranks are alike: the whole that it speaks of is a part."""
    model = nn.Linear(2, 2, bias=False)
    known = {id(model.weight): whole_of(model.weight, (0, 2))}
    found = placed_parameters({"model": model}, {"model": model}, known, ruled(COLUMNS))
    assert found[id(model.weight)].holding.global_shape == (4, 2)


def test_a_pattern_without_a_parameter_is_refused_where_all_ranks_have_the_same() -> None:
    """A stage of a pipeline may have none of what a rule matches; a rank of an axis that the rule
    names has."""
    bad = Rule(match="*wieght", sharded=Sharded(dim=0, over="tp"))
    for axes in ({"tp": 2}, {"pp": 1, "tp": 2}):
        with pytest.raises(ConfigError, match=r"'\*wieght' matches none of 1 parameters"):
            state_of({"weight": torch.ones(2, 2)}, ruled(bad, **axes))
    state_of({"weight": torch.ones(2, 2)}, ruled(bad, pp=2, tp=2))


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_rank_with_nothing_but_padding_has_state_all_the_same(after: int, tmp_path: Any) -> None:
    """4 rows in 3 ranks of 2: the last one's are padding, and its optimizer goes on with them."""
    from autockpt.executors.sharding.rules.rules import PaddedVocabulary

    words = PaddedVocabulary(rows=4)
    rule = Rule(match="w", sharded=Sharded(dim=0, over="tp"), padded_vocabulary=words)

    def rank(number: int, count: int, value: float | None = None) -> Member:
        rows = torch.arange(4.0)[2 * number : 2 * number + 2] if count > 1 else torch.arange(4.0)
        full = torch.zeros(2 if count > 1 else 4, 1)
        full[: len(rows)] = rows.view(-1, 1)
        told = ruled(rule, rank=number, tp=count)
        state = state_of({"w": full if value is None else torch.full_like(full, value)}, told)
        return Member(state)

    folder = save(str(tmp_path), [rank(r, 3) for r in range(3)])
    for r in range(after):
        new = rank(r, after, 7.0)
        new.restore(shards_on_disk(folder, r, after))
        (live,) = new.state.parameters().values()
        (optimizer,) = new.state.optimizers.values()
        state = optimizer.state[live]["momentum_buffer"]
        expected = rank(r, after).state.parameters()["model.w"]
        assert state.shape == live.shape
        if r < 2:
            assert torch.equal(live, expected)
            assert torch.equal(state, expected * 2)
        else:
            assert (live == 7).all()
            assert (state == 0).all()


def test_megatrons_layers_are_called_by_their_number_in_the_whole_model() -> None:
    """A stage of a pipeline counts its layers from 0; its ShardedTensors know better."""
    module: Any = nn.Module()
    module.layer = nn.Linear(2, 3, bias=False)
    leaf = SimpleNamespace(
        key="decoder.layers.weight", data=module.layer.weight.detach(), global_shape=(8, 3, 2),
        global_offset=(5, 0, 0), local_shape=(3, 2), prepend_axis_num=1,
    )  # fmt: skip
    module.sharded_state_dict = lambda: {"weight": leaf}
    held = {id(module.layer.weight): whole_of(module.layer.weight)}
    placed = placed_parameters({"model": module}, {"model": module}, held, None)
    state = LiveState({"model": module}, {}, {}, held, placed)
    assert list(state.tensors) == ["model.decoder.layers.weight[5]"]


def test_a_tensor_of_each_ranks_own_is_not_averaged() -> None:
    """Else the mean would be of different things."""
    with pytest.raises(ConfigError, match="is not averaged"):
        Rule(match="w", unique=("dp",), averaged=("tp",))


def _half(rank: int, told: RankRules | None, value: float | None = None) -> Member:
    rows = torch.arange(12.0).view(6, 2)[3 * rank : 3 * rank + 3]
    tensor = rows if value is None else torch.full_like(rows, value)
    return Member(state_of({"weight": tensor}, told), Place(rank=rank, nodes=(0, 0)))


def test_ranks_that_saved_without_rules_go_on_with_them(tmp_path: Any) -> None:
    """Each takes what was its own; from the next checkpoint on any number of ranks may follow."""
    before = save(str(tmp_path / "before"), [_half(rank, None) for rank in range(2)])
    whole = state_of({"weight": torch.zeros(6, 2)}, ruled(COLUMNS, tp=1))
    with pytest.raises(ConfigError, match=r"^weight: ranks 0, 1 hold different content"):
        Member(whole).restore(shards_on_disk(before, 0, 1))
    ranks = [_half(rank, ruled(COLUMNS, rank=rank), value=9.0) for rank in range(2)]
    for number, rank in enumerate(ranks):
        rank.restore(shards_on_disk(before, number, 2))
        assert rank.contents() == _half(number, ruled(COLUMNS, rank=number)).contents()
    after = save(str(tmp_path / "after"), ranks)
    Member(whole).restore(shards_on_disk(after, 0, 1))
    (weight,), (optimizer,) = whole.parameters().values(), whole.optimizers.values()
    assert torch.equal(weight, torch.arange(12.0).view(6, 2))
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], weight * 2)
