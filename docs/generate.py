"""Writes the reference and the pages of benchmarks from the code and from committed results.

`make docs` runs it.  tests/test_docs.py compares each page with the repository.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from autockpt.values.table import markdown
from benchmarks.contest import table as contest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MADE = "<!-- `make docs` writes this page from the code. -->\n"


def command_line() -> str:
    """Return every command with its usage, examples and options."""
    from autockpt.cli import app

    lines = [
        "# Command line",
        "",
        MADE,
        "Options stand before the script; the rest is the script's.",
    ]
    for heading, names in app.GROUPS.items():
        rows = [(f"[`autockpt {name}`](#autockpt-{name})", app.COMMANDS[name][1]) for name in names]
        lines += ["", f"## {heading}", "", *markdown(("command", "use"), rows)]
    for names in app.GROUPS.values():
        for name in names:
            command = app.cli.get_command(click.Context(app.cli), name)
            assert command is not None
            lines += list(_command(command, f"autockpt {name}"))
    return "\n".join(lines) + "\n"


def _command(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield from ("", f"## {path}", "")
    examples = getattr(command, "examples", "").strip("\n")
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield from ("```text", usage, *([""] if examples else []), *examples.splitlines(), "```", "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _command(child, f"{path} {name}")
        return
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            rows.append((f"`{_cell(record[0])}`", _cell(record[1])))
    yield from markdown(("option", "meaning"), rows)


def events() -> str:
    """Return every event of telemetry.jsonl with its fields."""
    source = ast.parse((ROOT / "autockpt" / "values" / "telemetry.py").read_text("utf-8"))
    lines = ["# Events", "", MADE, "`telemetry/` in a run directory holds one JSON object a line."]
    for node in source.body:
        if isinstance(node, ast.ClassDef) and (_bases(node) & {"Event"} or node.name == "Event"):
            head = _flat(ast.get_docstring(node) or "")
            rows = [("*the event*", "", _cell(head))]
            rows += [(f"`{name}`", f"`{_cell(kind)}`", _cell(text))
                     for name, kind, text in _fields(node)]  # fmt: skip
            lines += ["", f"## {node.name}", "", *markdown(("field", "type", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _bases(node: ast.ClassDef) -> set[str]:
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield (name, type, docstring) of the fields of a class."""
    for field, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            yield field.target.id, ast.unparse(field.annotation), text


def metrics() -> str:
    """Return every metric of the Prometheus text."""
    rows = [(f"`{name}`", kind, _cell(text)) for name, kind, text in metric_names()]
    table = markdown(("metric", "kind", "meaning"), rows)
    lines = ["# Metrics", "", MADE, "Every sample has the label `run`.", "", *table]
    return "\n".join(lines) + "\n"


def metric_names() -> list[tuple[str, str, str]]:
    """Return (name, kind, help) of the metrics, from the calls that make them."""
    found = {}
    path = ROOT / "autockpt" / "reports" / "formats" / "prometheus.py"
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Metric":
            words = {k.arg: k.value.value for k in node.keywords
                     if isinstance(k.value, ast.Constant)}  # fmt: skip
            name = f"autockpt_{words['name']}"
            found[name] = (name, str(words.get("kind", "gauge")), str(words["help"]))
    for name, text in re.findall(r"^# HELP (\w+) (.*)$", _live_metrics(), re.M):
        found.setdefault(name, (name, "gauge", text))
    return [found[name] for name in sorted(found)]


def _live_metrics() -> str:
    """Return the text of the keeper's endpoint and of `autockpt metrics`, for a whole status."""
    from autockpt.executors.keeper.standing.status_file import exposition
    from autockpt.values.status import RunStatus

    status = RunStatus(state="running", exit_code=None, restarts=0, last_step=2, protected=True,
                       last_durable="ckpt-t0001-step-00000001", report=None)  # fmt: skip
    return exposition(status, "run")


