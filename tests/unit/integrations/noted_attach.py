"""A session that notes what an adapter asks of it."""

from types import SimpleNamespace
from typing import Any

import pytest

import autockpt


class NotingLoader(list[Any]):
    """Batches."""

    def __init__(self, session: "NotingSession", batches: Any) -> None:
        super().__init__(batches)
        self._session = session

    def end_left_epoch(self) -> None:
        """Another pass begins."""
        self._session.calls.append("end_left_epoch")


class NotingSession:
    """Counts boundaries; `extras` holds what the adapter gave at each of them."""

    def __init__(self, restored: Any, named: dict[str, Any]) -> None:
        self.restored, self.named = restored, named
        self.step_count = restored.step if restored else 0
        self.extras: list[Any] = []
        self.calls: list[str] = []
        self.stopped = False

    def step(self) -> int:
        """A boundary."""
        self.step_count += 1
        self.extras.append(self.named["extra"]())
        self.calls.append("step")
        return self.step_count

    def loader(self, loader: Any, *, name: str) -> Any:
        """With what a loader of ours has."""
        self.calls.append(f"loader {name}")
        return NotingLoader(self, loader)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)


def note_attach(
    monkeypatch: pytest.MonkeyPatch, *, step: int = 0, extra: dict[str, Any] | None = None
) -> list[NotingSession]:
    """`autockpt.attach` gives such sessions from now on, resumed at `step` where there is one."""
    made: list[NotingSession] = []

    def attach(**named: Any) -> NotingSession:
        restored = SimpleNamespace(step=step, source="disk", extra=extra or {}) if step else None
        made.append(NotingSession(restored, named))
        return made[-1]

    monkeypatch.setattr(autockpt, "attach", attach)
    return made
