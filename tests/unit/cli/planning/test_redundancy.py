"""`autockpt redundancy`: the table of the document, one object, domains, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from autockpt.cli import app
from autockpt.run_directory import RunDirectory
from tests.support.profiles import example_failures, example_profile

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "concepts" / "redundancy.md"


def test_table_in_the_document_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`autockpt redundancy --markdown`, between the markers."""
    assert app.run(["redundancy", "--markdown"]) == 0
    table = re.search(r"<!-- redundancy -->\n(.*?)<!-- /redundancy -->", DOCUMENT.read_text(), re.S)
    assert table is not None
    assert table[1] == capsys.readouterr().out


def test_one_object_holds_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures, not texts; a scheme that a job is too small for has no row."""
    assert app.run(["redundancy", "--nodes", "16", "--nodes", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    group = next(row for row in rows if row["scheme"] == "2 copies, group" and row["nodes"] == 16)
    assert group["survived"]["2"] == pytest.approx(112 / 120)
    assert {row["scheme"] for row in rows if row["nodes"] == 2} == {
        "2 copies, group", "2 copies, ring", "XOR over 4 nodes", "XOR over 8 nodes",
    }  # fmt: skip


def test_domains_of_a_file_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs across two racks survive either of them; sets of four cannot."""
    path = tmp_path / "racks.csv"
    path.write_text('node,rack\n"n[1-4]",a\n"n[5-8]",b\n')
    assert app.run(["redundancy", "--domains", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    lost = {row["scheme"]: row["domains"]["rack"] for row in rows}
    assert (lost["2 copies, group"], lost["XOR over 4 nodes"]) == (1.0, 0.0)
    assert app.run(["redundancy", "--domains", str(path)]) == 0
    assert "a rack lost" in capsys.readouterr().out


def test_a_profile_gives_nodes_and_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was counted replaces what is assumed."""
    run = RunDirectory.create(tmp_path / "run")
    run.write_profile(example_profile(failures=example_failures(nodes=8)))
    assert app.run(["redundancy", "--profile", str(tmp_path / "run"), "--json"]) == 0
    assert {row["nodes"] for row in json.loads(capsys.readouterr().out)["rows"]} == {8}


def test_what_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One node, and a file for another number of nodes."""
    run = RunDirectory.create(tmp_path / "run")
    run.write_profile(example_profile())
    assert app.run(["redundancy", "--profile", str(tmp_path / "run")]) == 78
    assert app.run(["redundancy", "--nodes", "1"]) == 2
    assert "one node has no other" in capsys.readouterr().err
    path = tmp_path / "racks.csv"
    path.write_text("node,rack\nn1,a\nn2,b\n")
    assert app.run(["redundancy", "--domains", str(path), "--nodes", "3"]) == 78
    assert "names 2 nodes, the job has 3" in capsys.readouterr().err
