"""Traffic of the network and the GPUs' buses while the job trains without our traffic.

Network: byte counters of one interface (/proc/net/dev) and of all RDMA ports (sysfs), whose traffic
the interfaces do not see.  They are read at the begin and at the end.  PCIe: NVML counts for 20 ms
when it is asked, so a thread asks again and again and takes the mean.  All of them count
everybody's traffic, also that of other jobs.  `missing` names the devices without counters.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.values.profile import LinkTraffic

PERIOD_S = 0.25
"""Between two questions to NVML, each of which takes 40 ms."""
WORD_BYTES = 4
"""RDMA ports count words."""
MBIT = 1e6 / 8
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one PCIe lane by generation, after encoding, each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Counters of one device of the network."""

    sent: int
    received: int


class TrafficProbe:
    """Begins to count when it is made.  `stop` ends it."""

    def __init__(
        self,
        interface: str | None,
        *,
        gpus: bool,
        root: Path = Path("/"),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interface`: that carries the training's traffic; None: the job uses no network.

        `gpus`: it uses a GPU.
        """
        self.missing: list[str] = []
        """Uncounted traffic and the reasons, in sentences; complete after `stop`."""
        self._interface, self._root, self._now_s = interface, root, now_s
        self._bus = _Bus() if gpus else None
        self._before = self._counters()
        self._began_s = now_s()

    def stop(self) -> tuple[LinkTraffic, ...]:
        """Traffic since the begin, by device; waits for an answer of NVML at most."""
        seconds = self._now_s() - self._began_s
        after, pcie = self._counters(), () if self._bus is None else self._bus.stop()
        if self._bus is not None and not pcie:
            self.missing.append(f"traffic of PCIe: not counted: {self._bus.why_not}")
        both = sorted(self._before.keys() & after.keys()) if seconds > 0 else []
        network = tuple(
            LinkTraffic(
                link="network", device=device, seconds=seconds,
                sent_bytes_per_s=max(0, after[device].sent - self._before[device].sent) / seconds,
                received_bytes_per_s=max(0, after[device].received - self._before[device].received)
                / seconds,
                capacity_bytes_per_s=self._capacity(device),
            )
            for device in both
        )  # fmt: skip
        if self._interface is not None and not network:
            name = f"interface {self._interface}" if self._interface else "interface of the job"
            self.missing.append(f"traffic of the network: not counted: /proc/net/dev has no {name}")
        return (*network, *pcie)

    def _counters(self) -> dict[str, Bytes]:
        if self._interface is None:
            return {}
        table = _interfaces(self._text("proc/net/dev"))
        found = {self._interface: table[self._interface]} if self._interface in table else {}
        for port in sorted(self._root.glob("sys/class/infiniband/*/ports/*")):
            counts = [
                self._text(str((port / "counters" / name).relative_to(self._root)))
                for name in ("port_xmit_data", "port_rcv_data")
            ]
            if all(text.strip().isdigit() for text in counts):
                sent, received = (int(text) * WORD_BYTES for text in counts)
                found[f"{port.parent.parent.name}/{port.name}"] = Bytes(
                    sent=sent, received=received
                )
        return found

    def _capacity(self, device: str) -> float | None:
        """Bytes per second each way as the driver tells, None where it does not."""
        name, _, port = device.partition("/")
        with contextlib.suppress(ValueError):
            if port:
                text = self._text(f"sys/class/infiniband/{name}/ports/{port}/rate")  # 100 Gb/sec
                return float(text.partition(" ")[0]) * 1e3 * MBIT
            mbit = float(self._text(f"sys/class/net/{name}/speed"))
            return mbit * MBIT if mbit > 0 else None
        return None

    def _text(self, path: str) -> str:
        try:
            return (self._root / path).read_text()
        except OSError:  # a virtual interface has no speed, a container no sysfs
            return ""


def _interfaces(text: str) -> Mapping[str, Bytes]:
    """The table of /proc/net/dev: received bytes are its first column, sent ones its ninth."""
    found = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        columns = rest.split()
        if colon and len(columns) > 8 and columns[0].isdigit() and columns[8].isdigit():
            found[name.strip()] = Bytes(sent=int(columns[8]), received=int(columns[0]))
    return found


class _Bus:
    """Means of what NVML says of PCIe, by GPU."""

    def __init__(self) -> None:
        self.why_not = "no GPU answered"
        self._samples: dict[int, list[tuple[float, float]]] = {}
        self._about: dict[int, tuple[str, float | None]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_s = time.monotonic()
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no library, no driver, no permission
            self.why_not = str(error) or type(error).__name__
            return
        self._thread = threading.Thread(
            target=self._ask, args=(pynvml,), name="autockpt-pcie", daemon=True
        )
        self._thread.start()

    def stop(self) -> tuple[LinkTraffic, ...]:
        """Ends the thread; () where nothing was counted."""
        self._over.set()
        if self._thread is None:
            return ()
        self._thread.join(timeout=5.0)
        seconds = time.monotonic() - self._began_s
        return tuple(
            LinkTraffic(
                link="pcie", device=self._about[gpu][0], seconds=seconds,
                sent_bytes_per_s=sum(sent for sent, _ in samples) / len(samples),
                received_bytes_per_s=sum(received for _, received in samples) / len(samples),
                capacity_bytes_per_s=self._about[gpu][1],
            )
            for gpu, samples in sorted(self._samples.items())
        )  # fmt: skip

    def _ask(self, nvml: Any) -> None:
        try:
            devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            for number, device in enumerate(devices):
                self._about[number] = (f"GPU {number}", _pcie_capacity(nvml, device))
            while True:
                for number, device in enumerate(devices):
                    sent, received = (
                        nvml.nvmlDeviceGetPcieThroughput(device, way) * 1e3
                        for way in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
                    )
                    self._samples.setdefault(number, []).append((sent, received))
                if self._over.wait(PERIOD_S):
                    break
        except Exception as error:  # this GPU or driver does not tell
            self.why_not = str(error) or type(error).__name__
            self._samples.clear()
        finally:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()


def _pcie_capacity(nvml: Any, device: Any) -> float | None:
    try:
        lane = LANE_BYTES_PER_S.get(nvml.nvmlDeviceGetMaxPcieLinkGeneration(device))
        width = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(device))
    except Exception:
        return None
    return None if lane is None else lane * width
