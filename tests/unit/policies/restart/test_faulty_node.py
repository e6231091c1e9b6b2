"""A node that ends the job again and again is named; chance names none."""

import random

import pytest

from autockpt.policies.restart.faulty_node import advice, faulty_node
from autockpt.values.failure import FailureRecord, FaultyNode, Origins, origins_of


def record(
    node: int, *, term: int, told_s: float | None = 20.0, kind: str = "process", nodes: int = 3,
    apply_s: float = 1.0,
) -> FailureRecord:  # fmt: skip
    """As the keeper of one node writes it."""
    return FailureRecord(
        wall="2026-01-01T00:00:00Z", kind=kind, what="trainer", node=node, step=10,
        exposure_s=600.0, detect_s=0.5, restart_s=20.0, restore_s=apply_s, term=term,
        nodes=tuple(range(nodes)), told_s=told_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("began", "of", "nodes", "is_named"),
    [
        (3, 3, 16, False),  # 16 / 16^3 x 3 x 4 = 4.7 %
        (4, 4, 16, True),
        (2, 2, 1024, False),  # whatever the chance: twice is no habit
        (7, 7, 4, False),  # 4 / 4^7 x 7 x 8 = 1.4 %
        (8, 8, 4, True),
        (15, 15, 2, False),
        (16, 16, 2, True),
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
    """Failures that hit any node alike, looked at each time; what is not known does not count."""
    chance, named = random.Random(4), 0
    for _ in range(400):
        nodes = chance.choice([2, 4, 8, 64])
        began = [chance.randrange(nodes) if chance.random() < 0.8 else None for _ in range(40)]
        named += any(faulty_node(began[:n], nodes) is not None for n in range(1, 41))
    assert named < 4


def test_a_node_that_was_mended_is_innocent_after_a_while() -> None:
    """Only the newest interruptions count."""
    assert faulty_node([3] * 6, 8) is not None
    assert faulty_node([3] * 6 + [0, 1, 2, 4, 5, 6, 7] * 3, 8) is None


def test_an_interruption_began_where_ranks_were_gone_first() -> None:
    """Or where memory was lost; unclear ones, and the script's own errors, name no node."""
    log = [
        *[record(n, term=1, told_s=21.0 if n == 2 else 20.0) for n in range(3)],
        *[record(n, term=2, kind="node" if n == 1 else "process") for n in range(3)],
        *[record(n, term=3) for n in range(3)],
        *[record(n, term=4, kind="script", told_s=20.0 + n) for n in range(3)],
        *[record(n, term=5, kind="node") for n in range(3)],
    ]
    assert origins_of(log) == Origins(nodes=3, began=(2, 1, None, None, None))
    assert origins_of([]) == Origins()


@pytest.mark.parametrize(
    "log",
    [
        [record(n, term=1, apply_s=1.0 + n) for n in range(3)],
        [record(0, term=1)],
        [record(n, term=1, told_s=20.0 + n) for n in range(2)],
        [record(n, term=1, told_s=20.0 + n, nodes=0) for n in range(3)],
        [record(n, term=1, told_s=None if n == 0 else 20.0 + n) for n in range(3)],
        [record(n, term=1, kind="node" if n == 1 else "process") for n in range(2)],
    ],
    ids=[
        "applies slowly", "one record", "one is missing", "an old log", "one not told",
        "another one is missing",
    ],
)  # fmt: skip
def test_an_interruption_of_which_too_little_is_known_names_no_node(
    log: list[FailureRecord],
) -> None:
    """A node that puts its state in place slowly began nothing; nor do the ones that wrote."""
    assert not any(node is not None for node in origins_of(log).began)


def test_only_interruptions_of_the_present_nodes_count() -> None:
    """A job that went on with fewer, or with another one, is another one."""
    log = [
        *[record(n, term=t, told_s=21.0 if n == 2 else 20.0) for t in (1, 2) for n in range(3)],
        *[record(n, term=3, told_s=21.0 if n == 1 else 20.0, nodes=2) for n in range(2)],
    ]
    found = origins_of(log)
    assert found == Origins(nodes=2, began=(1,), earlier=2)
    assert [found.since(n) for n in (0, 2, 3)] == [(1,), (1,), ()]


@pytest.mark.parametrize(
    ("here", "elastic", "hosts", "leaves", "said"),
    [
        (0, True, True, True, "at the next failure that begins there, unless the nodes meet there"),
        (3, True, True, True, "the nodes meet here"),
        (3, True, False, True, "at the next failure that begins here"),
        (3, False, False, True, "look at this machine, or let the job go on without it"),
        (0, False, False, False, "look at that machine, or let the job go on without it: --nnodes"),
        (0, True, False, False, "failures.faulty_node: leave"),
    ],
)
def test_the_advice_says_what_can_be_done(
    here: int, elastic: bool, hosts: bool, leaves: bool, said: str
) -> None:
    """With the evidence in front."""
    faulty = FaultyNode(node=3, began=5, of=5, nodes=8, chance=2e-4)
    text = advice(faulty, here=here, elastic=elastic, hosts=hosts, leaves=leaves)
    assert text.startswith("node 3 began 5 of the newest 5 interruptions of 8 nodes")
    assert said in text
