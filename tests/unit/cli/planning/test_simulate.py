"""`autockpt simulate`: tables, one object, traces, and errors that say what to do."""

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.app import run
from autockpt.run_directory import RunDirectory
from tests.support.profiles import example_failures, example_profile

SMALL = ("simulate", "--nodes", "64", "--mtbf", "6 h", "--length", "20 d", "--runs", "3")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def object_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(text_of(capsys, *argv, "--json"))
    assert (body["schema_version"], body["command"]) == (1, "simulate")
    return body


def goodputs(body: dict[str, Any]) -> dict[str, float]:
    return {found["name"]: found["goodput"]["mean"] for found in body["strategies"]}


def test_all_strategies_meet_the_same_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """Presets and rules, best first in the table, differences to auto in the object."""
    body = object_of(capsys, *SMALL)
    found = {one["name"]: one for one in body["strategies"]}
    assert {"auto", "checkfreq", "every-30min", "young", "gemini"} <= set(found)
    assert len({one["failures"] for one in found.values()}) == 1
    assert found["auto"]["behind"]["mean"] == 0.0
    assert found["every-3h"]["behind"]["low"] > 0.0
    lines = text_of(capsys, *SMALL).splitlines()
    assert lines[0].startswith("auto: checkpoint to memory every")
    assert any(line.startswith("64 nodes, 20 d, 3 runs of seed 0") for line in lines)
    assert any(line.startswith("every-3h") for line in lines)


def test_the_answer_is_one_sentence_with_its_assumptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shared storage is divided among the nodes; strategies that do the same are named once."""
    words = ("simulate", "--nodes", "512", "--mtbf", "6 h", "--storage", "2 GB/s shared")
    names = [word for name in ("auto", "excp", "young") for word in ("--strategy", name)]
    assert run([*words, "--runs", "2", *names]) == 0
    printed = capsys.readouterr()
    answer, assumed, *_ = printed.out.splitlines()
    assert answer.startswith("auto: checkpoint to memory every 30 s (6 iterations) and to disk")
    for words_ in ("iteration 5 s", "state 3 GB a node", "copy 20 GB/s", "slow-down 5 %",
                   "storage 3.91 MB/s a node", "detection 60 s", "restart 10 min",
                   "network 10 GB/s, on which auto does not rely without --network"):  # fmt: skip
        assert words_ in assumed
    assert "the same intervals and times: excp as auto\n" in printed.err


def test_a_seed_prints_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """And another seed others."""
    first = text_of(capsys, *SMALL, "--seed", "5")
    assert first == text_of(capsys, *SMALL, "--seed", "5")
    assert first != text_of(capsys, *SMALL, "--seed", "6")


def test_a_profile_brings_its_own_costs_and_rates(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's intervals; --restart and --nodes are what-ifs on it; no network, no Gemini."""
    profile = example_profile(failures=example_failures(mtbf_s=20000.0))
    RunDirectory.create("runs/p").write_profile(profile)
    argv = ("simulate", "--profile", "runs/p", "--runs", "3", "--length", "10 d")
    body = object_of(capsys, *argv)
    assert body["nodes"] == 1
    assert body["mtbf_s"] == pytest.approx(20000.0)
    assert "gemini" not in goodputs(body)
    assert any("--network" in reason for reason in body["left_out"])
    longer = object_of(capsys, *argv, "--restart", "20 min", "--strategy", "auto")
    assert goodputs(longer)["auto"] < goodputs(body)["auto"] - 0.02
    wider = object_of(capsys, *argv, "--nodes", "8", "--strategy", "auto")
    assert wider["mtbf_s"] < body["mtbf_s"]


