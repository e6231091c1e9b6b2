"""The default iteration with several optimizers ends when every one has stepped once.

That is known of optimizers that take turns (a GAN's).  Where one steps more often than another, an
iteration may be a round of all, or each step of the busiest.  Only the script's loop knows.
"""

from collections.abc import Iterable

PATIENCE = 100
"""Steps of one optimizer for which another is waited for that does not step any more, or yet."""


class Rounds:
    """Counts the steps of each optimizer since the last boundary, by name."""

    def __init__(self, optimizers: Iterable[str]) -> None:
        self._awaited = set(optimizers)
        self._steps: dict[str, int] = {}

    def stepped(self, optimizer: str) -> None:
        """One of them has stepped."""
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._awaited.add(optimizer)
        if steps > PATIENCE:
            self._awaited &= set(self._steps)

    def begin(self) -> None:
        """A boundary."""
        self._steps.clear()

    @property
    def complete(self) -> bool:
        """All have stepped that are waited for."""
        return self._awaited <= set(self._steps)

    @property
    def uneven(self) -> tuple[str, str] | None:
        """(one that has stepped again, another that has not stepped yet) since the boundary."""
        behind = self._awaited - set(self._steps)
        again = [name for name, steps in self._steps.items() if steps > 1]
        return (again[0], min(behind)) if again and behind else None
