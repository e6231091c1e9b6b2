"""Every failure says what, where and what to do, in text and as an object, with its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.cli.jobs.run import misplaced
from autockpt.cli.jobs.run import run as run_command


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a directory of its own, without a foreign launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "AUTOCKPT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["run", "nowhere.py"], 78, "nowhere.py: no such script"),
        (["profile", "nowhere.py"], 78, "nowhere.py: no such script"),
        (
            ["run", "--run-dir", "s3://bucket/run", "t.py"],
            78,
            "with disk.path: --set disk.path=URL",
        ),
        (["drill", "s3://bucket/run"], 78, "expected a script, got a URL"),
        (["doctor", "s3://bucket/run"], 78, "`autockpt ls URL` asks a store"),
        (["tune", "s3://bucket/run"], 78, "The events of a run stay on the machine"),
        (["failures", "s3://bucket/run"], 78, "The events of a run stay on the machine"),
        (
            ["convert", "r", "s3://b/x", "--to", "dcp"],
            78,
            "s3://b/x: expected a path of this machine",
        ),
        (["convert", "r", "s3://b/x", "--to", "archive"], 78, "with the store's own tools"),
        (
            ["report", "s3://b/x/ckpt-t0001-step-00000060"],
            78,
            "expected that of a run; pass s3://b/x",
        ),
        (["push", "s3://b/x", "s3://b/y"], 78, "`autockpt pull s3://b/x RUN_DIR` brings"),
        (["run", "-m", "surely_not_here"], 78, "no module 'surely_not_here'"),
        (["run", "--policy", "nowhere.yaml", "t.py"], 78, "nowhere.yaml"),
        (["run", "--policy", "builtin:atuo", "t.py"], 78, "did you mean 'auto'"),
        (["run", "--set", "disk.writer=4", "t.py"], 78, "did you mean 'disk.writers'"),
        (["run", "--set", "interval=15", "t.py"], 78, "write a unit"),
        (["run", "--profile", "nowhere", "t.py"], 78, "`autockpt profile SCRIPT` writes one"),
        (["run", "--fresh", "--resume-from", "ckpt-t0001-step-00000001", "t.py"], 2, "contradict"),
        (["run", "--resume-from", "ckpt-t0001-step-00000001", "t.py"], 2, "add --run-dir"),
        (
            ["run", "--resume-from", "latest", "--run-dir", "r", "t.py"],
            78,
            "or of a pin",
        ),
        (["run", "--nnodes", "x", "t.py"], 2, "expected numbers"),
        (["plan", "--profile", "nowhere"], 78, "no profile"),
        (["plan"], 2, "--profile"),
        (["report", "nowhere"], 78, "no such run directory"),
        (["report", "."], 78, "not a run directory"),
        (["explain", "nowhere"], 78, "no such run directory"),
        (["ls", "nowhere"], 78, "no such directory"),
        (["ls", "."], 78, "neither a run nor a checkpoint directory"),
        (["show", "nowhere"], 78, "no such directory"),
        (["verify", "nowhere"], 78, "no such directory"),
        (["doctor", "nowhere"], 78, "no such directory"),
        (["policy", "check", "nowhere.yaml"], 78, "cannot be read"),
        (["policy", "init", "builtin:auto"], 78, "`extends: builtin:auto` in a policy"),
        (["metrics", "--mixin", "t.py"], 78, "--mixin t.py: is a file, expected a directory"),
        (["metrics", "--mixin", "/proc/x"], 74, "/proc/x: cannot be made"),
        (["slurm", "init", "--output", "/proc/x", "t.py"], 74, "/proc/x: cannot be written"),
        (["rnu", "t.py"], 2, "did you mean 'run'"),
        (["t.py"], 2, "did you mean `autockpt run t.py`"),
        (["completion", "tcsh"], 2, "bash"),
        (["run", "--master_addr", "h", "t.py"], 2, "expected --rdzv-endpoint HOST:PORT"),
        (["run", "--standalone", "t.py"], 2, "--standalone is not needed here; leave it out"),
        (["run", "--num_processes", "2", "t.py"], 2, "expected --nproc-per-node N"),
        (["run", "-r", "3", "t.py"], 2, "RUN_DIR/logs has the output of all ranks"),
        (["run", "--out", "x", "t.py"], 2, "--out is no option: expected --run-dir DIR"),
        (["profile", "--run-dir", "x", "t.py"], 2, "--run-dir is no option: expected --out DIR"),
        (["run", "--nproc_per_node", "abc", "t.py"], 2, "expected a whole number of ranks"),
        (["run", "--rdzv_nonsense", "t.py"], 2, "No such option"),
        (["ls", "--standalone", "."], 2, "No such option"),
        (["help"], 2, "did you mean `autockpt --help`"),
        (["version"], 2, "did you mean `autockpt --version`"),
        (["plan"], 2, "autockpt simulate --nodes N"),
        (["plan", "--profile", "run.json"], 78, "the record of a run, and no profile"),
        (["run", "--profile", "run.json", "t.py"], 78, "pass profile.json beside it"),
        (["run", "--max-restarts", "x", "t.py"], 2, "not a valid whole number"),
        (["run", "--nproc-per-node", "abc", "t.py"], 2, "expected a whole number of ranks"),
        (["profile", "--nproc-per-node", "0", "t.py"], 2, "above 0, gpu, cpu or auto"),
        (["run", "--nnodes", "3:1", "t.py"], 2, "with the smaller number first"),
        (["run", "--nnodes", "0", "t.py"], 2, "expected at least 1"),
        (["run", "--nnodes", "2", "t.py"], 2, "add --rdzv-endpoint HOST:PORT"),
        (["profile", "--nnodes", "2", "t.py"], 2, "add --rdzv-endpoint HOST:PORT"),
        (["failures", "."], 78, "no record of failures in it (failures.jsonl)"),
        (["failures", "empty.csv"], 78, "empty.csv: is empty"),
        (["failures", "nowhere"], 78, "pass a record of failures"),
        (["run", "n.ipynb"], 78, "is a notebook; save it as a script"),
        (["run", "t.sh"], 78, "begins with '#!/bin/sh', and is no Python script"),
        (["report", "runs/b", "--format", "text", "--out", "out"], 78, "name a file in it"),
        (["report", "runs/b", "--format", "text", "--out", "x/y"], 78, "no directory x; make it"),
        (["report", "a", "b", "c"], 2, "a comparison takes two run directories"),
        (["policy", "explain", "builtin:auto", "dsk"], 2, "did you mean 'disk'"),
        (["policy", "explain", "builtin:auto", "disk.writer"], 2, "did you mean 'disk.writers'"),
        (["push", "run", "http://host/bucket"], 78, "AWS_ALLOW_HTTP=true"),
        (["push", "run", "s3:/bucket"], 78, "expected s3://BUCKET/PREFIX"),
        (["bubbles", "--schedule", "foo"], 2, "unknown; torch knows 1F1B"),
        (["simulate"], 2, "--nodes: how large is the job"),
        (["simulate", "--nodes", "0", "--mtbf", "6 h"], 2, "must be at least 1"),
        (["simulate", "--nodes", "999999999999", "--mtbf", "6 h"], 2, "at most 1,000,000"),
        (["simulate", "--nodes", "4", "--mtbf", "-1"], 2, "it is negative"),
        (["simulate", "--nodes", "4", "--mtbf", "6"], 2, "write a unit"),
        (["simulate", "--nodes", "4", "--mtbf", "6 m"], 2, "did you mean min"),
        (["simulate", "--nodes", "4", "--mtbf", "6 fortnights"], 2, "unknown unit 'fortnights'"),
        (["simulate", "--nodes", "4", "--mtbf", ""], 2, "empty"),
        (["simulate", "--nodes", "4", "--mtbf", "1 h", "--state", "3 XB"], 2, "unknown unit"),
        (["simulate", "--nodes", "4", "--mtbf", "1 h", "--disk", "2 GB"], 2, "is not a rate"),
        (["simulate", "--nodes", "4", "--mtbf", "1 h", "--disk", "2 Gb/s"], 2, "bits or bytes"),
        (["simulate", "--nodes", "4", "--mtbf", "1 h", "--storage", "2 GB/s"], 2, "word shared"),
        (
            [
                "simulate",
                "--nodes",
                "4",
                "--mtbf",
                "1 h",
                "--disk",
                "1 GB/s",
                "--storage",
                "1 GB/s shared",
            ],
            2,
            "contradict each other",
        ),
        (["simulate", "--nodes", "4", "--mtbf", "1 h", "--node-mtbf", "1 h"], 2, "contradict"),
        (["simulate", "--nodes", "4", "--mtbf", "1 h", "--strategy", "atuo"], 78, "did you mean"),
        (
            ["simulate", "--nodes", "4", "--mtbf", "6 h", "--state", "99999PB"],
            2,
            "check its unit, --disk and --storage",
        ),
        (["bubbles", "--schedule", "foo"], 2, "GPipe, LoopedBFS, InterleavedZeroBubble, ZBV"),
        (["run", "--set", "interval=15", "t.py"], 78, "--set interval=15: error: interval"),
        (["policy", "check", "broken.yaml"], 78, "broken.yaml:3:1: error: not valid YAML"),
        (["redundancy", "--nodes", "999999999999"], 2, "not in the range"),
        (["watch", "nowhere"], 78, "no such run directory"),
        (["metrics", "nowhere"], 78, "no such run directory"),
        (["watch", ".", "--every", "0"], 2, "not in the range"),
        (["tune", "nowhere"], 78, "no profile"),
        (["ls", "s3:/bucket"], 78, "no such directory"),
        (["status", "r"], 2, "did you mean `autockpt watch`"),
        (["run", "--run-dir", "t.py", "t.py"], 78, "t.py: is a file, expected a directory"),
        (["report", "t.py"], 78, "is a file, expected the directory of a run"),
        (["report", "runs"], 78, "holds 2 runs, expected one; the newest is runs/b"),
        (["explain", "runs/a/checkpoints"], 78, "is within a run directory; pass runs/a"),
        (["ls", "."], 78, "pass the --run-dir of a run, or its checkpoints/"),
        (["plan", "--profile", "t.py"], 78, "is no profile; expected a run directory"),
        (["policy", "check", "latin.yaml"], 78, "is no text in UTF-8: byte 0xe9 at offset 2"),
        (["push", "s3://b/x", "r"], 2, "expected PATH before URL: autockpt push r s3://b/x"),
        (["pull", "r", "s3://b/x"], 2, "expected URL before PATH: autockpt pull s3://b/x r"),
    ],
)
def test_bad_input(
    here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str
) -> None:
    """The same error as a sentence and as an object; no traceback either way."""
    (here / "t.py").write_text("")
    (here / "t.sh").write_text("#!/bin/sh\nautockpt run t.py\n")
    for name in ("n.ipynb", "empty.csv"):
        (here / name).touch()
    (here / "out").mkdir()
    if "run.json" in argv:
        (here / "run.json").write_text("{}")
    (here / "broken.yaml").write_text("version: 1\ndisk: {writers: [1\n")
    (here / "latin.yaml").write_bytes("# \u00e9".encode("latin-1"))
    for name in ("a", "b"):
        (here / "runs" / name / "checkpoints").mkdir(parents=True)
        (here / "runs" / name / "run.json").write_text("{}")
        os.utime(here / "runs" / name, (0, ord(name)))
    assert run(argv) == code
    text = capsys.readouterr()
    assert said in text.err
    assert ": error: " not in said or text.err.startswith(said), "the place of a mistake is first"
    assert "version: missing" not in text.err
    assert "Traceback" not in text.err
    assert text.out == ""
    command = 2 if argv[0] in ("policy", "slurm") else 1
    assert run([*argv[:command], "--json", *argv[command:]]) == code
    printed = capsys.readouterr().out
    if code != 2:
        body = json.loads(printed)
        assert body["schema_version"] == 1
        assert body["error"]["exit_code"] == code
        assert said in body["error"]["message"]


def test_debug_shows_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--debug, or AUTOCKPT_DEBUG=1."""
    assert run(["ls", "--debug", "nowhere"]) == 78
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_of_ours_saves_its_traceback(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is printed; the code is 1."""
    from autockpt.integrations import places

    def broken(path: str, **named: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(places, "find_place", broken)
    monkeypatch.setattr("tempfile.tempdir", str(here))
    assert run(["ls", "."]) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError: on purpose" in error
    assert "Traceback" not in error
    saved = next(here.glob("autockpt-error-*.txt"))
    assert str(saved) in error
    assert "on purpose" in saved.read_text()


def test_nothing_is_touched_before_the_input_is_right(here: Path) -> None:
    """A refused command leaves no run directory behind."""
    (here / "t.py").write_text("")
    assert run(["run", "--set", "interval=15", "t.py"]) == 78
    assert sorted(path.name for path in here.iterdir()) == ["t.py"]


def test_a_read_only_directory_is_a_storage_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 74, with the place and the reason."""
    (here / "t.py").write_text("")
    (here / "file").write_text("")
    assert run(["run", "--run-dir", "file/run", "t.py"]) == 74
    assert "file/run" in capsys.readouterr().err


def test_an_option_behind_the_script_is_named(here: Path) -> None:
    """It went to the script, which does not know it; a script that reads it is left alone."""
    (here / "t.py").write_text("import sys")
    (here / "knows.py").write_text("parser.add_argument('--run-dir')")
    args = ("--run-dir", "x", "--lr=1", "--set=a")
    assert misplaced(run_command, "t.py", args) == ["--run-dir", "--set"]
    assert misplaced(run_command, "knows.py", ("--run-dir", "x")) == []
    assert misplaced(run_command, "a.module", args) == []


@pytest.mark.parametrize("buffers", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("policy schema", 74, "the result cannot be written to stdout: No space left"),
        ("policy schema --json", 74, "the result cannot be written to stdout: No space left"),
        ("--help", 74, "the result cannot be written to stdout: No space left"),
        ("ls --help", 74, "the result cannot be written to stdout: No space left"),
        ("policy init --help", 74, "the result cannot be written to stdout: No space left"),
        ("ls --json nowhere", 78, "nowhere: no such directory"),
        ("ls --json --nonsense", 2, "No such option"),
    ],
)
def test_a_full_disk_behind_stdout_is_no_bug(line: str, code: int, told: str, buffers: str) -> None:
    """Each error has its own code, where none of the object fits either."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autockpt", *line.split()], stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": buffers},
        )  # fmt: skip
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize("line", ["ls .", "ls --debug .", "run t.py", "run -m t", "doctor"])
def test_a_working_directory_that_was_removed_is_named(here: Path, line: str) -> None:
    """Any path in it has the same fault, whatever the command does with it first."""
    gone = here / "gone"
    gone.mkdir()
    words = [sys.executable, "-m", "autockpt", *line.split()]
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$0"; exec "$@"', gone, *words], cwd=gone,
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert done.returncode == 78, done.stderr
    assert "PWD: the working directory was removed; change to one that exists" in done.stderr
    assert "bug" not in done.stderr
    assert ("Traceback" in done.stderr) == ("--debug" in line)


def test_an_error_of_another_file_is_not_one_of_stdout(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --debug too, where it goes on to the caller."""
    from autockpt.integrations import places

    def broken(path: str, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(places, "find_place", broken)
    monkeypatch.setattr("tempfile.tempdir", str(here))
    assert run(["ls", "."]) == 1
    with pytest.raises(OSError, match="No space"):
        run(["ls", "--debug", "."])
    assert "stdout" not in capsys.readouterr().err