def test_a_policy_file_is_a_strategy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the presets, in the order in which they were named."""
    (here / "mine.yaml").write_text("version: 1\nextends: builtin:sync\ninterval: 1 h\n")
    argv = (*SMALL, "--strategy", "mine.yaml", "--strategy", "builtin:async")
    body = object_of(capsys, *argv)
    assert list(goodputs(body)) == ["mine.yaml", "builtin:async"]
    assert body["strategies"][0]["disk_steps"] == 720


def test_a_wrong_belief_costs_less_than_its_factor(capsys: pytest.CaptureFixture[str]) -> None:
    """An MTBF that is believed ten times too long lengthens intervals; the failures stay."""
    right = object_of(capsys, *SMALL, "--strategy", "young")
    wrong = object_of(capsys, *SMALL, "--strategy", "young", "--assumed-mtbf", "60 h")
    assert right["mtbf_s"] == wrong["mtbf_s"]
    assert wrong["strategies"][0]["disk_steps"] > 3 * right["strategies"][0]["disk_steps"]
    assert 0.0 < goodputs(right)["young"] - goodputs(wrong)["young"] < 0.1


def test_a_trace_is_replayed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes from the file, one history and so no interval; spares decide whether the job waits."""
    (here / "t.csv").write_text(
        "# made up\nnode,start_h,end_h\n3,10,12\n5,40.5,90\n,60,60\n4,70,71\n"
    )
    argv = ("simulate", "--trace", "t.csv", "--strategy", "auto", "--length", "100 h")
    body = object_of(capsys, *argv)
    assert (body["nodes"], body["runs"], body["seed"]) == (6, 1, None)
    one = body["strategies"][0]
    assert one["failures"] == 4
    assert one["goodput"]["low"] is None
    assert one["parts"]["waiting"] == 0.0
    short = object_of(capsys, *argv, "--spares", "1")["strategies"][0]
    assert short["parts"]["waiting"] == pytest.approx(0.01)


NAMED = {"nowhere", "nowhere.yaml", "atuo", "gemini", "nowhere.csv", "empty.csv", "header.csv",
         "none.csv", "late.csv"}  # fmt: skip
