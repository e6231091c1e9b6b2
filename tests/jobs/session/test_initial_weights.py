"""attach(load=...): weights of another run or of a file, for a training that begins."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autockpt
from autockpt.executors.state.live_state import LiveState
from autockpt.session.place.initial_weights import InitialWeights
from autockpt.session.sharding_rules import rank_rules
from autockpt.values.errors import ConfigError
from tests.support import trainings


def net(classes: int, seed: int = 0) -> torch.nn.Sequential:
    """A body with a buffer, and a head."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, classes)
    )


def saved(tmp_path: Path, content: Any, name: str = "w.pt") -> str:
    """A file of torch.save."""
    torch.save(content, tmp_path / name)
    return str(tmp_path / name)


def loaded(model: torch.nn.Module, source: str, **wish: Any) -> str:
    """The notice of a load into a model."""
    weights = InitialWeights.checked(
        {"model": source}, **{"missing": "error", "exclude": (), **wish}
    )
    assert weights is not None
    (notice,) = weights.apply(LiveState.of(model=model, optimizer=None, ruled=None))
    return notice


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """To the bit, buffers too."""
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize("place", [None, "model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_files_of_other_programs_are_read(tmp_path: Path, place: str | None, wrapper: str) -> None:
    """Bare or under one of the usual keys, with the names that DDP and torch.compile give."""
    old, new = net(3, seed=1), net(3, seed=2)
    state = {wrapper + name: tensor for name, tensor in old.state_dict().items()}
    source = saved(tmp_path, state if place is None else {place: state, "epoch": 3})
    assert "9 tensors are loaded" in loaded(new, source)
    assert equal(old, new)


def test_another_head_is_left_out(tmp_path: Path) -> None:
    """By its name; the body comes, the head stays as it was built."""
    old, new, built = net(3, seed=1), net(5, seed=2), net(5, seed=2)
    source = saved(tmp_path, old.state_dict())
    with pytest.raises(ConfigError, match=r"2.weight is \(3, 4\) there and \(5, 4\) here; leave"):
        loaded(new, source)
    assert equal(new, built), "nothing is written where something does not fit"
    loaded(new, source, exclude=["2.*"])
    assert equal(new[0], old[0])
    assert equal(new[1], old[1])
    assert equal(new[2], built[2])


def test_tensors_without_a_partner_are_named_and_may_be_allowed(tmp_path: Path) -> None:
    """On both sides."""
    state = net(3, seed=1).state_dict()
    state["old.weight"] = state.pop("0.weight")
    source = saved(tmp_path, state)
    new = net(3, seed=2)
    with pytest.raises(ConfigError, match=r"1 .*\(0.weight\) and 1 .*\(old.weight\); say missing="):
        loaded(new, source)
    notice = loaded(new, source, missing="ok")
    assert "1 stay as they are (0.weight); 1 of the source are not used (old.weight)" in notice


def test_a_source_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    """With `missing="ok"` as well: it is a mistake."""
    source = saved(tmp_path, {"encoder.weight": torch.zeros(1)})
    with pytest.raises(
        ConfigError, match=r"no name fits; the model has .*, the source has encoder"
    ):
        loaded(net(3), source, missing="ok")


def test_each_rank_takes_its_own_part(tmp_path: Path) -> None:
    """Rows 2 and 3 of four are those of rank 1 of two."""
    whole, part = torch.nn.Linear(2, 4, bias=False), torch.nn.Linear(2, 2, bias=False)
    rules = {"rules": [{"match": "*weight", "sharded": {"dim": 0, "over": "tp"}}]}
    ruled = rank_rules(rules, {"tp": 2}, rank=1, world_size=2)
    weights = InitialWeights({"model": saved(tmp_path, whole.state_dict())})
    weights.apply(LiveState.of(model=part, optimizer=None, ruled=ruled))
    assert torch.equal(part.weight, whole.weight[2:])


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"load": "runs/a"}, "expected a dict by model"),
        ({"load": {"model": "x"}, "missing": True}, 'expected "error" or "ok"'),
        ({"load": {"model": "x"}, "exclude": [3]}, "expected patterns of names"),
        ({"exclude": ["head.*"]}, "nothing to load; add load="),
    ],
)
def test_malformed_wishes_are_refused(wish: dict[str, Any], message: str) -> None:
    """Before anything else happens."""
    with pytest.raises(ConfigError, match=message):
        autockpt.attach(model=net(3), **wish)


def test_an_unknown_model_is_refused_with_those_there_are(tmp_path: Path) -> None:
    """Its prefix was misspelt."""
    weights = InitialWeights({"modle": saved(tmp_path, {})})
    with pytest.raises(ConfigError, match="no model is attached by this name; attached are model"):
        weights.apply(LiveState.of(model=net(3), optimizer=None, ruled=None))


@pytest.mark.usefixtures("attach")
def test_a_fine_tuning_begins_with_the_weights_of_another_run(
    new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its own step 0; its restart goes on from its own checkpoint, without the source."""
    monkeypatch.setenv("AUTOCKPT_LAUNCH_ID", "launch")
    plan = trainings.plan(memory=1, disk=1)
    first, second = (trainings.prepare(new_run(name), plan) for name in ("pre", "fine"))

    def train(run_dir: str, model: torch.nn.Module, steps: int, **wish: Any) -> int:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir=run_dir, **wish)
        start = int(ckpt.step_count)
        for _ in ckpt.steps(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        return start

    old, new, again = net(3, seed=1), net(5, seed=2), net(5, seed=3)
    train(first, old, 2)
    wish: dict[str, Any] = {"load": {"model": first}, "exclude": ["2.*"]}
    assert train(second, new, 0, **wish) == 0
    assert equal(new[0], old[0])
    assert equal(new[1], old[1])
    assert train(second, new, 3, **wish) == 0
    shutil.rmtree(first)
    assert train(second, again, 3, **wish) == 3
    assert equal(again, new)
