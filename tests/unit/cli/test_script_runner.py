"""The script cannot tell that it was started by us."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.scripts import ECHO, boot, write


def test_argv_path_and_name_are_pythons(tmp_path: Path) -> None:
    """sys.argv as typed, sys.path[0] the script's directory, an absolute __file__."""
    script = write(tmp_path / "deep", "s.py", ECHO)
    done = boot("deep/s.py", "--r=1", "--", "-x", "", cwd=tmp_path)
    assert json.loads(done.stdout) == {
        "argv": ["deep/s.py", "--r=1", "--", "-x", ""],
        "path0": str(script.parent),
        "name": "__main__",
        "file": str(script),
    }


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    """-m: argv[0] is the file, sys.path[0] the working directory, relative imports work."""
    write(tmp_path, "pkg/__init__.py", "")
    write(tmp_path, "pkg/other.py", "VALUE = 7")
    write(tmp_path, "pkg/mod.py", f"from .other import VALUE\n{ECHO}")
    write(tmp_path, "pkg/__main__.py", "import sys; print(sys.argv[1:])")
    found = json.loads(boot("-m", "pkg.mod", "--help", cwd=tmp_path).stdout)
    assert found["argv"] == [str(tmp_path / "pkg" / "mod.py"), "--help"]
    assert (found["path0"], found["name"]) == (str(tmp_path), "__main__")
    assert boot("-m", "pkg", "a", cwd=tmp_path).stdout == "['a']\n"


def test_main_is_still_the_script_when_exit_functions_run(tmp_path: Path) -> None:
    """A last save at exit looks a class of the script up by name: runpy would have lost it."""
    source = """
import atexit, sys
class State: pass
def bye():
    print("bye", sys.modules["__main__"].State is State, State.__module__)
atexit.register(bye)
"""
    assert boot("s.py", cwd=write(tmp_path, "s.py", source).parent).stdout == (
        "bye True __main__\n"
    )


def test_spawned_processes_find_the_script_again(tmp_path: Path) -> None:
    """multiprocessing's spawn imports the main module by its path."""
    source = """
import multiprocessing
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
    assert boot("s.py", cwd=write(tmp_path, "s.py", source).parent).stdout == "[2, 4]\n"


@pytest.mark.parametrize(
    ("ending", "code", "stderr"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("raise SystemExit(75)", 75, ""),
    ],
)
def test_exit_codes_are_the_scripts(tmp_path: Path, ending: str, code: int, stderr: str) -> None:
    """As Python gives them, exit functions included."""
    source = f"import atexit, sys\natexit.register(print, 'bye')\n{ending}\n"
    done = boot("s.py", cwd=write(tmp_path, "s.py", source).parent)
    assert (done.returncode, done.stdout, done.stderr) == (code, "bye\n", stderr)


def test_a_traceback_is_complete_and_has_no_frame_of_ours(tmp_path: Path) -> None:
    """Chained errors too; exactly what `python s.py` prints."""
    source = """
def inner():
    raise ValueError("first")
def outer():
    try:
        inner()
    except ValueError as error:
        raise KeyError("second") from error
outer()
"""
    write(tmp_path, "s.py", source)
    done = boot("s.py", cwd=tmp_path)
    from tests.unit.cli.scripts import python

    bare = python("s.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 2
    assert "autockpt" not in done.stderr
    assert done.stderr == bare.stderr.replace('"s.py"', f'"{tmp_path}/s.py"')


def test_the_scripts_own_excepthook_is_called(tmp_path: Path) -> None:
    """Frameworks install one (torch.distributed prefixes the rank)."""
    source = "import sys\nsys.excepthook = lambda t, v, tb: print('hook', v)\nraise OSError('x')\n"
    done = boot("s.py", cwd=write(tmp_path, "s.py", source).parent)
    assert (done.returncode, done.stdout, done.stderr) == (1, "hook x\n", "")


def test_an_attached_script_that_crashes_is_gone_at_once(
    new_run: Callable[..., str], tmp_path: Path
) -> None:
    """Other nodes wait for it: exit functions run, threads and torch are not waited for."""
    source = f"""
