"""Commands that read: plan, policy, report, explain, doctor, completion; and as one object."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.app import run
from autockpt.cli.jobs.preparation import prepare
from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.options import find_script
from autockpt.run_directory import RunDirectory
from autockpt.values.failure import FailureRecord
from tests.support.profiles import example_profile

ONE = plan_choice.Scale(world_size=1, nodes=1)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a directory with a script, without a foreign launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "t.py").write_text("print('trained')\n")
    return tmp_path


@pytest.fixture
def measured(here: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """What `autockpt profile t.py --lr 1` leaves behind, of this machine."""
    monkeypatch.setattr(plan_choice, "machine_mismatches", lambda measured, scale: [])
    goal = plan_choice.read_goal(None, ())
    directory = RunDirectory.create("runs/p")
    prepare(directory, find_script("t.py", False, ("--lr", "1")), "profile", goal, ONE)
    profile = example_profile()
    directory.write_profile(profile)
    plan_choice.write(directory, plan_choice.decide(profile, goal))
    return directory


def text_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints on stdout when it succeeds."""
    assert run(argv) == 0
    return capsys.readouterr().out


def object_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The object that a command prints with --json: stdout holds nothing else."""
    body: dict[str, Any] = json.loads(text_of(capsys, *argv, "--json"))
    assert body["schema_version"] == 1
    assert body["command"] == " ".join(argv[:2] if argv[0] == "policy" else argv[:1])
    return body


def test_plan_prints_every_choice_with_its_reason(
    measured: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same as an object; --out writes the commented YAML."""
    decision = measured.read_decision()
    assert decision is not None
    text = text_of(capsys, "plan", "--profile", "runs/p", "--out", "plan.yaml")
    for choice in decision.choices:
        assert choice.reason in text
    assert Path("plan.yaml").read_text() == measured.plan_text()
    body = object_of(capsys, "plan", "--profile", "runs/p/profile.json")
    assert len(body["decision"]["choices"]) == len(decision.choices)


