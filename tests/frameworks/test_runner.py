"""One command for all frameworks: a failure of one does not hide the results of the others."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from docs import generate
from tests.frameworks import runner

Make = Callable[[str, str, str], None]
PYTEST = """#!/bin/sh
for word in "$@"; do case $word in --junit-xml=*) report=${word#*=};; esac; done
cat > "$report" <<'EOF'
<testsuites><testsuite>
<testcase classname="tests.test_a.TestA" name="test_right"/>
<testcase classname="tests.test_a.TestA" name="test_left">%s</testcase>
</testsuite></testsuites>
EOF
%s
"""
"""Stands for the interpreter of an environment: writes the report of two tests."""


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes one: (name, what is said of the second test, the last command)."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "write_resumes", lambda: None)
    (tmp_path / "Makefile").write_text(".venv-%/.ready:\n\t@test -d .venv-$*\n")

    def make(name: str, second: str, last: str) -> None:
        python = tmp_path / f".venv-{name}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTEST % (second, last))
        python.chmod(0o755)

    return make


def test_each_framework_has_its_line(environments: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """One fails, one cannot be installed, one passes: all are in the summary."""
    environments("a", "<failure/>", "exit 1")
    environments("c", "<skipped message='no such case here'/>", "exit 0")
    assert runner.main(["a", "b", "c"]) == 1
    said = capfd.readouterr().out.splitlines()
    lines = {line.split()[0]: line.split(maxsplit=6)[2:] for line in said[-5:-2]}
    assert [lines["a"][n] for n in (0, 1, 2, 4)] == ["1", "1", "0", "failed"]
    assert lines["b"][4] == "not installed: `make .venv-b/.ready` ended with 2"
    assert [lines["c"][n] for n in (0, 1, 2, 4)] == ["1", "0", "1", "passed"]
    assert said[-2:] == [
        "FAILED a: TestA::test_left",
        "SKIPPED c: TestA::test_left: no such case here",
    ]
    assert runner.main(["c", "--", "-k", "right"]) == 0


@pytest.mark.timeout(120)
def test_a_framework_that_hangs_is_stopped(
    environments: Make, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted, also where a shell had its background ignore that; the next has a turn."""
    environments("a", "", "exec sleep 600")
    environments("b", "", "exec sleep 600")
    monkeypatch.setattr(runner, "GRACE_S", 300.0)
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert runner.main(["--minutes", "0.01", "a", "b"]) == 1
    finally:
        signal.signal(signal.SIGINT, former)
    said = capfd.readouterr().out.splitlines()
    assert all(line.endswith("stopped after 0.01 minutes") for line in said[-2:])


def test_a_framework_of_which_nothing_ran_has_not_passed(
    environments: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of it was skipped: its package is missing in its environment."""
    environments("a", "", '> "$report"; exit 5')
    assert runner.main(["a"]) == 1
    assert capfd.readouterr().out.rstrip().endswith("no test has run")