import atexit, threading, time
import torch, autockpt
model = torch.nn.Linear(2, 2)
ckpt = autockpt.attach(model=model, run_dir={new_run()!r})
atexit.register(print, "bye", flush=True)
threading.Thread(target=time.sleep, args=(600,)).start()
raise OSError("a peer is gone")
"""
    told = tmp_path / "error.json"
    write(tmp_path, "s.py", source)
    done = boot("s.py", cwd=tmp_path, AUTOCKPT_NO_PROFILE="1", TORCHELASTIC_ERROR_FILE=str(told))
    assert json.loads(told.read_text())["autockpt"]["step"] == 0
    assert (done.returncode, done.stdout) == (1, "bye\n"), done.stderr
    assert "OSError: a peer is gone" in done.stderr


def test_a_syntax_error_shows_the_users_line_alone(tmp_path: Path) -> None:
    """No frame of the import system either."""
    done = boot("s.py", cwd=write(tmp_path, "s.py", "x = (\n").parent)
    assert done.returncode == 1
    assert done.stderr.startswith(f'  File "{tmp_path}/s.py", line 1')
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    """As a shell would report it."""
    done = boot("s.py", cwd=write(tmp_path, "s.py", "raise KeyboardInterrupt\n").parent)
    assert done.returncode == 130


@pytest.mark.parametrize(
    ("source", "final"),
    [
        ("import sys; sys.exit(2)", True),
        ("import surely_not_here", True),
        ("x = (", True),
        ("raise RuntimeError('connection refused')", False),
    ],
)
def test_the_launcher_learns_whether_a_retry_makes_sense(
    tmp_path: Path, source: str, final: bool
) -> None:
    """torchelastic's error file, with our mark beside its message."""
    write(tmp_path, "s.py", source)
    file = tmp_path / "error.json"
    boot("s.py", cwd=tmp_path, TORCHELASTIC_ERROR_FILE=str(file))
    data = json.loads(file.read_text())
    assert data["autockpt"]["final"] is final
    assert data["message"]["extraInfo"]["timestamp"].isdigit()


def test_an_error_of_ours_keeps_its_exit_code(tmp_path: Path) -> None:
    """A scheduler sees 78 (fix the input) and not 1, and the user the whole traceback."""
    source = "from autockpt.values.errors import ConfigError\nraise ConfigError('no: do this')\n"
    done = boot("s.py", cwd=write(tmp_path, "s.py", source).parent)
    assert done.returncode == 78
    assert "line 2, in <module>" in done.stderr
    assert done.stderr.endswith("ConfigError: no: do this\n")


def test_a_script_that_never_attached_is_told_how(tmp_path: Path) -> None:
    """Once, with its own names, and the run directory remembers it."""
    source = "import atexit\natexit.register(print, 'bye')\nprint('trained')\n"
    write(tmp_path, "s.py", source)
    run = tmp_path / "run"
    run.mkdir()
    done = boot("s.py", cwd=tmp_path, AUTOCKPT_RUN_DIR=str(run), AUTOCKPT_MODE="run")
    assert done.stdout == "trained\nbye\n"
    assert done.stderr.count("UNPROTECTED") == 1
    assert "autockpt.attach(" in done.stderr
    assert "ckpt.batches(" in done.stderr
    assert (run / "unprotected").exists()


def test_only_rank_zero_speaks(tmp_path: Path) -> None:
    """Eight ranks print the lines once."""
    write(tmp_path, "s.py", "print('trained')\n")
    run = tmp_path / "run"
    run.mkdir()
    done = boot("s.py", cwd=tmp_path, AUTOCKPT_RUN_DIR=str(run), RANK="1", WORLD_SIZE="2")
    assert (done.stdout, done.stderr) == ("trained\n", "")


STOPS = """
import atexit, sys, types, threading, time
import autockpt
for name in ("", ".entry", ".conductor"):
    sys.modules["autockpt.profiling" + name] = types.ModuleType("autockpt.profiling" + name)
class StopTraining(BaseException): pass
sys.modules["autockpt.profiling.conductor"].StopTraining = StopTraining
sys.modules["autockpt.profiling.entry"].install = lambda run_dir: print("install", run_dir)
sys.argv = ["script_runner", "s.py"]
from autockpt.cli import script_runner
script_runner.main()
"""


def test_a_profile_ends_the_script_quietly_with_its_cleanup(tmp_path: Path) -> None:
    """finally and atexit run, a living thread does not hold the process, the code is 0."""
    source = """
import atexit, threading, time, sys
atexit.register(lambda: print("atexit"))
threading.Thread(target=time.sleep, args=(60,)).start()
try:
    raise sys.modules["autockpt.profiling.conductor"].StopTraining("enough")
finally:
    print("finally")
"""
    from tests.unit.cli.scripts import python

    write(tmp_path, "s.py", source)
    write(tmp_path, "start.py", STOPS)
    done = python("start.py", cwd=tmp_path, AUTOCKPT_MODE="profile", AUTOCKPT_RUN_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"install {tmp_path}\nfinally\natexit\n"
