"""The quick start of the README: killed and resumed, it ends with an undisturbed run's weights.

The script runs from the wheel, installed in an environment of its own.
"""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 600


def script() -> str:
    """The Python block of the README."""
    found = re.search(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.M | re.S
    )
    assert found is not None
    return found.group(1)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel of this checkout; dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(folder.glob("autockpt-*.whl"))
    python = folder / "venv" / "bin" / "python"
    argv = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*argv, "--force-reinstall", wheel], check=True)
    return folder / "venv" / "bin"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quick_start_survives_its_kill(installed: Path, tmp_path: Path) -> None:
    """One SIGKILL at step 3000 or later; equal weights; a report with its styles."""
    (tmp_path / "train.py").write_text(script())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOCKPT_", "PYTHON"))}
    argv = [installed / "autockpt", "run", "--set", "failures.mtbf=10 min", "train.py"]
    with open(tmp_path / "out", "w") as out:
        run = subprocess.Popen(
            argv, cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        os.kill(_process_at(tmp_path / "out", 3000), signal.SIGKILL)
        assert run.wait(DEADLINE_S) == 0, (tmp_path / "out").read_text()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    text = (tmp_path / "out").read_text()
    assert "resumed step" in text
    bare = subprocess.run(
        [installed / "python", "train.py"], cwd=tmp_path, env=environment, check=True,
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert _weights(text) == _weights(bare.stdout)
    report = next(tmp_path.glob("runs/train-*/report.html")).read_text()
    assert "--paper:" in report
    where = subprocess.run(
        [installed / "python", "-c", "import autockpt; print(autockpt.__file__)"],
        cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(installed.parent))


def _process_at(out: Path, step: int) -> int:
    """The process id that the script prints at a step."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        found = re.search(rf"^step {step} .*process (\d+)$", out.read_text(), re.M)
        if found is not None:
            return int(found.group(1))
        time.sleep(0.05)
    pytest.fail(f"no step {step}: {out.read_text()}")


def _weights(text: str) -> list[str]:
    found = re.findall(r"^weights (.*)$", text, re.M)
    assert len(found) == 1, text
    return found
