"""Rules: which part of which tensor a rank's plain tensor is."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.sharding.mesh import Coordinates
from autockpt.executors.sharding.rules.rules import (
    Expert,
    PaddedVocabulary,
    Rule,
    Rules,
    Sharded,
    drifted_copies,
    missing_rule,
)
from autockpt.executors.sharding.rules.rules_file import load_rules
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.covering import taken, times_covered


def along_tp(rank: int, count: int) -> Coordinates:
    """A rank of a job with tensor parallelism only."""
    return Coordinates(axes={"tp": count}, rank=rank)


def cut(widths: Sequence[int], count: int, rank: int) -> list[tuple[int, int]]:
    """What tensor-parallel layers keep of fused parts: a ceiling each, in order."""
    ranges, base = [], 0
    for width in widths:
        step = -(-width // count)
        ranges.append((base + min(rank * step, width), base + min((rank + 1) * step, width)))
        base += width
    return ranges


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(
    others=SHAPES,
    place=st.integers(0, 3),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    count=st.integers(1, 6),
)
def test_every_element_of_a_sharded_tensor_is_on_one_rank(
    others: list[int], place: int, widths: list[int], count: int
) -> None:
    """Any dimension, any widths of fused parts, any number of ranks: exactly once, in order."""
    dim = min(place, len(others))
    shape = [*others[:dim], sum(widths), *others[dim:]]
    whole = np.arange(np.prod(shape)).reshape(shape)
    rules = Rules(
        rules=(Rule(match="w", sharded=Sharded(dim=dim, over="tp"), sub_parameters=tuple(widths)),)
    )
    boxes = []
    for rank in range(count):
        ranges = cut(widths, count, rank)
        local = np.concatenate([whole.take(range(*r), axis=dim) for r in ranges], axis=dim)
        holding = rules.apply("w", local.shape, along_tp(rank, count))
        assert holding is not None
        assert holding.global_shape == tuple(shape)
        assert np.array_equal(taken(holding, whole), local.ravel())
        boxes += holding.boxes
    assert (times_covered(shape, boxes) == 1).all()


@given(parts=st.integers(1, 3), each=st.integers(1, 4), count=st.integers(1, 5))
def test_equal_fused_parts_need_no_widths(parts: int, each: int, count: int) -> None:
    """`sub_parameters: 2` of SwiGLU is the same as listing two equal widths."""
    shape, sharded = (parts * each, 3), Sharded(dim=0, over="tp")
    by_number = Rules(rules=(Rule(match="*", sharded=sharded, sub_parameters=parts),))
    widths = (each * count,) * parts
    by_width = Rules(rules=(Rule(match="*", sharded=sharded, sub_parameters=widths),))
    for rank in range(count):
        at = along_tp(rank, count)
        assert by_number.apply("w", shape, at) == by_width.apply("w", shape, at)


@given(rows=st.integers(1, 40), extra=st.integers(0, 7), count=st.integers(1, 6))
def test_true_rows_of_a_padded_vocabulary_are_covered_once(
    rows: int, extra: int, count: int
) -> None:
    """Rows beyond the true ones belong to no box, whatever they are padded to."""
    local = -(-rows // count) + extra
    rule = Rule(
        match="*", sharded=Sharded(dim=0, over="tp"), padded_vocabulary=PaddedVocabulary(rows=rows)
    )
    holdings = [
        Rules(rules=(rule,)).apply("w", (local, 2), along_tp(rank, count)) for rank in range(count)
    ]
    assert all(h is not None and h.global_shape == (rows, 2) for h in holdings)
    assert (times_covered((rows, 2), [b for h in holdings if h for b in h.boxes]) == 1).all()
    assert all(h.count <= 2 * local for h in holdings if h)


@given(count=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_experts_are_numbered_over_all_ranks(count: int) -> None:
    """Whatever number of ranks shares 12 experts, each has one name."""
    rules = Rules(rules=(Rule(match="*.experts.*", expert=Expert(over="ep", total=12)),))
    names = []
    for rank in range(count):
        at = Coordinates(axes={"ep": count}, rank=rank)
        for own in range(12 // count):
            placed = rules.place(f"layers.3.experts.{own}.up.weight", (2, 2), at)
            assert placed is not None
            assert placed.holding.holders == ()
            names.append(placed.name)
    assert names == [f"layers.3.experts.{number}.up.weight" for number in range(12)]


GRID = {"pp": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("rule", "holders"),
    [
        (Rule(match="*", sharded=Sharded(dim=0, over="tp")), (4, 6)),
        (Rule(match="*", replicated=("tp",)), (4, 5, 6, 7)),
        (Rule(match="*", unique=("tp",)), (4, 6)),
        (Rule(match="*", averaged=("tp",)), (4, 6)),
        (Rule(match="*", unique=("dp", "tp")), ()),
        (Rule(match="*", replicated=("pp", "tp")), tuple(range(8))),
    ],
    ids=["sharded", "replicated", "unique", "averaged", "unique in both", "on all"],
)
def test_holders_differ_along_copied_axes_only(rule: Rule, holders: tuple[int, ...]) -> None:
    """Data-parallel ranks hold copies; other stages hold other parameters unless a rule says so."""
    rules = Rules(rules=(rule,), copies=("dp",))
    holding = rules.apply("w", (4,), Coordinates(axes=GRID, rank=4))
    assert holding is not None
    assert holding.holders == holders


def test_tensors_of_their_own_are_numbered_in_their_names() -> None:
    """`unique` and `averaged` make one global tensor a rank of the axis."""
    rules = Rules(
        rules=(Rule(match="noise", unique=("dp", "tp")), Rule(match="bias", averaged=("tp",)))
    )
    at = Coordinates(axes=GRID, rank=7)
    noise, bias = rules.place("noise", (2,), at), rules.place("bias", (2,), at)
    assert noise is not None
    assert bias is not None
    assert (noise.name, noise.copies) == ("noise[dp=1][tp=1]", 0)
    assert (bias.name, bias.copies) == ("bias[tp=1]", 2)
    stored = ["bias[tp=0]", "bias[tp=1]", "bias", "bias2[tp=0]", "other"]
    assert drifted_copies("bias[tp=5]", stored) == ["bias[tp=0]", "bias[tp=1]", "bias"]


def test_a_name_that_no_rule_matches_is_left_alone() -> None:
    """Rules speak only for what they match."""
    assert Rules().place("w", (2,), along_tp(0, 1)) is None
    assert Rules().apply("w", (2,), along_tp(0, 1)) is None


def test_two_rules_for_one_name_are_refused() -> None:
    """Which one would win is not for us to guess."""
    rules = Rules(
        rules=(Rule(match="a.*", replicated=("tp",)), Rule(match="re:.*[.]w", unique=("tp",)))
    )
    with pytest.raises(ConfigError, match=re.escape("a.w: 2 rules match: 'a.*', 're:.*[.]w'")):
        rules.rule_for("a.w")


def test_a_rule_that_matches_nothing_is_refused() -> None:
    """A misspelled pattern would leave a tensor to chance."""
    rules = Rules(rules=(Rule(match="*.qvk.*", replicated=("tp",)),))
    with pytest.raises(ConfigError, match=r"'\*\.qvk\.\*' matches none of 1 parameters"):
        rules.require_used(["layers.0.qkv.weight"])
    rules.require_used(["layers.0.qvk.weight"])


TP = Sharded(dim=0, over="tp")


@pytest.mark.parametrize(
    ("rule", "shape", "message"),
    [
        (Rule(match="*", sharded=TP, sub_parameters=(8, 4)), (5,), "gives rank 0 of 2 .* 6 of 12"),
        (Rule(match="*", sharded=TP, sub_parameters=3), (5,), "3 equal parts, and 5 local rows"),
        (
            Rule(match="*", sharded=TP, padded_vocabulary=PaddedVocabulary(rows=11)),
            (5,),
            "11 true rows, and 2 ranks of 5 rows hold 10",
        ),
        (Rule(match="*", sharded=Sharded(dim=1, over="tp")), (5,), "cuts dim 1 of"),
        (Rule(match="*", sharded=Sharded(dim=0, over="ep")), (5,), "no axis 'ep'; .* has tp"),
        (Rule(match="*", expert=Expert(over="tp", total=4)), (5,), "no `experts.N` with N below 2"),
        (Rule(match="re:(", unique=("tp",)), (5,), "no regular expression"),
    ],
    ids=["widths", "parts", "rows", "dim", "axis", "expert", "expression"],
)
def test_a_tensor_that_cannot_be_what_the_rule_says_is_refused(
    rule: Rule, shape: tuple[int, ...], message: str
) -> None:
    """The message names the tensor, what the rule gives and what there is."""
    with pytest.raises(ConfigError, match=message):
        Rules(rules=(rule,)).apply("w", shape, along_tp(0, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "says nothing"),
        ({"sub_parameters": 2, "unique": ("tp",)}, "need `sharded"),
        ({"sharded": TP, "replicated": ("tp",)}, "an axis stands twice: tp"),
        (
            {"sharded": Sharded(dim=1, over="tp"), "padded_vocabulary": PaddedVocabulary(rows=3)},
            "is cut in dim 0",
        ),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(given: dict[str, object], message: str) -> None:
    """At once, not at the first checkpoint."""
    with pytest.raises(ConfigError, match=f"rule 'w': .*{message}"):
        Rule(match="w", **given)  # type: ignore[arg-type]


def test_rules_speak_for_plain_parameters_by_identity() -> None:
    """What the optimizer's state follows is the parameter, not its name."""
    model = torch.nn.Linear(3, 2)
    rules = Rules(rules=(Rule(match="*weight", sharded=TP),))
    placed = rules.place_all(model.named_parameters(), along_tp(1, 2))
    assert set(placed) == {id(model.weight)}
    assert isinstance(placed[id(model.weight)].holding, LocalShard)
    assert placed[id(model.weight)].holding.global_shape == (4, 3)


def test_a_missing_rule_is_written_out_for_the_reader() -> None:
    """Each line of the message is a rule for this very tensor, in the form of the file."""
    first, *lines = missing_rule("mlp.up.weight", {3: (4, 2), 1: (4, 2)}).splitlines()
    assert first.startswith("mlp.up.weight: ranks 1, 3 hold different content")
    rules = load_rules({"rules": yaml.safe_load("\n".join(lines))}).rules
    assert [rule.match for rule in rules] == ["mlp.up.weight"] * 4
    assert [rule.divided for rule in rules] == [("tp",), ("ep",), ("tp",), ("tp",)]