def test_set_changes_the_plan(measured: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """--set beats the policy."""
    argv = ("plan", "--profile", "runs/p", "--policy", "builtin:sync", "--set", "disk.writers=1")
    plan = object_of(capsys, *argv)["plan"]
    assert plan["staging"]["persist"] == "sync"
    assert plan["staging"]["writers"] == 1


def test_dry_run_touches_nothing(
    measured: RunDirectory, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds the profile of this script and these arguments, and says what would be written."""
    before = sorted(here.rglob("*"))
    text = text_of(capsys, "run", "--dry-run", "t.py", "--lr", "1")
    assert "profile   runs/p/profile.json" in text
    assert "promise   goodput" in text
    assert "no profile fits" in text_of(capsys, "run", "--dry-run", "t.py", "--lr", "2")
    assert "nothing was touched" in text_of(capsys, "run", "--dry-run", "--no-profile", "t.py")
    body = json.loads(text_of(capsys, "run", "--json", "--dry-run", "t.py", "--lr", "1"))
    assert body["dry_run"] is True
    assert body["plan"]["plan_id"].startswith("plan-")
    assert sorted(here.rglob("*")) == before


def test_a_profile_of_another_machine_is_refused_with_the_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 65; the command that refreshes it can be copied."""
    RunDirectory.create("runs/p").write_profile(example_profile())
    assert run(["run", "--profile", "runs/p", "--nproc-per-node", "2", "t.py", "--lr", "1"]) == 65
    error = capsys.readouterr().err
    assert "world_size 1, this job has 2" in error
    assert "run: autockpt profile --nproc-per-node 2 t.py --lr 1" in error


def test_a_profile_of_this_machine_fits(here: Path) -> None:
    """The launcher's idea of the machine is the probes'."""
    from importlib import metadata

    from autockpt.executors.linux.cores import usable_cores
    from autockpt.profiles.probes import host

    found = replace(
        example_profile().fingerprint,
        host=host.host_identity(),
        cpu=host.cpu_name(),
        cores=usable_cores(),
        torch_version=metadata.version("torch"),
    )
    assert plan_choice.machine_mismatches(found, ONE) == []


def test_report_in_every_format(measured: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """HTML into the directory, the others to stdout."""
    assert text_of(capsys, "report", "runs/p").strip() == "runs/p/report.html"
    assert "<h1" in measured.report.read_text()
    assert "lost time" in text_of(capsys, "report", "runs/p", "--format", "text").lower()
    assert json.loads(text_of(capsys, "report", "runs/p", "--format", "json"))["schema_version"]
    assert text_of(capsys, "report", "runs/p", "--format", "csv").startswith("event,")
    assert object_of(capsys, "report", "runs/p")["report"]["kind"] == "profile"
    text_of(capsys, "report", "runs/p", "--redact", "--out", "shared.html")
    assert str(measured.path) not in Path("shared.html").read_text()


def test_explain_prints_the_decisions(
    measured: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reasons."""
    decision = measured.read_decision()
    assert decision is not None
    text = text_of(capsys, "explain", "runs/p")
    assert all(choice.reason in text for choice in decision.choices)
    assert object_of(capsys, "explain", "runs/p")["decision"]["plan"]["plan_id"]


def test_the_what_if_is_the_decisions_own_waste(measured: RunDirectory) -> None:
    """The page's slider starts at the number that the verdict promises."""
    from autockpt.cli.shared.gather import run_data
    from autockpt.reports.analysis.what_if import waste

    data = run_data(measured)
    assert data.what_if is not None
    assert data.decision is not None
    assert data.what_if.waste == pytest.approx(data.decision.expected.waste)
    assert waste(data.what_if.point) == pytest.approx(data.what_if.waste)


def test_a_policy_from_init_to_diff(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """init writes a file that check accepts; explain shows where a value stands."""
    text_of(capsys, "policy", "init", "mine.yaml")
    assert run(["policy", "init", "mine.yaml"]) == 78
    assert "--force" in capsys.readouterr().err
    assert "mine.yaml: ok" in text_of(capsys, "policy", "check", "mine.yaml")
    Path("mine.yaml").write_text("version: 1\nextends: builtin:auto\ndisk: {writers: 4}\n")
    assert "mine.yaml:3" in text_of(capsys, "policy", "explain", "mine.yaml", "disk.writers")
    assert run(["policy", "explain", "mine.yaml", "disc"]) == 2
    assert "no such key" in capsys.readouterr().err
    assert "disk.writers: auto -> 4" in text_of(
        capsys, "policy", "diff", "builtin:auto", "mine.yaml"
    )
    found = object_of(capsys, "policy", "diff", "builtin:auto", "mine.yaml")["differences"]
    assert found == [{"path": "disk.writers", "before": "auto", "after": "4"}]
    assert json.loads(text_of(capsys, "policy", "schema"))["title"] == "autockpt policy"


def test_every_mistake_of_a_policy_is_reported_with_its_place(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """file:line:col: error: path: message; all at once."""
    Path("bad.yaml").write_text("version: 1\ndisk:\n  writer: 4\nlimits:\n  stall: 2\n")
    assert run(["policy", "check", "bad.yaml"]) == 78
    error = capsys.readouterr().err
    assert "bad.yaml:3:3: error: disk.writer: unknown field; did you mean 'writers'?" in error
    assert "bad.yaml:5:10: error: limits.stall: " in error


def test_doctor_tries_the_memory_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes are killed; every finding that is not ok says what to do."""
    body = object_of(capsys, "doctor")
    found = {finding["id"]: finding for finding in body["findings"]}
    for name in ("memfd", "pidfd", "trainer_killed", "launcher_killed", "keeper_killed"):
        assert found[f"memory.{name}"]["status"] in ("ok", "warning", "broken")
    assert {"limits.memlock", "limits.memory", "storage.direct_io", "versions"} <= set(found)
    assert all(f["fix"] for f in body["findings"] if f["status"] in ("warning", "broken"))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text_of(capsys, "doctor")


def test_doctor_says_why_checkpoints_go_through_the_page_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file system states is what the writers obey, whatever smaller writes succeed."""
    from autockpt.executors.linux import direct_io

    monkeypatch.setattr(direct_io, "stated_alignment", lambda descriptor: (512, 65536))
    body = object_of(capsys, "doctor", str(tmp_path))
    (found,) = (f for f in body["findings"] if f["id"] == "storage.direct_io")
    if "do not work" in found["what"]:
        pytest.skip("no direct I/O here")
    assert found["status"] == "warning"
    assert "page cache: the file system states an alignment of 512 B for memory" in found["what"]


def test_doctor_warns_about_memory_that_is_no_disk(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """A tmpfs is gone after a reboot; nothing of doctor stays in it."""
    from autockpt.profiles.probes.host import mount_of

    if mount_of("/dev/shm").kind != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    before = sorted(Path("/dev/shm").glob(".autockpt-doctor*"))
    assert "gone after a reboot" in text_of(capsys, "doctor", "/dev/shm")
    assert sorted(Path("/dev/shm").glob(".autockpt-doctor*")) == before


def test_doctor_names_the_key_that_moves_checkpoints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's own layer is gone with it; the advice must be something a policy can say."""
    from autockpt.cli.doctor import storage
    from autockpt.policies.policy_file import KEYS

    mount = replace(storage.mount_of(str(tmp_path)), kind="overlay")
    monkeypatch.setattr(storage, "mount_of", lambda path: mount)
    body = object_of(capsys, "doctor", str(tmp_path))
    (found,) = (f for f in body["findings"] if f["id"] == "storage.kind")
    named = [word for word in found["fix"].split() if "." in word]
    assert named == ["disk.path"]
    assert set(named) <= set(KEYS.known)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    """The shell's own script, naming our variable."""
    assert "_AUTOCKPT_COMPLETE" in text_of(capsys, "completion", shell)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """With -v also what it works with."""
    import autockpt

    assert text_of(capsys, "--version") == f"autockpt {autockpt.__version__}\n"
    assert "torch" in text_of(capsys, "--version", "-v")
    assert "torch" in json.loads(text_of(capsys, "--version", "-v", "--json"))["versions"]


def test_a_starter_file_is_auto_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written as `auto` is not counted as anything else."""
    monkeypatch.chdir(tmp_path)
    assert run(["policy", "init", "p.yaml"]) == 0
    capsys.readouterr()
    assert run(["policy", "check", "p.yaml"]) == 0
    assert "ok, it sets 0 of " in capsys.readouterr().out
    Path("q.yaml").write_text("version: 1\nextends: builtin:auto\ndisk: {writers: 4}\n")
    assert run(["policy", "check", "q.yaml"]) == 0
    assert "ok, it sets 1 of " in capsys.readouterr().out, "and not what its base sets"


def test_plan_and_dry_run_reckon_with_the_failures_on_record(
    measured: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the runs beside the profile, and of the run itself: both shorten the intervals."""

    def disk_steps(*argv: str) -> int:
        body = json.loads(text_of(capsys, argv[0], "--json", *argv[1:]))
        steps: int = body["plan"]["tiers"][1]["interval_steps"]
        return steps

    ways = [
        ("plan", "--profile", "runs/p"),
        ("run", "--dry-run", "--profile", "runs/p", "t.py", "--lr", "1"),
        ("run", "--dry-run", "--run-dir", "runs/q", "--profile", "runs/p", "t.py", "--lr", "1"),
    ]
    before = [disk_steps(*way) for way in ways]
    other = RunDirectory.create("runs/q")
    for number in range(1, 7):
        other.append_failure(
            FailureRecord(
                wall="2026-01-01T00:00:00Z", kind="node", what="keeper+trainer", node=0,
                step=1000 * number, exposure_s=600.0, term=number,
            )
        )  # fmt: skip
    after = [disk_steps(*way) for way in ways]
    assert all(now < then / 2 for then, now in zip(before, after, strict=True))
    assert len(set(after)) == 1
