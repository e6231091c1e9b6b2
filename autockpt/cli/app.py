"""The group of commands: loads the one that is asked for, and turns errors into exit codes.

Exit codes are the table `values/exit_codes.py`.  `run` and `profile` return the script's own, and
128 + n after signal n.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from autockpt.cli.shared import options
from autockpt.console import Console, no_output, save_traceback
from autockpt.launch.elastic.signals import Interrupted
from autockpt.values.errors import AutockptError, ConfigError, OptionError, StorageError
from autockpt.values.exit_codes import EXIT_CODES

COMMANDS: dict[str, tuple[str, str]] = {
    "profile": (
        "jobs.profile:profile",
        "Measure a job, then write a profile, a plan and a report.",
    ),
    "run": ("jobs.run:run", "Train under the plan, survive failures, report."),
    "drill": (
        "drill.command:drill",
        "Cause faults on a job, and compare what follows with the plan.",
    ),
    "plan": ("planning.plan:plan", "Decide from a profile, and say why."),
    "tune": ("jobs.tune:tune", "Search the best way to write, by measuring; a policy file."),
    "simulate": (
        "planning.simulate:simulate",
        "Weeks of a job under every strategy, without running it.",
    ),
    "failures": (
        "failures.failures:failures",
        "What a record of failures says, for later decisions.",
    ),
    "redundancy": (
        "planning.redundancy:redundancy",
        "What copies and parity survive, and what they cost.",
    ),
    "bubbles": (
        "planning.bubbles:bubbles",
        "Where a pipeline schedule idles, and what fits in there.",
    ),
    "explain": (
        "reports.explain:explain",
        "Every decision of a run, its reason and what came of it.",
    ),
    "report": (
        "reports.report:report",
        "The report of a run or a profile, as HTML, text, JSON or CSV.",
    ),
    "watch": ("reports.watch:watch", "A live view of a run, until it ends."),
    "metrics": (
        "reports.metrics:metrics",
        "Prometheus text of a run; a Grafana dashboard and alert rules.",
    ),
    "policy": ("planning.policy:policy", "Check, explain, compare or start a policy file."),
    "slurm": ("jobs.slurm_script:slurm", "Write job scripts for Slurm."),
    "keeper": ("jobs.pods:keeper", "Hold checkpoints in memory, in a container of its own."),
    "ls": ("checkpoints.ls:ls", "The checkpoints of a run or a directory."),
    "show": ("checkpoints.show:show", "What one checkpoint holds."),
    "verify": (
        "checkpoints.verify:verify",
        "Read checkpoints back and compare every byte's digest.",
    ),
    "push": (
        "checkpoints.push:push",
        "Copy the newest checkpoint to an object store; --follow a run.",
    ),
    "pull": ("checkpoints.pull:pull", "Bring a checkpoint back from an object store."),
    "restore": (
        "checkpoints.restore:restore",
        "What a restore into a script would read, and whether it fits.",
    ),
    "pin": ("checkpoints.gc:pin", "Keep a checkpoint that the policy would let go."),
    "gc": ("checkpoints.gc:gc", "Remove what dead runs left behind, and nothing else."),
    "convert": (
        "checkpoints.convert:convert",
        "A checkpoint as safetensors, torch DCP or torch.save.",
    ),
    "archive-eval": (
        "checkpoints.archive_quality:archive_eval",
        "What going on from a lossy archive costs this job.",
    ),
    "diff": ("checkpoints.diff:diff", "What differs between two checkpoints."),
    "doctor": ("doctor.command:doctor", "What this machine can and cannot do, each with its fix."),
    "completion": ("completion:completion", "The completion script of a shell."),
}
"""name: (file:function, one line).  Standing here, so that --help imports no command."""

SYNONYMS = {
    "check": "verify", "compare": "diff", "download": "pull", "export": "convert",
    "import": "convert", "init": "policy init", "list": "ls", "monitor": "watch", "prune": "gc",
    "resume": "run", "start": "run", "status": "watch", "top": "watch", "train": "run",
    "upload": "push",
}  # fmt: skip
"""Names that other programs have for a command."""

COMPLETE = "_AUTOCKPT_COMPLETE"
"""Variable by which a shell asks for completions."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Train": ("run", "profile", "drill", "tune", "slurm", "keeper"),
    "Look": ("watch", "report", "explain", "metrics"),
    "Plan": ("plan", "policy", "simulate", "failures", "redundancy", "bubbles"),
    "Checkpoints": (
        "ls", "show", "verify", "restore", "diff", "convert", "archive-eval", "pin", "push",
        "pull", "gc",
    ),
    "This machine": ("doctor", "completion"),
}  # fmt: skip
"""Headings of --help, with the commands in the order in which one needs them."""

EXAMPLES = """
autockpt profile train.py --lr 1e-3     # measure the job, write a profile, a plan and a report
autockpt run train.py --lr 1e-3         # train under the plan, survive failures, report
autockpt run --nproc-per-node 8 train.py --lr 1e-3
autockpt doctor                         # what this machine can do
"""


