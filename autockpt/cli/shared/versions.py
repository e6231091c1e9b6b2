"""Versions of autockpt and its dependencies."""

import platform
from importlib import metadata

import autockpt
from autockpt.console import Console

PACKAGES = ("torch", "numpy", "pandas", "optuna", "psutil", "click", "nvidia-ml-py")


def versions() -> dict[str, str]:
    """Without importing any of them."""
    found = {"autockpt": autockpt.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def driver_versions() -> dict[str, str]:
    """CUDA of the torch build and the NVIDIA driver, where there are any; imports torch."""
    found = {}
    try:
        import torch

        found["cuda"] = torch.version.cuda or "none (CPU build of torch)"
    except Exception as error:
        found["cuda"] = f"unknown ({error})"
    try:
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        found["nvml"] = str(pynvml.nvmlSystemGetNVMLVersion())
    except Exception:
        found["driver"] = "none (no NVML on this machine)"
    return found


def print_versions(console: Console, *, everything: bool) -> None:
    """The result of `autockpt --version`."""
    found = versions() | driver_versions() if everything else {"autockpt": autockpt.__version__}
    console.object("version", {"versions": found})
    for name, version in found.items():
        console.result(f"{name} {version}")