"""Words of command lines that name something."""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "--nodes: how large"),
        (("--nodes", "4"), "how often does it fail"),
        (("--nodes", "0", "--mtbf", "1 h"), "--nodes 0: must be at least 1"),
        (("--nodes", "4", "--mtbf", "0 s"), "--mtbf 0 s: must be more than 0"),
        (("--nodes", "4", "--mtbf", "1e999 h"), "finite"),
        (("--nodes", "4", "--mtbf", "3"), "--mtbf: '3': a bare number is ambiguous"),
        (("--nodes", "4", "--mtbf", "1 us"), "failures, and the most is"),
        (("--nodes", "4", "--mtbf", "1 h", "--disk", "0 GB/s"), "--disk 0 GB/s: must be more"),
        (("--nodes", "4", "--mtbf", "1 h", "--copy", "1e999 GB/s"), "finite"),
        (("--nodes", "4", "--mtbf", "1 h", "--network", "0 B/s"), "--network 0 B/s"),
        (("--nodes", "4", "--mtbf", "1 h", "--state", "0 B"), "--state 0 B: must be more"),
        (("--nodes", "4", "--mtbf", "1 h", "--idle", "120 %"), "between 0 % and 100 %"),
        (("--nodes", "4", "--mtbf", "1 h", "--burst", "2"), "is not a percentage"),
        (("--nodes", "4", "--mtbf", "1 h", "--node-mtbf", "1 d"), "contradict each other"),
        (("--trace", "t.csv", "--mtbf", "1 h"), "--trace and --mtbf contradict"),
        (("--profile", "p", "--state", "1 GB"), "--profile and --state contradict"),
        (("--nodes", "4", "--mtbf", "1 h", "--spares", "1"), "add --trace"),
        (("--nodes", "4", "--mtbf", "1 h", "--runs", "0"), "at least 1 run"),
        (("--nodes", "4", "--mtbf", "1 h", "--domain", "0"), "--domain 0"),
        (("--nodes", "4", "--mtbf", "1 h", "--strategy", "atuo"), "did you mean 'auto'"),
        (("--nodes", "4", "--mtbf", "1 h", "--strategy", "nowhere.yaml"), "nowhere.yaml"),
        (("--nodes", "1", "--mtbf", "1 h", "--strategy", "gemini"), "need at least 2"),
        (("--profile", "nowhere"), "`autockpt profile SCRIPT` writes one"),
        (("--trace", "nowhere.csv"), "nowhere.csv: cannot be read"),
        (("--trace", "empty.csv"), "empty.csv:1: error: empty"),
        (("--trace", "header.csv"), "header.csv:2: error: header 'node,begin,end'"),
        (("--trace", "none.csv"), "none.csv:1: error: no outage"),
        (("--trace", "late.csv", "--length", "1 h"), "no failure begins within"),
    ],
)
def test_bad_input(
    here: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    """What is wrong, as a sentence and as an object; 78 where the line names it, else 2."""
    (here / "empty.csv").write_text("")
    (here / "header.csv").write_text("# one\nnode,begin,end\n")
    (here / "none.csv").write_text("node,start_s,end_s\n")
    (here / "late.csv").write_text("node,start_h,end_h\n0,2,3\n")
    code = 2 if "contradict" in said or not NAMED.intersection(argv) else 78
    assert run(["simulate", *argv]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert run(["simulate", *argv, "--json"]) == code
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]


def test_every_mistake_of_a_trace_has_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All at once, with file:line."""
    (here / "bad.csv").write_text(
        "node,start_h,end_h\n1,2\nx,1,2\n1,5,4\n9,1,2\n1,-1,2\n1,nan,2\n1,?,2\n0,1,2\n"
    )
    assert run(["simulate", "--trace", "bad.csv", "--nodes", "8"]) == 78
    error = capsys.readouterr().err
    for expected in (
        "bad.csv:2: error: 2 cells",
        "bad.csv:3: error: node 'x': expected a number",
        "bad.csv:4: error: ends at 4, before its start at 5",
        "bad.csv:5: error: node 9: the job has nodes 0 to 7",
        "bad.csv:6: error: start -1: must be at least 0",
        "bad.csv:7: error: start nan",
        "bad.csv:8: error: start '?': expected a number",
    ):
        assert expected in error
    assert "bad.csv:9" not in error


def test_help_begins_with_examples_and_says_where_definitions_stand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in every command."""
    text = text_of(capsys, "simulate", "--help")
    assert text.startswith("Examples:")
    assert "docs/internals/simulation.md" in text


def test_a_page_shows_every_strategy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chart, tables and the command that makes it again; a cut bar says so."""
    text_of(capsys, *SMALL, "--html", "page.html")
    page = (here / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Lost time by strategy: " in page
    assert page.count("gemini-spread") >= 4
    assert "(cut)" in page
    assert "autockpt simulate --nodes 64 --mtbf &#x27;6 h&#x27;" in page
    assert len(page) < 100_000
    assert run([*SMALL, "--html", "nowhere/page.html"]) == 74


# --- documents and examples -------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[4]


def shown() -> list[tuple[str, str]]:
    """(command, output) of docs/internals/simulation.md, where an output is shown."""
    text = (ROOT / "docs" / "internals" / "simulation.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n\$ autockpt (.*)\n((?:.*\n)*?)```$", text, re.M)
    return [(command, output) for command, output in blocks if output]


@pytest.mark.parametrize(("command", "output"), shown(), ids=range(len(shown())))
def test_the_figures_of_the_document_are_what_its_commands_print(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the byte."""
    monkeypatch.chdir(ROOT)
    assert text_of(capsys, *shlex.split(command)) == output


def test_the_example_trace_is_what_its_script_prints() -> None:
    """`python examples/failures.py > examples/failures.csv`."""
    example = runpy.run_path(str(ROOT / "examples" / "failures.py"))
    assert "\n".join(example["lines"]()) + "\n" == (ROOT / "examples" / "failures.csv").read_text()
