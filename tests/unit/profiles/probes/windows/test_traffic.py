"""Byte counters of the network and of PCIe, from files and drivers that are not this machine's."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.profiles.probes.windows.traffic import TrafficProbe
from autockpt.profiling.facts import facts
from autockpt.profiling.facts.ranks import Ranks
from autockpt.reports.html import html
from autockpt.reports.model import build
from autockpt.values.profile import LinkTraffic
from tests.unit.reports.examples import profile_data

DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo: 500 5 0 0 0 0 0 0 500 5 0 0 0 0 0 0
  eth7: {received} 9 0 0 0 0 0 0 {sent} 9 0 0 0 0 0 0
"""


def write(root: Path, path: str, text: str) -> None:
    """A file of the made-up machine."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_bytes_of_the_interface_and_of_rdma_ports_are_counted(tmp_path: Path) -> None:
    """Two seconds of traffic against what the drivers say the links carry; of lo nothing."""
    now_s = [10.0]
    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(tmp_path, "proc/net/dev", DEV.format(received=1000, sent=2000))
    write(tmp_path, "sys/class/net/eth7/speed", "1000\n")
    write(tmp_path, f"{port}/rate", "100 Gb/sec (4X EDR)\n")
    write(tmp_path, f"{port}/counters/port_xmit_data", "0\n")
    write(tmp_path, f"{port}/counters/port_rcv_data", "0\n")
    probe = TrafficProbe("eth7", gpus=False, root=tmp_path, now_s=lambda: now_s[0])
    now_s[0] = 12.0
    write(tmp_path, "proc/net/dev", DEV.format(received=1000 + 25_000_000, sent=2000 + 50_000_000))
    write(tmp_path, f"{port}/counters/port_xmit_data", f"{5_000_000_000 // 4}\n")
    ethernet, infiniband = probe.stop()
    assert (ethernet.link, ethernet.device, ethernet.seconds) == ("network", "eth7", 2.0)
    assert ethernet.sent_bytes_per_s == 25e6
    assert ethernet.sent_share == pytest.approx(0.2)
    assert ethernet.received_share == pytest.approx(0.1)
    assert (infiniband.device, infiniband.received_bytes_per_s) == ("mlx5_0/1", 0.0)
    assert infiniband.sent_share == pytest.approx(0.2)
    assert probe.missing == []


def test_a_link_without_a_known_speed_has_no_share(tmp_path: Path) -> None:
    """A virtual interface says -1, or nothing."""
    write(tmp_path, "proc/net/dev", DEV.format(received=0, sent=0))
    write(tmp_path, "sys/class/net/eth7/speed", "-1\n")
    probe = TrafficProbe("eth7", gpus=False, root=tmp_path)
    time.sleep(0.001)
    (found,) = probe.stop()
    assert (found.capacity_bytes_per_s, found.sent_share) == (None, None)


def test_counters_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the interface nor a driver; nothing is made up, and nothing raised."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    probe = TrafficProbe("eth7", gpus=True, root=tmp_path)
    assert probe.stop() == ()
    assert len(probe.missing) == 2
    assert "PCIe: not counted" in probe.missing[0]
    assert "/proc/net/dev has no interface eth7" in probe.missing[1]


def test_a_job_that_uses_no_link_is_told_of_none(tmp_path: Path) -> None:
    """One node without a GPU."""
    probe = TrafficProbe(None, gpus=False, root=tmp_path)
    assert (probe.stop(), probe.missing) == ((), [])


class Bus:
    """A driver with one GPU, generation 4 and 16 lanes, which sends more and more."""

    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self) -> None:
        self.asked = 0

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return object()

    def nvmlDeviceGetMaxPcieLinkGeneration(self, device: object) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, device: object) -> int:
        return 16

    def nvmlDeviceGetPcieThroughput(self, device: object, way: int) -> int:
        self.asked += 1
        return 3_150_400 if way == 0 else 0


class SilentBus(Bus):
    """One that does not count."""

    def nvmlDeviceGetPcieThroughput(self, device: object, way: int) -> int:
        raise RuntimeError("Not Supported")


def test_pcie_is_asked_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """kB/s against 16 lanes of generation 4."""
    bus = Bus()
    monkeypatch.setitem(sys.modules, "pynvml", bus)  # type: ignore[arg-type]
    probe = TrafficProbe(None, gpus=True)
    while bus.asked < 2:
        time.sleep(0.001)
    (found,) = probe.stop()
    assert (found.link, found.device) == ("pcie", "GPU 0")
    assert found.sent_bytes_per_s == 3_150_400e3
    assert found.sent_share == pytest.approx(0.1)
    assert probe.missing == []


def test_a_driver_that_does_not_count_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words."""
    monkeypatch.setitem(sys.modules, "pynvml", SilentBus())  # type: ignore[arg-type]
    probe = TrafficProbe(None, gpus=True)
    assert probe.stop() == ()
    assert probe.missing == ["traffic of PCIe: not counted: Not Supported"]


def test_the_interface_is_the_one_that_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none where the job has one node and names none."""
    alone = Ranks(0, 1, 0, 1)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert facts.interface(alone) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "=nowhere0,lo")
    assert facts.interface(alone) == "lo"


def test_a_report_shows_the_traffic_of_the_training() -> None:
    """Rate and share of the capacity; a dash where that is unknown."""
    data = profile_data()
    assert data.profile is not None
    known = LinkTraffic(
        link="network", device="eth7", sent_bytes_per_s=25e6, received_bytes_per_s=12.5e6,
        capacity_bytes_per_s=125e6, seconds=2.0,
    )  # fmt: skip
    profile = replace(
        data.profile, traffic=(known, replace(known, device="veth", capacity_bytes_per_s=None))
    )
    page = html.render(build(replace(data, profile=profile)))
    assert "Traffic of the training" in page
    for word in ("eth7", "veth", "25 MB/s", "20 %"):
        assert word in page, word
    assert "Traffic of the training" not in html.render(build(data))
