"""Kernel logs: which Xid errors are failures, when, of which host, and how long the log watched."""

import pytest

from autockpt.profiles.imports.xid import read, recognises
from autockpt.values.errors import ConfigError

XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=4242, name=python, and so on"


def syslog(when: str, text: str, host: str = "node7") -> str:
    return f"{when} {host} kernel: [ 12.3] {text}"


def test_a_whole_log_is_exposure_and_a_lost_gpu_an_incident():
    """Three days of two hosts; Xid 79 on one of them."""
    log = "\n".join(
        [
            syslog("Jan 30 00:00:00", "booted"),
            syslog("Jan 31 12:00:00", XID.format(79)),
            syslog("Feb  2 00:00:00", "all is well", host="node8"),
        ]
    )
    assert recognises(log)
    found = read(log, where="kernel.log")
    assert found.exposures[0].node_s == 2 * 3 * 86400.0
    assert found.exposures[0].job_s == 0.0
    (one,) = found.incidents
    assert (one.kind, one.nodes, one.what) == ("node", ("node7",), "Xid 79")
    assert found.end_s - one.at_s == 1.5 * 86400.0


def test_a_burst_is_one_incident_of_its_worst_class():
    """Until three minutes of silence; the hosts apart."""
    log = "\n".join(
        [
            "2026-01-01T00:00:00+0000 a kernel: up",
            f"2026-01-01T00:00:10+0000 a kernel: {XID.format(45)}",
            f"2026-01-01T00:02:00+0000 a kernel: {XID.format(94)}",
            f"2026-01-01T00:04:00+0000 a kernel: {XID.format(95)}",
            f"2026-01-01T00:04:00+0000 b kernel: {XID.format(94)}",
            f"2026-01-01T00:08:00+0000 a kernel: {XID.format(94)}",
        ]
    )
    found = read(log, where="kernel.log").incidents
    assert [(one.nodes[0], one.kind) for one in found] == [
        ("a", "node"),
        ("b", "process"),
        ("a", "process"),
    ]
    assert found[0].what == "Xid 45, 94, 95"


def test_errors_of_programs_and_unknown_ones_are_no_failures_of_the_machine():
    """Both are said."""
    log = "\n".join(
        ["[1.0] boot", f"[5.5] {XID.format(31)}", f"[900.0] {XID.format(999)}", "[3600.0] end"]
    )
    found = read(log, where="dmesg")
    assert found.incidents == ()
    assert any("Xid 999" in note for note in found.notes)
    assert any(note.startswith("1 Xid lines of programs") for note in found.notes)


@pytest.mark.parametrize(
    "line",
    [
        "[Sat Jan 31 12:00:00 2026] {}",
        "Jan 31 12:00:00 h kernel: {}",
        "2026-01-31T12:00:00+0000 h kernel: {}",
        "[ 12345.678901] {}",
    ],
)
def test_all_four_formats_have_times(line):
    """dmesg -T, syslog, journalctl -o short-iso, dmesg."""
    log = line.format(XID.format(48))
    found = read(log, where="log", nodes=4, observed_s=86400.0)
    assert found.exposures[0].node_s == 4 * 86400.0
    assert found.incidents[0].kind == "node"


def test_a_syslog_that_passes_new_year_goes_on():
    """From December to January is a day, not eleven months back."""
    log = "\n".join([syslog("Dec 31 12:00:00", "old"), syslog("Jan  1 12:00:00", XID.format(79))])
    assert read(log, where="log").exposures[0].node_s == 86400.0


def test_a_record_that_cannot_say_how_long_it_watched_is_refused():
    """A rate out of nothing but events would be plug-in nonsense."""
    with pytest.raises(ConfigError, match=r"only Xid lines.*--observed '30 d' and --nodes N"):
        read(syslog("Jan 31 12:00:00", XID.format(79)), where="log")
    with pytest.raises(ConfigError, match="no line with a time"):
        read("NVRM: Xid (PCI:0): 79", where="log")
    two = syslog("Jan 1 00:00:00", "x") + "\n" + syslog("Jan 2 00:00:00", XID.format(79), host="b")
    with pytest.raises(ConfigError, match="2 hosts over 86400 s watched as 1 nodes"):
        read(two, where="log", nodes=1)
