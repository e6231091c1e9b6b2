"""`autockpt failures`: records in every format are recognised, said, and change decisions."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.cli.app import run
from autockpt.cli.shared.failure_import import FORMATS, read_failures
from autockpt.profiles.failures import estimate_rates
from autockpt.profiling.facts.failure_history import failure_history
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.failure import FailureRecord
from autockpt.values.record import to_data
from tests.support.profiles import example_profile

CSV = Path(__file__).parents[4] / "examples" / "failures.csv"
SACCT = """JobID|State|Start|End|NNodes|FailedNode
1|COMPLETED|2026-01-01T00:00:00|2026-01-03T00:00:00|8|
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def object_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert run((*argv, "--json")) == 0, capsys.readouterr().err
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def bad_cluster(jobs: int = 40) -> str:
    """A node is lost on every job of two hours."""
    rows = [
        f"{n}|NODE_FAIL|2026-01-{1 + n // 12:02}T{n % 12 * 2:02}:00:00|"
        f"2026-01-{1 + n // 12:02}T{n % 12 * 2 + 1:02}:59:00|8|n{n}"
        for n in range(jobs)
    ]
    return SACCT + "\n".join(rows) + "\n"


def test_each_format_is_recognised(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """Slurm, a kernel log, outages, our own log in its run, what was kept."""
    (here / "s.txt").write_text(SACCT)
    (here / "k.log").write_text(
        "Jan 1 00:00:00 a kernel: up\nJan 3 00:00:00 a kernel: NVRM: Xid (PCI:0): 79, gone\n"
    )
    record = RunDirectory.create(here / "elsewhere" / "run")
    record.append_failure(
        FailureRecord(wall="", kind="process", what="trainer", node=0, step=1, exposure_s=86400.0)
    )
    for file, source, incidents, node_days in (
        ("s.txt", "sacct", 0, 16.0),
        ("k.log", "kernel log", 1, 2.0),
        (str(CSV), "outages", 26, 44 * 1.0),
        ("elsewhere/run", "failure log", 1, 1.0),
    ):
        body = object_of(capsys, "failures", file)
        assert body["source"].startswith(source)
        assert body["incidents"] == incidents
        if source != "outages":
            assert body["node_days"] == pytest.approx(node_days)
        assert body["kept"] is None


def test_a_kept_record_is_in_every_later_profile(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """What `autockpt profile` and a run read as their history has it, once for each file."""
    (here / "s.txt").write_text(bad_cluster())
    before, _ = failure_history(str(here / "runs" / "new"), nodes=8)
    for _ in range(2):
        kept = object_of(capsys, "failures", "s.txt", "--save")["kept"]
    after, _ = failure_history(str(here / "runs" / "new"), nodes=8)
    assert after.per_node.events == 40
    assert after.interruptions_per_s > 5 * before.interruptions_per_s
    assert object_of(capsys, "failures", kept)["incidents"] == 40
    Path(kept).write_text("{}")
    assert failure_history(str(here / "runs" / "new"), nodes=8)[0] == before


def test_a_record_changes_what_is_decided(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """A cluster that loses a node every two hours gets shorter intervals and a longer reason."""
    (here / "bad.txt").write_text(bad_cluster())
    RunDirectory.create("runs/job").write_profile(example_profile())
    plan = ("plan", "--profile", "runs/job")
    usual = object_of(capsys, *plan)["plan"]["tiers"]
    often = object_of(capsys, *plan, "--failures", "bad.txt")["plan"]["tiers"]
    assert often[1]["interval_steps"] < usual[1]["interval_steps"] / 2


def test_a_person_sees_prior_evidence_and_offenders(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """The prior is named, the band given, and a lemon called by its name."""
    (here / "s.txt").write_text(bad_cluster(12).replace("|n3\n", "|n5\n").replace("|n4\n", "|n5\n"))
    assert run(("failures", "s.txt", "--nodes", "200")) == 0
    text = capsys.readouterr().out
    assert "prior: 4 failures per 1000 node-days" in text
    assert "90 % band" in text
    assert "offenders    n5 (3)" in text


def test_mistakes_say_what_to_do(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """Unknown formats, files that are not there, times that a record says itself."""
    (here / "x").write_text("hello\n")
    (here / "s.txt").write_text(SACCT)
    (here / "runs" / "failures").mkdir(parents=True)
    (here / "runs" / "s.txt").write_text(SACCT)
    for argv, message in (
        (("failures", "x"), "in no format that is known: sacct (Slurm's accounting"),
        (("failures", "nowhere"), "nowhere: cannot be read: No such file"),
        (("failures", "s.txt", "--observed", "3 d"), "says itself how long it is"),
        (("failures", str(CSV), "--observed", "3 d"), "later than that"),
        (("failures", str(CSV), "--observed", "3"), "--observed: "),
        (("failures", "runs/s.txt", "--save"), "whose failures are read anyway"),
    ):
        assert run(argv) == (2 if "3" in argv else 78)
        assert message in capsys.readouterr().err


pieces = st.sampled_from(
    [
        *(
            "State|Start|End|NNodes",
            "|",
            "\n",
            "NODE_FAIL",
            "FAILED",
            "2026-01-01T00:00:00",
            "Unknown",
        ),
        *(
            "2026-02-31T00:00:00",
            "n[1-3",
            "-5]",
            "4",
            "\u00b2",
            "Jan 31 12:00:00 h kernel: ",
            "Feb 30",
        ),
        *("NVRM: Xid (PCI:0): 79", "[12.5] ", "node,start_h,end_h", "1,2,3", ",", "{", "}", "inf"),
        *('{"schema_version":1,"source":"x","incidents":[],"exposures":[]', '"exposure_s"', "nan"),
    ]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=st.lists(pieces, max_size=25), form=st.sampled_from([None, *FORMATS]))
def test_any_text_is_read_or_refused_with_a_reason(here: Path, words: list[str], form: str) -> None:
    """Never another error, whatever stands in a file and whatever it is said to be."""
    (here / "any").write_text("".join(words), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        history = read_failures("any", form=form)
        assert estimate_rates((), nodes=3, histories=(history,)).interruptions_per_s > 0


def test_the_figures_of_the_document_are_what_its_command_prints(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """docs/howto/failures.md, below its `$` line."""
    (here / "examples").mkdir()
    (here / "examples" / "failures.csv").write_text(CSV.read_text())
    text = (CSV.parent.parent / "docs" / "howto" / "failures.md").read_text(encoding="utf-8")
    shown = text.partition("$ autockpt failures examples/failures.csv --nodes 64\n")[2]
    assert run(("failures", "examples/failures.csv", "--nodes", "64")) == 0
    assert capsys.readouterr().out == shown.partition("```")[0]


def test_a_run_that_met_no_failure_says_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """No log is no file that cannot be read; a directory without a run still is."""
    RunDirectory.create("good")
    assert run(("failures", "good")) == 0
    assert "note: this run met no failure" in capsys.readouterr().out
    body = object_of(capsys, "failures", "good", "--nodes", "4")
    assert (body["incidents"], body["node_days"]) == (0, 0.0)
    assert body["rates"] == to_data(estimate_rates((), nodes=1))
    (here / "empty").mkdir()
    assert run(("failures", "empty")) == 78
    assert "empty: no record of failures in it (failures.jsonl)" in capsys.readouterr().err


def test_a_place_that_cannot_be_made_is_no_bug(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """A file stands where the records are kept."""
    (here / "s.txt").write_text(SACCT)
    (here / "runs").write_text("")
    assert run(("failures", "s.txt", "--save")) == StorageError.exit_code
    error = capsys.readouterr().err
    assert "--save: cannot make runs/failures: " in error
    assert "bug" not in error