class Commands(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which one needs them."""
        return [name for names in GROUPS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        if cmd_name not in COMMANDS:
            return None
        file, _, function = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"autockpt.cli.{file}"), function)
        if COMPLETE in os.environ:
            from autockpt.cli.shared import completions

            completions.install(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Unknown names list the known ones; a script in the place of a command gets advice."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            if name.endswith(".py"):
                ctx.fail(f"{name!r} is no command; did you mean `autockpt run {name}`?")
            if name in ("help", "version"):
                ctx.fail(f"{name!r} is no command; did you mean `autockpt --{name}`?")
            if name in SYNONYMS:
                ctx.fail(f"{name!r} is no command; did you mean `autockpt {SYNONYMS[name]}`?")
            ctx.fail(f"{name!r} is no command{options.did_you_mean(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, then what there is."""
        options.write_examples(formatter, EXAMPLES)
        super().format_help(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the tables, without importing anything; then the exit codes."""
        widest = max(map(len, COMMANDS))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                rows = [(name.ljust(widest), COMMANDS[name][1]) for name in names]
                formatter.write_dl(rows)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, (text, _) in EXIT_CODES.items()])


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, help="The version; with -v also of what it works with.")
@click.option("-v", "--verbose", count=True, help="With --version: more versions.")
@click.option("--json", "as_json", is_flag=True, help="With --version: as an object.")
@click.pass_context
def cli(ctx: click.Context, version: bool, verbose: int, as_json: bool) -> None:
    """Measure a training job, decide how to checkpoint it, do it, and explain every choice."""
    if version:
        from autockpt.cli.shared.versions import print_versions

        print_versions(Console(json=as_json), everything=bool(verbose))
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(argv: Sequence[str]) -> int | Callable[[], int]:
    """Run one command: its exit code, or what is to be called when the command line is gone."""
    if COMPLETE in os.environ:
        cli.main(list(argv), prog_name="autockpt")
    # Parsing may not get as far as to know these two.
    debug = _ours(argv, "--debug") or options.debug_from_environment()
    console = Console(json=_ours(argv, "--json"), debug=debug)
    try:
        with cli.make_context("autockpt", list(argv)) as context:
            result: int | Callable[[], int] | None = _invoke(context, console)
        if callable(result):
            return result
        return _printed(int(result or 0), console, trains=context.invoked_subcommand == "run")
    except click.exceptions.Exit as ending:
        return int(ending.exit_code)
    except click.ClickException as error:
        return _printed(_usage(error, console), console)
    except (click.Abort, KeyboardInterrupt):
        console.say("interrupted", verbosity=-1)
        return 130
    except Interrupted as interrupted:
        console.say("interrupted", verbosity=-1)
        return 128 + interrupted.number
    except OSError as error:
        if not _is_of_output(error):
            return _bug(error, console)
        return _unprinted(error, 0, console)


def _invoke(context: click.Context, console: Console) -> Any:
    try:
        return context.command.invoke(context)
    except AutockptError as error:
        kind = "usage" if isinstance(error, OptionError) else type(error).__name__
        return console.fail(error, exit_code=error.exit_code, kind=kind)
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if isinstance(error, OSError) and _is_of_output(error):
            raise
        return _bug(error, console)


def _bug(error: Exception, console: Console) -> int:
    """Say that an error is our own, and keep its traceback; the exit code."""
    if isinstance(error, FileNotFoundError) and _is_nowhere():
        told = ConfigError(
            "PWD: the working directory was removed; change to one that exists: cd DIR"
        )
        told.__traceback__ = error.__traceback__
        return console.fail(told, exit_code=told.exit_code, kind=type(told).__name__)
    if console.debug:
        raise error
    path = save_traceback(error)
    text = f"{type(error).__name__}: {error}\n  a bug of autockpt; its traceback: {path}"
    return console.fail(RuntimeError(text), exit_code=1, kind="internal")


def _is_of_output(error: OSError) -> bool:
    """Whether the reader (head, less) has gone, or a help text has no place.

    Commands print by the console, which has errors of its own.
    """
    if isinstance(error, BrokenPipeError):
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_code is click.echo.__code__


def _is_nowhere() -> bool:
    """Whether the working directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _printed(code: int, console: Console, *, trains: bool = False) -> int:
    """The exit code, where all of the result has reached its file; 74 where it has not.

    That of a training stays, and of a result whose reader has gone.
    """
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError as error:
        failed = _unprinted(error, code, console)
        return code if trains else failed
    return code


def _unprinted(error: OSError, code: int, console: Console) -> int:
    """Name the error of stdout, behind no other error; the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else it is tried again at exit
    if code or isinstance(error, BrokenPipeError):
        return code
    told = no_output(error)
    return console.fail(told, exit_code=told.exit_code, kind=type(told).__name__)


def _usage(error: click.ClickException, console: Console) -> int:
    if console.json:
        body = {"kind": "usage", "message": error.format_message(), "exit_code": error.exit_code}
        with contextlib.suppress(StorageError):  # stdout takes nothing: stderr has it all the same
            console.object("error", {"error": body})
    error.show()
    return error.exit_code


def _ours(argv: Sequence[str], option: str) -> bool:
    """Whether `option` stands before the script, as far as one can tell without parsing."""
    for argument in argv:
        if argument == option:
            return True
        if argument == "--" or argument.endswith(".py"):
            return False
    return False
