"""Copies past the caches: from which size on glibc's memcpy uses non-temporal stores.

Such stores save a third of the memory traffic: a usual store first reads each line of the target.
The core that copies a checkpoint does not read it again.  By its own account, glibc (2.36) uses
them above three quarters of a hardware thread's share of the last cache.  That is 0.4 to 1.5 MB on
most processors.  A virtual machine may see few cores and all of the host's cache.  There the same
rule gives hundreds of MB, and on some machines pieces of a checkpoint move at half the speed.  On
others they move as fast, and stores past the caches only take more of the resources that cores
share.  On an EPYC, matrix products on another core lost twice as much beside them as beside usual
copies.  So the machine is asked.

The bound is a tunable, read once when a process starts; so the launcher sets it for the trainers.

Source: glibc manual, "Hardware Capability Tunables"; sysdeps/x86/dl-cacheinfo.h;
`make bench-copies`.
"""

import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
THRESHOLD_BYTES = 2**20
"""Within what glibc's rule gives on whole machines."""
PIECE_BYTES = 4 * 2**20
"""Bytes per memcpy call of a copy (`snapshot/copy_engine.py`): small enough to publish progress,
large enough for full bandwidth, if the bound is not above."""

GAIN = 1.25
"""Times as fast that pieces must be with the bound: measured were 1.0 to 1.1 and 1.8."""


def chosen(
    environ: Mapping[str, str], gain: Callable[[Mapping[str, str]], float | None]
) -> dict[str, str]:
    """`with_threshold` where this machine copies clearly faster with it, else {}.

    `gain` measures what is given to it: times as fast as without, None if it cannot say.
    """
    added = with_threshold(environ)
    measured = gain(added) if added else None
    return added if measured is not None and measured >= GAIN else {}


def with_threshold(environ: Mapping[str, str]) -> dict[str, str]:
    """Return additions to the environment of a process to be started; {}: it stays as it is.

    A tunable that the user has set stays.
    """
    given = environ.get(VARIABLE, "")
    if platform.machine() != "x86_64" or TUNABLE in given:
        return {}
    return {VARIABLE: ":".join(filter(None, (given, f"{TUNABLE}={THRESHOLD_BYTES}")))}


def given_bytes(environ: Mapping[str, str]) -> int:
    """The bound that an environment sets, of any origin; 0: glibc's own rule holds."""
    found = re.search(rf"{re.escape(TUNABLE)}=(0x[0-9a-fA-F]+|\d+)(:|$)", environ.get(VARIABLE, ""))
    return int(found[1], 0) if found else 0


def threshold_bytes() -> int | None:
    """Return the bound for processes started with this one's environment; None: glibc does not say.

    Asks the dynamic loader (glibc 2.33), which is a process.
    """
    maps = Path("/proc/self/maps").read_text(errors="replace")
    loader = re.search(r"/\S*/ld-linux\S*", maps)
    if loader is None:
        return None
    try:
        said = subprocess.run(
            [loader[0], "--list-tunables"], capture_output=True, text=True, timeout=5, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rf"^{re.escape(TUNABLE)}: (0x[0-9a-f]+)", said, re.MULTILINE)
    return int(found[1], 16) if found else None
