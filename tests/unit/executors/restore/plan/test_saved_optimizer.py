"""Skeletons of several ranks, put together by parameter name."""

from typing import Any

import pytest

from autockpt.executors.restore.plan.saved_optimizer import SavedOptimizer, add_skeleton
from autockpt.values.errors import CorruptCheckpointError


def skeleton(names: list[str], *, lr: float = 0.1, state: bool = True) -> dict[str, Any]:
    """One rank's optimizer: one group, Adam's state for each parameter or for none."""
    places = [[0, i] for i in range(len(names))]
    regular = {"exp_avg:d step:h": places} if state else {}
    return {
        "groups": [{"params": "\n".join(names), "values": {"lr": lr}}], "regular": regular,
        "irregular": {}, "loose": {},
    }  # fmt: skip


def put_together(*skeletons: dict[str, Any]) -> SavedOptimizer:
    """The home shard's first."""
    saved = SavedOptimizer()
    for data in skeletons:
        add_skeleton(saved, data)
    return saved


def test_stages_of_a_pipeline_make_one_optimizer() -> None:
    """Each rank has its own parameters; a group of all of them takes settings they agree on."""
    saved = put_together(skeleton(["a", "b"]), skeleton(["c"]))
    assert all(saved.knows(name) for name in "abc")
    assert list(saved.tensors_of("optimizer", "c")) == ["optimizer.c.exp_avg", "optimizer.c.step"]
    whole = saved.group_of(("a", "b", "c"))
    assert whole is not None
    assert whole.values == {"lr": 0.1}
    assert (saved.own_groups, len(saved.groups)) == (1, 2)


def test_settings_that_disagree_are_nobodys() -> None:
    """A learning rate is not chosen by the order of ranks."""
    saved = put_together(skeleton(["a"], lr=0.1), skeleton(["b"], lr=0.2))
    assert saved.group_of(("a", "b")) is None
    alone = saved.group_of(("b",))
    assert alone is not None
    assert alone.values == {"lr": 0.2}


def test_a_parameter_that_no_skeleton_names_has_no_group() -> None:
    """The model changed: whoever restores says so."""
    saved = put_together(skeleton(["a"]))
    assert saved.group_of(("a", "new")) is None
    assert not saved.knows("new")


def test_state_that_another_rank_owns_is_found_there() -> None:
    """ZeRO: all ranks have all parameters, each the state of some; the first word wins."""
    saved = put_together(skeleton(["a", "b"], state=False), skeleton(["a", "b"]))
    assert saved.keys["b"] == [("exp_avg", True), ("step", False)]
    again = skeleton(["a", "b"])
    again["regular"] = {"momentum:d": [[0, 0]]}
    add_skeleton(saved, again)
    assert saved.keys["a"] == [("exp_avg", True), ("step", False)]


def test_only_the_home_shards_private_tensors_are_taken() -> None:
    """A tensor among the settings, or beside the parameters, is its rank's own."""
    mine, other = skeleton(["a"]), skeleton(["b"])
    mine["groups"][0]["values"]["lr"] = {"$tensor": "optimizer.lr.0"}
    other["groups"][0]["values"]["lr"] = {"$tensor": "optimizer.lr.1"}
    mine["loose"], other["loose"] = {"k": {"$tensor": "own"}}, {"k": {"$tensor": "other"}}
    assert list(put_together(mine, other).private_tensors()) == ["optimizer.lr.0", "own"]


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 3},
        {"groups": [{"values": {}}]},
        {"regular": {"exp_avg:d": [[0, 7]]}},
        {"regular": {"exp_avg:d": [[2, 0]]}},
        {"regular": {"exp_avg": [[0, 0]]}},
        {"irregular": []},
    ],
)
def test_a_skeleton_that_lies_is_corrupt(change: dict[str, Any]) -> None:
    """Never an exception of Python's."""
    with pytest.raises(CorruptCheckpointError, match="its optimizer is malformed"):
        put_together(skeleton(["a"]) | change)
