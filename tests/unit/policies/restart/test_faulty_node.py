"""A node that ends the job again and again is named; chance names none."""

import random

import pytest

from autockpt.policies.restart.faulty_node import advice, faulty_node
from autockpt.values.failure import FailureRecord, FaultyNode, Origins, origins_of


def record(node: int, *, term: int, down_s: float = 20.0, kind: str = "process") -> FailureRecord:
    """As the keeper of one node writes it."""
    return FailureRecord(
        wall="2026-01-01T00:00:00Z", kind=kind, what="trainer", node=node, step=10,
        exposure_s=600.0, detect_s=0.5, restart_s=down_s - 1.5, restore_s=1.0, term=term,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("began", "of", "nodes", "is_named"),
    [
        (3, 3, 16, True),  # 16 / 16^3 = 0.4 %
        (2, 2, 1024, False),  # whatever the chance: twice is no habit
        (4, 4, 4, False),  # 4 / 4^4 = 1.6 %
        (5, 5, 4, True),
        (7, 7, 2, False),
        (8, 8, 2, True),
        (5, 15, 4, False),
        (9, 9, 1, False),
    ],
)
def test_a_node_is_named_where_chance_is_below_one_percent(
    began: int, of: int, nodes: int, is_named: bool
) -> None:
    """By the binomial bound over all nodes."""
    others = [1 + n % max(1, nodes - 1) for n in range(of - began)]
    found = faulty_node([*others, *[0] * began], nodes)
    assert (found is not None) is is_named
    if found is not None:
        assert (found.node, found.began, found.of) == (0, began, of)
        assert f"node 0 began {began} of the newest {of}" in found.sentence


def test_chance_names_a_node_in_less_than_one_of_a_hundred_jobs() -> None:
    """Failures that hit any node alike; what is not known does not count."""
    chance, named = random.Random(4), 0
    for _ in range(2000):
        nodes = chance.choice([2, 4, 8, 64])
        began = [chance.randrange(nodes) if chance.random() < 0.8 else None for _ in range(25)]
        named += faulty_node(began, nodes) is not None
    assert named < 20


def test_a_node_that_was_mended_is_innocent_after_a_while() -> None:
    """Only the newest interruptions count."""
    assert faulty_node([3] * 6, 8) is not None
    assert faulty_node([3] * 6 + [0, 1, 2, 4, 5, 6, 7] * 3, 8) is None


def test_an_interruption_began_where_ranks_were_gone_first() -> None:
    """Or where memory was lost; unclear ones, and the script's own errors, name no node."""
    log = [
        *[record(n, term=1, down_s=21.0 if n == 2 else 20.0) for n in range(3)],
        *[record(n, term=2, kind="node" if n == 1 else "process") for n in range(3)],
        *[record(n, term=3) for n in range(3)],
        *[record(n, term=4, kind="script", down_s=20.0 + n) for n in range(3)],
        *[record(n, term=5, kind="node") for n in range(2)],
        record(0, term=6),
    ]
    assert origins_of(log) == Origins(nodes=3, began=(2, 1, None, None, None, 0))
    assert origins_of([]) == Origins()


@pytest.mark.parametrize(
    ("here", "elastic", "hosts", "said"),
    [
        (0, True, False, "it leaves at its next failure"),
        (3, True, True, "the nodes meet here"),
        (3, False, False, "--nnodes 7:8"),
        (0, False, False, "look at that machine, or let the job go on without it: --nnodes 7:8"),
    ],
)
def test_the_advice_says_what_can_be_done(here: int, elastic: bool, hosts: bool, said: str) -> None:
    """With the evidence in front."""
    faulty = FaultyNode(node=3, began=5, of=5, nodes=8, chance=2e-4)
    text = advice(faulty, here=here, elastic=elastic, hosts=hosts)
    assert text.startswith("node 3 began 5 of the newest 5 interruptions of 8 nodes")
    assert said in text
