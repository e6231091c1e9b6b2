"""Options that several commands share, and the one way in which a user's command line is wrapped.

Our options stop at the first positional; what follows belongs to the script, byte for byte.
"""

import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from autockpt.console import Console
from autockpt.launch.script import Script
from autockpt.values.errors import ConfigError, OptionError

F = TypeVar("F", bound=Callable[..., Any])

WRAPPING: dict[str, Any] = {
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""Context settings of commands that take a script.  torchrun knows --nproc_per_node too."""

_RANKS, _NODES, _MEETING = "--nproc-per-node N", "--nnodes N", "--rdzv-endpoint HOST:PORT"
_NOT_NEEDED = "is not needed here; leave it out"
_OUTPUT = "is no option: RUN_DIR/logs has the output of all ranks, the terminal that of rank 0"
OF_OTHER_LAUNCHERS = {
    "--gpus": _RANKS, "--num-gpus": _RANKS, "--num-processes": _RANKS,
    "--nodes": _NODES, "--num-machines": _NODES, "--num-nodes": _NODES,
    "--machine-rank": "--node-rank N", "--main-process-ip": _MEETING,
    "--main-process-port": _MEETING, "--master-addr": _MEETING, "--master-port": _MEETING,
    "--local-ranks-filter": _OUTPUT, "--log-dir": _OUTPUT, "--logs-specs": _OUTPUT,
    "--redirects": _OUTPUT, "--tee": _OUTPUT, "-r": _OUTPUT, "-t": _OUTPUT,
    "--monitor-interval": _NOT_NEEDED, "--role": _NOT_NEEDED, "--standalone": _NOT_NEEDED,
    "--start-method": _NOT_NEEDED, "--multi-gpu": _NOT_NEEDED,
    "--module": "-m MODULE", "--no-python": "is no option: expected a Python script",
    "--out": "--run-dir DIR", "--output": "--run-dir DIR", "--run-dir": "--out DIR",
}  # fmt: skip
"""Options of torchrun, accelerate, deepspeed and other commands: an option in their place, or a
sentence."""


class Whole(click.IntRange):
    """A whole number in a range, which a message calls so."""

    name = "whole number"


class Seconds(click.FloatRange):
    """Seconds in a range: neither infinite, nor no number."""

    name = "number of seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """As of `click.ParamType`."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return seconds


MAY_BE_EMPTY = ("args", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr")
"""The script's own words, and options of torchrun."""


class Command(click.Command):
    """A command whose help begins with examples: the first block of the help text."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of `click.Command`; an empty word, as of a shell's unset variable, is refused.

        As a path it would be the working directory.
        """
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not (advice := self._advice(error.option_name)):
                raise
            raise click.UsageError(f"{error.option_name} {advice}", ctx) from None
        for param in () if ctx.resilient_parsing else self.params:
            given = ctx.params.get(param.name or "")
            words = given if isinstance(given, tuple) else (given,)
            typed = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
            if typed and "" in words and param.name not in MAY_BE_EMPTY:
                raise click.UsageError(
                    f"{_shown(param)}: is empty, expected a value; is a shell variable unset?"
                )
        return rest

    def _advice(self, unknown: str) -> str:
        """What to write for an option that another launcher knows; "": nothing is known of it."""
        if "script" not in (param.name for param in self.params):
            return ""
        advice = OF_OTHER_LAUNCHERS.get(unknown.replace("_", "-"), "")
        if not advice.startswith("-"):
            return advice
        own = [name for param in self.params for name in param.opts]
        return f"is no option: expected {advice}" if advice.split()[0] in own else ""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, then usage, text and options."""
        write_examples(formatter, self.examples)
        super().format_help(ctx, formatter)


def _shown(param: click.Parameter) -> str:
    """An option by its longest name, an argument by its placeholder."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.human_readable_name


def write_examples(formatter: click.HelpFormatter, examples: str) -> None:
    """The examples as they stand, above everything else."""
    if examples:
        formatter.write("Examples:\n")
        for line in examples.strip("\n").splitlines():
            formatter.write(f"  {line}\n" if line else "\n")
        formatter.write_paragraph()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest one, or all of them."""
    import difflib

    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(known)}"


def common(function: F) -> F:
    """The options of every command; the command gets a Console as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="Print results and problems only.")
    @click.option("-v", "--verbose", count=True, help="Say more; -vv everything.")
    @click.option("--no-color", is_flag=True, help="No colour (as NO_COLOR in the environment).")
    @click.option("--debug", is_flag=True, help="Show tracebacks (as AUTOCKPT_DEBUG=1).")
    @functools.wraps(function)
    def wrapped(
        as_json: bool, quiet: bool, verbose: int, no_color: bool, debug: bool, **rest: Any
    ) -> Any:
        console = Console(
            json=as_json,
            verbosity=-1 if quiet else verbose,
            color=not no_color,
            debug=debug or debug_from_environment(),
        )
        click.get_current_context().obj = console
        return function(console, **rest)

    return wrapped  # type: ignore[return-value]


def debug_from_environment() -> bool:
    """AUTOCKPT_DEBUG=1."""
    return os.environ.get("AUTOCKPT_DEBUG", "") not in ("", "0")


def policy_options(function: F) -> F:
    """--policy and --set."""
    function = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set one value of the policy, e.g. disk.writers=4 (repeatable).",
    )(function)
    return click.option(
        "--policy",
        metavar="FILE",
        help="Policy file, or builtin:NAME (`autockpt policy explain` shows what it says).",
    )(function)


