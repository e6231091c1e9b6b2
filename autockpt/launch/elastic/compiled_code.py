"""Where the ranks keep compiled code, so that a restart does not compile again.

The folders lie in the run directory and move with it.  Code that a compiler makes for
one kind of machine may not run on another one.  Each kind and each version has a folder of its own.
A variable that the user has set stays as it is.
"""

import hashlib
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}
"""By variable the folder that it names.

Not TORCH_EXTENSIONS_DIR: its lock is a file.  A rank that is killed while it builds leaves it, and
every later start would wait for it without end.
"""
SCHEDULERS = ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID")
"""Variables of systems that may start a job again on another machine."""
CPU_INFO = Path("/proc/cpuinfo")


def chosen(
    wish: Literal["on", "off"] | None,
    caches: Path,
    environ: Mapping[str, str],
    *,
    single_node: bool,
) -> dict[str, str]:
    """The variables that a policy wants to be set; `wish` None: auto."""
    if wish == "on" or (wish is None and may_move(environ, single_node=single_node)):
        return cache_variables(caches, environ)
    return {}


def cache_variables(
    caches: Path, environ: Mapping[str, str], *, cpu_info: Path = CPU_INFO
) -> dict[str, str]:
    """The variables that the user has not set, for a machine of this kind."""
    folder = caches / machine_kind(cpu_info)
    return {name: str(folder / sub) for name, sub in FOLDERS.items() if not environ.get(name)}


def may_move(environ: Mapping[str, str], *, single_node: bool) -> bool:
    """Whether the ranks of a later start may run on another machine.

    On one machine torch's own folders outlast a restart, and all runs of a user share them.
    """
    return not single_node or any(environ.get(name) for name in SCHEDULERS)


def machine_kind(cpu_info: Path = CPU_INFO) -> str:
    """A name for the processor, the interpreter and the version of torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    features = _processor(cpu_info)
    digest = hashlib.sha256(repr((features, torch, sys.version)).encode()).hexdigest()
    return f"{platform.machine()}-torch-{torch}-{digest[:12]}".replace("/", "-")


def _processor(cpu_info: Path) -> list[str]:
    """Model and instructions of the first core; compilers ask the machine for the same."""
    told = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = cpu_info.read_text(errors="replace").split("\n\n")[0]
    except OSError:
        return [platform.processor()]
    rows = [line.partition(":") for line in first.splitlines()]
    return [f"{name.strip()}={value.strip()}" for name, _, value in rows if name.strip() in told]
