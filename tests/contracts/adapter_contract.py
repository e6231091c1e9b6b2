"""What every adapter promises: a killed training ends as if nothing had happened.

    class TestHuggingFace(AdapterContract):
        framework = Framework("huggingface", "tests/frameworks/huggingface_driver.py",
                              "transformers")

Each case runs bare in the framework, and under autockpt, where the process dies once.  The
bytes of the end (parameters, optimizer, scheduler, random states, the framework's counters) and the
samples of every micro-batch, those of the killed attempt too, must equal those of the bare run.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.conftest import end_keeper
from tests.contracts.adapter_process import Case
from tests.jobs.kill.forked_keepers import FORKED_KEEPERS
from tests.jobs.kill.zygote import Zygote

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
    prefix: tuple[str, ...] = ()
    """In front of the command: a network namespace, where the framework has its nodes in such."""

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
    attempts: dict[str, list[dict[int, dict[str, str]]]]
    """By rank its attempts in order: digests in front of each micro-batch."""
    said: str


@functools.cache
def bare(framework: Framework, case: Case) -> Outcome:
    """Of the framework alone."""
    with tempfile.TemporaryDirectory() as folder:
        if framework.launches:
            return _run(_command(framework, folder, "bare", case), folder)
        return _fork(framework, folder, "bare", case)


def protected(framework: Framework, case: Case, folder: str) -> Outcome:
    """Each rank as torchrun starts `autockpt run`, and all again; or as the framework does."""
    if framework.launches:
        return _run(_command(framework, folder, "protected", case), folder)
    try:
        return _fork(framework, folder, "protected", case)
    finally:
        end_keeper(f"{folder}/run")


def launched(framework: Framework, case: Case, folder: str) -> Outcome:
    """Under `autockpt run`, which starts the ranks, and starts them again."""
    command = [framework.python, "-m", "autockpt", "run", "--run-dir", f"{folder}/run"]
    for setting in PLAN:
        command += ["--set", setting]
    command += ["--nproc-per-node", str(case.ranks)]
    command += _command(framework, folder, "protected", case)[1:]
    return _run(command, folder, again=case.kill.startswith("sigterm"))


def own(framework: Framework, case: Case, folder: str) -> Outcome:
    """Of the framework with its own checkpoints, started again when it died."""
    if framework.launches:
        return _run(_command(framework, folder, "own", case), folder, again=True)
    return _fork(framework, folder, "own", case)


def _command(framework: Framework, folder: str, how: str, case: Case) -> list[str]:
    words = [framework.python, framework.driver, folder, how, _text(case)]
    return [*framework.prefix, *words]


def _text(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case))


@functools.cache
def _zygote(framework: Framework) -> Zygote:
    """It has imported the framework, and forks ranks; ends with this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    module = framework.driver.removesuffix(".py").replace("/", ".")
    zygote = Zygote(module, python=framework.python)
    zygote.START_WITHIN_S = LIMIT_S
    atexit.register(zygote.close)
    return zygote


def _fork(framework: Framework, folder: str, how: str, case: Case) -> Outcome:
    """All ranks, and after a failure once more."""
    arguments = {
        "driver": str(ROOT / framework.driver), "folder": folder, "how": how,
        "case": _text(case), "settings": PLAN,
    }  # fmt: skip
    zygote = _zygote(framework)
    for start in range(2 if case.kill else 1):
        pids = []
        environment = _as_torchrun(folder, case.ranks, start)
        for rank in range(case.ranks):
            out = Path(folder) / f"rank-{rank}"
            out.mkdir(exist_ok=True)
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if how != "protected" and case.ranks == 1:
                environment, of_rank = {}, {}
            call = "tests.contracts.adapter_process:forked"
            pids.append(
                zygote.call(call, arguments, out, **FORKED_KEEPERS, **environment, **of_rank)
            )
        if not any(_ended(zygote, pids)):
            break
    said = "".join(path.read_text()[-4000:] for path in Path(folder).glob("rank-*/log"))
    codes = [zygote.status(pid) for pid in pids]
    assert not any(codes), f"{framework.name}, {how}, {case.name} ended with {codes}:\n{said}"
    return _outcome(Path(folder), said)


def _as_torchrun(folder: str, ranks: int, start: int) -> dict[str, str]:
    port = 0
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": folder,
        "TORCHELASTIC_RESTART_COUNT": str(start), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    }  # fmt: skip


def _ended(zygote: Zygote, pids: list[int]) -> list[int]:
    """Exit codes; where one fails the others are ended, as a launcher does."""
    deadline = time.monotonic() + LIMIT_S
    try:
        while None in (codes := [zygote.status(pid, wait_s=0.05) for pid in pids]):
            if any(codes):
                break
            assert time.monotonic() < deadline, f"no end in {LIMIT_S} s"
    finally:
        for pid in pids:
            zygote.kill(pid)
    return [zygote.status(pid, wait_s=60) or 0 for pid in pids]


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
    attempts: dict[str, list[dict[int, dict[str, str]]]] = {}
    for path in sorted(folder.glob("samples-*"), key=lambda path: path.stat().st_mtime_ns):
        rank = path.name.split("-")[1]
        attempts.setdefault(rank, []).append({})
        for line in path.read_text().splitlines():
            number, ids, digests = json.loads(line)
            samples.setdefault((rank, number), []).append(ids)
            attempts[rank][-1][number] = digests
    ends = {p.name.split("-")[1]: json.loads(p.read_text()) for p in folder.glob("end-*")}
    began = [int(path.read_text()) for path in folder.glob("began-*")]
    return Outcome(ends=ends, samples=samples, began=began, attempts=attempts, said=said)


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
BY_MICRO_BATCH = {
    "boundary:4,accumulation=4": "an iteration is a micro-batch here: no checkpoint by then"
}
"""`not_for` where `step()` stands behind each micro-batch; such an adapter has `LATER` instead."""
LATER = (Case(kill="boundary:16", accumulation=4),)
LAUNCHED = (Case(kill="backward:5", ranks=2),)


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

    @pytest.mark.parametrize("case", LAUNCHED, ids=lambda case: case.name)
    def test_under_autockpt_run(self, case: Case, tmp_path: Path) -> None:
        """The launcher starts the ranks; a zygote starts them in the other cases."""
        if self.framework.launches or case.name in self.not_for:
            pytest.skip("the framework launches its ranks" if self.framework.launches else "")
        prove(self.framework, case, tmp_path, launched)

    def test_its_own_ways_are_undisturbed_too(self, tmp_path: Path) -> None:
        """Options that no other framework has."""
        for number, case in enumerate(self.more):
            folder = tmp_path / str(number)
            folder.mkdir()
            prove(self.framework, case, folder)

    def test_what_its_own_resume_keeps(self) -> None:
        """The table of its page: whatever the framework keeps, all is exact with autockpt."""
        from tests.contracts import adapter_table

        result = adapter_table.measured(self.framework)
        ours = {what: with_autockpt for what, _, with_autockpt in result["rows"]}
        assert int(ours.pop("batches trained twice")) <= 2
        assert set(ours.values()) == {"exact"}, ours
        adapter_table.keep(self.framework, result)


def prove(
    framework: Framework, case: Case, folder: Path,
    start: Callable[[Framework, Case, str], Outcome] = protected,
) -> None:  # fmt: skip
    """One case.  Raises AssertionError saying what differs."""
    outcome = start(framework, case, str(folder))
    assert (folder / "killed").exists()
    assert max(outcome.began) > 0, f"nothing was resumed:\n{outcome.said[-6000:]}"
    require_equal(outcome, bare(framework, case.undisturbed))
