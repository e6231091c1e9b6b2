"""A rendezvous that the user's own torchrun may name: `torchrun --rdzv-backend autockpt`.

It meets at torchrun's own store, as the backend c10d does.  The rest is as under `autockpt run`.
Nodes keep their numbers when others are lost or replaced.  A small job looks more often whether all
are there, and notices a dead launcher sooner.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autockpt.launch import environment
from autockpt.launch.elastic.rendezvous.node_numbers import Seated
from autockpt.launch.elastic.rendezvous.polls import liveliness, quick_rendezvous

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

BACKEND = "autockpt"


class _Numbered(Seated):
    """Tells the ranks of this node its number, and looks often."""

    use_agent_store = False
    """Restarted ranks would read the dead attempt's addresses from the store of the launchers."""

    def __init__(self, handler: Any, local_addr: str | None, most_nodes: int) -> None:
        super().__init__(handler, local_addr, ())
        self._most_nodes = most_nodes

    def get_backend(self) -> str:
        """Its name on torchrun's command line."""
        return BACKEND

    def next_rendezvous(self) -> Any:
        """The handler's answer; the ranks that start now inherit the number of this node."""
        with quick_rendezvous(self._most_nodes):
            met = super().next_rendezvous()
        os.environ[environment.NODE] = str(self.number)
        return met


def make_factory() -> Callable[["RendezvousParameters"], Any]:
    """What torchelastic asks for at its entry point `torchrun.handlers`."""
    return _create


def _create(parameters: "RendezvousParameters") -> Any:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    # Where ranks share torchrun's store, torch 2.13 tells its address at the first start alone.  A
    # replacement then waits for it for ever.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    most = parameters.max_nodes
    parameters.config = {**liveliness(most), **parameters.config}
    backend, store = create_backend(parameters)
    return _Numbered(create_handler(store, backend, parameters), parameters.local_addr, most)
