"""Probes on tiny sizes, with movers that can be told what to do and with the real ones."""

import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autockpt.executors.image.container import chunk_digest
from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.shard_file import read_image, write_image
from autockpt.profiles.probes import clean, codecs, gpu, links, storage
from autockpt.profiles.probes.interference import (
    CopyWork,
    EncodeWork,
    InterferenceProbe,
    Outcome,
    PersistWork,
    WriteWork,
)
from autockpt.profiles.probes.proof import ChangeProof, raw_bytes
from autockpt.profiles.schedule import Unit
from autockpt.profiling.measure.movers import ElementCodec
from autockpt.values.errors import StorageError

MIB = 2**20


# --- clean files


def test_a_probe_file_has_no_name_while_it_is_open(tmp_path: Path) -> None:
    """It can be written through its path, and the directory stays empty."""
    with clean.probe_file(str(tmp_path)) as path:
        with open(path, "wb") as file:
            file.write(b"x")
        assert os.listdir(tmp_path) == []
        assert os.path.getsize(path) == 1
    assert not os.path.exists(path)


def test_a_named_probe_file_is_removed(tmp_path: Path) -> None:
    """The fall-back for movers that must create their file."""
    with clean.probe_file(str(tmp_path), named=True) as path:
        assert not os.path.exists(path)
        Path(path).write_bytes(b"x")
    assert os.listdir(tmp_path) == []


def test_left_overs_of_dead_processes_are_swept_and_others_stay(tmp_path: Path) -> None:
    """Only probe files, only of processes that are gone."""
    dead, alive = _dead_pid(), os.getpid()
    names = {pid: Path(_name_of(str(tmp_path), pid)) for pid in (dead, alive)}
    for path in names.values():
        path.write_bytes(b"x")
    (tmp_path / ".autockpt-probe-notes.txt").write_bytes(b"mine")

    assert clean.sweep(str(tmp_path)) == 1
    assert not names[dead].exists()
    assert names[alive].exists()
    assert (tmp_path / ".autockpt-probe-notes.txt").exists()
    assert clean.sweep(str(tmp_path / "missing")) == 0


def _name_of(directory: str, pid: int) -> str:
    return os.path.join(directory, f"{clean.PREFIX}{pid}-{clean._host()}-0")


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


KILLED = """
import sys, time
from autockpt.profiles.probes.clean import probe_file
with probe_file(sys.argv[1]) as path:
    with open(path, "wb") as file:
        file.write(bytes(2**20)); file.flush()
        print("writing", flush=True)
        time.sleep(60)
"""


