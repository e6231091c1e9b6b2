"""Whether one node ends the job again and again, so that the job does better without it.

An interruption begins on one node.  If all nodes were alike, each would begin its share of them.
The chance that some node begins k of n by accident is at most

    nodes x P(Binomial(n, 1 / nodes) >= k)

Each interruption is one more look.  So the chance at look m counts m (m + 1) times, and the sum of
1 / (m (m + 1)) is 1.  Then chance names a node in less than 1 of 100 jobs, however long they last.
Only the newest interruptions count: a node that was mended is innocent after a while.
"""

import math
from collections import Counter
from collections.abc import Sequence

from autockpt.values.failure import FaultyNode

CHANCE = 0.01
"""Chance of an accident below which a node is named, for a whole job."""
LEAST = 3
"""Interruptions that one node must have begun, however many nodes there are."""
NEWEST = 20
"""Interruptions that count."""


def faulty_node(origins: Sequence[int | None], nodes: int) -> FaultyNode | None:
    """The node that the job should do without; None: none stands out.

    `origins`: the node that began each interruption, oldest first; None: it is not known.
    """
    every = [node for node in origins if node is not None]
    looks, known = len(every), every[-NEWEST:]
    if nodes < 2 or not known:
        return None
    node, began = Counter(known).most_common(1)[0]
    at_one_look = nodes * _at_least(began, len(known), 1.0 / nodes)
    chance = min(1.0, at_one_look * looks * (looks + 1))
    if began < LEAST or chance >= CHANCE:
        return None
    return FaultyNode(node=node, began=began, of=len(known), nodes=nodes, chance=chance)


def advice(faulty: FaultyNode, *, here: int, elastic: bool, hosts: bool, leaves: bool) -> str:
    """The sentence of the launcher of node `here`, which does not leave now.

    `elastic`: the job may go on with one node less.  `hosts`: the nodes meet at node `here`.
    `leaves`: the policy lets a faulty node leave.
    """
    then = "look at this machine" if faulty.node == here else "look at that machine"
    if not elastic:
        then += f", or let the job go on without it: --nnodes {faulty.nodes - 1}:{faulty.nodes}"
    elif not leaves:
        then += ", or let it leave by itself: failures.faulty_node: leave"
    elif faulty.node != here:
        then += "; it leaves at the next failure that begins there, unless the nodes meet there"
    elif hosts:
        then += "; it stays, because the nodes meet here"
    else:
        then += "; it leaves at the next failure that begins here"
    return f"{faulty.sentence}: {then}"


def _at_least(k: int, n: int, share: float) -> float:
    """P(Binomial(n, share) >= k)."""
    return sum(math.comb(n, i) * share**i * (1.0 - share) ** (n - i) for i in range(k, n + 1))
