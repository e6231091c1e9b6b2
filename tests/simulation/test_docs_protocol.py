"""docs/internals/protocol.md says what the code does."""

import re
from pathlib import Path

from autockpt.executors.protocol.transitions import TRANSITIONS, markdown
from tests.simulation.mutants import MUTANTS

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "protocol.md"


def test_the_table_of_the_page_is_the_generated_one() -> None:
    """The transition table is printed from transitions.py and nowhere else."""
    text = PAGE.read_text()
    table = re.search(r"<!-- transitions -->\n(.*?)<!-- /transitions -->", text, re.DOTALL)
    assert table is not None
    assert table.group(1) == markdown()


def test_every_mutant_stands_beside_its_rule() -> None:
    """Each mutant is named in the row of the rule it removes, and every rule has one."""
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    for name, mutant in MUTANTS.items():
        assert f"`{name}`" in rows[mutant.rule], name
    assert {mutant.rule for mutant in MUTANTS.values()} == set(rows)


def test_no_transition_is_listed_twice() -> None:
    """Two rows with the same move and cause would hide one another."""
    moves = [(r.actor, s, r.target, r.cause) for r in TRANSITIONS for s in r.sources]
    assert len(moves) == len(set(moves))
