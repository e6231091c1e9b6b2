"""What documents say is so: their commands run, their links lead somewhere, nothing is missing.

Commands are the `$` lines of ```console blocks.  Those that only read or decide are run, against a
profile made here; those that train are parsed by the real command line; `make` targets are checked
with `make -n`.
"""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from autockpt.cli import app
from autockpt.launch.environment import FOR_USERS, SET_BY_THE_LAUNCHER
from autockpt.policies.policy_file import keys_table
from autockpt.policies.registry import presets
from autockpt.run_directory import RunDirectory
from autockpt.values import errors
from benchmarks.compression.table import table
from benchmarks.contest.table import README as README_SYSTEMS
from docs import generate
from tests.support.profiles import example_profile
from tests.unit.cli.planning.test_simulate import shown
from tests.unit.integrations.trained import saved, trained_job

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
KEYS_DOCUMENT = ROOT / "docs" / "howto" / "policy_files.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
REPORTERS = ("report_degraded", "degraded", "_degrade")
"""Methods whose first argument names the part that failed."""

RUNS_JOBS = ("run", "profile", "tune", "doctor", "drill", "archive-eval", "restore")
"""Commands that take longer than a test may: their command lines are parsed, not run."""


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S)


def with_keys_table() -> str:
    """The document of policy files with the table of keys as the code has it."""
    before, head, after = KEYS_DOCUMENT.read_text("utf-8").partition("| key | values |")
    assert head, "the table of keys is gone"
    return before + keys_table() + "".join(after.partition("\n\n")[1:]).removeprefix("\n")


def console_commands() -> Iterator[tuple[str, str]]:
    """(document, command) of every `$` line."""
    for path in DOCUMENTS:
        for block in blocks(path, "console"):
            for line in block.splitlines():
                if line.startswith("$ "):
                    yield path.relative_to(ROOT).as_posix(), line[2:]


COMMANDS = list(console_commands())
COMPARED = {command for command, _ in shown()}
"""Their output is compared in tests/unit/cli/planning/test_simulate.py."""


def named(program: str) -> list[str]:
    """The documented command lines that start with a program."""
    return sorted({line for _, line in COMMANDS if line.split()[0] == program})


