"""Who claimed a checkpoint directory, and whether that process lives.

A pid means something on one boot of one machine, in one pid namespace.  Elsewhere only the
heartbeat of the claim tells.
"""

import os
import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFile:
    """terms/t-N: who claimed the directory."""

    schema_version: int = 1
    term: int
    run_id: str
    launch_id: str
    restart_round: int
    host: str
    boot_id: str
    pid: int
    pid_start: int
    """Start time of the process in clock ticks since boot: pids are reused."""
    nonce: str
    pid_namespace: str = ""
    """Where `pid` names the process; "" in claims of before this was written."""


def own_claim(term: int, run_id: str, launch_id: str, restart_round: int) -> TermFile:
    """A claim of this process."""
    return TermFile(
        term=term, run_id=run_id, launch_id=launch_id, restart_round=restart_round,
        host=os.uname().nodename, boot_id=boot_id(), pid=os.getpid(),
        pid_start=pid_start(os.getpid()) or 0, nonce=secrets.token_hex(8),
        pid_namespace=pid_namespace(),
    )  # fmt: skip


def start_of(claim: TermFile) -> tuple[str, int]:
    """Return the start of the run it belongs to; keepers may change within one."""
    return claim.launch_id, claim.restart_round


def boot_id() -> str:
    """Identity of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def pid_namespace() -> str:
    """Identity of the pid namespace of this process, "" where the system does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_visible(holder: TermFile) -> bool:
    """Whether its pid means the same process here: containers of one machine share its boot."""
    if holder.boot_id != boot_id():
        return False
    own = pid_namespace()
    if holder.pid_namespace and own:
        return holder.pid_namespace == own
    return holder.host == os.uname().nodename


def is_alive(holder: TermFile) -> bool:
    """Whether another process than this one holds it; only where its pid is visible."""
    return pid_start(holder.pid) == holder.pid_start and holder.pid != os.getpid()


def pid_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
