"""Placement: everybody protected, domains apart, and few who move when a node is lost."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.values.errors import ConfigError
from autockpt.values.placement import (
    Cell,
    FailureDomains,
    Placement,
    place,
    rank_sets,
    ranks_by_node,
    repaired,
)
from autockpt.values.record import from_json, to_json
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy, said


def replicas(copies: int, placement="mixed") -> Redundancy:
    return Redundancy(scheme="replicas", copies=copies, placement=placement)


def parity(set_size: int, parity: int = 1) -> Redundancy:
    scheme = "xor" if parity == 1 else "rs"
    return Redundancy(scheme=scheme, set_size=set_size, parity=parity)


SCHEMES = st.one_of(
    st.builds(replicas, st.integers(2, 5), st.sampled_from(["mixed", "ring"])),
    st.integers(1, 4).flatmap(lambda t: st.builds(parity, st.integers(t + 1, 12), st.just(t))),
)


def racks(*labels: str) -> FailureDomains:
    return FailureDomains(levels=("rack",), labels=tuple((label,) for label in labels))


def together(placement: Placement, domains: FailureDomains) -> int:
    """Most nodes of one rack in one cell."""
    return max(
        max(Counter(domains.of(node) for node in cell.members).values()) for cell in placement.cells
    )


@given(SCHEMES, st.integers(1, 40))
def test_every_node_is_in_one_cell_that_holds_its_shard_often_enough(scheme, nodes):
    """Copies: exactly m holders, the node first; parity: sets larger than their parity."""
    if nodes <= scheme.tolerates:
        with pytest.raises(ConfigError, match="it takes at least"):
            place(scheme, nodes)
        return
    placement = place(scheme, nodes)
    assert placement.nodes == tuple(range(nodes))
    for node in range(nodes):
        cell = placement.cell_of(node)
        holders = cell.holders(node)
        assert holders[0] == node
        assert len(set(holders)) == scheme.copies
        assert len(cell.members) > cell.tolerates == scheme.tolerates
        assert {m for m in cell.members if node in cell.holders(m)} == {node, *cell.kept_by(node)}


@given(SCHEMES, st.integers(2, 9))
def test_memory_survives_exactly_while_every_shard_has_a_holder(scheme, nodes):
    """All patterns of losses, against the definition of the scheme."""
    if nodes <= scheme.tolerates:
        return
    placement = place(scheme, nodes)
    for count in range(nodes + 1):
        for lost in itertools.combinations(range(nodes), count):
            assert placement.survives(lost) == _recoverable(placement, scheme, set(lost))


def _recoverable(placement: Placement, scheme: Redundancy, lost: set[int]) -> bool:
    if scheme.parity:
        return all(len(lost & set(cell.members)) <= scheme.parity for cell in placement.cells)
    return all(set(placement.cell_of(n).holders(n)) - lost for n in placement.nodes)


def test_gemini_s_placements_are_these():
    """Divided: pairs; one left over: pairs and a ring of three; ring: everybody and the next."""
    assert [cell.kind for cell in place(replicas(2, "group"), 16).cells] == ["group"] * 8
    mixed = place(replicas(2), 15).cells
    assert [(cell.kind, len(cell.members)) for cell in mixed] == [("group", 2)] * 6 + [("ring", 3)]
    (ring,) = place(replicas(3, "ring"), 6).cells
    assert [len(ring.kept_by(node)) for node in range(6)] == [2] * 6
    with pytest.raises(ConfigError, match="nearest: placement mixed, or 14 nodes"):
        place(replicas(2, "group"), 15)


# --- domains --------------------------------------------------------------------------------------


@given(st.data(), SCHEMES, st.integers(2, 60))
def test_cells_have_no_two_of_a_domain_that_is_small_enough(data, scheme, nodes):
    """Groups and sets: a domain of at most as many nodes as cells is never twice in one."""
    if nodes <= scheme.tolerates or scheme.placement == "ring":
        return
    labels = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=nodes, max_size=nodes))
    domains = racks(*labels)
    placement = place(scheme, nodes, domains)
    cells = [cell for cell in placement.cells if cell.kind != "ring"]
    if len(cells) == len(placement.cells) and max(Counter(labels).values()) <= len(cells):
        assert together(placement, domains) == 1
    assert place(scheme, nodes, domains) == placement


def test_a_lost_rack_is_survived_where_copies_stand_in_other_racks():
    """Four racks of four nodes, two and three copies, sets of four: any whole rack may go."""
    domains = racks(*(f"r{node // 4}" for node in range(16)))
    for scheme in (replicas(2), replicas(3), replicas(2, "ring"), parity(4)):
        placement = place(scheme, 16, domains)
        for members in domains.members("rack").values():
            assert placement.survives(members), said(scheme)


def test_nested_and_crossing_domains_are_both_kept_apart():
    """Racks within power supplies, and power supplies that cross racks."""
    nested = tuple((f"p{node // 8}", f"r{node // 4}") for node in range(16))
    crossing = tuple((f"p{node % 2}", f"r{node // 4}") for node in range(16))
    for labels in (nested, crossing):
        domains = FailureDomains(levels=("power", "rack"), labels=labels)
        placement = place(replicas(2), 16, domains)
        for level in domains.levels:
            assert all(placement.survives(m) for m in domains.members(level).values()), level


def test_a_loss_of_few_nodes_asks_their_cells_only(monkeypatch):
    """Of 4,096 nodes two are lost, and another one that is not placed at all."""
    placement, asked = place(replicas(2), 4096), []
    survives = Cell.survives
    monkeypatch.setattr(
        Cell, "survives", lambda cell, lost: asked.append(cell) or survives(cell, lost)
    )
    first, second = placement.cells[0].members
    assert placement.survives([first, placement.cells[9].members[0], 99_999])
    assert len(asked) == 2
    assert not placement.survives([first, second])


def test_without_domains_partners_stand_as_far_apart_as_they_can():
    """Racks hold neighbours: 16 nodes in pairs are 8 apart."""
    assert {b - a for a, b in (cell.members for cell in place(replicas(2), 16).cells)} == {8}


def test_a_domain_needs_a_label_for_every_level():
    """A node with fewer says which."""
    with pytest.raises(
        ConfigError, match=r"node 1: 1 labels, expected one for each of power, rack"
    ):
        FailureDomains(levels=("power", "rack"), labels=(("p", "r"), ("p",)))
    with pytest.raises(ConfigError, match="called 'row'; known: rack"):
        racks("a").members("row")


@pytest.mark.parametrize("scheme", [replicas(2), parity(8), parity(8, 2)], ids=said)
def test_thousands_of_nodes_in_one_huge_domain_are_dealt_at_once(scheme):
    """The search for a cell without a neighbour ends where there can be none."""
    labels = [f"r{max(0, node - 3000) // 16}" for node in range(4096)]
    begun_s = time.process_time()
    assert len(place(scheme, 4096, racks(*labels)).nodes) == 4096
    assert time.process_time() - begun_s < 5.0


# --- losses ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data(), SCHEMES, st.integers(2, 40))
def test_after_a_loss_only_the_cells_that_were_hit_are_placed_anew(data, scheme, nodes):
    """Everybody is protected again, and no more than the hit cells and one or two more move."""
    if nodes <= scheme.tolerates:
        return
    placement = place(scheme, nodes)
    lost = data.draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=3))
    left = [node for node in range(nodes) if node not in lost]
    if len(left) <= scheme.tolerates:
        with pytest.raises(ConfigError, match="it takes at least"):
            repaired(placement, scheme, lost)
        return
    after = repaired(placement, scheme, lost)
    assert after.nodes == tuple(left)
    for cell in after.cells:
        assert len(cell.members) > cell.tolerates == scheme.tolerates
    if scheme.placement == "ring":
        return
    hit = [cell for cell in placement.cells if lost & set(cell.members)]
    moved = [cell for cell in placement.cells if cell not in after.cells]
    assert len(moved) <= len(hit) + 1


def test_one_loss_moves_its_partner_and_one_more_pair():
    """16 nodes in pairs without one: six pairs stay, three nodes form a ring."""
    before = place(replicas(2), 16)
    after = repaired(before, replicas(2), {5})
    assert len(set(before.cells) & set(after.cells)) == 6
    assert sorted(len(cell.members) for cell in after.cells) == [2] * 6 + [3]
    again = repaired(after, replicas(2), {6})
    assert [cell.kind for cell in again.cells].count("ring") <= 1
    assert all(again.survives({node}) for node in again.nodes)


def test_a_placement_and_a_scheme_survive_their_files():
    """Both are values: they come back as they went."""
    placement = place(replicas(2), 5)
    assert from_json(Placement, to_json(placement)) == placement
    for scheme in (NO_REDUNDANCY, replicas(3), parity(8), parity(8, 2)):
        assert from_json(Redundancy, to_json(scheme)) == scheme


# --- schemes --------------------------------------------------------------------------------------


def test_schemes_cost_what_the_table_says():
    """Memory beside the own image, sent per checkpoint, read to rebuild, over one node's state."""
    rows = {
        replicas(2): (1.0, 1.0, 1.0), replicas(3): (2.0, 2.0, 1.0),
        parity(8): (1 / 7, 1.0, 7.0), parity(8, 2): (2 / 6, 2.0, 6.0),
    }  # fmt: skip
    for scheme, row in rows.items():
        assert (scheme.memory_share, scheme.sent_share, scheme.rebuilt_share) == row


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "replicas"}, "1 copies with scheme replicas"),
        ({"copies": 2}, "2 copies with scheme none"),
        ({"scheme": "xor", "set_size": 8}, "0 parity in sets of 8"),
        ({"scheme": "xor", "set_size": 8, "parity": 2}, "rs takes more"),
        ({"scheme": "rs", "set_size": 2, "parity": 2}, "2 parity in sets of 2"),
        ({"parity": 1, "set_size": 4}, "with scheme none"),
        ({"rate_bytes_per_s": -1.0}, "must not be negative"),
    ],
)
def test_a_scheme_that_makes_no_sense_is_refused(fields, message):
    """What is wrong stands in the message."""
    with pytest.raises(ConfigError, match=message):
        Redundancy(**fields)