def test_a_killed_probe_leaves_no_file(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write: the kernel frees the unnamed file."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert os.listdir(tmp_path) == []


# --- links


def test_link_sizes_are_whole_pages_and_bounded() -> None:
    """Five sizes up to the largest, at least one for tiny memory."""
    assert links.link_sizes(64 * MIB)[-1] == 64 * MIB
    assert len(links.link_sizes(64 * MIB)) == 5
    assert all(size % 4096 == 0 for size in links.link_sizes(64 * MIB))
    assert links.link_sizes(100) == [4096]


def test_every_size_is_sampled_equally() -> None:
    """Rounds, not blocks; the warm-up is not among the samples."""
    moved: list[int] = []
    samples = links.time_link(moved.append, [10, 20], rounds=3, budget_s=60)

    assert sorted(s.bytes for s in samples) == [10, 10, 10, 20, 20, 20]
    assert len(moved) == 7


def test_a_slow_link_stops_at_its_budget() -> None:
    """The first round is always whole."""
    samples = links.time_link(lambda n: time.sleep(0.01), [1, 2, 3], rounds=100, budget_s=0.05)

    assert 3 <= len(samples) < 20


def test_peer_link_moves_the_bytes() -> None:
    """What is sent over the loopback arrives in the target, and both ends close."""
    source, target = Arena.anonymous(MIB), Arena.anonymous(MIB)
    source.view[:] = bytes(range(256)) * (MIB // 256)
    peer = links.PeerLink(source.view, target.view)
    try:
        peer.move(MIB)
        peer.move(4096)
    finally:
        peer.close()

    assert target.view == source.view


def test_unknown_interface_is_the_loopback() -> None:
    """A name that does not exist here falls back."""
    assert links.interface_address(None) == "127.0.0.1"
    assert links.interface_address("nothere0") == "127.0.0.1"
    assert links.interface_address("lo") == "127.0.0.1"


# --- storage


def probe_of(directory: Path, image: memoryview, **movers: Any) -> storage.StorageProbe:
    """A probe with the real movers unless told otherwise."""
    chosen: dict[str, Any] = {"write": write_image, "read": read_image, **movers}
    return storage.StorageProbe(str(directory), image, **chosen)


@pytest.mark.parametrize("named", [False, True])
def test_the_real_movers_write_and_read_real_bytes(tmp_path: Path, named: bool) -> None:
    """Every configuration has samples of the whole image, the directory ends empty."""
    image = Arena.anonymous(2 * MIB).view
    probe = probe_of(tmp_path, image)
    probe.named = named or probe.named
    measured = probe.run(write_s=20, read_s=20, rounds=1)

    writes = [s for s in measured.samples if s.operation == "write"]
    reads = [s for s in measured.samples if s.operation == "read"]
    assert len(writes) == len(storage.write_grid())
    assert len(reads) == len(storage.read_grid())
    assert {s.bytes for s in measured.samples} == {2 * MIB}
    assert len(measured.empty_write_s) == 3
    assert os.listdir(tmp_path) == []


def test_the_default_configuration_comes_first() -> None:
    """A budget that ends early has measured what will most likely be used."""
    first = storage.write_grid()[0]

    assert (first.writers, first.chunk_bytes, first.direct) == (2, 8 * MIB, True)
    assert len(set(storage.write_grid())) == 18


class SlowWriter:
    """Takes its time and writes nothing but the length."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.largest = 0

    def __call__(self, path: str, image: memoryview, **_: Any) -> None:
        time.sleep(self.seconds)
        self.largest = max(self.largest, len(image))
        with open(path, "wb") as file:
            file.truncate(len(image))


def read_nothing(path: str, into: memoryview, **_: Any) -> float:
    """A reader that is always done."""
    return 0.0


def test_slow_storage_is_cut_short_and_says_so(tmp_path: Path) -> None:
    """A spent budget leaves out the unlikeliest configurations, with a sentence."""
    probe = probe_of(tmp_path, Arena.anonymous(MIB).view, write=SlowWriter(0.02), read=read_nothing)
    measured = probe.run(write_s=0.1, read_s=0.1)

    writes = [s for s in measured.samples if s.operation == "write"]
    assert 1 <= len(writes) < 18
    assert writes[0].configuration == ("write", True, 2, 8 * MIB)
    assert "not measured within" in measured.warnings[0]


def test_slow_storage_gets_a_smaller_sample(tmp_path: Path) -> None:
    """16 MiB in half a second: a sample of 64 MiB would take too long."""
    writer = SlowWriter(0.3)
    probe = probe_of(tmp_path, Arena.anonymous(64 * MIB).view, write=writer, read=read_nothing)
    measured = probe.run(write_s=0.1, read_s=0.1)

    assert writer.largest < 40 * MIB
    assert measured.samples[0].bytes < 40 * MIB


def test_little_space_gets_a_smaller_sample_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a quarter of the free space is written to."""
    real = os.statvfs(tmp_path)

    class Nearly:
        f_bavail = 4 * MIB // real.f_frsize
        f_frsize = real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Nearly)
    probe = probe_of(tmp_path, Arena.anonymous(8 * MIB).view, read=read_nothing)
    measured = probe.run(write_s=0.2, read_s=0.1, rounds=1)

    assert {s.bytes for s in measured.samples} == {MIB}
    assert "room for a sample of 1.05 MB" in measured.warnings[0]


def test_a_directory_that_takes_no_file_is_an_error(tmp_path: Path) -> None:
    """It names the directory; nothing is measured from thin air."""
    with pytest.raises(StorageError, match="gone"):
        probe_of(tmp_path / "gone", Arena.anonymous(4096).view)


def test_a_mover_without_open_files_gets_named_ones(tmp_path: Path) -> None:
    """Movers that insist on creating their file are measured too."""

    def exclusive(path: str, image: memoryview, **_: Any) -> None:
        with open(path, "xb") as file:
            file.write(image)

    probe = probe_of(tmp_path, Arena.anonymous(4096).view, write=exclusive, read=read_nothing)

    assert probe.named
    assert probe.run(write_s=1, read_s=1, rounds=1).samples
    assert os.listdir(tmp_path) == []


# --- codecs


def test_pieces_are_spread_over_every_class() -> None:
    """A budget per class, whole pieces, nothing of classes that hold a few numbers."""
    big, tiny = memoryview(bytes(8 * MIB)), memoryview(bytes(100))
    regions = [
        codecs.Piece("parameters", big),
        codecs.Piece("moments", big),
        codecs.Piece("other", tiny),
    ]
    pieces = codecs.spread_pieces(regions, piece_bytes=MIB, bytes_per_class=2 * MIB)

    assert {p.tensor_class for p in pieces} == {"parameters", "moments"}
    assert sum(len(p.data) for p in pieces if p.tensor_class == "moments") == 2 * MIB


def test_small_pieces_are_measured_together() -> None:
    """Those that are alike, with their bases, in order, and no byte twice or lost."""
    small = [
        codecs.Piece(
            "moments", memoryview(bytes([i]) * 10), "F32", base=memoryview(bytes([i + 100]) * 10),
            gap_steps=3, role="m" if i % 2 else "v",
        )
        for i in range(8)
    ]  # fmt: skip
    one, other, *rest = codecs.joined(small, piece_bytes=30)
    assert bytes(one.data) == b"".join(bytes([i]) * 10 for i in (0, 2, 4))
    assert one.base == b"".join(bytes([i + 100]) * 10 for i in (0, 2, 4))
    assert bytes(other.data) == b"".join(bytes([i]) * 10 for i in (1, 3, 5))
    assert [len(piece.data) for piece in rest] == [10, 10]
    assert {(piece.gap_steps, piece.dtype) for piece in (one, other, *rest)} == {(3, "F32")}


def test_real_codecs_round_trip() -> None:
    """zstd on zeros shrinks, none does not; both give the bytes back."""
    pieces = [codecs.Piece("parameters", memoryview(bytes(MIB)))]
    samples, warnings = codecs.measure_codecs(
        {name: ElementCodec(name) for name in ("none", "planes", "zstd")}, pieces
    )

    by_name = {s.codec: s for s in samples}
    assert warnings == []
    assert by_name["none"].encoded_bytes == MIB
    assert by_name["zstd"].encoded_bytes < MIB / 100
    assert by_name["planes"].encoded_bytes < MIB / 100


class Liar:
    """Decodes to something else."""

    def encode(self, raw: memoryview, dtype: str, base: object) -> bytes:
        return b""

    def decode(self, frame: bytes, raw_bytes: int, base: object) -> bytes:
        return bytes(raw_bytes + 1)


class Broken(Liar):
    """Does not even encode."""

    def encode(self, raw: memoryview, dtype: str, base: object) -> bytes:
        raise RuntimeError("out of order")


def test_a_codec_that_loses_bytes_is_left_out() -> None:
    """Fast and wrong is no candidate; the sentence names it."""
    pieces = [codecs.Piece("moments", memoryview(b"abc" * 1000))]
    samples, warnings = codecs.measure_codecs({"liar": Liar(), "broken": Broken()}, pieces)

    assert samples == []
    assert "codec liar: does not give back the moments" in warnings[0]
    assert "out of order" in warnings[1]


# --- proof


def test_changes_without_a_version_are_seen() -> None:
    """numpy writes and buffers that move in forward do not bump a version; bytes do not lie."""
    still, alias, buffer = torch.zeros(10), torch.zeros(10), torch.zeros(0)
    tensors = {"still": still, "alias": alias, "empty": buffer, "scalar": torch.tensor(1.0)}
    proof = ChangeProof(tensors, chunk_digest)
    alias.numpy()[3] = 1.0

    assert proof.changed(tensors) == {"alias"}
    assert proof.changed({**tensors, "new": still}) == {"alias", "new"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_raw_bytes_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    """As many bytes as elements times size, whatever the layout."""
    tensor = torch.zeros(4, 6).to(dtype).t()[1:]

    assert len(raw_bytes(tensor)) == tensor.numel() * tensor.element_size()


# --- interference


class FakeMover:
    """A snapshot that blocks for 1 at the boundary and for 2 at the fence, on a manual clock."""

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock
        self.log: list[str] = []

    def begin(self) -> float:
        self.log.append("begin")
        self.clock.now += 1
        return 1.0

    def fence(self) -> float:
        self.log.append("fence")
        self.clock.now += 2
        return 2.0

    def wait_copied(self) -> float:
        return 4.0


class Clock:
    """Moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(probe: InterferenceProbe, clock: Clock, *, iteration_s: float = 10.0) -> int:
    """Iterations until the probe has enough."""
    count = 0
    while probe.boundary():
        clock.now += iteration_s
        probe.fence()
        probe.fence()  # a second optimizer
        count += 1
    return count


def units(*works: str, iterations: int = 2) -> list[Unit]:
    """One round."""
    return [Unit(work=w, round=0, iterations=iterations) for w in works]


def test_stalls_are_taken_out_of_the_iteration() -> None:
    """Copying costs 3 of stall in each of 2 iterations; what is left equals the quiet unit."""
    clock = Clock()
    mover = FakeMover(clock)
    probe = InterferenceProbe(
        units("quiet", "snapshot_copy"), {"snapshot_copy": CopyWork(mover)}, clock=clock
    )

    assert drive(probe, clock) == probe.iterations == 4
    quiet, copy = probe.samples
    assert (quiet.total_s, quiet.busy_s) == (20.0, 0.0)
    assert copy.total_s == pytest.approx(20.0)
    assert copy.stalls_s == (3.0, 3.0)
    assert copy.copies_s == (4.0, 4.0)
    assert copy.busy_s == 8.0
    assert mover.log == ["begin", "fence"] * 2


def test_writes_run_beside_the_unit_and_stop_with_it() -> None:
    """As many files as the limit allows, none after the unit."""
    clock, written = Clock(), []
    work = WriteWork(lambda: written.append(1), limit=3)
    probe = InterferenceProbe(units("storage_write"), {"storage_write": work}, clock=clock)
    drive(probe, clock)

    assert 1 <= len(written) <= 3
    assert probe.samples[0].busy_s >= 0.0


def test_persist_is_one_snapshot_and_one_write() -> None:
    """However many iterations the unit has; the latency is of the whole."""
    clock, written = Clock(), []
    mover = FakeMover(clock)
    work = PersistWork(mover, lambda: written.append(1))
    probe = InterferenceProbe(units("persist", iterations=3), {"persist": work}, clock=clock)
    drive(probe, clock)

    assert mover.log == ["begin", "fence"]
    assert len(written) == 1
    assert len(probe.samples[0].persists_s) == 1
    assert probe.samples[0].stalls_s == (3.0,)


def test_encoders_run_beside_the_unit_and_stop_with_it() -> None:
    """Each on a thread of its own; their rates add up."""
    enough, done = threading.Barrier(3), [0, 0]

    def encoder(which: int) -> Callable[[], int]:
        def encode() -> int:
            done[which] += 1
            if done[which] == 4:  # three pieces were counted before
                enough.wait(timeout=30)
            return 1000

        return encode

    work = EncodeWork([encoder(0), encoder(1)])
    work.begin()
    work.begin()  # a second boundary of the unit
    enough.wait(timeout=30)
    threads = list(work._threads)
    outcome = work.finish()

    assert outcome.busy_s > 0.0
    assert outcome.encoded_bytes_per_s >= 6 * 1000 / outcome.busy_s
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)


def test_a_piece_that_outlives_its_unit_does_not_count() -> None:
    """The end of it had the cores to itself."""
    entered = threading.Event()

    def encode() -> int:
        entered.set()
        work._stop.wait(timeout=30)
        return 10**9

    work = EncodeWork([encode])
    work.begin()
    assert entered.wait(timeout=30)
    assert work.finish().encoded_bytes_per_s == 0.0


def test_an_encoder_that_fails_is_a_sentence() -> None:
    """And no measure."""

    def encode() -> int:
        raise ValueError("not of this dtype")

    clock = Clock()
    probe = InterferenceProbe(units("encode"), {"encode": EncodeWork([encode])}, clock=clock)
    drive(probe, clock)
    assert probe.samples == []
    assert "not of this dtype" in probe.errors["encode"]


def fail() -> None:
    """A disk that is full."""
    raise StorageError("no space left")


def test_work_that_fails_is_dropped_and_the_iterations_go_on() -> None:
    """Other ranks count on the number of iterations: it stays what was planned."""
    clock = Clock()
    works = {"storage_write": WriteWork(fail), "persist": PersistWork(FakeMover(clock), fail)}
    planned = [*units("storage_write", "persist", "quiet"), *units("storage_write")]
    probe = InterferenceProbe(planned, works, clock=clock)

    assert drive(probe, clock) == 8
    assert [sample.work for sample in probe.samples] == ["quiet"]
    assert set(probe.errors) == {"storage_write", "persist"}
    assert "no space left" in probe.errors["persist"]


def test_abandoning_in_the_middle_waits_for_the_work() -> None:
    """A script that ends early leaves no copy in flight and no half sample."""
    clock = Clock()
    mover = FakeMover(clock)
    probe = InterferenceProbe(
        units("snapshot_copy"), {"snapshot_copy": CopyWork(mover)}, clock=clock
    )
    assert probe.boundary()
    probe.abandon()

    assert mover.log == ["begin", "fence"]
    assert probe.samples == []


def test_an_outcome_is_empty_at_first() -> None:
    """Outcomes of two units share nothing."""
    Outcome().stalls_s.append(1.0)
    assert Outcome().stalls_s == []


# --- gpu


def test_without_nvml_there_are_no_counters() -> None:
    """Never an error, whatever the machine."""
    assert isinstance(gpu.gpu_counters(), tuple)


class FakeNvml:
    """One GPU whose driver knows little."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return object()

    def nvmlDeviceGetName(self, device: object) -> bytes:
        return b"H200"

    def nvmlDeviceGetCurrPcieLinkWidth(self, device: object) -> int:
        return 16

    def nvmlDeviceGetTotalEccErrors(self, device: object, kind: int, counter: int) -> int:
        raise RuntimeError("not supported")


def test_what_the_driver_does_not_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counter on its own."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    (found,) = gpu.gpu_counters()

    assert (found.name, found.pcie_width) == ("H200", 16)
    assert (found.pcie_generation, found.ecc_uncorrected, found.xid_events) == (None, None, None)
    assert (found.utilisation, found.rows_remapped, found.slowed_by) == (None, None, None)
    assert (found.pcie_tx_bytes_per_s, found.sm_clock_hz) == (None, None)


class TalkativeNvml(FakeNvml):
    """One GPU that copies, is hot, and has lost three rows."""

    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES, NVML_CLOCK_SM = 0, 1, 1
    nvmlClocksEventReasonGpuIdle, nvmlClocksEventReasonSwPowerCap = 1, 4
    nvmlClocksEventReasonHwThermalSlowdown = 64

    def nvmlDeviceGetUtilizationRates(self, device: object) -> object:
        return SimpleNamespace(gpu=97, memory=41)

    def nvmlDeviceGetPcieThroughput(self, device: object, counter: int) -> int:
        return (24_500_000, 120_000)[counter]

    def nvmlDeviceGetRemappedRows(self, device: object) -> tuple[int, int, int, int]:
        return 1, 2, 0, 1

    def nvmlDeviceGetClockInfo(self, device: object, clock: int) -> int:
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, device: object, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: object) -> int:
        return 1 | 64


def test_traffic_clocks_and_lost_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In SI units; bits become words, and being idle is no reason."""
    monkeypatch.setitem(sys.modules, "pynvml", TalkativeNvml())  # type: ignore[arg-type]
    (found,) = gpu.gpu_counters()

    assert (found.utilisation, found.memory_utilisation) == (0.97, 0.41)
    assert (found.pcie_tx_bytes_per_s, found.pcie_rx_bytes_per_s) == (24.5e9, 120e6)
    assert (found.rows_remapped, found.remapping_failed) == (3, True)
    assert (found.sm_clock_hz, found.sm_clock_most_hz) == (1.2e9, 1.98e9)
    assert found.slowed_by == ("heat (hardware)",)


class OldNvml(FakeNvml):
    """A GPU and a driver from before rows were remapped and reasons were called events."""

    NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS = 0
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
    nvmlClocksThrottleReasonSwPowerCap = 4

    def nvmlDeviceGetRetiredPages(self, device: object, cause: int) -> list[int]:
        return [[0x1000, 0x2000], [0x3000]][cause]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: object) -> int:
        return 4


def test_an_old_driver_tells_pages_and_throttling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of both causes are counted; that a replacement failed is not known."""
    monkeypatch.setitem(sys.modules, "pynvml", OldNvml())  # type: ignore[arg-type]
    (found,) = gpu.gpu_counters()

    assert (found.rows_remapped, found.remapping_failed) == (3, None)
    assert found.slowed_by == ("the power limit",)


def test_the_names_that_are_asked_for_are_those_of_nvml() -> None:
    """A typing mistake would read as "not supported" on every machine."""
    import pynvml

    source = inspect.getsource(gpu)
    asked = re.findall(r'"(nvmlDevice[A-Za-z]+|NVML_[A-Z_]+)"', source)
    assert len(asked) > 12
    assert [name for name in asked if not hasattr(pynvml, name)] == []
    for kind in ("Event", "Throttle"):
        assert hasattr(pynvml, f"nvmlDeviceGetCurrentClocks{kind}Reasons")
        assert [n for n in gpu.REASONS if not hasattr(pynvml, f"nvmlClocks{kind}Reason{n}")] == []
