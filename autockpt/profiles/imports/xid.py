"""NVIDIA Xid errors in kernel logs: which of them end a training, and how long the log watched.

    Jan 31 12:00:00 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, GPU has fallen off ...
    2026-01-31T12:00:00+0000 node7 kernel: NVRM: Xid ...       journalctl -k -o short-iso
    [Sat Jan 31 12:00:00 2026] NVRM: Xid ...                   dmesg -T
    [12345.678901] NVRM: Xid ...                               dmesg

Classes follow NVIDIA's advice for each.  An Xid that asks for a reset of the GPU or a reboot takes
the node out of the job, and its memory with it.  (A reset alone would leave the memory, but jobs
are restarted without the node.)  An Xid that only ends the program kills processes.  Errors that
the hardware repairs, and errors of the program itself, are no failures of the machine.

Exposure is from the first line of the log to the last, for every host in it.  This needs a whole
log, not only its Xid lines, or `observed_s` and `nodes` from the user.

Source: docs.nvidia.com/deploy/xid-errors, the descriptions and the Xid catalog; a burst is one
incident until three minutes of silence (NVIDIA Fleet Intelligence, "XID Bursts").
"""

import re
from collections import Counter
from dataclasses import dataclass

from autockpt.profiles.imports.moments import iso_s, syslog_s
from autockpt.values.errors import ConfigError
from autockpt.values.failure import Exposure, FailureHistory, Incident, Kind

BURST_S = 180.0
"""Silence that ends a burst of one node."""
FIRST_YEAR = 2000
"""Of a syslog without years: only differences are used; a leap year, so that Feb 29 exists."""

CLASSES: dict[int, Kind | None] = {
    13: None,  # graphics engine exception: the program's, as a rule
    31: None,  # memory page fault: the program's
    32: None,  # corrupted push buffer
    43: None,  # GPU stopped processing: the program's
    45: None,  # channels removed after another error
    48: "node",  # uncorrectable ECC error (double bit)
    61: "node",  # internal micro-controller breakpoint
    62: "node",  # internal micro-controller halt
    63: None,  # row remapping recorded: repaired at the next reset
    64: "node",  # row remapping failed
    68: None,  # video decoder
    69: None,  # graphics engine class error
    74: "node",  # NVLink error
    79: "node",  # GPU has fallen off the bus
    92: None,  # many corrected ECC errors
    94: "process",  # contained memory error: the application restarts
    95: "node",  # uncontained memory error
    109: "process",  # context switch timeout: the program's channels are gone
    110: "node",  # security fault
    119: "node",  # GSP RPC timeout
    120: "node",  # GSP error
    121: None,  # corrected errors of the link between chips
    140: "node",  # unrecovered ECC error
    143: "node",  # GPU initialisation failed
    154: None,  # recovery action changed: says what another Xid asks for
}
"""Xid: class of the interruption; None: not an interruption, or not of the machine."""

