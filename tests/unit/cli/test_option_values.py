"""Exit code 2: the command line alone is wrong.  78: it names something that cannot work.

One rule over all commands.  Each option that takes a value stands in the table below, or has a type
of click's, which refuses by itself.
"""

import importlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from autockpt.cli.app import COMMANDS, run
from autockpt.values.errors import ConfigError, OptionError

NAMES = ""
"""The value names a file, a host or a policy: whether it works cannot be seen from the line."""
TABLE: dict[str, dict[str, str]] = {
    "launching": {
        "--nproc-per-node": "few", "--nnodes": "4:2", "--rdzv-backend": NAMES,
        "--rdzv-endpoint": NAMES, "--rdzv-id": NAMES, "--rdzv-conf": NAMES, "--local-addr": NAMES,
    },
    "profile": {"--policy": NAMES, "--set": NAMES, "--out": NAMES},
    "run": {
        "--policy": NAMES, "--set": NAMES, "--profile": NAMES, "--run-dir": NAMES,
        "--resume-from": NAMES,
    },
    "drill": {
        "--run-dir": NAMES, "--policy": NAMES, "--set": NAMES, "--profile": NAMES,
        "--nproc-per-node": "0",
    },
    "plan": {
        "--profile": NAMES, "--policy": NAMES, "--set": NAMES, "--failures": NAMES, "--out": NAMES,
    },
    "tune": {
        "--profile": NAMES, "--policy": NAMES, "--set": NAMES, "--time": "soon", "--out": NAMES,
        "--replay": NAMES,
    },
    "simulate": {
        "--length": "0 s", "--mtbf": "often", "--node-mtbf": "-1 d", "--trace": NAMES,
        "--process-share": "140 %", "--burst": "some", "--assumed-mtbf": "0 s", "--profile": NAMES,
        "--iteration": "5 parsecs", "--state": "large", "--copy": "0 GB/s", "--disk": "7",
        "--storage": "2 GB/s", "--network": "fast", "--idle": "2", "--slowdown": "x",
        "--detect": "?", "--restart": "-", "--strategy": NAMES, "--html": NAMES,
    },
    "failures": {"--observed": "long"},
    "redundancy": {"--domains": NAMES, "--profile": NAMES},
    "bubbles": {
        "--schedule": "Nope", "--forward": "x", "--backward": "0 s", "--transfer": "x",
        "--step": "x", "--state": "0 GB", "--copy": "x", "--profile": NAMES,
    },
    "report": {"--out": NAMES},
    "metrics": {"--mixin": NAMES},
    "policy explain": {"--set": NAMES},
    "slurm init": {"--time": "a day", "--output": NAMES},
    "push": {"--rate": "slow"},
    "pull": {"--generation": NAMES},
    "restore": {"--generation": NAMES},
    "pin": {"--generation": NAMES},
    "convert": {"--generation": NAMES, "--max-shard-size": "0 GB"},
    "archive-eval": {
        "--archive": NAMES, "--generation": NAMES, "--original": NAMES, "--loss": "(",
    },
    "diff": {"--only": NAMES},
    "keeper": {"--run-dir": NAMES, "--checkpoints": NAMES},
}  # fmt: skip
ARGUMENTS: dict[str, list[str]] = {
    "profile": ["t.py"], "run": ["t.py"], "drill": ["t.py"], "plan": ["--profile", "p"],
    "tune": ["--profile", "p"], "simulate": ["--nodes", "8"], "failures": ["f"],
    "explain": ["r"], "report": ["r"], "watch": ["r"], "slurm init": ["t.py"], "ls": ["r"],
    "show": ["r"], "verify": ["r"], "push": ["r", "file:///x"], "pull": ["file:///x", "r"],
    "restore": ["--dry-run", "r", "t.py"], "pin": ["r", "name"],
    "convert": ["r", "out", "--to", "torch"], "diff": ["a", "b"], "completion": ["bash"],
    "archive-eval": ["--archive", "a", "t.py", "{seed}"], "policy check": ["f"],
    "policy diff": ["a", "b"],
}  # fmt: skip
"""Words that a command needs; nothing of what they name is there, but the script."""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command, those of groups by two words."""
    for name, (where, _) in COMMANDS.items():
        file, _, function = where.partition(":")
        command = getattr(importlib.import_module(f"autockpt.cli.{file}"), function)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                assert found is not None
                yield f"{name} {inner}", found
        else:
            yield name, command


def words(name: str, option: str, value: str) -> list[str]:
    """A line that is wrong by this value alone."""
    more = ARGUMENTS.get(name, [])
    if option in more and name == "convert":
        more = more[:2]
    elif name == "simulate" and option not in ("--mtbf", "--node-mtbf", "--nodes"):
        more = [*more, "--mtbf", "1 d"]
    elif option in more:
        more = []
    return [*name.split(), option, value, *more]


def options_of(command: click.Command) -> list[click.Option]:
    """Those that take a value."""
    return [p for p in command.params if isinstance(p, click.Option) and not (p.is_flag or p.count)]


def known(name: str) -> dict[str, str]:
    """Rows of a command."""
    launching = TABLE["launching"] if name in ("profile", "run") else {}
    return {**launching, **TABLE.get(name, {})}


TYPED = [
    (name, option.opts[-1])
    for name, command in commands()
    for option in options_of(command)
    if option.type is not click.STRING
]
WRONG = [
    (name, option, value)
    for name, _ in commands()
    for option, value in known(name).items()
    if value is not NAMES
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("print(1)\n")


def test_every_option_with_a_text_has_a_row() -> None:
    """A new option is judged here, or its author says what its value names."""
    for name, command in commands():
        texts = {o.opts[-1] for o in options_of(command) if o.type is click.STRING}
        assert texts == set(known(name)), name


@pytest.mark.parametrize(("name", "option"), TYPED)
def test_a_value_of_another_type_is_a_wrong_line(name: str, option: str) -> None:
    """Numbers, ranges and choices."""
    assert run(words(name, option, "no-such-value")) == 2


@pytest.mark.parametrize(("name", "option", "value"), WRONG)
def test_a_value_that_an_option_never_takes_is_a_wrong_line(
    name: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Durations, sizes, rates, shares, ranks: seen before a file is looked at, and named."""
    assert run(words(name, option, value)) == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "run --profile p --no-profile t.py",
        "run --fresh --resume-from x --run-dir r t.py",
        "run --resume-from x t.py",
        "run --same-job t.py",
        "run --nnodes 2 t.py",
        "run --node-rank -1 t.py",
        "run -m t.py",
        "drill --profile p --no-profile t.py",
        "tune",
        "tune r --profile p",
        "tune --profile p --budget 1",
        "tune --replay x --profile p",
        "simulate",
        "simulate --nodes 8",
        "simulate --nodes 0 --mtbf 1d",
        "simulate --nodes 8 --mtbf 1d --node-mtbf 1d",
        "simulate --nodes 8 --mtbf 1d --runs 0",
        "simulate --nodes 8 --mtbf 1d --spares 1",
        "redundancy --nodes 1",
        "pin r name --remove --generation x",
        "pin r a/b",
        "convert r out --to torch --codec excp",
        "convert r out --to archive --full-every 65",
        "restore r t.py",
        "archive-eval --archive a t.py",
        "watch r --every nan",
        "watch r --every inf",
        "drill --patience nan t.py",
        "plan",
        "metrics",
        "policy explain builtin:auto no.such.key",
        "run --no-such-option t.py",
        "no-such-command",
        "ls",
    ],
)
def test_what_is_missing_or_contradicts_itself_is_a_wrong_line(line: str) -> None:
    """Nothing has to be read to see it."""
    assert run(line.split()) == 2


