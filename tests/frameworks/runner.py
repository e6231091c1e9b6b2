"""Runs the tests of each framework in its environment, and ends with one summary.

    python -m tests.frameworks [--minutes N] NAME... [-- PYTEST_ARGS]

`make test-frameworks` calls it.  The time of each framework is bounded, and one that fails does not
hide the others.  The tables of resumes that the tests have measured go into the pages.
"""

import argparse
import contextlib
import importlib.metadata
import os
import signal
import subprocess
import tempfile
import time
import uuid
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autockpt.values.table import table
from docs import generate
from tests.cases import runner as cases

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "huggingface": ("transformers", "peft", "trl"), "ignite": ("pytorch-ignite",),
    "trackers": ("tensorboard", "wandb", "mlflow", "opentelemetry-sdk"),
}  # fmt: skip
"""By framework the packages whose versions the summary has; others have the framework's name."""
INSTALL_MINUTES = 40.0
GRACE_S = 120.0
"""For pytest, to write what it has until it is interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How the tests of one framework ended."""

    name: str
    said: str
    """"passed", or why not."""
    passed: int = 0
    failed: tuple[str, ...] = ()
    """Names of the tests."""
    skipped: tuple[str, ...] = ()
    """Names of the tests, each with its reason."""
    took_s: float = 0.0
    """Wall time without the installation."""


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if a framework has not passed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each framework")
    end = argv.index("--") if "--" in argv else len(argv)
    given = parser.parse_args(argv[:end])
    results = [run_tests(name, given.minutes, argv[end + 1 :]) for name in given.names]
    generate.write_resumes()
    print("", *summary(results), sep="\n")
    return int(any(one.said != "passed" for one in results))


def summary(results: Sequence[Result]) -> list[str]:
    """A table, and below it the tests that failed or were skipped."""
    rows = [
        (
            one.name, _versions(one.name), str(one.passed), str(len(one.failed)),
            str(len(one.skipped)), f"{one.took_s / 60:.1f}", one.said,
        )
        for one in results
    ]  # fmt: skip
    headers = ("framework", "version", "passed", "failed", "skipped", "minutes", "verdict")
    failed = [f"FAILED {one.name}: {test}" for one in results for test in one.failed]
    skipped = [f"SKIPPED {one.name}: {test}" for one in results for test in one.skipped]
    return [*table(headers, rows), *failed, *skipped]


def run_tests(name: str, minutes: float, arguments: Sequence[str]) -> Result:
    """Run the tests of one framework in its environment, which is made first."""
    print(f"\n== {name}", flush=True)
    said = _install(name)
    if said:
        print(said, flush=True)
        return Result(name=name, said=f"not installed: {said}")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        python = ROOT / f".venv-{name}" / "bin" / "python"
        command = [str(python), "-m", "pytest", f"tests/frameworks/test_{name}.py"]
        code = _run([*command, f"--junit-xml={report}", *arguments], minutes, ROOT)
        passed, failed, skipped = _counted(report, interrupted=code in (None, 2))
    took_s = time.monotonic() - began_s
    said = f"pytest ended with {code}" if code else "passed"
    if code is None:
        said = f"stopped after {minutes:g} minutes"
    elif failed:
        said = "failed"
    elif not passed and not arguments:
        said = "no test has run"
    elif code == 5:
        said = "passed"  # none of its tests was chosen
    return Result(
        name=name, said=said, passed=passed, failed=failed, skipped=skipped, took_s=took_s
    )


def _install(name: str) -> str:
    """Makes the environment; returns why that failed, "" where it did not."""
    command = [os.environ.get("MAKE", "make"), "--no-print-directory", f".venv-{name}/.ready"]
    code = _run(command, INSTALL_MINUTES, ROOT)
    if code is None:
        return f"no end in {INSTALL_MINUTES:g} minutes"
    return f"`make .venv-{name}/.ready` ended with {code}" if code else ""


def _run(command: Sequence[str], minutes: float, folder: Path) -> int | None:
    """Its exit code; None where the time was over, and all that it started was ended."""
    mark = uuid.uuid4().hex
    # In the background of a shell SIGINT is ignored, and pytest would not hear of its end.
    process = subprocess.Popen(
        command, cwd=folder, env={**os.environ, cases.MARK: mark}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        return process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        cases._end(process, mark)  # type: ignore[arg-type]


def _counted(report: Path, *, interrupted: bool) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """(tests that passed, names of those that failed, skipped tests) of pytest's report.

    The test that was under way when pytest was interrupted has a record without a verdict.
    """
    passed, failed, skipped = 0, list[str](), list[str]()
    with contextlib.suppress(OSError, xml.etree.ElementTree.ParseError):
        for test in xml.etree.ElementTree.parse(report).iter("testcase"):
            place, reason = test.get("classname", "").rpartition(".")[2], test.find("skipped")
            name = f"{place}::{test.get('name')}"
            if test.find("failure") is not None or test.find("error") is not None:
                failed.append(name)
            elif reason is not None:
                skipped.append(f"{name}: {reason.get('message', '')}")
            else:
                passed += 1
    return max(passed - interrupted, 0), tuple(failed), tuple(skipped)


def _versions(name: str) -> str:
    """Of what is installed in the environment of a framework."""
    paths = [str(path) for path in ROOT.glob(f".venv-{name}/lib/python*/site-packages")]
    found = []
    for package in DISTRIBUTIONS.get(name, (name,)):
        for one in importlib.metadata.distributions(name=package, path=paths):
            found.append(one.version if len(DISTRIBUTIONS.get(name, ())) < 2 else
                         f"{package} {one.version}")  # fmt: skip
    return ", ".join(found) or "-"