_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_ISO_HOST = re.compile(r"\d{4}-\d\d-\d\dT\S+ (\S+)")
_SYSLOG_HOST = re.compile(r"[A-Z][a-z]{2}\s+\d{1,2} \d\d:\d\d:\d\d (\S+)")
_HUMAN = re.compile(r"\[[A-Z][a-z]{2} ([^\]]+)\]")
_BOOT = re.compile(r"\[\s*(\d+\.\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    at_s: float
    host: str
    xid: int | None


def recognises(text: str) -> bool:
    """At least one Xid line."""
    return _XID.search(text) is not None


def read(
    text: str, *, where: str, nodes: int | None = None, observed_s: float | None = None
) -> FailureHistory:
    """The history of a kernel log.  Raises ConfigError where it cannot tell how long it watched."""
    lines = _lines(text)
    if not lines:
        raise ConfigError(f"{where}: no line with a time of syslog, journalctl or dmesg")
    if observed_s is None and all(line.xid is not None for line in lines):
        raise ConfigError(
            f"{where}: only Xid lines, which do not show how long the log watched. Give the "
            "whole kernel log, or say it: --observed '30 d' and --nodes N"
        )
    begin_s, end_s = lines[0].at_s, max(line.at_s for line in lines)
    length_s = observed_s if observed_s is not None else end_s - begin_s
    hosts = {line.host for line in lines}
    count = nodes if nodes is not None else len(hosts)
    if length_s <= 0 or count < len(hosts):
        raise ConfigError(
            f"{where}: {len(hosts)} hosts over {length_s:g} s watched as {count} nodes; expected "
            "more than 0 s and at least as many nodes as there are hosts"
        )
    seen = Counter(line.xid for line in lines if line.xid is not None)
    return FailureHistory(
        source=f"kernel log, {where}: {sum(seen.values())} Xid lines of {count} node(s)",
        incidents=tuple(_incidents(lines)),
        exposures=(
            Exposure(begin_s=end_s - length_s, end_s=end_s, node_s=count * length_s, job_s=0.0),
        ),
        notes=tuple(_notes(seen)),
    )


def _lines(text: str) -> list[_Line]:
    """Every line whose time can be read; a syslog that goes back in time has changed the year."""
    found: list[_Line] = []
    year, last_s = FIRST_YEAR, -1.0
    for line in text.splitlines():
        moment = _moment(line, year)
        if moment is None:
            continue
        at_s, host, yearless = moment
        if yearless and at_s < last_s - 180 * 86400.0:
            year += 1
            at_s = (_moment(line, year) or moment)[0]
        last_s = at_s
        xid = _XID.search(line)
        found.append(_Line(at_s=at_s, host=host, xid=int(xid[2]) if xid else None))
    return found


def _moment(line: str, year: int) -> tuple[float, str, bool] | None:
    """(time, host, whether the year is a guess) of a line of any of the four formats."""
    if (found := _ISO_HOST.match(line)) and (at_s := iso_s(line)) is not None:
        return at_s, found[1], False
    if (found := _SYSLOG_HOST.match(line)) and (at_s := syslog_s(line, year=year)) is not None:
        return at_s, found[1], True
    if (found := _HUMAN.match(line)) and (at_s := syslog_s(found[1], year=year)) is not None:
        return at_s, "localhost", False
    if found := _BOOT.match(line):
        return float(found[1]), "localhost", False
    return None


def _incidents(lines: list[_Line]) -> list[Incident]:
    """One incident for each burst of a node, of the worst class in it."""
    bursts: dict[str, list[list[_Line]]] = {}
    for line in lines:
        if line.xid is None:
            continue
        of_host = bursts.setdefault(line.host, [])
        if not of_host or line.at_s - of_host[-1][-1].at_s > BURST_S:
            of_host.append([])
        of_host[-1].append(line)
    found = []
    for host, groups in bursts.items():
        for group in groups:
            kinds = {CLASSES.get(line.xid) for line in group if line.xid is not None}
            kind: Kind | None = (
                "node" if "node" in kinds else "process" if "process" in kinds else None
            )
            if kind is not None:
                what = "Xid " + ", ".join(sorted({str(line.xid) for line in group}))
                found.append(Incident(at_s=group[0].at_s, kind=kind, nodes=(host,), what=what))
    return sorted(found, key=lambda one: one.at_s)


def _notes(seen: Counter[int]) -> list[str]:
    quiet = sum(count for xid, count in seen.items() if xid in CLASSES and CLASSES[xid] is None)
    unknown = sorted(xid for xid in seen if xid not in CLASSES)
    notes = ["a kernel log says nothing about failures of jobs; that rate stays as it was"]
    if quiet:
        notes.append(f"{quiet} Xid lines of programs or repaired by themselves are not counted")
    if unknown:
        names = ", ".join(str(xid) for xid in unknown)
        notes.append(f"Xid {names}: class unknown, not counted")
    return notes
