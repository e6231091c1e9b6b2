"""docs/reference/renamed.md: old words are gone, and new ones exist."""

from pathlib import Path

import click
import pytest

from autockpt.cli import app
from autockpt.values import telemetry

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "renamed.md"
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith(("| command", "| option", "| event"))
]


def has(kind: str, name: str) -> bool:
    """Whether the program has a command, an option (`command --option`) or an event."""
    if kind == "event":
        return hasattr(telemetry, name)
    words = name.split()
    command = app.cli.get_command(click.Context(app.cli), words[0])
    options = [] if command is None else [o for p in command.params for o in p.opts]
    return command is not None and all(word in options for word in words[1:])


@pytest.mark.parametrize(("kind", "old", "new"), ROWS)
def test_the_page_is_true(kind: str, old: str, new: str) -> None:
    """A word that comes back, or a name that changes again, fails."""
    assert has(kind, new), new
    assert not has(kind, old), old
