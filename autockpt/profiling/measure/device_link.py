"""The path through emulated devices as copies will use it, beside the hosts' link: same bytes.

Each node receives from the next one, all at once.  A request is a word on the path itself.  The
received bytes are compared with the digests of every node's bytes.
"""

import os
import threading
from contextlib import suppress
from typing import Any

from autockpt.executors.network.device_path import (
    RECEIVER,
    SENDER,
    DeviceLinks,
    DevicePath,
    emulated_links,
    listening_store,
    store_at,
)
from autockpt.executors.network.discovery import listen_host
from autockpt.executors.network.transfer.lease import Lease
from autockpt.profiling.facts.ranks import Ranks
from autockpt.profiling.measure.peer_link import NodeLink
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.plan import CHUNK_BYTES
from autockpt.values.units import format_rate


class DeviceProbe:
    """This node's two ends: one receives from the next node, one sends to the former."""

    def __init__(self, memory: NodeLink, links: DeviceLinks) -> None:
        """Listen; `memory` holds the bytes to send and receives into.  Raises RuntimeError."""
        self._memory, self._links = memory, links
        self.sizes = memory.sizes
        self._store, self.address = listening_store(listen_host(os.environ, one_host=False))
        self._path: DevicePath | None = None

    @property
    def note(self) -> str:
        """The kind of its figures."""
        return (
            f"emulated devices: gates of {format_rate(self._links.bytes_per_s)} on "
            f"{self._links.interface}, not a device network"
        )

    def connect(self, former: str) -> None:
        """Both ends; `former`: where the node before this one listens.  Raises RuntimeError."""
        threading.Thread(
            target=self._send, args=(former,), name="autockpt-device-probe", daemon=True
        ).start()
        self._path = DevicePath(self._store, RECEIVER, self._links)

    def move(self, nbytes: int) -> None:
        """Brings that many bytes of the next node here, verified.  Raises StorageError."""
        assert self._path is not None
        self._path.ask(nbytes)
        target = self._memory.target[:nbytes]
        if self._path.receive(target, CHUNK_BYTES, Lease()) != self._memory.digests(nbytes):
            raise StorageError("through the devices other bytes came than were sent")

    def fetch_all(self) -> None:
        """One of the largest size."""
        self.move(self.sizes[-1])

    def close(self) -> None:
        """Asks for nothing more."""
        if self._path is not None:
            with suppress(RuntimeError):
                self._path.ask(0)

    def _send(self, former: str) -> None:
        """Send the requested bytes until no request comes; the receiver reports a failed probe."""
        with suppress(RuntimeError, AutockptError):
            path = DevicePath(store_at(former), SENDER, self._links)
            while nbytes := path.asked():
                path.send(self._memory.source[:nbytes], CHUNK_BYTES, Lease())


def meet_devices(ranks: Ranks, link: NodeLink | None) -> tuple[DeviceProbe | None, str]:
    """Return (probe, error) once all nodes have made their offers; every rank must call it.

    Without the setting on any node there is no probe and nothing wrong.
    """
    probe, wrong = None, ""
    offer: dict[str, Any] | None = None
    try:
        links = emulated_links()
        if links is not None and link is not None:
            probe = DeviceProbe(link, links)
            offer = {"node": ranks.node, "address": probe.address}
    except (AutockptError, RuntimeError) as error:
        wrong = str(error)
    offers = {said["node"]: said["address"] for said in ranks.everyone(offer) if said is not None}
    if not offers or len(offers) < ranks.nodes:
        lacking = sorted(set(range(ranks.nodes)) - set(offers))
        return None, wrong or (f"nodes {lacking} have no emulated device" if offers else "")
    if probe is None:
        return None, ""
    try:
        probe.connect(offers[(ranks.node - 1) % ranks.nodes])
    except RuntimeError as error:
        return None, str(error)
    return probe, ""
