"""The runner of cases tells right from wrong, and leaves no process behind."""

from pathlib import Path

import pytest

from tests.cases import runner


def test_each_ending_has_its_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 is ok, 77 is skipped with its reason, any other code failed with the last lines."""
    (tmp_path / "right.sh").write_text("exit 0\n")
    (tmp_path / "other.sh").write_text("echo 'skipped: needs root'; exit 77\n")
    (tmp_path / "wrong.py").write_text("print('expected 3, got 4'); raise SystemExit(1)\n")
    assert runner.main(tmp_path, []) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("skipped other")
    assert lines[0].endswith(": needs root")
    assert lines[1].startswith("ok      right")
    assert lines[2].startswith("FAILED  wrong")
    assert lines[2].endswith("exit code 1")
    assert lines[3].strip() == "expected 3, got 4"
    assert runner.main(tmp_path, ["right"]) == 0
    assert runner.main(tmp_path, ["rihgt"]) == 2


def test_what_a_case_started_ends_with_it(tmp_path: Path) -> None:
    """A process that left the group is killed too, also when the case exceeds its limit."""
    script = tmp_path / "leaver.sh"
    script.write_text(
        f"cd {tmp_path}; setsid sh -c 'echo $$ > pid; exec sleep 600' &\n"
        "until [ -s pid ]; do sleep 0.01; done; cp pid seen; sleep 600\n"
    )
    result = runner.run_case(script, limit_s=3.0)
    assert result.word == "FAILED"
    assert "had not ended after 3 s" in result.detail
    if (tmp_path / "seen").exists():
        pid = int((tmp_path / "seen").read_text())
        status = Path(f"/proc/{pid}/stat")
        assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] in "ZX"
