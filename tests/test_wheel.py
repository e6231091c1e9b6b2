"""The wheel: built from the sources, installed from its file into a fresh environment, and used."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from autockpt import __version__

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 600.0
TRAINING = """
import os, signal, sys, torch, autockpt
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(40):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    if step == 25 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print("autockpt of", os.path.dirname(autockpt.__file__))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def call(*command: str | Path, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A command outside of this repository and its environment."""
    environment = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "AUTOCKPT_", "VIRTUAL_ENV"))
    }  # fmt: skip
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**environment, **variables}, capture_output=True,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by pip as a user's would be; its build tool comes from the package index."""
    folder = tmp_path_factory.mktemp("dist")
    built = call(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT, cwd=folder)
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("no package index: hatchling cannot be had")
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("autockpt-*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    """Presets, templates, styles and `py.typed` too; no test and no cache."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "autockpt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == ours


def test_a_fresh_environment_runs_what_the_wheel_holds(wheel: Path, tmp_path: Path) -> None:
    """The README's training is killed and resumed there, and the report is written."""
    venv, python = tmp_path / "venv", tmp_path / "venv" / "bin" / "python"
    made = call(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (packages,) = venv.glob("lib/python*/site-packages")
    # The dependencies of this environment serve there; what is editable here is not followed.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index")
    installed = call(*pip, "--force-reinstall", "--no-deps", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    needed = call(*pip, "--dry-run", f"{wheel}[remote]", cwd=tmp_path)
    assert needed.returncode == 0, f"a dependency is missing: {needed.stderr}"
    program = venv / "bin" / "autockpt"
    version = call(program, "--version", cwd=tmp_path)
    assert version.stdout == f"autockpt {__version__}\n"
    (tmp_path / "train.py").write_text(TRAINING)
    run = call(
        program, "run", "--no-profile", "--set", "memory.interval=5 steps", "--run-dir", "r",
        "train.py", cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert f"autockpt of {packages}" in run.stdout, "it ran the sources and not the wheel"
    resumed = re.search(r"resumed step (\d+) from memory", run.stderr)
    assert resumed is not None, run.stderr
    assert int(resumed[1]) >= 15
    assert "</html>" in (tmp_path / "r" / "report.html").read_text()