def all_commands(group: click.Group, prefix: str = "autockpt") -> Iterator[str]:
    """Every command of the command line and of its groups, as one types it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield f"{prefix} {name}"
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{prefix} {name}")


# --- commands ---------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the documented commands name: profiles, a policy, the examples."""
    for name in sorted(set(re.findall(r"runs/[\w-]+-\d{8}-\d{6}", TEXT))):
        RunDirectory.create(tmp_path / name).write_profile(example_profile())
    for name in re.findall(r"convert (runs/[\w-]+)", TEXT):
        if not (tmp_path / name / "checkpoints").exists():
            saved(tmp_path / name / "checkpoints", trained_job())
    (tmp_path / "policy.yaml").write_text(blocks(KEYS_DOCUMENT, "yaml")[0])
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("AUTOCKPT_")]:
        monkeypatch.delenv(variable)
    return tmp_path


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("path", sorted({path for path, _ in COMMANDS}))
def test_documented_commands_work(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every `$ autockpt` line of a document, in its order: run it, or parse it if it trains or asks
    a store."""
    for line in [line for where, line in COMMANDS if where == path]:
        program, *argv = shlex.split(line)
        if program != "autockpt" or line.removeprefix("autockpt ") in COMPARED:
            continue
        follows = path.startswith("docs/start/")  # run in tests/jobs/kill/test_tutorials.py
        if follows or argv[0] in RUNS_JOBS or any("://" in word for word in argv):
            parses(argv)
        else:
            assert app.run(argv) == 0, f"{path}: $ {line}\n{capfd.readouterr().err}"


def parses(argv: list[str]) -> None:
    """Fails with click's own message if the command line would be refused."""
    command = app.cli.get_command(click.Context(app.cli), argv[0])
    assert command is not None
    command.make_context(argv[0], argv[1:])


@pytest.mark.usefixtures("workplace")
def test_outputs_of_quick_commands_are_the_shown_ones(capfd: pytest.CaptureFixture[str]) -> None:
    """The line below `autockpt policy check` in the documents is its output."""
    command = "$ autockpt policy check policy.yaml"
    shown = [block for block in blocks(KEYS_DOCUMENT, "console") if command in block]
    assert app.run(["policy", "check", "policy.yaml"]) == 0
    assert capfd.readouterr().out.strip() == shown[0].splitlines()[1]


def test_there_are_commands_to_check() -> None:
    """The search for `$` lines finds what a reader sees."""
    assert len(named("autockpt")) >= 8
    assert {"make demo"} <= set(named("make"))


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize("line", named("make"))
def test_documented_make_targets_exist(line: str) -> None:
    """`make -n` knows what to do."""
    make_knows(line.split()[1])


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize(
    "name",
    sorted(
        path.stem
        for path in ROOT.glob("benchmarks/[a-z]*.py")
        if "__main__" in path.read_text(encoding="utf-8")
    ),
)
def test_every_benchmark_has_a_make_target(name: str) -> None:
    """`make bench-NAME` runs benchmarks/NAME.py."""
    assert f"-m benchmarks.{name}" in make_knows(f"bench-{name.replace('_', '-')}")


def make_knows(target: str) -> str:
    """What make would do for a target, without doing it."""
    argv = ["make", "-n", "-C", str(ROOT), target]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, f"make -n {target}: {result.stderr}"
    return result.stdout


def test_programs_in_documents_are_ours_or_everybodys() -> None:
    """A `$` line starts with a program that the reader has after the installation."""
    allowed = {"autockpt", "make", "python", "python3", "pip", "torchrun"}
    assert {line.split()[0] for _, line in COMMANDS} <= allowed


def test_example_scripts_of_documents_exist() -> None:
    """Every script that a document names is there."""
    scripts = set(re.findall(r"\bexamples/[\w/]+\.py\b", TEXT))
    assert scripts
    assert [name for name in sorted(scripts) if not (ROOT / name).is_file()] == []


def test_demo_says_how_it_is_used() -> None:
    """`examples/demo.py --help` works from a checkout without an installation."""
    argv = [sys.executable, str(ROOT / "examples" / "demo.py"), "--help"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "--seed" in result.stdout


# --- nothing is left out ----------------------------------------------------------------------


@pytest.mark.parametrize("command", sorted(set(all_commands(app.cli))))
def test_every_command_is_documented(command: str) -> None:
    """README or docs name it, as one types it."""
    *group, name = command.split()[1:]
    said = f"`{command}" in TEXT or f"$ {command}" in TEXT
    if group:  # a table may list the commands of a group in one row
        said = said or re.search(rf"`autockpt {group[0]}`.*`{name}`", TEXT) is not None
    assert said, f"no document says what `{command}` does"


@pytest.mark.parametrize("preset", sorted(presets()))
def test_every_preset_is_documented(preset: str) -> None:
    """README or docs say what it switches on."""
    assert f"`builtin:{preset}`" in TEXT


def test_the_table_of_policy_keys_is_the_one_in_the_code() -> None:
    """`make docs` writes it."""
    assert KEYS_DOCUMENT.read_text(encoding="utf-8") == with_keys_table()


def test_every_room_is_on_the_map() -> None:
    """The tables of CONTRIBUTING and of the design have every package that is a room."""
    edges = {"cli", "profiling", "session", "integrations"}
    rooms = {path.parent.name for path in ROOT.glob("autockpt/*/__init__.py")} - edges
    for path in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "concepts" / "design.md"):
        text = path.read_text(encoding="utf-8")
        missing = [room for room in sorted(rooms) if not re.search(rf"^\| `{room}/?`", text, re.M)]
        assert missing == [], f"{path.name} does not show {missing}"


def test_every_decision_is_in_the_index() -> None:
    """docs/decisions/README.md lists each record once, in order."""
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))