def profile_options(function: F) -> F:
    """--profile and --no-profile."""
    function = click.option(
        "--no-profile", is_flag=True, help="Safe defaults; measure nothing at the start."
    )(function)
    return click.option(
        "--profile", metavar="FILE", help="Decide from this profile (file or directory)."
    )(function)


def script_arguments(function: F) -> F:
    """[-m] SCRIPT [ARGS]..."""
    function = click.argument("args", nargs=-1, type=click.UNPROCESSED)(function)
    function = click.argument("script")(function)
    return click.option("-m", "module", is_flag=True, help="SCRIPT is a module name.")(function)


def find_script(script: str, module: bool, args: tuple[str, ...]) -> Script:
    """The script, checked.  Raises ConfigError when it does not exist."""
    if module:
        _check_module(script)
        return Script(target=script, module=True, args=args, shown=script)
    if "://" in script:
        raise ConfigError(f"{script}: expected a script, got a URL")
    path = Path(script)
    if path.is_dir():
        raise ConfigError(f"{script}: is a directory; name the script in it, or use -m for modules")
    if not path.is_file():
        raise ConfigError(f"{script}: no such script{_similar(path)}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{script}: cannot be read by this user; see `ls -l {script}`")
    _require_python(path)
    return Script(target=str(path.absolute()), module=False, args=args, shown=script)


def _require_python(path: Path) -> None:
    """Raise ConfigError for a notebook and for the script of a shell."""
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"{path}: is a notebook; save it as a script: jupyter nbconvert --to script {path}"
        )
    with open(path, "rb") as file:
        first = file.readline(200).decode(errors="replace").strip()
        if _interpreter(first) not in SHELLS or _compiles(first.encode() + b"\n" + file.read()):
            return
    raise ConfigError(
        f"{path}: begins with {first!r}, and is no Python script; put `autockpt run` into it, "
        "in front of the Python script that it starts"
    )


SHELLS = ("sh", "bash", "dash", "ksh", "zsh")


def _interpreter(first: str) -> str:
    """The name of the program in a `#!` line; "": it is none."""
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    names = [os.path.basename(w) for w in words if not w.startswith("-") and "=" not in w]
    return next((name for name in names if name != "env"), "")


def _compiles(source: bytes) -> bool:
    """A file that begins with a shell's name may be Python too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "script", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
    return True


def out_file(text: str) -> Path:
    """The file of an option --out.  Raises ConfigError where no file can be."""
    require_local(text, name="--out ")
    path = Path(text)
    if path.is_dir():
        raise ConfigError(f"--out {text}: is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {text}: no directory {path.parent}; make it first")
    return path


def require_local(path: str, *, name: str = "") -> None:
    """Raises ConfigError where the place of a result is a URL; `name`: of the option."""
    if "://" in path:
        raise ConfigError(
            f"{name}{path}: expected a path of this machine, got a URL; name a path, and copy the "
            "result with the store's own tools"
        )


def _check_module(name: str) -> None:
    """Only the top-level package is looked up: finding deeper ones would import it."""
    from importlib.machinery import PathFinder

    if name.endswith(".py") or os.sep in name:
        raise OptionError(f"-m {name}: takes a module name (pkg.mod); drop -m to run a file")
    top = name.partition(".")[0]
    if PathFinder.find_spec(top, [os.getcwd(), *sys.path[1:]]) is None:
        raise ConfigError(f"-m {name}: no module {top!r} in {os.getcwd()} or installed")


def _similar(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return f" (and no directory {path.parent})"
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {path.parent / close[0]}?"
    return f" in {path.parent.absolute()}"


def launch_options(function: F) -> F:
    """torchrun's own options, by their own names."""
    for option in reversed(_LAUNCH_OPTIONS):
        function = option(function)
    return function


