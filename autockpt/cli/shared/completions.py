"""Values that a shell completes: presets, policy keys, runs, checkpoints, decisions and files.

Each function gets the context, the parameter and the word so far.  None of them loads torch, and
what cannot be read completes to nothing.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem

Found = list[CompletionItem]
Completer = Callable[[click.Context, click.Parameter, str], Found]


def install(command: click.Command) -> None:
    """Give each parameter of a command, and of its subcommands, the values that it takes."""
    for subcommand in getattr(command, "commands", {}).values():
        install(subcommand)
    for parameter in command.params:
        name = str(parameter.name)
        found = OF_COMMAND.get((str(command.name), name)) or BY_NAME.get(name)
        if found is not None:
            complete = partial(_parameter, found, parameter)
            parameter.shell_complete = complete  # type: ignore[method-assign]


def _parameter(
    complete: Completer, parameter: click.Parameter, context: click.Context, incomplete: str
) -> Found:
    try:
        return complete(context, parameter, incomplete)
    except Exception:  # a tab shows no traceback
        return []


def files(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """The shell's own files and directories."""
    return [CompletionItem(incomplete, type="file")]


def runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """The runs under `runs/`, newest first, and every file."""
    from autockpt.run_directory import RUNS

    parent = Path(os.path.dirname(incomplete) or RUNS)
    found = [each for each in parent.iterdir() if (each / "run.json").is_file()]
    found.sort(key=lambda each: -(each / "run.json").stat().st_mtime)
    return [*_beginning(incomplete, map(str, found)), *files(context, parameter, incomplete)]


def checkpoints(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """The checkpoints of the run or the directory that stands in the command line, newest first."""
    from autockpt.integrations.places import find_place
    from autockpt.values.errors import ConfigError
    from autockpt.values.generation import Generation

    named = [context.params.get(name) for name in ("path", "source", "run_dir")]
    # Behind an option without its value click leaves the arguments as words.
    place = next(filter(None, [*named, *context.args]))
    names = []
    for entry in os.listdir(find_place(place).directory):
        with contextlib.suppress(ConfigError):
            names.append(Generation.from_name(entry))
    return _beginning(incomplete, (each.name for each in sorted(names, reverse=True)))


def policies(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """The presets with their descriptions, and every file."""
    from autockpt.policies.registry import PREFIX, presets

    found = [
        CompletionItem(f"{PREFIX}{name}", help=text)
        for name, text in presets().items()
        if f"{PREFIX}{name}".startswith(incomplete)
    ]
    return [*found, *files(context, parameter, incomplete)]


def strategies(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """Presets and rules by their bare names, and every file."""
    from autockpt.policies.registry import presets
    from autockpt.tuner.simulation.rules import RULES

    names = sorted({*presets(), *RULES})
    return [*_beginning(incomplete, names), *files(context, parameter, incomplete)]


def settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """The keys of a policy, each with `=` behind it."""
    return _keys(incomplete, "=")


def keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """The keys of a policy."""
    return _keys(incomplete, "")


def _keys(incomplete: str, end: str) -> Found:
    from autockpt.policies.policy_file import KEYS

    return _beginning(incomplete, (f"{key}{end}" for key in sorted(KEYS.rows)))


def decisions(context: click.Context, parameter: click.Parameter, incomplete: str) -> Found:
    """The choices of the plan of a run."""
    from autockpt.run_directory import RunDirectory

    decision = RunDirectory(str(context.params["run_dir"])).read_decision()
    return _beginning(incomplete, (choice.name for choice in decision.choices) if decision else ())


def _beginning(incomplete: str, words: Iterable[str]) -> Found:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


BY_NAME: dict[str, Completer] = {
    "policy": policies, "settings": settings, "strategies": strategies,
    "run_dir": runs, "run_dirs": runs, "profile": runs, "path": runs, "source": runs,
    "a": runs, "b": runs, "directory": runs,
    "generation": checkpoints, "resume_from": checkpoints, "decision": decisions,
    "script": files, "args": files, "command": files, "out": files, "html": files, "trace": files,
    "failures": files, "destination": files, "file": files,
}  # fmt: skip
"""By the name of a parameter."""
OF_COMMAND: dict[tuple[str, str], Completer] = {
    ("check", "file"): policies,
    ("explain", "file"): policies,
    ("explain", "path"): keys,
    ("diff", "before"): policies,
    ("diff", "after"): policies,
}
"""By command and parameter, where the name says another thing there."""

BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value word head i
    local words=()
    # readline splits words at : and =, which stand in builtin:auto and KEY=VALUE.
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((i > 1)) && [[ $word == [:=]* || ${words[-1]} == *[:=] ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
    done
    word=${words[-1]}
    head=
    [[ $word == *[:=]* ]] && head=${word%%"${word##*[:=]}"}
    response=$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) \\
        %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    for completion in $response; do
        type=${completion%%%%,*}
        value=${completion#*,}
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                value=${value#"${head#--*=}"}
                [[ $value == *= ]] && compopt -o nospace
                COMPREPLY+=("$value") ;;
        esac
    done
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""The script of bash; click's own takes `builtin:auto` apart at the colon."""