# --------------------------------------------------------------------------- sets of ranks


def unequal_cells() -> Iterator[tuple[Cell, tuple[int, ...]]]:
    """Every cell of up to five nodes with up to four ranks each, and up to two losses."""
    for size in range(2, 6):
        for counts in itertools.product(range(1, 5), repeat=size):
            nodes = tuple(node for node, count in enumerate(counts) for _ in range(count))
            for losses in range(1, min(3, size)):
                yield Cell(kind="parity", members=tuple(range(size)), tolerates=losses), nodes


def test_every_rank_is_in_one_set_with_partners_on_other_nodes() -> None:
    """Wherever that can be: each rank of the fullest node needs a set of its own, and no more."""
    for cell, nodes in unequal_cells():
        least = cell.tolerates + 1
        fullest = max(nodes.count(node) for node in cell.members)
        if len(nodes) < fullest * least:
            with pytest.raises(ConfigError, match="partners of its own"):
                rank_sets(cell, ranks_by_node(nodes))
            continue
        sets = rank_sets(cell, ranks_by_node(nodes))
        assert sorted(rank for each in sets for rank in each) == list(range(len(nodes)))
        for each in sets:
            assert len(each) >= least, (cell, nodes, sets)
            assert len({nodes[rank] for rank in each}) == len(each), (cell, nodes, sets)


def test_equal_nodes_have_their_nth_ranks_in_one_set() -> None:
    """As few sets as there are ranks on a node, each across all nodes."""
    cell = Cell(kind="parity", members=(2, 0, 1), tolerates=1)
    assert rank_sets(cell, ranks_by_node((0, 0, 1, 1, 2, 2))) == ((4, 0, 2), (5, 1, 3))
