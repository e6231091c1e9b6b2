"""The command line answers at once: it imports nothing heavy before it must."""

import json
import sys
from pathlib import Path

import pytest

from tests.unit.cli.scripts import python

HEAVY = ("torch", "pandas", "numpy", "optuna", "yaml", "rich")
BUDGET_S = 0.3

MEASURE = """
import json, resource, sys
sys.argv = ["autockpt", *sys.argv[1:]]
from autockpt.cli import main
try:
    main()
except SystemExit as ending:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({
        "code": ending.code, "cpu_s": used.ru_utime + used.ru_stime, "modules": list(sys.modules)
    }), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("run", "--help"),
        ("profile", "-h"),
        ("policy", "--help"),
        ("convert", "-h"),
    ],
    ids=" ".join,
)
def test_help_is_fast_and_light(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Under 300 ms of CPU, the best of five; without torch, pandas, optuna or YAML."""
    (tmp_path / "measure.py").write_text(MEASURE)
    for _ in range(5):
        done = python("measure.py", *arguments, cwd=tmp_path)
        found = json.loads(done.stderr.splitlines()[-1])
        assert found["code"] == 0
        assert not set(HEAVY) & set(found["modules"])
        if found["cpu_s"] < BUDGET_S:
            return
    pytest.fail(f"{found['cpu_s']:.2f} s of CPU, five times above {BUDGET_S} s")


def test_help_lists_every_command_with_one_line(tmp_path: Path) -> None:
    """And each of them has its own help, examples first."""
    from autockpt.cli.app import COMMANDS, cli

    text = python("-m", "autockpt", "--help", cwd=tmp_path).stdout
    for name, (_, line) in COMMANDS.items():
        assert f"  {name}" in text
        assert line in text
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.name == name


def test_the_boot_module_brings_nothing_along(tmp_path: Path) -> None:
    """What the user's script finds in sys.modules is what it imported itself."""
    (tmp_path / "s.py").write_text(
        "import sys; print([m for m in sys.argv[1:] if m in sys.modules])"
    )
    done = python("-m", "autockpt.cli.script_runner", "s.py", *HEAVY, "click", cwd=tmp_path)
    assert done.stdout == "[]\n"
    assert sys.version_info >= (3, 11)
