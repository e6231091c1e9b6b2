"""Whether one node ends the job again and again, so that the job does better without it.

An interruption begins on one node.  If all nodes were alike, each would begin its share of them.
The chance that some node begins k of n by accident is at most

    nodes x P(Binomial(n, 1 / nodes) >= k)

A node is named below 1 %.  Only the newest interruptions count: a node that was mended is innocent
after a while.
"""

import math
from collections import Counter
from collections.abc import Sequence

from autockpt.values.failure import FaultyNode

CHANCE = 0.01
"""Chance of an accident below which a node is named."""
LEAST = 3
"""Interruptions that one node must have begun, however many nodes there are."""
NEWEST = 20
"""Interruptions that count."""


def faulty_node(origins: Sequence[int | None], nodes: int) -> FaultyNode | None:
    """The node that the job should do without; None: none stands out.

    `origins`: the node that began each interruption, oldest first; None: it is not known.
    """
    known = [node for node in origins if node is not None][-NEWEST:]
    if nodes < 2 or not known:
        return None
    node, began = Counter(known).most_common(1)[0]
    chance = min(1.0, nodes * _at_least(began, len(known), 1.0 / nodes))
    if began < LEAST or chance >= CHANCE:
        return None
    return FaultyNode(node=node, began=began, of=len(known), nodes=nodes, chance=chance)


def advice(faulty: FaultyNode, *, here: int, elastic: bool, hosts: bool) -> str:
    """The sentence of the launcher of node `here`, which does not leave.

    `elastic`: the job may go on with one node less.  `hosts`: the nodes meet at node `here`.
    """
    if faulty.node != here:
        then = "it leaves at its next failure" if elastic else "look at that machine"
    elif hosts and elastic:
        then = "it stays, because the nodes meet here; look at the machine"
    else:
        then = "look at the machine"
    if not elastic:
        then += f", or let the job go on without it: --nnodes {faulty.nodes - 1}:{faulty.nodes}"
    return f"{faulty.sentence}: {then}"


def _at_least(k: int, n: int, share: float) -> float:
    """P(Binomial(n, share) >= k)."""
    return sum(math.comb(n, i) * share**i * (1.0 - share) ** (n - i) for i in range(k, n + 1))
