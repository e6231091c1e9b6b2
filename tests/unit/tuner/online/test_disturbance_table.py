"""The table of decisions and disturbances, as the real controller plays it."""

from pathlib import Path

from tests.unit.tuner.online.disturbances import DECISIONS, MOST_CHANGES, played, table_of

PAGE = Path(__file__).parents[4] / "docs" / "concepts" / "policy.md"
MOVES = {
    "storage 4 times slower": ("codec",),
    "storage as before": ("codec",),
    "a co-runner comes": ("intervals",),
    "the co-runner goes": ("intervals",),
    "link half as fast": ("rate of copies", "scheme of copies"),
    "link as before": ("rate of copies", "scheme of copies"),
    "saves lack a slot": ("slots",),
}


def test_each_decision_moves_where_it_should_and_undoes_nothing() -> None:
    """At most two changes a phase; the page shows what `python -m` of the module prints."""
    phases = list(played())
    for phase in phases:
        for decision, value_of in DECISIONS.items():
            changes = phase.changes(decision)
            assert len(changes) <= MOST_CHANGES, (phase.name, decision, changes)
            assert value_of(phase.plans[0]) not in changes, (phase.name, decision, changes)
        for expected in MOVES.get(phase.name, ()):
            assert phase.changes(expected), (phase.name, expected)
            assert phase.first_s is not None
            # Within eight checkpoints of the interval at its end.
            assert phase.first_s <= 8 * phase.disk_steps, phase.name
    assert table_of(phases) in PAGE.read_text(encoding="utf-8")