def environment() -> str:
    """Return the variables that autockpt reads, and those that the launcher sets."""
    from autockpt.launch.environment import FOR_USERS, SET_BY_THE_LAUNCHER

    lines = ["# Environment variables", "", MADE]
    for heading, names in (("For users", FOR_USERS), ("Set by the launcher", SET_BY_THE_LAUNCHER)):
        rows = [(f"`{name}`", text) for name, text in names.items()]
        lines += ["", f"## {heading}", "", *markdown(("variable", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def python_api() -> str:
    """Return the public names with their signatures and docstrings."""
    import autockpt
    from autockpt.session.session import Session

    lines = ["# Python", "", MADE]
    for name in autockpt.__all__:
        value = getattr(autockpt, name)
        if callable(value):
            lines += _described(f"autockpt.{name}", value)
    lines += ["", "`ckpt` is the object that `attach` returns."]
    for name, value in sorted(vars(Session).items()):
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            lines += _described(f"ckpt.{name}", value)
    return "\n".join(lines) + "\n"


def _described(name: str, value: Any) -> list[str]:
    """Return heading, signature and docstring; the text stands as the code has it."""
    signature = ""
    if callable(value):
        shown = str(inspect.signature(value)).replace("(self, ", "(").replace("(self)", "()")
        signature = re.sub(r" at 0x[0-9a-f]+", "", shown)
    text = inspect.getdoc(value) or ""
    return ["", f"## {name}", "", "```text", f"{name}{signature}", "", *text.splitlines(), "```"]


def targets() -> str:
    """Return each committed result that has targets: machine, date, commit, met or missed."""
    lines = [
        "# Targets, met and missed",
        "",
        MADE,
        "Each table is one file of `benchmarks/results`. A spread is a range of samples.",
    ]
    for path in sorted(ROOT.glob("benchmarks/results/*.json")):
        result = json.loads(path.read_text("utf-8"))
        rows = [row for row in result.get("rows", ()) if row["target"]]
        if rows:
            machine = result["machine"]
            made = [
                ("date", result["date"]), ("commit", f"`{result['commit']}`"),
                ("command", f"`{_cell(result['command'])}`"),
            ]  # fmt: skip
            on = ("machine", f"{machine['cpu']}, {machine['cores']} cores")
            lines += ["", f"## {path.stem}", "", *markdown(on, made), ""]
            lines += markdown(TARGET_HEAD, map(_target, rows))
    return "\n".join(lines) + "\n"


TARGET_HEAD = ("system", "figure", "value", "spread", "n", "target", "")


def _target(row: dict[str, Any]) -> list[str]:
    value = "not measured" if row["value"] is None else f"{row['value']:.3g} {row['unit']}".strip()
    spread = f"{row['spread'][0]:.3g} to {row['spread'][1]:.3g}" if row["spread"] else ""
    verdict = {True: "met", False: "**missed**", None: ""}[row["met"]]
    cells = (row["contestant"], row["figure"], value, spread, row["n"], row["target"], verdict)
    return [_cell(str(cell)) for cell in cells]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """Return the text as a cell of a table."""
    return _flat(text).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "reference/command_line.md": command_line,
    "reference/events.md": events,
    "reference/metrics.md": metrics,
    "reference/environment.md": environment,
    "reference/python.md": python_api,
    "benchmarks/targets.md": targets,
}
"""Whole pages, by their path under docs/."""


def with_engine_table(document: str, chosen: tuple[str, ...] = ()) -> str:
    """Return a document whose table of bench-engine is the one of the results."""
    result = json.loads((ROOT / "benchmarks" / "results" / "engine.json").read_text("utf-8"))
    made = contest.table(result["rows"], chosen)
    head = made.partition("\n")[0]
    before, found, after = document.partition(head)
    if not found:
        raise ValueError(f"no table with the head {head}")
    return before + made + "".join(after.partition("\n\n")[1:])


def resumes() -> dict[str, Any]:
    """Return what `make test-frameworks` has measured of each framework."""
    text = (ROOT / "benchmarks" / "results" / "resumes.json").read_text("utf-8")
    return dict(json.loads(text))


EACH_STEP = "Here autockpt saves to memory at every step; one save at least is whole at the kill."
"""Below each table of resumes: the conditions that favour autockpt."""


def with_resumes(document: str) -> str:
    """Return a document whose tables behind `<!-- resume of NAME -->` are those of the results."""
    results = resumes()

    def table(found: re.Match[str]) -> str:
        result = results[found[1]]
        killed = f"{result['version']}, killed in batch {result['killed']} of the first 12"
        rows = ([*map(_cell, row)] for row in result["rows"])
        lines = [
            found[0].partition("\n")[0],
            *markdown((killed, "its own resume", "with autockpt"), rows),
            "",
            EACH_STEP,
        ]
        return "\n".join(lines) + "\n"

    place = rf"^<!-- resume of (\w+) -->\n(?:\|.*\n)*(?:\n{EACH_STEP}\n)?"
    return re.sub(place, table, document, flags=re.M)


COST_HEAD = (
    "CPU time of the training thread", "an iteration, bare", "added", "with / without",
    "bare / bare, the noise", "target",
)  # fmt: skip


def costs() -> dict[str, dict[str, dict[str, Any]]]:
    """Return by framework, then figure, the rows of `make bench-adapters`."""
    result = json.loads((ROOT / "benchmarks" / "results" / "adapters.json").read_text("utf-8"))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["contestant"], {})[row["figure"]] = row
    return found


def with_costs(document: str) -> str:
    """Return a document whose tables behind `<!-- cost of NAME -->` are those of the result."""
    result = json.loads((ROOT / "benchmarks" / "results" / "adapters.json").read_text("utf-8"))
    machine = result["machine"]
    where = (
        f"{machine['cores']} cores at load {machine['load_before']:.0f}, {result['date']}, "
        f"`{result['commit']}`"
    )

    def table(found: re.Match[str]) -> str:
        rows = costs()[found[1]]
        ratio, noise = rows["with/without"], rows["bare/bare: noise"]
        spread = "{:.3f} to {:.3f}".format(*ratio["spread"])
        cells = (
            where, f"{rows['iteration, bare']['value'] / 1e3:.1f} ms",
            f"{rows['adapter']['value'] / 1e3:.2f} ms", f"{ratio['value']:.3f} ({spread})",
            f"{noise['value']:.3f}", f"{ratio['target']}, {'met' if ratio['met'] else 'missed'}",
        )  # fmt: skip
        lines = [found[0].partition("\n")[0], *markdown(COST_HEAD, [cells])]
        return "\n".join(lines) + "\n"

    return re.sub(r"^<!-- cost of (\w+) -->\n(?:\|.*\n)*", table, document, flags=re.M)


def write() -> None:
    """Write what comes from the code or from results."""
    for path, page in PAGES.items():
        (DOCS / path).write_text(page(), encoding="utf-8")
    for file, chosen in (
        (ROOT / "README.md", contest.README),
        (DOCS / "benchmarks" / "benchmarks.md", ()),
    ):
        file.write_text(with_engine_table(file.read_text("utf-8"), chosen), encoding="utf-8")
    write_resumes()


def write_resumes() -> None:
    """Write the tables of frameworks alone, of which `make test-frameworks` has new ones."""
    for file in sorted(DOCS.glob("**/*.md")):
        before = file.read_text("utf-8")
        if (after := with_costs(with_resumes(before))) != before:
            file.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    write()
