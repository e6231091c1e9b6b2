"""Tells a person on the terminal what the keeper of this node has found of stuck ranks.

The rank that speaks on the terminal may be the one that is stuck.
"""

import json
import time

from autockpt.console import Console
from autockpt.run_directory import RunDirectory

LOOK_S = 0.5


class Incidents:
    """Of one launcher."""

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self._folder, self._console = run.path / "incidents", console
        self._looked_s = 0.0
        self._told = self._names()

    def look(self, node: int | None, *, now: bool = False) -> None:
        """Says what is new of `node`; rarely, but `now`."""
        if not now and time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        for name in sorted(self._names() - self._told):
            if node is not None and not name.endswith(f"-node-{node:03d}"):
                continue
            try:
                text = json.loads((self._folder / name / "incident.json").read_text())["sentence"]
            except (OSError, ValueError, LookupError, TypeError):
                continue  # it is still being written
            self._told.add(name)
            self._console.warn(str(text))

    def _names(self) -> set[str]:
        try:
            return {path.name for path in self._folder.iterdir()}
        except OSError:
            return set()