@pytest.mark.parametrize(
    "line",
    [
        "run --run-dir '' t.py",
        "run --set '' t.py",
        "run ''",
        "keeper --run-dir ''",
        "ls ''",
        "gc ''",
        "report r ''",
        "report r --out ''",
        "push r ''",
        "plan --profile ''",
    ],
)
def test_an_empty_word_is_no_working_directory(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a variable of the shell is unset."""
    before = sorted(Path().rglob("*"))
    assert run(shlex.split(line)) == 2
    assert "is empty, expected a value" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_a_script_may_have_empty_words_of_its_own() -> None:
    """They are passed on; so are those of torchrun's options."""
    assert run(["run", "--rdzv-conf", "", "--dry-run", "t.py", "", "--name", ""]) == 0


@pytest.mark.parametrize(
    "line",
    [
        "keeper --run-dir t.py",
        "run no-such-script.py",
        "run -m no_such_module",
        "run --policy no-such.yaml t.py",
        "run --policy builtin:no-such t.py",
        "run --set disk.interval=x t.py",
        "run --set nonsense t.py",
        "run --run-dir r --resume-from x t.py",
        "plan --profile p",
        "tune --profile p",
        "simulate --nodes 8 --mtbf 1d --strategy no-such",
        "simulate --nodes 8 --trace no-such.csv",
        "failures no-such.log",
        "redundancy --domains no-such.csv",
        "ls r",
        "show r",
        "verify r",
        "diff a b",
        "convert r out --to torch",
        "push r file:///x --rate 5MB/s",
        "push r gopher://x",
        "pull nonsense r",
        "pin r name",
        "policy check no-such.yaml",
        "doctor no-such-directory",
    ],
)
def test_what_is_named_and_cannot_work_is_78(line: str) -> None:
    """The line is well-formed: a policy and its settings, files, places and scripts are not."""
    assert run(line.split()) == 78


def test_both_ways_of_saying_2_are_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that reads --json tells them from 78 by kind, too."""
    kinds = []
    for line in ("redundancy --nodes x --json", "redundancy --nodes 1 --json"):
        assert run(line.split()) == 2
        kinds.append(json.loads(capsys.readouterr().out)["error"]["kind"])
    assert kinds == ["usage", "usage"]
    assert issubclass(OptionError, ConfigError)
