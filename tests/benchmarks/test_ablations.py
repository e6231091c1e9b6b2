"""The ablations' driver: a save is one that began, on a boundary behind an optimizer's step."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.ablation import presets


class Fake:
    """A session whose slot is free at the `free`-th boundary behind an iteration."""

    fence_stall_s = 0.0

    def __init__(self, free: int) -> None:
        self.free, self.iterated, self.asked = free, False, False
        self.saves = SimpleNamespace(newest_on_disk=0)
        self._client = SimpleNamespace(saves=self.saves)

    def iterate(self) -> None:
        self.iterated = True

    def save(self) -> None:
        self.asked = True

    def step(self) -> None:
        self.free -= 1
        if self.iterated and self.asked and self.free == 0:
            self.saves.newest_on_disk += 1
        self.iterated = self.asked = False


def test_a_save_is_asked_for_until_one_begins() -> None:
    """Iterations come first; later boundaries are tried while no slot is free."""
    fake: Any = Fake(3)
    assert presets.begin_save(fake, fake) > 0
    assert fake.saves.newest_on_disk == 1


def test_no_save_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure of a checkpoint that never began would be one of nothing."""
    monkeypatch.setattr(presets, "PATIENCE_S", 0.01)
    fake: Any = Fake(-1)
    with pytest.raises(RuntimeError, match="no checkpoint began"):
        presets.begin_save(fake, fake)


@pytest.mark.parametrize(
    ("commit", "clean"), [("abc1234", True), ("abc1234-changed", False), ("unknown", False)]
)
def test_results_of_changed_code_are_marked(
    commit: str, clean: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clean` is true only where the commit's own code ran."""
    monkeypatch.setattr(harness, "commit", lambda: commit)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.publish("x", [harness.row("a", "b", [1.0], "s")], settings={})
    assert f'"clean": {str(clean).lower()}' in (tmp_path / "x.json").read_text()
