"""`autockpt report`: the report of a run or a profile, or two runs side by side."""

from dataclasses import replace
from pathlib import Path

import click

from autockpt.cli.shared.options import Command, common, out_file
from autockpt.console import Console

EXAMPLES = """
autockpt report runs/train-20260101-120000                       # writes report.html there
autockpt report runs/train-20260101-120000 --format text
autockpt report runs/train-20260101-120000 --format csv > telemetry.csv
autockpt report runs/before runs/after                           # compares them
autockpt report runs/train-20260101-120000 --redact --out shared.html
"""
FORMATS = ("html", "text", "json", "csv", "prometheus")


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("run_dirs", metavar="RUN_DIR [OTHER]", nargs=-1, required=True)
@click.option(
    "--format", "format_", type=click.Choice(FORMATS), help="html unless --json was given."
)
@click.option("--redact", is_flag=True, help="Hide paths and host names.")
@click.option("--out", metavar="FILE", help="Write there instead.")
@common
def report(
    console: Console, run_dirs: tuple[str, ...], format_: str | None, redact: bool, out: str | None
) -> None:
    """Write or print the report of RUN_DIR: html into the directory, other formats to stdout.

    With OTHER, compare the two runs: policy, machine, costs, losses, failures, and the better one.
    """
    if len(run_dirs) > 1:
        _compare(console, run_dirs, format_, redact=redact, out=out)
        return
    run_dir = run_dirs[0]
    from autockpt.cli.jobs.outcome import shown
    from autockpt.cli.shared.gather import run_data
    from autockpt.reports.formats import renderers
    from autockpt.run_directory import RunDirectory

    run = RunDirectory.open(run_dir)
    target = _beside(run.report, redact) if out is None else out_file(out)
    format_ = format_ or ("json" if console.json and out is None else "html")
    text = renderers.report(run_data(run), format_=format_, redacted=redact)
    if out is None and format_ != "html":
        _print(console, format_, text)
        return
    RunDirectory(target.parent).write_text(target.name, text)
    console.object("report", {"format": format_, "report": str(target.absolute())})
    console.result(shown(target))
    console.next(["autockpt", "explain", run_dir])


def _compare(
    console: Console,
    run_dirs: tuple[str, ...],
    format_: str | None,
    *,
    redact: bool,
    out: str | None,
) -> None:
    """Print two runs side by side."""
    from autockpt.cli.shared.gather import run_data
    from autockpt.reports.comparison import compare
    from autockpt.reports.model import build
    from autockpt.reports.redact import redact_together
    from autockpt.run_directory import RunDirectory
    from autockpt.values.errors import OptionError
    from autockpt.values.record import to_data

    if len(run_dirs) != 2 or out is not None or format_ not in (None, "text", "json"):
        raise OptionError(
            f"a comparison takes two run directories, --format text or json, and no --out; got "
            f"{len(run_dirs)} directories, --format {format_ or 'text'}, --out {out or 'none'}"
        )
    data = [run_data(RunDirectory.open(run_dir)) for run_dir in run_dirs]
    if data[0].title == data[1].title:
        data = [replace(one, title=given) for one, given in zip(data, run_dirs, strict=True)]
    if redact:
        data = list(redact_together(data))
    said = compare(*map(build, data))
    if format_ == "json":
        console.json = True
    console.object("report", {"comparison": to_data(said)})
    console.styled(said.verdict, "bold")
    console.table(
        ("", "", *said.names, "difference"),
        ((row.group, row.label, row.first, row.second, row.difference) for row in said.rows),
    )


def _beside(report: Path, redact: bool) -> Path:
    return report.with_stem("report-redacted") if redact else report


def _print(console: Console, format_: str, text: str) -> None:
    """To stdout; JSON is one object either way."""
    import json

    if console.json:
        body = json.loads(text) if format_ == "json" else text
        console.object("report", {"format": format_, "report": body})
    console.result(text.rstrip("\n"))
