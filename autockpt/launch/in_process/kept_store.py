"""A restartable function meets the other ranks at the store that the launcher keeps.

torch would ask rank 0 for one at MASTER_PORT.  The launcher's takes its place there, and at no
address that the script names itself.  Each further group of a start has keys of its own in the
store.  Under the same keys ranks would read the addresses of the group before.
"""

import contextlib
import importlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

VARIABLE = "AUTOCKPT_KEPT_STORE"
"""Variable in which the launcher tells the ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Of both stores of one start."""

    torch: int
    """MASTER_PORT as the launcher gives it; torch's rank 0 listens there."""
    kept: int
    """The launcher listens there."""

    def text(self) -> str:
        """As in the variable."""
        return f"{self.torch}:{self.kept}"


def ports(environ: Mapping[str, str]) -> Ports | None:
    """None: the launcher keeps no store."""
    torch, _, kept = environ.get(VARIABLE, "").partition(":")
    if not (torch.isdigit() and kept.isdigit()):
        return None
    return Ports(torch=int(torch), kept=int(kept))


_numbers = itertools.count()
"""Of the groups that meet in this process at the store of the present start."""


def begin_anew() -> None:
    """Another start, which has another store."""
    global _numbers
    _numbers = itertools.count()


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """As long as it lasts groups meet at the launcher's store, where it keeps one.

    All ranks of a job must enter it, or none: they would wait for each other at two addresses.
    """
    if ports(os.environ) is None:
        yield
        return
    try:
        module: Any = importlib.import_module("torch.distributed.rendezvous")
        dist: Any = importlib.import_module("torch.distributed")
        torchs, whole, prefixed = module._create_c10d_store, dist.TCPStore, dist.PrefixStore
    except (ImportError, AttributeError):  # another version of torch: rank 0 keeps the store
        yield
        return

    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any
    ) -> Any:
        now = ports(os.environ)
        if now is None or now.torch != port:
            return torchs(hostname, port, rank, world_size, timeout, *more)
        store = whole(hostname, now.kept, world_size, is_master=False, timeout=timeout)
        number = next(_numbers)
        return prefixed(f"group-{number}", store) if number else store

    module._create_c10d_store = create
    try:
        yield
    finally:
        module._create_c10d_store = torchs
