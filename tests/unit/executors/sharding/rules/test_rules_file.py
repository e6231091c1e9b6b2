"""Rules as data: the example in the docstring, and every refusal."""

import inspect
from typing import Any

import pytest
import yaml

from autockpt.executors.sharding.mesh import Coordinates
from autockpt.executors.sharding.rules import rules_file
from autockpt.executors.sharding.rules.rules import Expert, PaddedVocabulary, Sharded
from autockpt.executors.sharding.rules.rules_file import load_rules
from autockpt.values.errors import ConfigError


def test_the_documented_file_is_read() -> None:
    """Every pattern of Universal Checkpointing has its line."""
    text = inspect.getdoc(rules_file) or ""
    rules = load_rules(yaml.safe_load(text.split("\n\n", 1)[1]))
    assert rules.copies == ("dp",)
    norm, qkv, gate, embed, experts, router, noise = rules.rules
    assert norm.replicated == ("tp",)
    assert qkv.sharded == Sharded(dim=0, over="tp")
    assert qkv.sub_parameters == (4096, 1024, 1024)
    assert gate.sub_parameters == 2
    assert embed.padded_vocabulary == PaddedVocabulary(rows=50257)
    assert experts.expert == Expert(over="ep", total=64)
    assert router.averaged == ("tp",)
    assert router.matches("layers.1.router.bias")
    assert noise.unique == ("dp", "tp")
    at = Coordinates(axes={"dp": 2, "tp": 4}, rank=3)
    holding = rules.apply("layers.0.qkv.weight", (1536, 8), at)
    assert holding is not None
    assert [str(box) for box in holding.boxes] == [
        "[3072:4096, 0:8]", "[4864:5120, 0:8]", "[5888:6144, 0:8]",
    ]  # fmt: skip
    assert holding.holders == (3, 7)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "rules file: expected keys and values, got list"),
        ({"rule": []}, "rules file: unknown key 'rule'; known: rules, copies"),
        ({"rules": {}, "copies": "dp"}, "copies: expected a list of axes"),
        ({"rules": "x"}, "rules: expected a list, got str"),
        ({"rules": ["x"]}, r"rules\[0\]: expected keys and values"),
        ({"rules": [{"unique": ["tp"]}]}, r"rules\[0\].match: expected a pattern"),
        ({"rules": [{"match": "w", "shard": 1}]}, r"rules\[0\]: unknown key 'shard'"),
        ({"rules": [{"match": "w"}]}, r"rules\[0\]: rule 'w': says nothing"),
        ({"rules": [{"match": "re:(", "unique": ["tp"]}]}, r"rules\[0\]: .*no regular expression"),
        (
            {"rules": [{"match": "w", "sharded": {"dim": "0", "over": "tp"}}]},
            r"rules\[0\].sharded.dim: expected int",
        ),
        ({"rules": [{"match": "w", "sharded": {"dim": 0}}]}, "'over' of Sharded is missing"),
        (
            {"rules": [{"match": "w", "sharded": {"di": 0, 4: None}}]},
            "sharded: unknown field 4 of Sharded",
        ),
        (
            {"rules": [{"match": "w", "sharded": {"dim": 0, "over": "tp"}, "sub_parameters": []}]},
            "sub_parameters: expected a number of equal parts",
        ),
        (
            {"rules": [{"match": "w", "sharded": {"dim": 0, "over": "t"}, "sub_parameters": [0]}]},
            "sub_parameters: expected a number of equal parts",
        ),
    ],
)
def test_a_bad_entry_is_named(data: Any, message: str) -> None:
    """Where it stands, what was expected and what is there."""
    with pytest.raises(ConfigError, match=message):
        load_rules(data)
