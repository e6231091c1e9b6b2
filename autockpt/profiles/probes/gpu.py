"""What NVML tells about the GPUs of this process; () without NVML, None where it does not say."""

import contextlib
from typing import Any

from autockpt.values.profile import GpuCounters


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

    def ask(question: str, *args: Any) -> Any:
        try:
            return getattr(nvml, question)(device, *args)
        except Exception:  # not supported by this device, this driver or this pynvml
            return None

    name = ask("nvmlDeviceGetName")
    ecc = None
    with contextlib.suppress(AttributeError):
        ecc = ask(
            "nvmlDeviceGetTotalEccErrors",
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
    temperature = None
    with contextlib.suppress(AttributeError):
        temperature = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    return GpuCounters(
        name=name.decode() if isinstance(name, bytes) else str(name or f"GPU {index}"),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        ecc_uncorrected=ecc,
        temperature_c=temperature,
        xid_events=_xid_events(nvml, device, xid_wait_ms),
    )


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
