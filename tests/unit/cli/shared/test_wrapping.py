"""Somebody else's command line: ours ends at the script, the rest arrives byte for byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from autockpt.cli.app import run as run_command_line
from autockpt.cli.shared import options
from autockpt.cli.shared.options import WRAPPING, Command
from autockpt.console import Console
from autockpt.values.errors import ConfigError


@pytest.fixture
def parse() -> Callable[..., dict[str, Any]]:
    """Parses a command line as `autockpt run` does; the parameters, or a click exception."""

    @click.command(cls=Command, context_settings=WRAPPING)
    @options.policy_options
    @options.launch_options
    @options.script_arguments
    @options.common
    def wrap(console: Console, **parameters: Any) -> dict[str, Any]:
        return parameters

    def parse_(*argv: str) -> dict[str, Any]:
        result: dict[str, Any] = wrap.main(list(argv), standalone_mode=False)
        return result

    return parse_


@pytest.mark.parametrize(
    ("argv", "script", "args"),
    [
        pytest.param(["t.py"], "t.py", (), id="bare"),
        pytest.param(["t.py", "--lr=1", "-x"], "t.py", ("--lr=1", "-x"), id="options"),
        pytest.param(["t.py", "--r=1"], "t.py", ("--r=1",), id="prefix of --rdzv-*"),
        pytest.param(["t.py", "--policy", "mine"], "t.py", ("--policy", "mine"), id="our name"),
        pytest.param(["t.py", "-m", "--help"], "t.py", ("-m", "--help"), id="our flags"),
        pytest.param(["--", "t.py", "a", "--", "-x"], "t.py", ("a", "--", "-x"), id="leading --"),
        pytest.param(["t.py", "--", "--x"], "t.py", ("--", "--x"), id="inner --"),
        pytest.param(["t.py", "", "a b", "ü$"], "t.py", ("", "a b", "ü$"), id="odd bytes"),
    ],
)
def test_everything_after_the_script_is_the_users(
    parse: Callable[..., dict[str, Any]], argv: list[str], script: str, args: tuple[str, ...]
) -> None:
    """The table of the wrapping test: own options before, the user's untouched."""
    found = parse("--policy", "p.yaml", *argv)
    assert (found["policy"], found["script"], found["args"]) == ("p.yaml", script, args)
    assert not found["module"]


def test_m_takes_a_module_and_passes_help_on(parse: Callable[..., dict[str, Any]]) -> None:
    """`-m pkg.mod --help` is the module's help."""
    found = parse("-m", "pkg.mod", "--help")
    assert (found["module"], found["script"], found["args"]) == (True, "pkg.mod", ("--help",))


@pytest.mark.parametrize("typo", ["--polcy", "--pol", "--rdzv", "--nproc"])
def test_no_abbreviations(parse: Callable[..., dict[str, Any]], typo: str) -> None:
    """A prefix of an option is an error before the script, never a guess."""
    with pytest.raises(click.NoSuchOption, match="No such option"):
        parse(typo, "x", "t.py")


def test_a_typo_gets_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option names the nearest one."""
    assert run_command_line(["run", "--polcy", "x", "t.py"]) == 2
    assert "--policy" in capsys.readouterr().err


def test_launch_options_are_torchruns(parse: Callable[..., dict[str, Any]]) -> None:
    """They pass through by their own names."""
    found = parse("--nproc-per-node", "8", "--rdzv-conf", "a=1,b=2", "--nnodes", "2:4", "t.py")
    settings = options.launch_settings(found)
    assert settings["nproc_per_node"] == "8"
    assert settings["nnodes"] == "2:4"
    assert settings["rdzv_conf"] == "a=1,b=2"
    assert settings["max_restarts"] is None


def test_help_begins_with_examples() -> None:
    """People copy the first thing they see."""
    from autockpt.cli.jobs.run import run

    text = CliRunner().invoke(run, ["--help"]).output
    assert text.startswith("Examples:\n  autockpt run train.py")
    assert text.index("Examples") < text.index("Usage") < text.index("Options")


def test_a_missing_script_names_the_nearest(tmp_path: Path) -> None:
    """Not found, with the file that was probably meant."""
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match=r"trian\.py: no such script; did you mean .*train\.py"):
        options.find_script(str(tmp_path / "trian.py"), False, ())


def test_a_directory_is_no_script(tmp_path: Path) -> None:
    """And the message says what to name instead."""
    with pytest.raises(ConfigError, match="is a directory"):
        options.find_script(str(tmp_path), False, ())


@pytest.mark.parametrize(
    "text",
    [
        "#!/usr/bin/env -S uv run --script\n# /// script\n# ///\nprint(1)\n",
        "#!/opt/conda/bin/launch\nprint(1)\n",
        '#!/bin/sh\n"exec" "python3" "$0" "$@"\nprint(1)\n',
        "#!/bin/sh\n# -*- coding: latin-1 -*-\nname = '\xe9'\n",
        "#!/usr/bin/env -S A=/b/sh python3\n",
    ],
)
def test_a_python_script_may_name_any_program(tmp_path: Path, text: str) -> None:
    """Its first line says how it is started without us."""
    (tmp_path / "train.py").write_bytes(text.encode("latin-1"))
    assert options.find_script(str(tmp_path / "train.py"), False, ()).target


@pytest.mark.parametrize("first", ["#!/bin/bash -e", "#! /usr/bin/env -S FLAG=1 dash"])
def test_the_script_of_a_shell_is_refused(tmp_path: Path, first: str) -> None:
    """Where it is no Python: it starts the training in its own way."""
    (tmp_path / "train").write_text(f"{first}\nautockpt run t.py\n")
    with pytest.raises(ConfigError, match="is no Python script"):
        options.find_script(str(tmp_path / "train"), False, ())


def test_a_missing_module_is_found_out_before_anything_starts() -> None:
    """Only the top-level package is looked up, nothing is imported."""
    with pytest.raises(ConfigError, match="no module 'surely_not_here'"):
        options.find_script("surely_not_here.train", True, ())


def test_a_file_with_m_is_explained() -> None:
    """`-m train.py` is a common mistake."""
    with pytest.raises(ConfigError, match="drop -m to run a file"):
        options.find_script("train.py", True, ())
