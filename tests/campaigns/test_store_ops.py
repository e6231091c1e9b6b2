"""The campaign `store` notices when a rule of replaced COMMITs is taken away."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from autockpt.executors.storage.places.object_store import Objects
from autockpt.executors.storage.rewriting import commits
from autockpt.values.record import to_json
from tests.campaigns.store_ops import StoreEverywhere


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[StoreEverywhere]:
    """The cases of one shape in which shards are written again."""
    campaign = StoreEverywhere(tmp_path)
    shape = campaign._plan[0][0]
    campaign._plan = [one for one in campaign._plan if one[:2] == (shape, "reduce")]
    yield campaign
    campaign.close()


def is_broken(campaign: StoreEverywhere) -> bool:
    """Whether one of its cases fails."""
    for number in range(len(campaign._plan)):
        try:
            campaign.run(number, random.Random(0))
        except AssertionError:
            return True
    return False


def unconditional(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced whatever it is."""
    monkeypatch.setattr(Objects, "replace", lambda self, name, old, new: not self.write(name, new))


def unfenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that a late put names are removed."""
    monkeypatch.setattr(commits, "_whole", lambda folder, commit: commit)


def old_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old shards go in front of the COMMIT that counts."""
    real = commits._swap

    def swap(folder: str, old: object, new: object, **more: object) -> None:
        if "replaces" in to_json(new):  # type: ignore[arg-type]
            commits._remove(folder, commits.files_of(old.records))  # type: ignore[attr-defined]
        real(folder, old, new, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commits, "_swap", swap)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [unconditional, unfenced, old_first])
def test_each_rule_is_missed(
    campaign: StoreEverywhere, monkeypatch: pytest.MonkeyPatch, mutant: object
) -> None:
    """Without a rule some case leaves a checkpoint that cannot be read."""
    with monkeypatch.context() as patch:
        mutant(patch)  # type: ignore[operator]
        assert is_broken(campaign)


@pytest.mark.slow
def test_no_case_fails_with_every_rule(campaign: StoreEverywhere) -> None:
    """Else the mutants say nothing."""
    assert not is_broken(campaign)
