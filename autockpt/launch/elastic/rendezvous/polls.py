"""How often torchelastic's rendezvous looks whether the others are there, and still alive.

It waits a second between two looks, for the sake of one store that thousands of nodes ask.  A small
job spends most of a warm restart in these waits: one to three of them.

It also writes a log in which it names functions.  To find a name it reads the source of the whole
stack, which takes 0.05 to 0.25 s at each restart.  Here the name comes from the frame.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

PER_NODE_S = 0.01
"""A store of torch's answers some thousands of questions a second; so it gets a hundred."""
LONGEST_S = 1.0
"""The wait of torchelastic, in seconds."""
LIVELY = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "last_call_timeout": 5}
"""Of torchelastic's rendezvous: a dead launcher is out after 3 s.  With its defaults (5 s, 3 times,
last call 30 s) four nodes took 48 s to meet again after a loss.  With these values they took 5 s.
Every sign of life writes the state of all nodes to one store, so large jobs keep torchelastic's
interval."""
MANY_NODES = 128
"""From here on the defaults of torchelastic stand."""


def liveliness(most_nodes: int) -> dict[str, int]:
    """Settings of a rendezvous of at most so many nodes; a user's own come before them."""
    return dict(LIVELY) if most_nodes < MANY_NODES else {}


def poll_s(nodes: int) -> float:
    """Seconds between two looks of each of `nodes` nodes."""
    return min(LONGEST_S, PER_NODE_S * max(1, nodes))


@contextlib.contextmanager
def quick_rendezvous(nodes: int) -> Iterator[None]:
    """As long as it lasts, rendezvous of this process wait `poll_s` at most, and log cheaply.

    `nodes`: the most that the job may have.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    module: Any = dynamic_rendezvous
    wait, most = getattr(module, "_delay", None), poll_s(nodes)

    def delay(seconds: Any) -> None:
        assert wait is not None
        wait(seconds if isinstance(seconds, tuple) else min(seconds, most))

    ours = {"_delay": delay, "get_method_name": _function_name}
    # Another version of torch may have one of them no more.
    before = {name: getattr(module, name) for name in ours if hasattr(module, name)}
    for name in before:
        setattr(module, name, ours[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _function_name(depth: int = 2) -> str:
    """As torchelastic's: the function that many calls up."""
    try:
        return sys._getframe(depth).f_code.co_name
    except ValueError:
        return "no_method_name"
