"""Agree on the incarnation of the ranks of several nodes, through the rendezvous store.

Each launcher names its starts and counts its restarts for itself.  Two launchers of one job have
two names, and only the launcher whose rank died counts a restart.  So rank 0 says for all.  Its
word is kept in the checkpoint directory, because a round must be higher than every earlier one.  A
start that shares a launcher with the newest one continues its launch; any other is a launch of its
own.
"""

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from autockpt import new_files
from autockpt.executors.network.discovery import (
    network_of,
    open_secret,
    read_record,
    read_secret,
    write_record,
)
from autockpt.executors.protocol.messages import Incarnation
from autockpt.executors.storage.directory.claims import pid_start
from autockpt.executors.storage.places.store import read_patiently
from autockpt.launch.rank_env import RankPlace, rank_and_world
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.record import from_json, to_json

NO_LABELS: Mapping[str, str] = {}
SHARED_WITHIN_S = 15.0
"""A file of rank 0 is seen by all nodes so soon, if at all: network file systems remember names."""
ATTACH_WITHIN_S = 120.0
"""Ranks that a script has started come to `attach` one after the other."""
_RECORD = "round.json"
_SHARED = "shared"
"""A node sees the directory of rank 0, or all do."""
_calls = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """control/round.json: the newest incarnation."""

    schema_version: int = 1
    incarnation: Incarnation
    launchers: tuple[str, ...]
    """Names that the launchers of its nodes gave their starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The facts that all ranks of this start share."""

    schema_version: int = 1
    incarnation: Incarnation
    nodes: tuple[int, ...]
    """Number of the node of every rank."""
    one_host: bool
    """All nodes share one machine's loopback (a test, or several launchers on one machine)."""
    domains: FailureDomains = UNKNOWN_DOMAINS
    """The failure domains of the nodes, as far as each knows its own."""
    directory: str = ""
    """Digest of secret and round in the directory of rank 0: a node that finds others is elsewhere,
    also where its directory is a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The report of a node's first rank about the node."""

    schema_version: int = 1
    launcher: str
    ranks: int
    network: str
    labels: dict[str, str]
    """Its failure domains by level."""
    number: int | None
    """Its launcher's number for it, which stays when other nodes are lost; None: it has none."""


def agree(
    checkpoints: str,
    launch_id: str,
    place: RankPlace,
    labels: Mapping[str, str] = NO_LABELS,
    number: int | None = None,
) -> Agreement:
    """The agreement of all ranks; waits for the first rank of every node.

    `labels` and `number`: see `Node`.  Every rank calls it, equally often, after
    `init_process_group`; ranks of a node follow one another.
    Raises ConfigError without a process group, StorageError when rank 0 cannot write it down.
    Where a node does not see the directory of rank 0, all ranks raise it: none could train.
    """
    global _calls
    store = group_store()
    _calls += 1
    prefix = f"autockpt/{_calls}"
    if place.local_rank == 0:
        node = Node(
            launcher=launch_id, ranks=place.local_size, network=network_of(),
            labels=dict(labels), number=number,
        )  # fmt: skip
        store.set(f"{prefix}/node/{place.rank}", to_json(node))
    every: list[Node] = []
    if place.rank == 0:
        while (first := sum(node.ranks for node in every)) < place.world_size:
            text = bytes(store.get(f"{prefix}/node/{first}")).decode()
            every.append(from_json(Node, text, where=f"the node of rank {first}"))
        store.set(f"{prefix}/agreed", _decide(checkpoints, every))
    text = bytes(store.get(f"{prefix}/agreed")).decode()
    if text.startswith("error "):
        raise StorageError(text.removeprefix("error "))
    agreed = from_json(Agreement, text, where="agreement of rank 0")
    if place.local_rank == 0:
        unshared = _unshared(checkpoints, agreed, place)
        store.set(f"{prefix}/sees/{place.rank}", unshared or _SHARED)
        if unshared:
            raise StorageError(unshared)
    if place.rank == 0:
        firsts = (sum(node.ranks for node in every[:at]) for at in range(len(every)))
        seen = [bytes(store.get(f"{prefix}/sees/{first}")).decode() for first in firsts]
        found = next((text for text in seen if text != _SHARED), _SHARED)
        store.set(f"{prefix}/shared", found)
    if (text := bytes(store.get(f"{prefix}/shared")).decode()) != _SHARED:
        raise StorageError(text)
    return agreed


def begin_anew() -> None:
    """The next call is the first one, as in the new processes of this start."""
    global _calls
    _calls = 0


def _unshared(checkpoints: str, agreed: Agreement, place: RankPlace) -> str:
    """Why this node has a directory of its own at that path; "": it has that of rank 0.

    Keepers of different directories never find one another: the job would wait for ever.
    """
    deadline = time.monotonic() + SHARED_WITHIN_S
    while (seen := _seen(checkpoints)) is None or seen != agreed.directory:
        if time.monotonic() > deadline:
            got = "another directory" if seen is not None else "nothing"
            return (
                f"{checkpoints}: not shared by all nodes. Rank 0 wrote there {SHARED_WITHIN_S:.0f} "
                f"s ago, and rank {place.rank} on {socket.gethostname()} sees {got}. Give the run "
                "a directory on storage that all nodes see: autockpt run --run-dir DIR, "
                "AUTOCKPT_RUN_DIR=DIR, or attach(run_dir=DIR)"
            )
        time.sleep(0.1)
    return ""


