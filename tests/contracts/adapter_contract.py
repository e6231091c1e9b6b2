"""What every adapter promises: a killed training ends as if nothing had happened.

    class TestHuggingFace(AdapterContract):
        framework = Framework("huggingface", "tests/frameworks/huggingface_driver.py",
                              "transformers")

Each case runs bare in the framework, and under `autockpt run`, where the process dies once.  The
bytes of the end (parameters, optimizer, scheduler, random states, the framework's counters) and the
samples of every micro-batch, those of the killed attempt too, must equal those of the bare run.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from tests.contracts.adapter_process import Case

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600
"""For one run of a case."""
PLAN = ("memory.interval=1 steps", "disk.interval=4 steps", "retune=false")


@dataclasses.dataclass(frozen=True, slots=True)
class Framework:
    """An environment, and a script in it that trains."""

    name: str
    driver: str
    """Path from the root of the project."""
    package: str
    """What the driver imports."""
    launches: bool = False
    """It starts its ranks, and starts them again; else `autockpt run` does, or torchrun."""

    @property
    def python(self) -> str:
        """The interpreter of the environment that has it: this one, or that of the make target."""
        if importlib.util.find_spec(self.package) is not None:
            return sys.executable
        return str(ROOT / f".venv-{self.name}" / "bin" / "python")

    @property
    def missing(self) -> str:
        """Why it cannot run; "": it can."""
        there = os.path.exists(self.python)
        return "" if there else f"{self.package} is not installed: make test-frameworks"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run left."""

    ends: dict[str, dict[str, str]]
    """By rank the digests at its end."""
    samples: dict[tuple[str, int], list[list[int]]]
    """By rank and micro-batch the ids that were trained, once for each attempt that reached it."""
    began: list[int]
    """Steps that attempts began at, in any order."""
    said: str


@functools.cache
def bare(framework: Framework, case: Case) -> Outcome:
    """Of the framework alone."""
    with tempfile.TemporaryDirectory() as folder:
        python = framework.python
        command = [python, framework.driver, folder, "bare", _text(case)]
        if case.ranks > 1 and not framework.launches:
            launch = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={case.ranks}",
            ]
            command = [python, *launch, *command[1:]]
        return _run(command, folder)


def protected(framework: Framework, case: Case, folder: str) -> Outcome:
    """Under `autockpt run`, which starts it again when it died, or as the framework does."""
    if framework.launches:
        command = [framework.python, framework.driver, folder, "protected", _text(case)]
        return _run(command, folder)
    command = [framework.python, "-m", "autockpt", "run", "--run-dir", f"{folder}/run"]
    for setting in PLAN:
        command += ["--set", setting]
    if case.ranks > 1:
        command += ["--nproc-per-node", str(case.ranks)]
    command += [framework.driver, folder, "protected", _text(case)]
    outcome = _run(command, folder, again=case.kill.startswith("sigterm"))
    return outcome


def own(framework: Framework, case: Case, folder: str) -> Outcome:
    """Of the framework with its own checkpoints, started again by hand when it died."""
    command = [framework.python, framework.driver, folder, "own", _text(case)]
    return _run(command, folder, again=True)


def _text(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case))


def _run(command: list[str], folder: str, *, again: bool = False) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "AUTOCKPT_RUN_DIR"):
        environment.pop(name, None)
    environment |= {"AUTOCKPT_NO_PROFILE": "1", "HF_HUB_OFFLINE": "1"}
    said, code = "", 1
    for _ in range(2 if again else 1):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said += process.communicate(timeout=LIMIT_S)[0]
        finally:
            _end(process)
        code = process.returncode
        if code == 0:
            break
    assert code == 0, f"{command} ended with {code}:\n{said[-6000:]}"
    return _outcome(Path(folder), said)


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(folder: Path, said: str) -> Outcome:
    samples: dict[tuple[str, int], list[list[int]]] = {}
    for path in folder.glob("samples-*"):
        rank = path.name.split("-")[1]
        for line in path.read_text().splitlines():
            number, ids = json.loads(line)
            samples.setdefault((rank, number), []).append(ids)
    ends = {p.name.split("-")[1]: json.loads(p.read_text()) for p in folder.glob("end-*")}
    began = [int(path.read_text()) for path in folder.glob("began-*")]
    return Outcome(ends=ends, samples=samples, began=began, said=said)


def require_equal(outcome: Outcome, undisturbed: Outcome) -> None:
    """Samples of every attempt first: they say more than a digest."""
    assert set(outcome.samples) == set(undisturbed.samples)
    for key, attempts in sorted(outcome.samples.items()):
        (expected,) = undisturbed.samples[key]
        assert all(ids == expected for ids in attempts), f"rank, micro-batch {key}: {attempts}"
    assert outcome.ends == undisturbed.ends


EDGE = 12
"""Micro-batches of an epoch on one rank."""
CASES = (
    Case(kill="forward:8"),
    Case(kill="backward:9"),
    Case(kill="boundary:7"),
    Case(kill=f"boundary:{EDGE}"),
    Case(kill=f"forward:{EDGE + 1}"),
    Case(kill="sigterm:9"),
    Case(kill="backward:19", accumulation=4),
    Case(kill="boundary:4", accumulation=4),
    Case(kill="forward:8", draws=True),
    Case(kill="forward:17", draws=True, accumulation=4),
    Case(kill="forward:8", evaluate_every=3),
    Case(kill="boundary:6", evaluate_every=3, draws=True),
    Case(kill="forward:8", workers=2),
    Case(kill="forward:20", workers=2, persistent=True),
    Case(kill="backward:5", ranks=2),
    Case(kill="boundary:6", ranks=2),
    Case(kill="forward:9", ranks=2, accumulation=2, evaluate_every=3),
)
"""The matrix: each axis by itself, and the pairs that broke something once."""


class AdapterContract:
    """Subclassed per framework; a class without `framework` proves nothing."""

    framework: ClassVar[Framework]
    more: ClassVar[tuple[Case, ...]] = ()
    """Cases of this framework alone."""
    not_for: ClassVar[dict[str, str]] = {}
    """By name of a case why this framework cannot have it."""

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_killed_is_undisturbed(self, case: Case, tmp_path: Path) -> None:
        """Bytes and samples equal those of the bare framework, and something was resumed."""
        if case.name in self.not_for:
            pytest.skip(self.not_for[case.name])
        prove(self.framework, case, tmp_path)

    def test_its_own_ways_are_undisturbed_too(self, tmp_path: Path) -> None:
        """Options that no other framework has."""
        for number, case in enumerate(self.more):
            folder = tmp_path / str(number)
            folder.mkdir()
            prove(self.framework, case, folder)


def prove(framework: Framework, case: Case, folder: Path) -> None:
    """One case.  Raises AssertionError saying what differs."""
    outcome = protected(framework, case, str(folder))
    assert (folder / "killed").exists()
    assert max(outcome.began) > 0, f"nothing was resumed:\n{outcome.said[-6000:]}"
    require_equal(outcome, bare(framework, case.undisturbed))
