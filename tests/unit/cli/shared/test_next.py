"""The command that is printed for next: what it runs has the goal, place and ranks of this."""

import html
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.app import run
from autockpt.cli.jobs import profile as profile_command
from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.gather import run_data
from autockpt.policies.policy_file import load_policy
from autockpt.run_directory import RunDirectory, RunInfo
from autockpt.session.job import current_job
from autockpt.values.goal import Goal
from autockpt.values.record import from_data, to_data
from tests.support.profiles import example_profile, example_state
from tests.unit.integrations.trained import saved, trained_job

POLICY = """
version: 1
extends: builtin:checkfreq
limits: {stall: 1 h, lost_time: 1 d}
disk: {path: "here it is"}
"""
SET = ("--set", "limits.stall=50 min", "--set", "retune=observe")
ONE = plan_choice.Scale(world_size=1, nodes=1)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script, a policy and a profile, all with a blank in the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_choice, "machine_mismatches", lambda measured, scale: [])
    for name in [name for name in os.environ if name.startswith(("AUTOCKPT_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    Path("my s.py").write_text("print('trained')\n")
    Path("my policy.yaml").write_text(POLICY)
    RunDirectory.create("a p").write_profile(example_profile(state=example_state(24 * 2**20)))


def next_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line of a command."""
    capsys.readouterr()
    assert run(argv) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("autockpt: next: ")
    return last.removeprefix("autockpt: next: ")


def dry_run(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    """What such a run would do, as an object."""
    program, name, *words = shlex.split(command.replace("SCRIPT", "'my s.py'"))
    assert (program, name) == ("autockpt", "run")
    assert run([name, "--dry-run", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def goal_in(found: dict[str, Any]) -> Goal:
    return from_data(Goal, found["goal"], where="--json")


def test_a_dry_run_is_followed_by_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Directory, policy, settings, ranks and the script's arguments."""
    words = ("--run-dir", "out/z z", "--policy", "my policy.yaml", *SET, "--no-profile",
             "--nproc-per-node", "2", "my s.py", "--lr", "a b")  # fmt: skip
    command = next_of(capsys, "run", "--dry-run", *words)
    assert command == f"autockpt run {command[13:]}"
    first = dry_run(capsys, shlex.join(("autockpt", "run", *words)))
    assert dry_run(capsys, command) == first
    assert shlex.split(command)[2:] == [
        *("--policy", "my policy.yaml", *SET, "--no-profile", "--run-dir", "out/z z"),
        *("--nproc-per-node", "2", "my s.py", "--lr", "a b"),
    ]


def test_a_dry_run_shows_what_a_run_without_a_profile_begins_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals to be measured at, and with --no-profile those that stay."""
    for option, words, interval in (
        ([], "no profile under runs/; measured while it runs", 8),
        (["--no-profile"], "none is taken", 100),
    ):
        assert run(["run", "--dry-run", *option, "my s.py"]) == 0
        assert f"profile   {words}\n" in capsys.readouterr().out
        shown = dry_run(capsys, shlex.join(["autockpt", "run", *option, "my s.py"]))
        monkeypatch.setenv("AUTOCKPT_NO_PROFILE", "1" if option else "0")
        begun = current_job(run_dir=f"run {interval}").plan
        assert {tier.interval_steps for tier in begun.tiers} == {interval}
        assert shown["plan"] == to_data(begun)
        monkeypatch.delenv("AUTOCKPT_NO_PROFILE")


def test_a_plan_is_followed_by_a_run_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Failures that are no part of the profile are kept first."""
    words = ("--profile", "a p", "--policy", "my policy.yaml", *SET)
    command = next_of(capsys, "plan", *words)
    assert goal_in(dry_run(capsys, command)) == plan_choice.read_goal(
        "my policy.yaml", (SET[1], SET[3])
    )
    Path("the log.csv").write_text("node,start_h,end_h\n0,1,2\n")
    again = next_of(capsys, "plan", *words, "--failures", "the log.csv")
    assert again == f"autockpt failures 'the log.csv' --save && {command}"


@pytest.mark.parametrize("kept", [True, False])
def test_a_profile_is_followed_by_a_run_under_its_goal(
    kept: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given with the command or kept by the run over which it is taken; and on as many ranks."""

    def measured(run: RunDirectory, *_: object) -> None:
        run.write_profile(example_profile())

    monkeypatch.setattr(profile_command, "_measure", measured)
    goal = plan_choice.read_goal("my policy.yaml", (SET[1], SET[3]), scale=ONE)
    given = ("--policy", "my policy.yaml", *SET)
    if kept:
        RunDirectory.create("o o").write_goal(goal)
        given = ()
    words = ("--out", "o o", *given, "--nproc-per-node", "2", "my s.py", "--lr", "1")
    command = next_of(capsys, "profile", *words)
    assert goal_in(dry_run(capsys, command)) == goal
    assert command.endswith("--nproc-per-node 2 'my s.py' --lr 1")
    assert "--profile 'o o/profile.json'" in command
    at_home = run_data(RunDirectory("o o")).train
    assert at_home == command.replace("'my s.py'", shlex.quote(os.path.abspath("my s.py")))
    assert html.escape(at_home, quote=False) in html.escape(
        html.unescape(Path("o o/report.html").read_text()), quote=False
    )


def test_a_search_goes_on_from_the_goal_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """tuned.yaml says all of it: what it extends, and what was set."""
    goal = plan_choice.read_goal("my policy.yaml", (SET[1], SET[3]), scale=ONE)
    RunDirectory("a p").write_goal(goal)
    command = next_of(capsys, "tune", "a p", "--budget", "10", "--out", "found it")
    assert shlex.split(command)[2:] == [
        *("--profile", "a p", "--policy", "found it/tuned.yaml", "SCRIPT")
    ]
    tuned = goal_in(dry_run(capsys, command))
    assert load_policy("found it/tuned.yaml").goal.policy == tuned.policy
    for name in ("limits", "objective", "storage_path", "retention", "redundancy", "archive"):
        assert getattr(tuned, name) == getattr(goal, name), name
    assert tuned.pins.retune == "observe"
    assert tuned.pins.interval_rule == goal.pins.interval_rule == "checkfreq"


def test_settings_of_a_search_are_in_what_it_writes() -> None:
    """Also where the policy from which the goal came is not there any more."""
    goal = plan_choice.read_goal("my policy.yaml", (SET[1],), scale=ONE)
    assert plan_choice.origin_of(goal, ONE) == ("my policy.yaml", {"limits.stall": "50 min"})
    Path("my policy.yaml").unlink()
    source, settings = plan_choice.origin_of(goal, ONE)
    assert source == "builtin:auto"
    words = plan_choice.policy_words(goal, ONE)
    assert "--policy" not in words
    assert {f"{key}={value}" for key, value in settings.items()} == set(words[1::2])
    assert settings["disk.path"] == json.dumps(goal.storage_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_is_printed_for_next_works_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell takes each line, and the command succeeds; names have blanks and umlauts."""
    run_dir = RunDirectory.create("läufe/mein lauf")
    run_dir.write_info(RunInfo(run_id="0" * 32, created="", script="my s.py"))
    run_dir.write_profile(example_profile())
    saved(Path(run_dir.checkpoints()), trained_job())
    pending = [
        ("ls", "läufe"), ("ls", "läufe/mein lauf"),
        ("convert", "läufe/mein lauf", "out put", "--to", "dcp"),
        ("convert", "läufe/mein lauf", "out weights", "--to", "safetensors"),
        ("convert", "läufe/mein lauf", "out history", "--to", "archive"),
        ("policy", "init", "mine too.yaml"), ("push", "läufe/mein lauf", f"file://{tmp_path}/st"),
        ("simulate", "--profile", "läufe/mein lauf", "--nodes", "4", "--runs", "1", "--length",
         "1 d", "--strategy", "auto"),
    ]  # fmt: skip
    tried: set[tuple[str, ...]] = set()
    while pending:
        words = pending.pop()
        tried.add(words)
        assert run(words) == 0, words
        for line in capsys.readouterr().err.splitlines():
            if not line.startswith("autockpt: next: "):
                continue
            command = line.removeprefix("autockpt: next: ")
            shell = ["/bin/sh", "-c", f"for word in {command}\ndo printf '%s\\n' \"$word\"; done"]
            taken = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=True)
            program, *again = taken.stdout.splitlines()
            assert program == "autockpt"
            is_whole = not any(word.isupper() for word in again)  # SCRIPT stands for a name
            if is_whole and tuple(again) not in tried:
                pending.append(tuple(again))
    assert {words[0] for words in tried} >= {
        "ls", "show", "verify", "report", "explain", "diff", "policy", "plan", "simulate",
    }  # fmt: skip
