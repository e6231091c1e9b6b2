"""The pages of docs/start, as a reader follows them: each command in order, in one directory."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

START = Path(__file__).resolve().parents[3] / "docs" / "start"
DEADLINE_S = 600.0


def parts(page: str, language: str) -> list[str]:
    """The blocks of one language of a page."""
    text = (START / f"{page}.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands(page: str) -> list[list[str]]:
    """The `$` lines of a page as argument lists."""
    lines = "".join(parts(page, "console")).splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]


class Reader:
    """Types commands in one directory."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("AUTOCKPT_")}

    def do(self, argv: list[str], *, stop_at: str = "", code: int = 0) -> str:
        """Run a command; send SIGINT when it has printed `stop_at`.  Return its output."""
        assert argv[0] == "autockpt"
        out = self._place / "out"
        with open(out, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "autockpt", *argv[1:]], cwd=self._place, stdout=file,
                stderr=subprocess.STDOUT, env=self._environment, start_new_session=True,
            )  # fmt: skip
        try:
            deadline_s = time.monotonic() + DEADLINE_S
            while stop_at and stop_at not in out.read_text():
                assert process.poll() is None, out.read_text()
                assert time.monotonic() < deadline_s, out.read_text()
                time.sleep(0.05)
            if stop_at:
                process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == code, f"{argv}: {out.read_text()}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return out.read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tutorials_do_what_they_say(tmp_path: Path) -> None:
    """An interrupted run resumes and ends with the weights of an undisturbed one."""
    (tmp_path / "train.py").write_text(parts("protect", "python")[0])
    (tmp_path / "mine.yaml").write_text(parts("settings", "yaml")[0])
    reader = Reader(tmp_path)
    first, again, undisturbed, *looks = commands("protect")
    reader.do(first, stop_at="step 200 ", code=130)
    resumed = reader.do(again)
    assert re.search(r"resumed step \d+ from disk", resumed), resumed
    assert "step 200 " not in resumed
    assert _weights(resumed) == _weights(reader.do(undisturbed))
    for argv in (*looks, *commands("report")):
        assert reader.do(argv)
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    measure, plan, often, check, bounded, run = commands("settings")
    reader.do(measure)
    assert _interval_s(reader.do(often)) < _interval_s(reader.do(plan))
    assert "ok" in reader.do(check)
    reader.do(bounded)
    assert _weights(reader.do(run)) == _weights(resumed)


def _weights(text: str) -> str:
    found = re.search(r"^weights (.*)$", text, re.M)
    assert found, text
    return found.group(1)


def _interval_s(text: str) -> int:
    found = re.search(r"every (\d+) iterations", text)
    assert found, text
    return int(found.group(1))