def sources_with(pattern: str) -> list[str]:
    """The modules of the package in which a pattern stands."""
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("autockpt/**/*.py")]
    return [text for text in texts if re.search(pattern, text, re.M)]


def names_of_degraded_parts() -> set[str]:
    """Names with which the package reports a failed part, from the calls that do."""
    found = set()
    for text in sources_with(r"egraded?\("):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args[:1] if name in REPORTERS else []
            if name == "Degraded":
                given = [keyword.value for keyword in node.keywords if keyword.arg == "what"]
            found |= {str(a.value) for a in given if isinstance(a, ast.Constant)}
    return found


def names_of_errors() -> dict[str, int | None]:
    """Every error class of the package with its exit code; None: its base has it."""
    bases: dict[str, set[str]] = {}
    for text in sources_with(r"^class \w+\(.*Error\):"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    found = {"AutockptError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    codes = {name: getattr(errors, name, None) for name in found if not name.startswith("_")}
    return {name: error.exit_code if error else None for name, error in codes.items()}


def test_each_failed_part_has_an_entry() -> None:
    """Troubleshooting has a heading for each name in a `Degraded` event, and for no other."""
    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    listed = re.findall(r"^### (.+)$", text, re.M)
    reported = names_of_degraded_parts()
    assert len(reported) > 20
    assert listed == sorted(reported, key=str.lower)
    entries = re.split(r"^### .+$", text.partition("## Errors")[0], flags=re.M)[1:]
    assert all("Meaning:" in entry and "Remedy:" in entry for entry in entries)


def test_each_error_has_an_entry() -> None:
    """With the exit code that its class has."""
    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.M))
    for name, code in names_of_errors().items():
        assert f"`{name}`" in text, f"{TROUBLESHOOTING}: no entry for {name}"
        if code is not None and name != "AutockptError":
            assert rows[name] == str(code), f"{name} ends with {code}"


# --- what is shown is true --------------------------------------------------------------------


def test_two_lines_of_the_readme_are_python_that_attach_takes() -> None:
    """The snippet compiles, and its arguments are those of `attach`."""
    import autockpt

    snippet = blocks(README, "python")[0]
    compile(snippet, "README.md", "exec")
    call = re.search(r"attach\((.*)\)", snippet)
    assert call is not None
    arguments = {part.split("=")[0].strip(): None for part in call.group(1).split(",")}
    inspect.signature(autockpt.attach).bind(**arguments)


def test_tests_named_in_documents_exist() -> None:
    """A document that says where something is tested names a file that is there."""
    named_files = set(re.findall(r"\btests/[\w/]+\.py\b", TEXT))
    assert [name for name in sorted(named_files) if not (ROOT / name).is_file()] == []


