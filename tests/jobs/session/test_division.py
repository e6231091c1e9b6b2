"""Rules and axes as a script writes them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autockpt
from autockpt.session.sharding_rules import rank_rules
from autockpt.values.errors import ConfigError

RULE = {"match": "*.weight", "sharded": {"dim": 0, "over": "tp"}}
SAME = autockpt.Rules(
    rules=(autockpt.Rule(match="*.weight", sharded=autockpt.Sharded(dim=0, over="tp")),),
    copies=("dp",),
)
AXES = {"dp": 2, "tp": 2}


def test_an_object_a_dict_and_a_file_say_the_same(tmp_path: Path) -> None:
    """Whatever form is the handiest."""
    file = tmp_path / "rules.yaml"
    file.write_text('copies: [dp]\nrules:\n  - {match: "*.weight", sharded: {dim: 0, over: tp}}\n')
    for given in (SAME, {"copies": ["dp"], "rules": [RULE]}, file, str(file)):
        found = rank_rules(given, AXES, rank=3, world_size=4)
        assert found is not None
        assert found.rules == SAME
        assert (found.at.at("dp"), found.at.at("tp")) == (1, 1)


def test_a_device_mesh_says_where_ranks_stand() -> None:
    """Its own order of ranks, and the names of its dimensions."""
    ranks = torch.tensor([[0, 2], [1, 3]])
    mesh = SimpleNamespace(mesh=ranks, mesh_dim_names=("dp", "tp"))
    found = rank_rules(SAME, mesh, rank=2, world_size=4)
    assert found is not None
    assert (found.at.at("dp"), found.at.at("tp")) == (0, 1)
    mesh.mesh_dim_names = None
    with pytest.raises(ConfigError, match="mesh_dim_names"):
        rank_rules(SAME, mesh, rank=2, world_size=4)


@pytest.mark.parametrize(
    ("rules", "axes", "message"),
    [
        (None, AXES, "pass rules="),
        ([RULE], AXES, "expected autockpt.Rules, a dict .* got list"),
        ({"rules": [{"match": "w"}]}, AXES, r"attach\(rules=\.\.\.\): rules\[0\]: .* says nothing"),
        ({"rulse": []}, AXES, "unknown key 'rulse'"),
        ("missing.yaml", AXES, "missing.yaml: cannot be read"),
        (SAME, None, r"\{\} are 1 ranks, this job has 4"),
        (SAME, {"tp": 2}, r"\{'tp': 2\} are 2 ranks, this job has 4"),
    ],
)
def test_what_cannot_be_meant_is_refused(rules: Any, axes: Any, message: str) -> None:
    """With what was expected."""
    with pytest.raises(ConfigError, match=message):
        rank_rules(rules, axes, rank=0, world_size=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [", ".*line"),
        ("a: 2024-13-99", "month must be"),
        ("[" * 3000, "brackets are nested deeper"),
        ("- " * 3000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, text: str, message: str) -> None:
    """And what the reader stumbled over."""
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)rules\.yaml: not valid YAML: {message}"):
        rank_rules(file, AXES, rank=0, world_size=4)


def test_a_job_without_rules_has_none() -> None:
    """Nothing is asked of it."""
    assert rank_rules(None, None, rank=0, world_size=4) is None
