"""`autockpt policy`: check, explain, compare or start a policy file."""

import json
from pathlib import Path
from typing import Any

import click

from autockpt.cli.shared.options import Command, common, did_you_mean
from autockpt.console import Console

NAME = "autockpt.policy.yaml"
SCHEMA = "autockpt.policy.schema.json"
EXAMPLES = """
autockpt policy init                              # writes autockpt.policy.yaml, commented
autockpt policy check autockpt.policy.yaml
autockpt policy explain builtin:checkfreq
autockpt policy diff builtin:auto autockpt.policy.yaml
autockpt policy schema > autockpt.policy.schema.json
"""


class _Group(click.Group):
    """Examples first, as in every command."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from autockpt.cli.shared.options import write_examples

        write_examples(formatter, EXAMPLES)
        super().format_help(ctx, formatter)


@click.group(cls=_Group)
def policy() -> None:
    """Work with policy files: limits for auto, and pinned values."""


@policy.command(cls=Command, examples="autockpt policy check FILE")
@click.argument("file")
@common
def check(console: Console, file: str) -> None:
    """Report every mistake of FILE as file:line:col: error: path: message; did you mean ...?"""
    from autockpt.cli.shared.plan_choice import placed

    loaded = _load(file)
    placed(loaded.goal)
    set_here = [
        value
        for value in loaded.values
        if value.value != "auto" and value.source.rpartition(":")[0] == loaded.name
    ]
    console.object("policy check", {"file": file, "ok": True, "values": len(set_here)})
    console.result(f"{file}: ok, it sets {len(set_here)} of {len(loaded.values)} values")
    console.next(["autockpt", "policy", "explain", file])


@policy.command(
    cls=Command,
    examples="autockpt policy explain FILE\nautockpt policy explain builtin:sync disk",
)
@click.argument("file", default="builtin:auto")
@click.argument("path", required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As in `run`.")
@common
def explain(console: Console, file: str, path: str | None, settings: tuple[str, ...]) -> None:
    """Print every effective value (or those under PATH) and where it was written."""
    from autockpt.policies.policy_file import explain as explain_
    from autockpt.policies.registry import presets
    from autockpt.values.errors import OptionError
    from autockpt.values.record import to_data

    loaded = _load(file, settings)
    text = explain_(loaded, path, width=console.width)
    if not text:
        keys = [value.path for value in loaded.values]
        sections = {key.partition(".")[0] for key in keys}
        raise OptionError(f"{path}: no such key{did_you_mean(str(path), [*sections, *keys])}")
    console.object("policy explain", {"file": file, "values": to_data(loaded.values)})
    console.result(text)
    if path is None:
        shipped = ", ".join(f"builtin:{name}" for name in presets())
        console.say(f"policies that come with autockpt: {shipped}")
    console.next(["autockpt", "plan", "--profile", "PROFILE", "--policy", file])


@policy.command(cls=Command, examples=f"autockpt policy schema > {SCHEMA}")
@common
def schema(console: Console) -> None:
    """Print the JSON schema of policy files, for editors."""
    from autockpt.policies.policy_file import schema as schema_

    body = schema_()
    console.object("policy schema", {"schema": body})
    console.result(json.dumps(body, indent=2))


@policy.command(cls=Command, examples="autockpt policy diff builtin:auto mine.yaml")
@click.argument("before")
@click.argument("after")
@common
def diff(console: Console, before: str, after: str) -> None:
    """Print the values in which two policies differ."""
    from autockpt.policies.policy_file import diff as diff_
    from autockpt.values.record import to_data

    found = diff_(_load(before), _load(after))
    console.object("policy diff", {"differences": to_data(found)})
    for difference in found:
        console.result(str(difference))
    if not found:
        console.say("no difference")


@policy.command(cls=Command, examples="autockpt policy init\nautockpt policy init mine.yaml")
@click.argument("file", default=NAME)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@common
def init(console: Console, file: str, force: bool) -> None:
    """Write a commented policy file to start from, and its schema beside it."""
    from autockpt.policies.policy_file import init_text
    from autockpt.policies.policy_file import schema as schema_
    from autockpt.run_directory import RunDirectory
    from autockpt.values.errors import ConfigError

    if file.startswith("builtin:"):
        raise ConfigError(
            f"{file}: a preset is no file to write; `extends: {file}` in a policy begins with it"
        )
    target = Path(file)
    if target.exists() and not force:
        raise ConfigError(f"{file}: exists; --force replaces it")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent}: no such directory")
    directory = RunDirectory(target.parent)
    first = f"# yaml-language-server: $schema=./{SCHEMA}\n"
    directory.write_text(target.name, first + init_text())
    directory.write_text(SCHEMA, json.dumps(schema_(), indent=2) + "\n")
    console.object("policy init", {"file": file, "schema": str(target.parent / SCHEMA)})
    console.result(f"{file} and {target.parent / SCHEMA} written")
    console.next(["autockpt", "policy", "check", file])


def _load(source: str, settings: tuple[str, ...] = ()) -> Any:
    import os

    from autockpt.policies.policy_file import load_policy

    return load_policy(source, environment=os.environ, settings=settings)