_LAUNCH_OPTIONS: tuple[Callable[[F], F], ...] = (
    click.option(
        "--nproc-per-node",
        default="1",
        show_default=True,
        metavar="N|gpu|cpu|auto",
        help="Ranks on this node.",
    ),
    click.option(
        "--nnodes", default="1", show_default=True, metavar="N|MIN:MAX", help="Nodes of the job."
    ),
    click.option(
        "--node-rank", type=Whole(min=0), default=0, metavar="N", help="Number of this node."
    ),
    click.option("--rdzv-backend", default="c10d", show_default=True, help="Rendezvous backend."),
    click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Where nodes meet."),
    click.option("--rdzv-id", default="", metavar="ID", help="Same on all nodes of the job."),
    click.option(
        "--rdzv-conf",
        default="",
        metavar="K=V,...",
        help="Rendezvous settings, as torchrun takes them.",
    ),
    click.option("--local-addr", default=None, metavar="ADDR", help="Address of this node."),
    click.option(
        "--max-restarts",
        type=Whole(min=0),
        default=None,
        metavar="N",
        help="Restarts after failures (default 100; 3 in a row without progress end the run).",
    ),
)


LAUNCH_NAMES = (
    *("nproc_per_node", "nnodes", "node_rank", "max_restarts"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr"),
)

RUN_NAMES = (
    *("policy", "settings", "profile", "no_profile", "run_dir", "fresh", "resume_from"),
    "same_job",
    *LAUNCH_NAMES,
)
"""Options of `autockpt run` that another command line must repeat to mean the same."""


def given_names(names: Iterable[str]) -> set[str]:
    """The options of the running command, of these, that a person wrote."""
    from click.core import ParameterSource

    source = click.get_current_context().get_parameter_source
    return {name for name in names if source(name) is ParameterSource.COMMANDLINE}


def repeated(names: Iterable[str]) -> list[str]:
    """Return the options among `names` that the user gave, as they were given."""
    from click.core import ParameterSource

    context = click.get_current_context()
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if name not in names or not given:
            continue
        value = context.params[name]
        if isinstance(option, click.Option) and option.is_flag:
            words.append(option.opts[-1])
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [word for one in values for word in (option.opts[-1], str(one))]
    return words


def check_ranks(ranks: str) -> None:
    """Raises OptionError for a number of ranks that torchrun does not take."""
    if not (ranks in ("gpu", "cpu", "auto", "xpu") or (ranks.isdecimal() and int(ranks) > 0)):
        raise OptionError(
            f"--nproc-per-node {ranks}: expected a whole number of ranks above 0, gpu, cpu or auto"
        )


def check_launch(launching: Mapping[str, Any]) -> None:
    """Refuse launch options that cannot work, before a run directory is made.

    Raises OptionError with the option and an example.
    """
    check_ranks(launching["nproc_per_node"])
    nodes = launching["nnodes"]
    low, _, high = nodes.partition(":")
    high = high or low
    if not (low.isdecimal() and high.isdecimal()):
        raise OptionError(f"--nnodes {nodes}: expected numbers: N, or MIN:MAX as 2:4")
    if not 1 <= int(low) <= int(high):
        raise OptionError(
            f"--nnodes {nodes}: expected at least 1, and MIN:MAX with the smaller number first"
        )
    if int(high) > 1 and not (launching["rdzv_endpoint"] and launching["rdzv_id"]):
        raise OptionError(
            f"--nnodes {nodes}: nodes need a place to meet; "
            "add --rdzv-endpoint HOST:PORT and the same --rdzv-id on every node"
        )


def launch_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The launch options among a command's parameters."""
    return {name: values[name] for name in LAUNCH_NAMES}
