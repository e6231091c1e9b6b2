"""The blocking probes of one node, between two iterations: copy, peer, storage, codecs, device.

Each is tried on its own: one that fails leaves a sentence and the others go on.
"""

import contextlib
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autockpt import new_files
from autockpt.executors.linux.memory import Arena
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.shard_file import read_image, write_image
from autockpt.profiles.assemble import Measurements
from autockpt.profiles.probes import clean, codecs, host, links, storage
from autockpt.profiles.schedule import ProfileSettings
from autockpt.profiling.facts.ranks import Ranks
from autockpt.profiling.measure import movers, store_probe
from autockpt.profiling.measure.device_link import DeviceProbe, meet_devices
from autockpt.profiling.measure.movers import LiveSnapshot
from autockpt.profiling.measure.peer_link import NodeLink, meet
from autockpt.values.errors import GuardError
from autockpt.values.policy_keys.paths import is_store_url

UNKNOWN_BYTES_PER_S = 200e6
"""A storage that was not measured is planned for as a slow network disk."""
PIECE_BYTES = 4 * 2**20
CODEC_BYTES_PER_CLASS = 32 * 2**20
BASE_BYTES_PER_CLASS = 8 * 2**20
"""Kept from the codecs' turn to the end of the profile, to be a base then."""
BASES_S = 1.0
INTERFERENCE_WRITE_BYTES = 4 * 2**30
"""All writes of the interference rounds together: a profile should not wear out a disk."""

_SHARES = {"copy": 0.06, "peer": 0.1, "device": 0.08, "writes": 0.42, "reads": 0.18, "codecs": 0.16}
"""How the time for blocking probes is shared out."""


