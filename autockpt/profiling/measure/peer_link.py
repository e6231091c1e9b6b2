"""The link to another node as copies will use it: the same pool, frames and digests, fetched.

The ranks that probe their nodes exchange their addresses and a secret.  Then each node fetches from
the next one, all at once, as they will when copies are made.  They fetch known bytes of several
sizes.
"""

import os
import queue
import secrets
from contextlib import suppress
from typing import Any

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.linux.memory import Arena, require_headroom
from autockpt.executors.network.discovery import listen_host, network_of
from autockpt.executors.network.handshake import Identity
from autockpt.executors.network.transfer.destination import SlotDestination
from autockpt.executors.network.transfer.events import FetchEnd, TransferFailed
from autockpt.executors.network.transfer.frames import Subject, Want
from autockpt.executors.network.transfer.pool import TransferPool
from autockpt.executors.network.transfer.session import Loan
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.protocol.messages import Incarnation
from autockpt.profiles.probes import links
from autockpt.profiling.facts.ranks import Ranks
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.plan import CHUNK_BYTES

RUN = "profile"
DEADLINE_S = 20.0
"""For one fetch; then the network is too slow to be measured in a profile."""
PATTERN_BYTES = 2**20


class NodeLink:
    """This node's end: lends its bytes, fetches the next node's."""

    def __init__(self, node: int, nbytes: int) -> None:
        """Memory and digests; nothing is fetched before `call`.  Raises AutockptError."""
        require_headroom(2 * nbytes, what="profile: what is sent to another node")
        self._source = Arena.create_shared(nbytes, name="autockpt-peer-probe")
        self._target = Arena.anonymous(nbytes)
        pattern = bytes(range(256)) * (PATTERN_BYTES // 256)
        for start in range(0, nbytes, PATTERN_BYTES):
            piece = self._source.view[start : start + PATTERN_BYTES]
            piece[:] = pattern[: len(piece)]
        self.sizes = links.link_sizes(nbytes)
        self._images = {size: _index(self._source.view[:size], size) for size in self.sizes}
        self._me = Identity(
            run_id=RUN, node=node, incarnation=Incarnation(launch_id=RUN, restart_round=0)
        )
        self._pool: TransferPool | None = None
        self._peer: tuple[int, tuple[str, int]] | None = None

    @property
    def source(self) -> memoryview:
        """The lent bytes."""
        return self._source.view

    @property
    def target(self) -> memoryview:
        """Where it comes."""
        return self._target.view

    def digests(self, nbytes: int) -> tuple[str, ...]:
        """Of the first `nbytes` of what every node lends; one of `sizes`."""
        return self._images[nbytes].digests

    def listen(self, secret: bytes) -> tuple[str, int]:
        """Takes calls on the address that keepers would use.  Raises ConfigError."""
        host = listen_host(os.environ, one_host=False)
        self._pool = TransferPool(secret, self._me, self._lend)
        return host, self._pool.listen(host)

    def call(self, node: int, address: tuple[str, int]) -> None:
        """Fetches from there."""
        self._peer = (node, address)

    def move(self, nbytes: int) -> None:
        """Brings that many bytes of the other node here, verified.  Raises StorageError."""
        assert self._pool is not None
        assert self._peer is not None
        node, address = self._peer
        index = self._images[nbytes]
        destination = SlotDestination(self._target.view[:nbytes], Subject.of(index))
        told: queue.SimpleQueue[FetchEnd] = queue.SimpleQueue()
        self._pool.fetch(
            node, address, Subject.of(index), index.root, destination, ended=told.put,
            deadline_s=DEADLINE_S,
        )  # fmt: skip
        event = told.get(timeout=2 * DEADLINE_S)
        if isinstance(event, TransferFailed):
            raise StorageError(f"node {node} at {address[0]}: {event.reason}")

    def fetch_all(self) -> None:
        """One fetch of the largest size."""
        self.move(self.sizes[-1])

    def close(self) -> None:
        """Lends no more."""
        if self._pool is not None:
            self._pool.close("the profile is taken")

    def _lend(self, peer: Identity, want: Want) -> Loan | str:
        index = next((i for i in self._images.values() if i.root == want.root), None)
        if index is None:
            return "no such bytes are lent"
        assert self._source.fd is not None
        image = self._source.view[: index.image_bytes]
        return Loan(source=ImageSource(self._source.fd, image, index), deadline_s=DEADLINE_S)


def meet(ranks: Ranks, link: NodeLink | None) -> str:
    """Connect all ranks, `link` None where a rank probes nothing; return the error or ""."""
    (secret, *_) = ranks.everyone(secrets.token_bytes(32))
    offer: dict[str, Any] | None = None
    if link is not None:
        with suppress(AutockptError, OSError):
            host, port = link.listen(secret)
            offer = {"node": ranks.node, "host": host, "port": port, "network": network_of()}
    offers = {said["node"]: said for said in ranks.everyone(offer) if said is not None}
    if len(offers) < ranks.nodes:
        lacking = sorted(set(range(ranks.nodes)) - set(offers))
        return f"nodes {lacking} could not listen for others"
    if len({said["network"] for said in offers.values()}) == 1:
        return "all nodes are one machine"
    if link is not None:
        to = (ranks.node + 1) % ranks.nodes
        link.call(to, (offers[to]["host"], offers[to]["port"]))
    return ""


def _index(image: memoryview, size: int) -> ImageIndex:
    starts = range(0, size, CHUNK_BYTES)
    return ImageIndex(
        run_id=RUN, generation=Generation(term=1, step=size), step=0, rank=0, world_size=1,
        layout_digest=RUN, image_bytes=size, chunk_bytes=CHUNK_BYTES,
        digests=tuple(chunk_digest(image[start : start + CHUNK_BYTES]) for start in starts),
    )  # fmt: skip
