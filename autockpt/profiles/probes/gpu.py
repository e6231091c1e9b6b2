"""NVML's counters of this process's GPUs; () without NVML, None for a missing counter."""

import contextlib
from collections.abc import Callable
from typing import Any

from autockpt.values.profile import GpuCounters

Ask = Callable[..., Any]
"""A question of NVML about one device, by name, with names of constants."""
KB, MHZ = 1e3, 1e6
"""NVML tells PCIe traffic in kB/s and clocks in MHz."""
REASONS = {
    "HwThermalSlowdown": "heat (hardware)",
    "SwThermalSlowdown": "heat (software)",
    "HwPowerBrakeSlowdown": "a power brake",
    "HwSlowdown": "a hardware slow-down",
    "SwPowerCap": "the power limit",
    "ApplicationsClocksSetting": "the clocks that were set",
    "SyncBoost": "another GPU of its boost group",
}
"""NVML's names of limits on the clocks, without the limits of an idle GPU or a display."""


def gpu_counters(*, xid_wait_ms: int = 0) -> tuple[GpuCounters, ...]:
    """One entry per GPU of the node, in NVML's order.  Never raises."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: then there are no counters
        return ()
    try:
        count = pynvml.nvmlDeviceGetCount()
        return tuple(_counters(pynvml, index, xid_wait_ms) for index in range(count))
    except Exception:
        return ()
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _counters(nvml: Any, index: int, xid_wait_ms: int) -> GpuCounters:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: str, *constants: str) -> Any:
        """The answer; None where device, driver or this pynvml do not know the question."""
        try:
            return getattr(nvml, question)(device, *(getattr(nvml, name) for name in constants))
        except Exception:
            return None

    name, used = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetUtilizationRates")
    sent = ask("nvmlDeviceGetPcieThroughput", "NVML_PCIE_UTIL_TX_BYTES")
    received = ask("nvmlDeviceGetPcieThroughput", "NVML_PCIE_UTIL_RX_BYTES")
    rows, failed = _remapped(ask)
    return GpuCounters(
        name=name.decode() if isinstance(name, bytes) else str(name or f"GPU {index}"),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        ecc_uncorrected=ask(
            "nvmlDeviceGetTotalEccErrors", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"
        ),
        temperature_c=ask("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        xid_events=_xid_events(nvml, device, xid_wait_ms),
        utilisation=None if used is None else used.gpu / 100.0,
        memory_utilisation=None if used is None else used.memory / 100.0,
        pcie_tx_bytes_per_s=_times(sent, KB),
        pcie_rx_bytes_per_s=_times(received, KB),
        rows_remapped=rows,
        remapping_failed=failed,
        sm_clock_hz=_times(ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"), MHZ),
        sm_clock_most_hz=_times(ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"), MHZ),
        slowed_by=_slowed_by(nvml, ask),
    )


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _remapped(ask: Ask) -> tuple[int | None, bool | None]:
    """(rows or pages that were replaced, whether a replacement failed).

    From Ampere on rows are remapped, before that pages were retired; those cannot fail.
    """
    rows = ask("nvmlDeviceGetRemappedRows")
    if rows is not None:
        corrected, uncorrected, _, failed = rows
        return corrected + uncorrected, bool(failed)
    kinds = ("MULTIPLE_SINGLE_BIT_ECC_ERRORS", "DOUBLE_BIT_ECC_ERROR")
    lists = [
        ask("nvmlDeviceGetRetiredPages", f"NVML_PAGE_RETIREMENT_CAUSE_{kind}") for kind in kinds
    ]
    known = [pages for pages in lists if pages is not None]
    return (sum(map(len, known)) if known else None), None


def _slowed_by(nvml: Any, ask: Ask) -> tuple[str, ...] | None:
    """The reasons whose bits are set; drivers before 535 call them throttle reasons."""
    for kind in ("Event", "Throttle"):
        bits = ask(f"nvmlDeviceGetCurrentClocks{kind}Reasons")
        if bits is not None:
            masks = {
                words: getattr(nvml, f"nvmlClocks{kind}Reason{name}", 0)
                for name, words in REASONS.items()
            }
            return tuple(words for words, mask in masks.items() if bits & mask)
    return None


def _xid_events(nvml: Any, device: Any, wait_ms: int) -> int | None:
    """Critical events pending now, None where the driver offers none (NVML keeps no history)."""
    try:
        events = nvml.nvmlEventSetCreate()
    except Exception:
        return None
    try:
        nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
        count = 0
        while count < 100 and _pending(nvml, events, wait_ms):
            count += 1
        return count
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlEventSetFree(events)


def _pending(nvml: Any, events: Any, wait_ms: int) -> bool:
    try:
        wait = getattr(nvml, "nvmlEventSetWait_v2", None) or nvml.nvmlEventSetWait
        wait(events, wait_ms)
    except nvml.NVMLError_Timeout:
        return False
    return True