class NodeProbes:
    """Measures this node with the state of this rank; fills `measured`."""

    def __init__(
        self,
        measured: Measurements,
        *,
        state: LiveState,
        progress: Callable[[], dict[str, Any]],
        directory: str,
        device: torch.device | None,
        settings: ProfileSettings,
    ) -> None:
        self.measured = measured
        self.snapshot = LiveSnapshot(state, progress)
        self._blocking_s = 0.0
        self._state, self._directory, self._device = state, directory, device
        self._settings, self._is_store = settings, is_store_url(directory)
        self._created: list[Path] = []
        self.named = False
        """Files that are written for a probe need a name here."""
        self._image: memoryview | None = None
        self._keep: list[Arena] = []
        self._bases: list[codecs.Piece] = []
        self._based_at_step = 0
        self._link: NodeLink | None = None
        self._devices: DeviceProbe | None = None

    def meet(self, ranks: Ranks) -> None:
        """Finds the next node, where there is another one; every rank must call it."""
        if ranks.nodes < 2 or not ranks.together:
            return

        def prepare() -> None:
            self._link = NodeLink(ranks.node, min(movers.LINK_BYTES, movers.spare_bytes()))

        if ranks.probes_node:
            self.attempt("host to the next node", prepare)
        wrong = meet(ranks, self._link)
        if wrong:
            self.measured.warnings.append(f"host to another node: not measured: {wrong}")
            self._leave()
        self._devices, wrong = meet_devices(ranks, self._link)
        if wrong:
            self.measured.warnings.append(f"device to another node: not measured: {wrong}")

    def _leave(self) -> None:
        if self._devices is not None:
            self._devices.close()
            self._devices = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def copier(self) -> Callable[[], None] | None:
        """Fetches from the next node what a copy of a large state would; None: there is none."""
        return None if self._link is None else self._link.fetch_all

    def device_copier(self) -> Callable[[], None] | None:
        """The same through the devices; None: there is no such path."""
        return None if self._devices is None else self._devices.fetch_all

    def take_memory(self) -> None:
        """Allocates the image of one snapshot and takes one, or a sample where that has no room."""

        def take() -> None:
            self.snapshot.allocate()
            self._blocking_s = self.snapshot.blocking()
            self._image = self.snapshot.image

        if not self.attempt("snapshots", take):
            self.attempt("sample of the state", self._take_sample)

    def _take_sample(self) -> None:
        nbytes = min(movers.spare_bytes(), storage.SAMPLE_LIMIT_BYTES) // 4096 * 4096
        arena = movers.filled_memory(self._state, nbytes)
        self._keep.append(arena)
        self._image = arena.view

    def run(self, stage: Callable[[str], None]) -> None:
        """Run all probes in turn; `stage` receives the name of each that begins."""
        if self._image is None:
            return
        seconds = {name: share * self._settings.probes_s for name, share in _SHARES.items()}
        stage("host copy and peer")
        self.attempt("host copy", lambda: self._copy(seconds["copy"]))
        share = 0.5 if self._devices is not None else 1.0
        self.attempt("host to peer", lambda: self._peer(share * seconds["peer"]))
        self.attempt("device to peer", lambda: self._device_to_peer(share * seconds["peer"]))
        if self._device is not None and self._device.type == "cuda":
            stage("device links")
            self.attempt("device links", lambda: self._device_links(seconds["device"]))
        stage("storage writes and reads")
        image = self._image
        self.attempt("storage", lambda: self._storage(image, seconds["writes"], seconds["reads"]))
        stage("codecs")
        self.attempt("codecs", lambda: self._codecs(seconds["codecs"]))

    def attempt(self, what: str, probe: Callable[[], object]) -> bool:
        """Runs one probe; a failure becomes a warning, never the end of the profile."""
        try:
            probe()
        except Exception as error:
            self.measured.warnings.append(f"{what}: not measured: {error}")
            return False
        return True

    def writer(self) -> Callable[[], None] | None:
        """Writes a sample of the image durably to a file that is gone again."""
        if self._image is None:
            return None
        sample = self._image[: storage.SAMPLE_LIMIT_BYTES]

        def write() -> None:
            with self._target() as path:
                movers.write(path, sample)

        return write if self.attempt("storage write", write) else None

    def persister(self) -> Callable[[], None]:
        """Does with a whole image what a keeper does."""

        def persist() -> None:
            with self._target() as path:
                movers.persist(path, self.snapshot.image)

        return persist

    def _target(self) -> contextlib.AbstractContextManager[str]:
        """Return the path of a write that is gone again behind the block."""
        if self._is_store:
            return store_probe.probe_object(self._directory)
        return clean.probe_file(self._directory, named=self.named)

    def encodes(self) -> bool:
        """Whether a codec was measured, so that encoders beside the training are worth a look."""
        return bool(self.measured.codecs)

    def encoders(self) -> list[Callable[[], int]]:
        """Return a save's encoders, on samples of the state; none where it is too small."""
        pieces = self._codec_pieces()
        return movers.encoders(pieces) if pieces else []

    def writes_per_unit(self, units: int) -> int:
        """How many samples one unit may write."""
        sample = min(len(self._image or b"1"), storage.SAMPLE_LIMIT_BYTES)
        return max(1, INTERFERENCE_WRITE_BYTES // (max(1, units) * sample))

    def expected_persist_s(self, ranks: int) -> float:
        """Return the time to copy and write `ranks` images, from the measurements so far."""
        rates = [
            sample.bytes / sample.seconds
            for sample in (self.measured.storage.samples if self.measured.storage else ())
            if sample.operation == "write"
        ]
        rate = statistics.median(rates) if rates else UNKNOWN_BYTES_PER_S
        return self._blocking_s + ranks * self.snapshot.layout.image_bytes / rate

    def close(self) -> None:
        """Ends threads and removes the directories that were made for probing."""
        self._leave()
        self.snapshot.close()
        for path in reversed(self._created):
            try:
                path.rmdir()
            except OSError:
                break  # it is in use

    # -- the probes -------------------------------------------------------------------------

    def _scratch(self) -> tuple[memoryview, Arena]:
        """(source, target): two faulted memories of one length."""
        image = self._image or memoryview(b"")
        nbytes = min(movers.LINK_LIMIT_BYTES, movers.spare_bytes())
        nbytes = min(nbytes, max(movers.LINK_BYTES, len(image))) // 4096 * 4096
        if not self._keep or self._keep[-1].nbytes != nbytes:
            self._keep.append(Arena.anonymous(nbytes))
        if len(image) >= nbytes:
            return image[:nbytes], self._keep[-1]
        source = Arena.anonymous(nbytes)
        source.view[: len(image)] = image
        self._keep.insert(0, source)
        return source.view, self._keep[-1]

    def _copy(self, budget_s: float) -> None:
        source, target = self._scratch()
        self.measured.links["host_copy"] = links.time_link(
            movers.host_copy(source, target),
            links.link_sizes(len(source)),
            budget_s=budget_s,
            seed=self._settings.seed,
        )
        self.measured.link_notes["host_copy"] = "one thread, faulted memory"

    def _peer(self, budget_s: float) -> None:
        if self._link is not None:
            self.measured.links["host_to_peer"] = links.time_link(
                self._link.move, self._link.sizes, budget_s=budget_s, seed=self._settings.seed
            )
            self.measured.between_nodes.add("host_to_peer")
            self.measured.link_notes["host_to_peer"] = (
                "fetched from the next node and verified, while all nodes did the same"
            )
            return
        source, target = self._scratch()
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
        address = links.interface_address(interface)
        peer = links.PeerLink(source, target.view, address=address)
        try:
            self.measured.links["host_to_peer"] = links.time_link(
                peer.move,
                links.link_sizes(len(source)),
                budget_s=budget_s,
                seed=self._settings.seed,
            )
        finally:
            peer.close()
        self.measured.link_notes["host_to_peer"] = (
            f"TCP within this node over {interface or 'loopback'}: an upper bound of the network"
        )

    def _device_to_peer(self, budget_s: float) -> None:
        if self._devices is None:
            return
        self.measured.links["device_to_peer"] = links.time_link(
            self._devices.move, self._devices.sizes, budget_s=budget_s, seed=self._settings.seed
        )
        self.measured.between_nodes.add("device_to_peer")
        self.measured.link_notes["device_to_peer"] = self._devices.note

    def _device_links(self, budget_s: float) -> None:
        free = host.memory_headroom(device=self._device).device_available_bytes or 0
        nbytes = min(movers.LINK_LIMIT_BYTES, movers.spare_bytes(), free // 8)
        for name, move in links.device_moves(self._device, nbytes).items():
            self.measured.links[name] = links.time_link(
                move, links.link_sizes(nbytes), budget_s=budget_s / 3, seed=self._settings.seed
            )

    def _storage(self, image: memoryview, write_s: float, read_s: float) -> None:
        if self._is_store:
            self.measured.storage = store_probe.measure(
                self._directory, image, write_s=write_s, read_s=read_s
            )
            return
        self._prepare_directory()
        probe = storage.StorageProbe(
            self._directory,
            image,
            write=write_image,
            read=read_image,
            seed=self._settings.seed,
        )
        self.named = probe.named
        self.measured.storage = probe.run(write_s=write_s, read_s=read_s)

    def _codecs(self, budget_s: float) -> None:
        if self.snapshot.arena is None:
            raise GuardError("no memory for a snapshot to take samples from")
        samples, warnings = codecs.measure_codecs(
            movers.codecs(), self._codec_pieces(), budget_s=budget_s
        )
        self.measured.codecs = samples
        self.measured.warnings += warnings

    def _codec_pieces(self) -> list[codecs.Piece]:
        pieces = codecs.spread_pieces(
            self.snapshot.regions() if self.snapshot.arena else [],
            piece_bytes=PIECE_BYTES,
            bytes_per_class=CODEC_BYTES_PER_CLASS,
        )
        return codecs.joined(pieces, piece_bytes=PIECE_BYTES)

    def remember(self, step: int) -> None:
        """Keep some bytes of the snapshot now: their later change shows the gain of a delta."""

        if self._is_store:
            return  # nothing is stored as a difference there

        def keep() -> None:
            pieces = codecs.spread_pieces(
                self.snapshot.regions() if self.snapshot.arena else [],
                piece_bytes=PIECE_BYTES,
                bytes_per_class=BASE_BYTES_PER_CLASS,
            )
            self._bases = [replace(piece, base=memoryview(bytes(piece.data))) for piece in pieces]
            self._based_at_step = step

        self.attempt("bases of deltas", keep)

    def differences(self, step: int) -> None:
        """Measure deltas between the state after `step` and the remembered bytes."""
        gap = step - self._based_at_step
        if gap < 1 or not self._bases:
            return

        def measure() -> None:
            self.snapshot.blocking()
            pieces = [replace(piece, gap_steps=gap) for piece in self._bases]
            pieces = codecs.joined(pieces, piece_bytes=PIECE_BYTES)
            samples, warnings = codecs.measure_codecs(
                movers.base_codecs(), pieces, budget_s=BASES_S
            )
            self.measured.codecs += samples
            self.measured.warnings += warnings

        self.attempt("deltas", measure)

    def _prepare_directory(self) -> None:
        """Makes the target directory as a run would, and sweeps what a killed profile left."""
        directory = Path(self._directory)
        missing = [p for p in (directory, *directory.parents) if not p.exists()]
        for path in reversed(missing):
            new_files.make_directory(path)
            self._created.append(path)
        clean.sweep(self._directory)
