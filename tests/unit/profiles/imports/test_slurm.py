"""Slurm's accounting: which ends are interruptions, what is exposure, what is left out."""

import pytest

from autockpt.profiles.imports.slurm import read, recognises
from autockpt.values.errors import ConfigError

HEADER = "JobID|State|ExitCode|Start|End|ElapsedRaw|NNodes|NodeList|FailedNode"


def table(*rows: str, header: str = HEADER) -> str:
    return "\n".join([header, *rows]) + "\n"


def job(number: int, state: str, *, days: int = 1, nodes: int = 8, failed: str = "") -> str:
    """From the 1st of January 2026 on."""
    end = f"2026-01-{1 + days:02}T00:00:00"
    begin, names = "2026-01-01T00:00:00", f"n[1-{nodes}]"
    return f"{number}|{state}|0:0|{begin}|{end}|{days * 86400}|{nodes}|{names}|{failed}"


def test_old_versions_without_failed_node_name_the_node_of_small_jobs() -> None:
    """With -D a requeued job has two rows; of several nodes the lost one is unknown."""
    header = HEADER.removesuffix("|FailedNode")
    rows = [job(1, "NODE_FAIL", nodes=1), job(1, "COMPLETED", nodes=1), job(2, "NODE_FAIL")]
    found = read(table(*(r.rpartition("|")[0] for r in rows), header=header), where="s.txt")
    assert [one.nodes for one in found.incidents] == [("n1",), ()]
    assert len(found.exposures) == 3
    assert any("1 lost nodes without a name" in note for note in found.notes)


def test_every_job_is_exposure_and_some_ends_are_interruptions():
    """Seven jobs of 8 nodes and a day each; one lost a node, one two, one lost a process."""
    text = table(
        job(1, "COMPLETED"),
        job(2, "NODE_FAIL", failed="n3"),
        job(3, "NODE_FAIL", failed="n[4-5]"),
        job(4, "FAILED"),
        job(5, "CANCELLED by 1000"),
        job(6, "TIMEOUT"),
        job(7, "PREEMPTED"),
    )
    found = read(text, where="s.txt")
    assert sum(one.node_s for one in found.exposures) == 7 * 8 * 86400.0
    assert sum(one.job_s for one in found.exposures) == 7 * 86400.0
    kinds = [(one.kind, one.nodes) for one in found.incidents]
    assert kinds == [("node", ("n3",)), ("nodes", ("n4", "n5")), ("process", ())]
    assert any("1 preempted" in note for note in found.notes)


def test_steps_early_failures_and_jobs_that_never_ran_are_left_out_and_said():
    """No exposure from them either: their time is no training."""
    text = table(
        job(1, "COMPLETED"),
        "1.batch|COMPLETED|0:0|2026-01-01T00:00:00|2026-01-02T00:00:00|86400|1|n1|",
        "2|FAILED|1:0|2026-01-01T00:00:00|2026-01-01T00:09:59|599|8|n[1-8]|",
        "3|PENDING|0:0|Unknown|Unknown|0|8|None assigned|",
        "4|BOOT_FAIL|0:0|2026-01-01T00:00:00|2026-01-01T00:09:59|599|8|n[1-8]|",
    )
    found = read(text, where="s.txt")
    assert len(found.exposures) == 1
    assert found.incidents == ()
    assert [note.split()[0] for note in found.notes] == ["1", "2", "1"]


def test_running_jobs_count_up_to_now_where_sacct_says_how_long():
    """ElapsedRaw is exposure; without it they are left out."""
    row = "9|RUNNING|0:0|2026-01-01T00:00:00|Unknown|3600|4|n[1-4]|"
    assert read(table(row), where="s.txt").exposures[0].node_s == 4 * 3600.0
    header = HEADER.replace("ElapsedRaw|", "")
    both = table(job(1, "COMPLETED").replace("86400|", ""), row.replace("3600|", ""), header=header)
    assert any("ElapsedRaw" in note for note in read(both, where="s.txt").notes)


def test_nodes_are_counted_from_the_list_where_the_number_is_missing():
    """And the trailing separator of `sacct -p` does not matter."""
    text = "State|Start|End|NodeList|\nCOMPLETED|2026-01-01T00:00:00|2026-01-02T00:00:00|n[1-3]|\n"
    assert recognises(text)
    assert read(text, where="s.txt").exposures[0].node_s == 3 * 86400.0


def test_malformed_lines_are_named_all_at_once():
    """file:line of each; a header without what is needed says what to ask sacct."""
    text = table(
        "1|COMPLETED|0:0|yesterday|2026-01-02T00:00:00|1|8|n1|",
        job(2, "COMPLETED"),
        "3|COMPLETED|0:0|2026-01-02T00:00:00|2026-01-01T00:00:00|1|8|n1|",
        "4|COMPLETED|0:0|2026-01-01T00:00:00|2026-01-02T00:00:00|1||n[2-1]|",
    )
    with pytest.raises(
        ConfigError, match=r"s.txt:2: .*\n.*s.txt:4: .*before.*\n.*s.txt:5: .*range"
    ):
        read(text, where="s.txt")
    with pytest.raises(ConfigError, match=r"lacks Start; ask sacct -P"):
        read("JobID|State|End|NNodes\n", where="s.txt")
    with pytest.raises(ConfigError, match="no job in it ran"):
        read(table(), where="s.txt")