def test_pages_named_in_the_sources_exist() -> None:
    """A message, a comment or a document that names a page names one that is there."""
    sources = [path for room in ("autockpt", "benchmarks", "tests", "examples", "docs")
               for path in (ROOT / room).glob("**/*.py")]  # fmt: skip
    sources += [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    named_pages = set(re.findall(r"(?<![\w/.])docs/[\w/-]+\.md\b", text))
    assert len(named_pages) > 20
    assert [name for name in sorted(named_pages) if not (ROOT / name).is_file()] == []


def test_folders_of_the_site_are_rooms() -> None:
    """Each section is a folder with at most a dozen pages; records of decisions are numbered."""
    for folder in [
        ROOT / "docs",
        *(path for path in ROOT.glob("docs/**/") if "_build" not in str(path)),
    ]:
        names = [path.name for path in folder.iterdir() if not path.name.startswith(("_", "."))]
        assert len(names) <= 12 or folder.name == "decisions", f"{folder}: {len(names)} entries"


def test_package_shows_the_readme() -> None:
    """The index page of the package is the README; the changelog has a place for the next entry."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["readme"] == "README.md"
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(path: Path) -> None:
    """Relative links lead to files, and anchors to headings."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = unquote(link).partition("#")
        file = (path.parent / target) if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """Of the headings of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    """Tracked files hold neither this checkout's path nor anybody's home directory."""
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8", errors="ignore")
        except FileNotFoundError:
            continue  # somebody's scratch file
        if any(place in text for place in machine_paths()):
            found.append(path.relative_to(ROOT).as_posix())
    assert found == []


def tracked_files() -> list[Path]:
    """What git tracks or would track; everything but caches where there is no git."""
    argv = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def machine_paths() -> set[str]:
    """This checkout and this user's home, where they are more than a top-level directory."""
    return {f"{place}/" for place in (ROOT, Path.home()) if str(place).count("/") > 1}


@pytest.mark.parametrize("results", ["codecs", "codecs_125m"])
def test_the_tables_of_codecs_are_those_of_the_results(results: str) -> None:
    """Made by benchmarks/compression/table.py from the files that stand beside them."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text())["rows"]
    assert table(rows) in (ROOT / "docs" / "concepts" / "compression.md").read_text("utf-8")


@pytest.mark.parametrize("path", generate.PAGES)
def test_pages_of_the_reference_are_those_of_the_code(path: str) -> None:
    """`make docs` writes them: every command, event, metric, variable and public name is there."""
    assert (ROOT / "docs" / path).read_text("utf-8") == generate.PAGES[path](), (
        "python -m tests.test_docs"
    )


def test_the_comparison_is_the_one_of_the_results() -> None:
    """README and benchmarks show the table of benchmarks/results/engine.json and nothing else."""
    for path, chosen in (
        (README, README_SYSTEMS),
        (ROOT / "docs" / "benchmarks" / "benchmarks.md", ()),
    ):
        text = path.read_text("utf-8")
        assert text == generate.with_engine_table(text, chosen)
        assert "DLRover Flash Checkpoint | 1.06" in text


def test_the_tables_of_resumes_are_those_of_the_results() -> None:
    """Each framework that was measured has a table on its page; with autockpt all is exact."""
    shown = re.findall(r"^<!-- resume of (\w+) -->$", TEXT, re.M)
    assert sorted(shown) == sorted(generate.resumes())
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        assert text == generate.with_resumes(text), f"{path.name}: python -m tests.test_docs"
    for result in generate.resumes().values():
        assert {row[2] for row in result["rows"]} <= {"exact", "0", "1", "2"}


def test_the_costs_of_adapters_are_those_of_the_result() -> None:
    """Each framework that was measured has a line on its page."""
    shown = re.findall(r"^<!-- cost of (\w+) -->$", TEXT, re.M)
    assert sorted(shown) == sorted(generate.costs())
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        assert text == generate.with_costs(text), f"{path.name}: python -m tests.test_docs"


def test_readme_is_short() -> None:
    """At most 150 lines."""
    assert len(README.read_text("utf-8").splitlines()) <= 150


def test_every_variable_in_the_sources_is_listed() -> None:
    """And each listed one is in the sources."""
    used = {
        name
        for path in ROOT.glob("autockpt/**/*.py")
        if path != ROOT / "autockpt" / "launch" / "environment.py"
        for name in re.findall(r"\bAUTOCKPT_[A-Z_]+[A-Z]\b", path.read_text("utf-8"))
    }
    assert used - {"AUTOCKPT_COMPLETE"} == set(FOR_USERS) | set(SET_BY_THE_LAUNCHER)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` builds it."""
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    pytest.importorskip("furo", reason="the extra docs is not installed")
    argv = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*argv, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "command_line.html").is_file()


if __name__ == "__main__":
    generate.write()
    KEYS_DOCUMENT.write_text(with_keys_table(), encoding="utf-8")