def _seen(checkpoints: str) -> str | None:
    """The digest of the directory as this node sees it; None while it sees no secret."""
    secret = read_secret(checkpoints)
    with contextlib.suppress(StorageError):  # asked again until the deadline
        if secret is not None:
            return _digest(secret, read_record(checkpoints, _RECORD) or b"")
    return None


def _digest(secret: bytes, record: bytes) -> str:
    return hashlib.sha256(b"autockpt directory " + secret + record).hexdigest()


def _decide(checkpoints: str, every: Sequence[Node]) -> str:
    """The agreement as JSON, or why there is none: the other ranks wait for an answer."""
    launchers = tuple(sorted({node.launcher for node in every}))
    try:
        if not is_store_url(checkpoints):
            new_files.make_directory(checkpoints)
        secret = open_secret(checkpoints)
        incarnation = next_incarnation(_newest(checkpoints), every[0].launcher, launchers)
        record = Round(incarnation=incarnation, launchers=launchers)
        written = to_json(record).encode()
        write_record(checkpoints, _RECORD, written)
    except (StorageError, OSError) as error:
        return f"error {checkpoints}: rank 0 cannot write down the incarnation: {error}"
    numbers = numbers_of(every)
    domains = FailureDomains.joined([node.labels for node in every]).renumbered(numbers)
    ranks = zip(numbers, every, strict=True)
    agreement = Agreement(
        incarnation=incarnation,
        nodes=tuple(number for number, node in ranks for _ in range(node.ranks)),
        one_host=len({node.network for node in every}) == 1,
        domains=domains,
        directory=_digest(secret, written),
    )
    return to_json(agreement)


def numbers_of(every: Sequence[Node]) -> tuple[int, ...]:
    """Return the launchers' numbers of nodes; if one is missing or doubled, count the nodes."""
    said = [node.number for node in every if node.number is not None]
    return tuple(said) if len(set(said)) == len(every) else tuple(range(len(every)))


def next_incarnation(
    newest: Round | None, launch_id: str, launchers: tuple[str, ...]
) -> Incarnation:
    """Return the incarnation of these launchers' start; `launch_id` is rank 0's."""
    if newest is None or not set(newest.launchers) & set(launchers):
        return Incarnation(launch_id=launch_id, restart_round=0)
    former = newest.incarnation
    return Incarnation(launch_id=former.launch_id, restart_round=former.restart_round + 1)


def _newest(checkpoints: str) -> Round | None:
    """None: there was none, or its record is damaged.  Raises StorageError."""
    text = read_patiently(checkpoints, lambda: read_record(checkpoints, _RECORD))
    if text is None:
        return None
    try:
        return from_json(Round, text)
    except ConfigError:
        return None


def group_store() -> Any:
    """The store by which the ranks of a process group meet.  Raises ConfigError without one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "attach() on several nodes needs the process group, by which the ranks agree who they "
            "are: call torch.distributed.init_process_group() before attach()"
        )
    return dist.distributed_c10d._get_default_store()


def spawned_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank that no launcher has told who it is.

    A script may start its ranks by itself, as with `torch.multiprocessing.spawn`.  Its process
    group says who they are; ranks of one parent are a node.  Every rank calls it.  Empty where the
    environment and the group agree, or where there is no group.
    Raises ConfigError where another rank does not come, or where ranks are dealt out among nodes.
    """
    if not in_group_of_several():
        return {}
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank_and_world(environ) == (rank, world_size):
        return {}
    store, parent = group_store(), os.getppid()
    if store is None:  # MPI has none
        return {}
    names = [f"autockpt/parent/{number}" for number in range(world_size)]
    store.set(names[rank], f"{network_of()} {parent} {pid_start(parent)}")
    try:
        store.wait(names, timedelta(seconds=ATTACH_WITHIN_S))
    except Exception as error:
        raise ConfigError(
            f"rank {rank} of {world_size} is in autockpt.attach(), and another rank has not come "
            f"within {ATTACH_WITHIN_S:.0f} s; call it on every rank"
        ) from error
    parents = [bytes(store.get(name)) for name in names]
    size = parents.count(parents[rank])
    first = parents.index(parents[rank])
    whole = all(len(set(parents[at : at + size])) == 1 for at in range(0, world_size, size))
    if world_size % size or not whole:
        raise ConfigError(
            f"rank {rank} of {world_size} was started by the script beside {size - 1} others: "
            "each node must have as many ranks, and they must follow one another"
        )
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank - first),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": str(world_size // size),
    }  # fmt: skip


def in_group_of_several() -> bool:
    """Whether this process is one of several ranks of a process group."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
